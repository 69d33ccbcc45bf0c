//! Measured figures as a table.

pub mod figures;

use std::path::Path;

use machine::Bytes;

use self::figures::{
    ClusterFigures, CompressFigures, JobPart, JobRow, LoadFigure, ModelFigures, ModelRow,
    OpFigures, OpTimes, PeerFigures, ProgramFigures, RankFigures, StepFigures, TextFigures,
};
use crate::text::{BOLD, DIM, PLAIN, TextPage, bar, name_of};

/// Draws what `hearth bench load` measured.
pub fn loading(file: &Path, figures: &[LoadFigure]) -> String {
    let mut page = TextPage::new();
    page.line(BOLD, &format!("loading {}", file.display()));
    let mut rows = vec![
        ["reader", "cache", "GiB/s", "of a memory copy", "peak memory of tensors"]
            .map(str::to_owned),
    ];
    for figure in figures {
        let peak = figure.rss_peak_bytes.map_or("unknown".into(), |peak| {
            format!("{:.2}", peak as f64 / figure.tensor_bytes.max(1) as f64)
        });
        rows.push([
            name_of(&figure.reader),
            format!("{:?}", figure.cache).to_lowercase(),
            format!("{:.2}", figure.gib_per_s),
            format!("{:.2}", figure.ratio_to_memcpy),
            peak,
        ]);
    }
    page.table(&rows);
    page.line(DIM, "the best of each; every measurement in a process of its own");
    page.finish()
}

/// Draws what `hearth bench cluster` measured.
pub fn cluster(figures: &ClusterFigures) -> String {
    let mut page = TextPage::new();
    let ClusterFigures { together_secs, of_the_sum, ranks } = figures;
    let share = 100.0 * of_the_sum;
    page.line(
        BOLD,
        &format!("{together_secs:.3} s a step together, {share:.0} % of the sum of speeds"),
    );
    let head = ["machine", "device", "alone", "samples", "computing", "waiting", "summing"];
    let mut rows = vec![head.map(str::to_owned)];
    let secs = |secs: f64| format!("{secs:.3} s");
    for RankFigures { alone_secs, share } in ranks {
        rows.push([
            share.node.clone(),
            share.device.clone(),
            secs(*alone_secs),
            share.samples.to_string(),
            secs(share.compute_secs),
            secs(share.wait_secs),
            secs(share.exchange_secs),
        ]);
    }
    page.table(&rows);
    page.line(DIM, "alone: whole steps of the job, all ranks at the same time; medians");
    page.finish()
}

/// Draws what `hearth bench compress` measured: means over seeds, with their deviation.
pub fn compress(title: &str, figures: &[CompressFigures]) -> String {
    let mut page = TextPage::new();
    page.line(BOLD, title);
    let head = ["tokens", "bits per byte", "kept", "word ends kept", "bytes/s", "steps", "runs"];
    let mut rows = vec![head.map(str::to_owned)];
    let mut arms: Vec<&str> = Vec::new();
    for figure in figures {
        if !arms.contains(&figure.arm) {
            arms.push(figure.arm);
        }
    }
    for arm in arms {
        let of: Vec<&CompressFigures> = figures.iter().filter(|it| it.arm == arm).collect();
        let spread = Spread::of(of.iter().map(|it| it.bits_per_byte));
        let share = |value: fn(&CompressFigures) -> Option<f64>| {
            let known: Vec<f64> = of.iter().filter_map(|it| value(it)).collect();
            let mean = Spread::of(known.iter().copied()).mean;
            if known.is_empty() { "-".into() } else { format!("{:.1} %", 100.0 * mean) }
        };
        rows.push([
            arm.to_owned(),
            format!("{:.4} ± {:.4}", spread.mean, spread.deviation),
            share(|it| it.kept_share),
            share(|it| it.spaces_found),
            format!("{:.0}", Spread::of(of.iter().map(|it| it.bytes_per_s)).mean),
            of[0].steps.to_string(),
            of.len().to_string(),
        ]);
    }
    page.table(&rows);
    page.line(
        DIM,
        "held-out text; all with the same number of floating-point operations in training",
    );
    page.finish()
}

