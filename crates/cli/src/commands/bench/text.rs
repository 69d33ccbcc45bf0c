//! `hearth bench text`: a training step of a language model from scratch, alone or beside plain PyTorch.

use compute::Dtype;
use std::io::Write;
use std::path::{Path, PathBuf};
use trainer::model::recompute::Recompute;

use compute::Device;
use trainer::bench::cases::text::TextStep;
use trainer::model::llama::preset::LlamaPreset;

use super::compare;
use super::{Timing, median};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::{BenchProgram, ProgramFigures, TextFigures};

/// Warm-up steps, which are not measured.
const WARM_UP: usize = 2;

/// Measure a training step of a language model trained from scratch (all weights).
///
/// With --python it is compared with the same model in plain PyTorch, in turns, each in its own process.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench text
  hearth bench text --preset 1B --dtype bf16 --batch 8 --length 2048 --device cuda:0
  python3 -m venv .venv && .venv/bin/pip install torch
  hearth bench text --dtype bf16 --python .venv/bin/python --compile")]
pub struct BenchTextArgs {
    /// Size of the model: tiny, 25M, 125M, 350M or 1B
    #[arg(long, default_value = "125M", value_parser = preset)]
    preset: LlamaPreset,

    /// Vocabulary size
    #[arg(long, default_value_t = 32_000, value_parser = vocabulary)]
    vocabulary: usize,

    /// Tokens per sequence
    #[arg(long, default_value_t = 512)]
    length: usize,

    /// Documents packed into a sequence, each half of what the ones before it left
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    documents: u16,

    /// Sequences per step (batch size)
    #[arg(long, default_value_t = 4)]
    batch: usize,

    /// Number format of activations; weights are f32
    #[arg(long, default_value = "f32", value_parser = named_value::parser::<Dtype>())]
    dtype: Dtype,

    /// Gradient checkpointing: which blocks are recomputed in backward
    #[arg(long, default_value = "none", value_parser = named_value::parser::<Recompute>())]
    recompute: Recompute,

    /// Measured steps, after two warm-up steps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    /// A Python with torch, to compare with
    #[arg(long)]
    python: Option<PathBuf>,

    /// Compare with torch.compile as well
    #[arg(long, requires = "python")]
    compile: bool,

    /// Rounds of the comparison; medians over all of them count
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object per program
    #[arg(long)]
    json: bool,
}

pub(super) fn preset(name: &str) -> Result<LlamaPreset, String> {
    let names = || LlamaPreset::ALL.map(LlamaPreset::name).join(", ");
    LlamaPreset::from_name(name).ok_or_else(|| format!("not one of {}", names()))
}

fn vocabulary(text: &str) -> Result<usize, String> {
    let parsed = text.parse().ok().filter(|n| (2..=MOST_TOKENS).contains(n));
    parsed.ok_or_else(|| format!("accepted is a whole number from 2 to {MOST_TOKENS}"))
}

/// Chosen: above any published vocabulary.
const MOST_TOKENS: usize = 1 << 24;

pub fn run(arguments: &BenchTextArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    match &arguments.python {
        None => {
            let figures = measure(arguments)?;
            if arguments.json {
                render::json::line(out, &figures)?;
            } else {
                write!(out, "{}", render::bench::text(&figures))?;
            }
        }
        Some(python) => {
            let all = compare(arguments, python)?;
            if arguments.json {
                for beside in &all {
                    render::json::line(out, beside)?;
                }
            } else {
                let name = format!(
                    "{} {}",
                    arguments.preset.name(),
                    named_value::value_name(&arguments.dtype)
                );
                write!(out, "{}", render::bench::texts_compared(&name, &all))?;
            }
        }
    }
    Ok(CommandOutcome::Done)
}

