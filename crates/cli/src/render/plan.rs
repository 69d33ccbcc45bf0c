//! A plan as a page: what each phase takes against the limit, what was chosen and why, and what more
//! memory would buy.

use compute::Kind;
use machine::{Bytes, Provenance};
use trainer::config::train::Length;
use trainer::plan::{Considered, Plan};

use crate::commands::plan::{Computer, Planned};
use crate::render::progress::duration;
use crate::render::training::speed;
use crate::text::{BOLD, DIM, GOOD, PLAIN, Page, bar};

/// Draws everything.
pub fn page(planned: &Planned) -> String {
    let Planned { on: Computer { machine, limit_bytes, .. }, plan, .. } = planned;
    let mut page = Page::new();
    page.line(BOLD, &title(planned));
    if let Provenance::Documented { basis } = &machine.provenance {
        page.line(DIM, &format!("from published facts, nobody measured it: {basis}"));
    }
    page.heading("memory");
    phases(planned, &mut page);
    let fits = format!(
        "fits: {} of {}, the program itself and what it reads ahead included",
        bytes(plan.total_bytes),
        bytes(*limit_bytes)
    );
    page.item("✓", GOOD, &fits);
    if let (Kind::Cuda { .. }, true) = (planned.on.kind, plan.streamed_bytes > 0) {
        let text = format!(
            "and {} of main memory, from where blocks of the model come to the card",
            bytes(plan.streamed_bytes)
        );
        page.item("✓", GOOD, &text);
    }
    page.heading("time");
    page.row("step", PLAIN, &step(planned));
    if let Kind::Cuda { is_deterministic } = planned.on.kind {
        page.row("bits", PLAIN, same_bits(is_deterministic));
    }
    page.heading("chosen");
    chosen(planned, &mut page);
    page.heading("instead");
    instead(planned, &mut page);
    page.finish()
}

fn title(planned: &Planned) -> String {
    let engine = match planned.on.kind {
        Kind::Cpu { threads, .. } => format!("cpu with {threads} threads"),
        Kind::Cuda { .. } => "its NVIDIA card".to_owned(),
        Kind::Gpu { .. } => "its GPU".to_owned(),
    };
    let base = planned.config.base.path.file_name().unwrap_or_default().to_string_lossy();
    format!("{base} on {}, {engine}", planned.on.machine.title)
}

fn phases(planned: &Planned, page: &mut Page) {
    let limit = planned.on.limit_bytes;
    let rows: Vec<[String; 3]> = planned
        .plan
        .phases
        .iter()
        .map(|phase| {
            let share = phase.peak_bytes as f64 / limit as f64;
            [phase.name.clone(), format!("{:>9}", bytes(phase.peak_bytes)), bar(share)]
        })
        .collect();
    page.table(&rows);
}

fn step(planned: &Planned) -> String {
    let secs = planned.plan.step_secs;
    let how = if planned.on.rates.is_measured {
        "from rates measured on this machine"
    } else {
        "an estimate: `hearth bench calibrate` measures this machine"
    };
    let all = match planned.config.train.length {
        Length::Steps(steps) => {
            format!("{steps} steps in {}", duration(secs * steps as f64))
        }
        Length::Epochs(epochs) => format!("{epochs} epochs"),
    };
    format!("{}, {all}; {how}", speed(secs))
}

/// What a card gives up to be fast, or does not.
fn same_bits(is_deterministic: bool) -> &'static str {
    if is_deterministic {
        "the same every time: attention finds the gradient of queries by hearth's own kernel"
    } else {
        "differ a little from run to run: attention's backward is cuDNN's where it is, which is a \
         quarter faster; `machine.deterministic = true` keeps them"
    }
}

fn chosen(planned: &Planned, page: &mut Page) {
    let config = &planned.config;
    // Those that mean nothing in this job have no origin.
    let settings = planned.plan.choice.settings().into_iter();
    let rows = settings.filter(|(key, _)| config.origin(key).is_some()).map(|(key, value)| {
        let why = if config.is_free(key) { "free, so the plan's" } else { "as the job says" };
        [key.to_owned(), value, why.to_owned()]
    });
    page.table(&rows.collect::<Vec<_>>());
}

fn instead(planned: &Planned, page: &mut Page) {
    let Plan { choice, considered, .. } = &planned.plan;
    let roomier = considered.iter().filter(|it| !it.fits).min_by(|a, b| a.secs.total_cmp(&b.secs));
    if let Some(it) = roomier {
        let text = format!("{}: needs {}, does not fit", it.choice, bytes(it.peak_bytes));
        page.row("rejected", PLAIN, &text);
    }
    if let Some(it) = planned.plan.runner_up() {
        let text =
            format!("{}: {}, fits in {}", it.choice, slower(planned, it), bytes(it.peak_bytes));
        page.row("runner-up", PLAIN, &text);
    }
    let text = match &planned.with_more {
        Some(more) => {
            let faster = 100.0 * (1.0 - more.step_secs / planned.plan.step_secs);
            let takes = bytes(more.peak_bytes());
            if more.choice.quantise == choice.quantise {
                format!("{}: {faster:.0} % less time, {takes}", more.choice)
            } else {
                format!("{}: more precise, {takes}", more.choice)
            }
        }
        None => "would change nothing".into(),
    };
    page.row("8 GiB more", PLAIN, &text);
}

fn slower(planned: &Planned, considered: &Considered) -> String {
    match planned.times_slower(considered) {
        Some(times) if times >= 1.005 => format!("{:.0} % slower", 100.0 * (times - 1.0)),
        // Too little for streaming; see `Considered::cost`.
        Some(times) if times <= 0.995 => format!("{:.0} % faster", 100.0 * (1.0 - times)),
        _ => "as fast".into(),
    }
}

fn bytes(bytes: usize) -> String {
    Bytes(bytes as u64).to_string()
}