/// Mean and standard deviation.
struct Spread {
    mean: f64,
    deviation: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.collect();
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Self { mean, deviation: (squares / (n - 1.0).max(1.0)).sqrt() }
    }
}

/// Draws what `hearth bench step` measured.
pub fn step(figures: &StepFigures) -> String {
    let StepFigures { config, dtype, base, recompute, device, threads, .. } = figures;
    let base = base.as_ref().map_or_else(String::new, |base| format!(" with weights in {base}"));
    let bytes = |bytes: usize| Bytes(bytes as u64).to_string();
    let mut page = TextPage::new();
    let title = format!(
        "{config}, {dtype}{base}, recompute {recompute}, on {device} with {threads} threads"
    );
    page.line(BOLD, &title);
    let time = format!(
        "{:.0} ms (best {:.0}, CPU time {:.0}), {:.0} GFLOP/s",
        figures.ms_median, figures.ms_min, figures.cpu_ms_median, figures.gflop_per_s
    );
    page.row("step", PLAIN, &time);
    if let Some(predicted) = figures.predicted_ms {
        page.row("predicted", PLAIN, &format!("{predicted:.0} ms by this machine's rates"));
    }
    if let Some(launches) = figures.launches {
        page.row("launches", PLAIN, &format!("{launches} kernels a step"));
    }
    page.row("loss", PLAIN, &format!("{:.6} → {:.6}", figures.loss_first, figures.loss_last));
    let kept =
        if figures.peak_bytes == figures.plan_bytes { "as planned" } else { "not as planned" };
    let arena = format!(
        "{}, {kept}; {} hold tensors at the peak",
        bytes(figures.peak_bytes),
        bytes(figures.peak_in_use_bytes)
    );
    page.row("arena", PLAIN, &arena);
    for (what, held) in &figures.peak_by_use {
        let share = *held as f64 / figures.peak_bytes as f64;
        page.row("", DIM, &format!("{} {} {what}", bar(share), bytes(*held)));
    }
    let resident = figures.rss_peak_bytes.map_or("unknown".into(), |peak| Bytes(peak).to_string());
    page.row("process", PLAIN, &format!("{resident} resident at most"));
    page.finish()
}

/// Draws what `hearth bench ops` measured.
pub fn ops(all: &[OpFigures]) -> String {
    let mut page = TextPage::new();
    let mut rows = vec![
        ["op", "inputs", "ms", "GFLOP/s", "GB/s", "backward ms", "GFLOP/s", "GB/s"]
            .map(str::to_owned),
    ];
    let three = |figure: &OpTimes| {
        [
            format!("{:.2}", figure.ms_median),
            format!("{:.0}", figure.gflop_per_s),
            format!("{:.1}", figure.gb_per_s),
        ]
    };
    for figures in all {
        let [ms, flops, bytes] = three(&figures.forward);
        let [back_ms, back_flops, back_bytes] =
            figures.backward.as_ref().map_or([const { String::new() }; 3], three);
        let (op, shape) = (figures.op.to_owned(), figures.shape.clone());
        rows.push([op, shape, ms, flops, bytes, back_ms, back_flops, back_bytes]);
    }
    page.table(&rows);
    let title = all.first().map_or(String::new(), |first| {
        format!("{} with {} threads; medians", first.dtype, first.threads)
    });
    page.line(DIM, &title);
    page.finish()
}

/// Draws what `hearth bench peers` measured.
pub fn peers(all: &[PeerFigures]) -> String {
    compared(all.iter().map(|figures| {
        let PeerFigures { config, dtype, recompute, figures: beside } = figures;
        (format!("{config} {dtype} {recompute}"), beside)
    }))
}

