//! `hearth bench step`: a training step of the benchmark job, planned on the meta device
//! first, then run in an arena of exactly the planned size.

use compute::Quantisation;
use std::io::Write;
use trainer::model::offload::Offload;
use trainer::model::recompute::Recompute;

use compute::{Device, Dtype, Tag, Usage, WorkStats};
use trainer::bench::workload::{CONFIGS, RandomWeightInit, Workload, WorkloadConfig, WorkloadJob};

use super::{Timing, median, predicted_ms};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::StepFigures;

/// Warm-up steps, which are not measured.
const WARM_UP: usize = 3;

/// Measure a training step: LoRA on a stack of transformer blocks.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench step                                     cpu-small in f32
  hearth bench step --config cpu-mid --dtype bf16 --recompute block
  hearth bench step --dtype bf16 --base nf4             weights in 4 bits
  hearth bench step --config gpu-sd3-b4 --dtype bf16 --micro-batch 2 --offload alternate --device cuda:0
  hearth bench step --json --steps 20 --threads 2")]
pub struct BenchStepArgs {
    /// Size of the job: width, blocks, tokens and batch
    #[arg(long, default_value = "cpu-small", value_parser = config)]
    config: WorkloadConfig,

    /// Number format of weights and activations; LoRA weights are always f32
    #[arg(long, default_value = "f32", value_parser = named_value::parser::<Dtype>())]
    dtype: Dtype,

    /// Quantise the base weights
    #[arg(long, value_parser = named_value::parser::<Quantisation>())]
    base: Option<Quantisation>,

    /// Multiply in fp8 (base.compute), with --base fp8
    #[arg(long, requires = "base")]
    fp8_matmuls: bool,

    /// Gradient checkpointing: which blocks are recomputed in backward to save memory
    #[arg(long, default_value = "none", value_parser = named_value::parser::<Recompute>())]
    recompute: Recompute,

    /// Samples per micro-batch [default: the whole batch]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    micro_batch: Option<u16>,

    /// Block offloading (block swap): which blocks stay in main memory until they are needed
    #[arg(long, default_value = "none", value_parser = named_value::parser::<Offload>())]
    offload: Offload,

    /// Measured steps, after three warm-up steps
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn config(name: &str) -> Result<WorkloadConfig, String> {
    let names = || CONFIGS.map(|config| config.name).join(", ");
    let found = CONFIGS.into_iter().find(|config| config.name == name);
    found.ok_or_else(|| format!("not one of {}", names()))
}

pub fn run(arguments: &BenchStepArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let figures = measure(arguments)?;
    if arguments.json {
        render::json::line(out, &figures)?;
    } else {
        write!(out, "{}", render::bench::step(&figures))?;
    }
    Ok(CommandOutcome::Done)
}

impl BenchStepArgs {
    fn job(&self) -> WorkloadJob {
        let plain = WorkloadJob::plain(self.config, self.dtype);
        WorkloadJob {
            base: self.base,
            multiplies_fp8: self.fp8_matmuls,
            recompute: self.recompute,
            micro_batch: self.micro_batch.map_or(plain.micro_batch, usize::from),
            offload: self.offload,
            ..plain
        }
    }
}

fn prepared(device: &Device, job: WorkloadJob) -> compute::Result<Workload> {
    Workload::new(device, job, &mut RandomWeightInit::new(device, 0))
}

/// What a step will do, and the memory that it takes.
fn planned(arguments: &BenchStepArgs) -> Result<(WorkStats, Usage), Failure> {
    let meta = Device::meta(arguments.engine.kind(), usize::MAX);
    let mut workload = prepared(&meta, arguments.job())?;
    workload.step()?;
    let before = meta.work();
    workload.step()?;
    Ok((meta.work().since(&before), meta.usage()))
}

fn measure(arguments: &BenchStepArgs) -> Result<StepFigures, Failure> {
    let threads = arguments.engine.threads();
    let (work, plan) = planned(arguments)?;
    let rss_before_bytes = machine::process::peak_resident();
    let device = arguments.engine.open(plan.extent)?;
    let mut job = prepared(&device, arguments.job())?;
    let (mut losses, mut times, mut before) = (Vec::new(), Vec::new(), None);
    for step in 0..WARM_UP + arguments.steps as usize {
        before = device.launches();
        let (time, loss) = Timing::measure(threads, || -> Result<_, Failure> {
            let loss = job.step()?;
            device.synchronise()?;
            Ok(loss)
        })?;
        losses.extend(loss);
        times.extend((step >= WARM_UP).then_some(time));
    }
    let ms_median = median(times.iter().map(|time| time.wall_ms));
    let usage = device.usage();
    Ok(StepFigures {
        config: arguments.config.name,
        dtype: arguments.dtype.to_string(),
        base: arguments.base.as_ref().map(named_value::value_name),
        recompute: named_value::value_name(&arguments.recompute),
        offloaded_bytes: device.host_bytes(),
        device: arguments.engine.name(),
        threads,
        ms_median,
        ms_min: times.iter().map(|time| time.wall_ms).fold(f64::INFINITY, f64::min),
        predicted_ms: predicted_ms(&arguments.engine, &work),
        cpu_ms_median: median(times.iter().map(|time| time.cpu_ms)),
        gflop_per_s: work.flops as f64 / ms_median / 1e6,
        launches: device.launches_since(before),
        peak_bytes: usage.extent,
        plan_bytes: plan.extent,
        peak_in_use_bytes: usage.peak,
        peak_by_use: by_use(&usage),
        rss_peak_bytes: machine::process::peak_resident(),
        rss_before_bytes,
        loss_first: losses.first().copied().unwrap_or(f32::NAN),
        loss_last: losses.last().copied().unwrap_or(f32::NAN),
    })
}

/// What the arena held at its peak, the largest first.
fn by_use(usage: &Usage) -> Vec<(String, usize)> {
    let tags = Tag::ALL.iter().map(ToString::to_string).zip(usage.by_tag_at_peak);
    let mut held: Vec<_> = tags.filter(|(_, bytes)| *bytes > 0).collect();
    held.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    held
}