fn measure(arguments: &BenchTextArgs) -> Result<TextFigures, Failure> {
    let BenchTextArgs { preset, vocabulary, length, batch, .. } = *arguments;
    let (dtype, recompute) = (arguments.dtype, arguments.recompute);
    let documents = arguments.documents.into();
    let step = TextStep { preset, vocabulary, length, documents, batch, dtype, recompute };
    let engine = &arguments.engine;
    let meta = Device::meta(engine.kind(), usize::MAX / 2);
    let flops = step.with_steps(&meta, |take| {
        let before = meta.work().flops;
        take().map(|_| meta.work().flops - before)
    })??;
    let plan_bytes = meta.usage().extent;

    let rss_before_bytes = machine::process::peak_resident();
    let device = engine.open(plan_bytes)?;
    let (times, losses) = step.with_steps(&device, |take| repeat(arguments, take))??;
    let ms_median = median(times.iter().map(|time| time.wall_ms));
    let is_card = !matches!(engine.kind(), compute::DeviceKind::Cpu { .. });
    let peak_bytes = device.usage().extent;
    Ok(TextFigures {
        preset: preset.name(),
        dtype: named_value::value_name(&arguments.dtype),
        ms_median,
        ms_min: times.iter().map(|time| time.wall_ms).fold(f64::INFINITY, f64::min),
        cpu_ms_median: median(times.iter().map(|time| time.cpu_ms)),
        tokens_per_s: (batch * length) as f64 / ms_median * 1e3,
        gflop_per_s: flops as f64 / ms_median / 1e6,
        peak_bytes,
        plan_bytes,
        loss_first: losses[0],
        loss_last: losses[losses.len() - 1],
        rss_peak_bytes: if is_card {
            Some(peak_bytes as u64)
        } else {
            machine::process::peak_resident()
        },
        rss_before_bytes: if is_card { Some(0) } else { rss_before_bytes },
    })
}

/// All steps, with their losses; the times only of those that are measured.
fn repeat(
    arguments: &BenchTextArgs,
    take: &mut dyn FnMut() -> trainer::Result<f64>,
) -> Result<(Vec<Timing>, Vec<f64>), Failure> {
    let (mut times, mut losses) = (Vec::new(), Vec::new());
    for round in 0..WARM_UP + arguments.steps as usize {
        let (time, loss) = Timing::measure(arguments.engine.threads(), &mut *take)?;
        times.extend((round >= WARM_UP).then_some(time));
        losses.push(loss);
    }
    Ok((times, losses))
}

fn compare(arguments: &BenchTextArgs, python: &Path) -> Result<Vec<ProgramFigures>, Failure> {
    let threads = arguments.engine.threads();
    let mut programs = vec![
        (BenchProgram::Hearth, hearth(arguments, threads)?),
        (BenchProgram::PytorchEager, pytorch(arguments, python, threads, false)),
    ];
    if arguments.compile {
        programs.push((BenchProgram::PytorchCompiled, pytorch(arguments, python, threads, true)));
    }
    compare::measure(arguments.rounds, &mut programs)
}

fn hearth(arguments: &BenchTextArgs, threads: usize) -> Result<std::process::Command, Failure> {
    let BenchTextArgs { preset, vocabulary, length, batch, steps, .. } = arguments;
    let settings = [
        ("--preset", preset.name().to_owned()),
        ("--vocabulary", vocabulary.to_string()),
        ("--length", length.to_string()),
        ("--batch", batch.to_string()),
        ("--steps", steps.to_string()),
        ("--dtype", named_value::value_name(&arguments.dtype)),
        ("--recompute", named_value::value_name(&arguments.recompute)),
        ("--device", arguments.engine.name()),
        ("--threads", threads.to_string()),
    ];
    let words = settings.iter().flat_map(|(flag, value)| [*flag, value.as_str()]);
    let words: Vec<&str> = ["bench", "text", "--json"].into_iter().chain(words).collect();
    compare::hearth(&words)
}

fn pytorch(
    arguments: &BenchTextArgs,
    python: &Path,
    threads: usize,
    compile: bool,
) -> std::process::Command {
    let BenchTextArgs { preset, vocabulary, length, batch, steps, .. } = arguments;
    let shape = preset.config(*vocabulary);
    let job = serde_json::json!({
        "vocabulary": vocabulary, "length": length, "batch": batch, "steps": steps,
        "width": shape.hidden_size, "inner": shape.intermediate_size,
        "blocks": shape.num_hidden_layers, "heads": shape.num_attention_heads,
        "kv_heads": shape.num_key_value_heads, "compile": compile, "threads": threads,
        "dtype": named_value::value_name(&arguments.dtype), "recompute": named_value::value_name(&arguments.recompute),
        "device": arguments.engine.name(),
    });
    let script = include_str!("../../../../../benches/peers/text.py");
    compare::python(python, script, &job, threads)
}