/// Draws what `hearth bench models` measured beside others.
pub fn models_compared(all: &[ModelRow]) -> String {
    compared(all.iter().map(|row| (format!("{} {}", row.model, row.dtype), &row.figures)))
}

/// Draws what `hearth bench text` measured.
pub fn text(figures: &TextFigures) -> String {
    let bytes = |bytes: usize| Bytes(bytes as u64).to_string();
    let mut page = TextPage::new();
    page.line(BOLD, &format!("{}, {}", figures.preset, figures.dtype));
    let time = format!(
        "{:.0} ms (best {:.0}, CPU time {:.0}), {:.0} tokens/s, {:.0} GFLOP/s",
        figures.ms_median,
        figures.ms_min,
        figures.cpu_ms_median,
        figures.tokens_per_s,
        figures.gflop_per_s
    );
    page.row("step", PLAIN, &time);
    page.row("loss", PLAIN, &format!("{:.4} → {:.4}", figures.loss_first, figures.loss_last));
    let (peak, planned) = (bytes(figures.peak_bytes), bytes(figures.plan_bytes));
    page.row("arena", PLAIN, &format!("{peak}, planned {planned}"));
    page.finish()
}

/// Draws what it measured beside others.
pub fn texts_compared(name: &str, all: &[ProgramFigures]) -> String {
    compared(all.iter().map(|figures| (name.to_owned(), figures)))
}

/// Draws what `hearth bench train` measured.
pub fn training(all: &[JobRow]) -> String {
    let name = |row: &JobRow| format!("{:?} {}", row.part, row.dtype).to_lowercase();
    let mut page = compared(all.iter().map(|row| (name(row), &row.figures)));
    let mut notes = TextPage::new();
    notes.line(DIM, "times are per image where images are encoded, and per step");
    for part in [JobPart::Encode, JobPart::Train] {
        let mark = format!("{part:?} hearth / it is to be at most {:.2}", part.mark());
        notes.line(DIM, &mark.to_lowercase());
    }
    for row in all {
        if let Some(waited) = row.figures.wait_ms {
            let line =
                format!("{}: {waited:.1} ms waiting for images, after the first step", name(row));
            notes.line(PLAIN, &line);
        }
    }
    page.push_str(&notes.finish());
    page
}

fn compared<'a>(all: impl Iterator<Item = (String, &'a ProgramFigures)>) -> String {
    let mut page = TextPage::new();
    let mut rows = vec![
        ["job", "program", "ms", "CPU ms", "memory", "hearth / it", "CPU ratio", "memory ratio"]
            .map(str::to_owned),
    ];
    for (job, figures) in all {
        rows.push([
            job,
            format!("{:?}", figures.program).to_lowercase(),
            format!("{:.0}", figures.ms_median),
            format!("{:.0}", figures.cpu_ms_median),
            figures.memory_bytes.map_or("unknown".into(), |bytes| Bytes(bytes).to_string()),
            format!("{:.2}", figures.hearth_time_ratio),
            format!("{:.2}", figures.hearth_cpu_ratio),
            figures.hearth_memory_ratio.map_or("unknown".into(), |ratio| format!("{ratio:.2}")),
        ]);
    }
    page.table(&rows);
    page.line(DIM, "medians over alternating rounds; every measurement in its own process");
    page.finish()
}

/// Draws what `hearth bench models` measured.
pub fn models(all: &[ModelFigures]) -> String {
    let mut page = TextPage::new();
    let mut rows = vec![["model", "ms", "CPU ms", "GFLOP/s", "memory"].map(str::to_owned)];
    for figures in all {
        rows.push([
            format!("{} {}", figures.model, figures.dtype),
            format!("{:.1}", figures.ms_median),
            format!("{:.1}", figures.cpu_ms_median),
            format!("{:.0}", figures.gflop_per_s),
            Bytes(figures.peak_bytes as u64).to_string(),
        ]);
    }
    page.table(&rows);
    page.line(DIM, "medians; memory as planned, weights included");
    page.finish()
}
