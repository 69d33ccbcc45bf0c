//! `hearth bench models`: real models with random weights, alone or beside diffusers and
//! transformers.

use std::io::Write;
use std::path::PathBuf;
use trainer::model::offload::Offload;
use trainer::model::recompute::Recompute;

use compute::{Device, Dtype, Quantisation};
use trainer::bench::cases::{BenchCase, BenchSettings};

use super::compare;
use super::{Timing, median, predicted_ms};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::{BenchProgram, ModelFigures, ModelRow};

/// Warm-up runs, which are not measured.
const WARM_UP: usize = 2;

/// Measure whole models: a training step of SD3 and FLUX.1, text encoders, VAE.
///
/// Weights are random. Without --only, the small models run; sd3-medium, sd3.5-large, flux1-dev, qwen-image,
/// z-image, flux2-klein-4b, flux2-klein-9b, kandinsky5-t2i-lite, kandinsky5-t2v-lite, vae-encode-1024, qwen-vae-encode-1024, hunyuan-vae-encode and
/// hunyuan-vae-decode have full size.
/// With --python each is compared with diffusers, transformers and PEFT, in turns, each in its own process, on the CPU.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench models
  hearth bench models --only sd3-mid --dtype bf16
  hearth bench models --only sd3-medium --dtype bf16 --recompute block --device cuda:0 --offload blocks
  python3 -m venv .venv && .venv/bin/pip install torch diffusers transformers peft
  hearth bench models --python .venv/bin/python")]
pub struct BenchModelsArgs {
    /// Models to measure; may be given several times
    #[arg(long, value_parser = case)]
    only: Vec<BenchCase>,

    /// Number format of weights and activations
    #[arg(long, default_value = "f32", value_parser = named_value::parser::<Dtype>())]
    dtype: Dtype,

    /// Images per training step (batch size)
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    samples: u16,

    /// Images per micro-batch [default: the whole batch]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    micro_batch: Option<u16>,

    /// Gradient checkpointing: which transformer blocks are recomputed in backward to save memory
    #[arg(long, default_value = "none", value_parser = named_value::parser::<Recompute>())]
    recompute: Recompute,

    /// Block offloading (block swap): which frozen blocks stay in main memory until they are needed
    #[arg(long, default_value = "none", value_parser = named_value::parser::<Offload>())]
    offload: Offload,

    /// Quantisation of the frozen weights
    #[arg(long, value_parser = named_value::parser::<Quantisation>())]
    quantise: Option<Quantisation>,

    /// Multiply in fp8 (base.compute), with --quantise fp8
    #[arg(long, requires = "quantise")]
    fp8_matmuls: bool,

    /// Repetitions; the median counts
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,

    /// A Python with torch, diffusers, transformers and peft, to compare with
    #[arg(long)]
    python: Option<PathBuf>,

    /// Rounds of the comparison; medians over all of them count
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object per model
    #[arg(long)]
    json: bool,
}

fn case(name: &str) -> Result<BenchCase, String> {
    let all = || BenchCase::SMALL.into_iter().chain(BenchCase::FULL);
    let names = || all().map(BenchCase::name).collect::<Vec<_>>().join(", ");
    let found = all().find(|case| case.name() == name);
    found.ok_or_else(|| format!("not one of {}", names()))
}

pub fn run(arguments: &BenchModelsArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let cases = if arguments.only.is_empty() { &BenchCase::SMALL[..] } else { &arguments.only[..] };
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for case in cases {
        if let Some(python) = &arguments.python {
            let rows = compare(arguments, python, *case)?;
            rows.iter()
                .filter(|_| arguments.json)
                .try_for_each(|row| render::json::line(out, row))?;
            beside.extend(rows);
        } else {
            let figures = measure(arguments, *case)?;
            if arguments.json {
                render::json::line(out, &figures)?;
            }
            alone.push(figures);
        }
    }
    if !arguments.json {
        let page = if arguments.python.is_some() {
            render::bench::models_compared(&beside)
        } else {
            render::bench::models(&alone)
        };
        write!(out, "{page}")?;
    }
    Ok(CommandOutcome::Done)
}

fn measure(arguments: &BenchModelsArgs, case: BenchCase) -> Result<ModelFigures, Failure> {
    let (engine, dtype) = (&arguments.engine, arguments.dtype);
    let meta = Device::meta(engine.kind(), usize::MAX / 2);
    let how = BenchSettings {
        samples: arguments.samples.into(),
        micro_batch: arguments.micro_batch.unwrap_or(arguments.samples).into(),
        recompute: arguments.recompute,
        offload: arguments.offload,
        quantise: arguments.quantise,
        multiplies_fp8: arguments.fp8_matmuls,
    };
    let mut dry_run = case.prepare(&meta, dtype, how)?;
    dry_run.run()?;
    let before = meta.work();
    dry_run.run()?;
    let work = meta.work().since(&before);
    let plan_bytes = meta.usage().extent;

    let rss_before_bytes = machine::process::peak_resident();
    let device = engine.open(plan_bytes)?;
    let mut model = case.prepare(&device, dtype, how)?;
    let (mut times, mut before) = (Vec::new(), None);
    for round in 0..WARM_UP + arguments.repeats as usize {
        before = device.launches();
        let (time, ()) = Timing::measure(engine.threads(), || -> Result<(), Failure> {
            model.run()?;
            Ok(device.synchronise()?)
        })?;
        times.extend((round >= WARM_UP).then_some(time));
    }
    let ms_median = median(times.iter().map(|time| time.wall_ms));
    Ok(ModelFigures {
        model: case.name(),
        dtype: named_value::value_name(&arguments.dtype),
        ms_median,
        ms_min: times.iter().map(|time| time.wall_ms).fold(f64::INFINITY, f64::min),
        predicted_ms: predicted_ms(engine, &work),
        cpu_ms_median: median(times.iter().map(|time| time.cpu_ms)),
        gflop_per_s: work.flops as f64 / ms_median / 1e6,
        launches: device.launches_since(before),
        peak_bytes: device.usage().extent,
        plan_bytes,
        offloaded_bytes: device.host_bytes(),
        rss_peak_bytes: machine::process::peak_resident(),
        rss_before_bytes,
    })
}

fn compare(
    arguments: &BenchModelsArgs,
    python: &std::path::Path,
    case: BenchCase,
) -> Result<Vec<ModelRow>, Failure> {
    let threads = arguments.engine.threads();
    let (dtype, repeats) = (named_value::value_name(&arguments.dtype), arguments.repeats);
    let (threads_text, repeats_text) = (threads.to_string(), repeats.to_string());
    let ours = compare::hearth(&[
        "bench",
        "models",
        "--json",
        "--only",
        case.name(),
        "--dtype",
        &dtype,
        "--device",
        "cpu",
        "--repeats",
        &repeats_text,
        "--threads",
        &threads_text,
    ])?;
    let job = serde_json::json!({
        "model": case.name(), "dtype": dtype, "repeats": repeats, "threads": threads,
    });
    let script = include_str!("../../../../../benches/peers/models.py");
    let theirs = compare::python(python, script, &job, threads);
    let mut programs = [(BenchProgram::Hearth, ours), (BenchProgram::PytorchEager, theirs)];
    let rows = compare::measure(arguments.rounds, &mut programs)?.into_iter();
    Ok(rows
        .map(|beside| ModelRow { model: case.name(), dtype: dtype.clone(), figures: beside })
        .collect())
}
