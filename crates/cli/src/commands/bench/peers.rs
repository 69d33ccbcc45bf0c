//! `hearth bench peers`: the benchmark job by hearth and by PyTorch, one after the other and round
//! after round, each in a process of its own, so that anyone can repeat our claim.

use compute::Dtype;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use trainer::model::recompute::Recompute;

use trainer::bench::workload::WorkloadConfig;

use super::compare;
use super::step::config;
use crate::commands::CommandOutcome;

use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::{BenchProgram, PeerFigures};

/// Compare a training step with PyTorch's.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  python3 -m venv .venv && .venv/bin/pip install torch
  hearth bench peers --python .venv/bin/python
  hearth bench peers --python .venv/bin/python --config cpu-mid --dtype bf16 --compile --json")]
pub struct BenchPeersArgs {
    /// A Python with torch
    #[arg(long)]
    python: PathBuf,

    /// Size of the job; may be given several times
    #[arg(long, default_values = ["cpu-small"], value_parser = config)]
    config: Vec<WorkloadConfig>,

    /// Number formats of weights and activations
    #[arg(long, default_values = ["f32", "bf16"], value_parser = named_value::parser::<Dtype>())]
    dtype: Vec<Dtype>,

    /// Gradient checkpointing: which blocks are recomputed in backward
    #[arg(long, default_values = ["none", "block"], value_parser = named_value::parser::<Recompute>())]
    recompute: Vec<Recompute>,

    /// Compare with torch.compile as well
    #[arg(long)]
    compile: bool,

    /// Measured steps per process
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    /// Rounds; medians over all of them count
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Threads [default: one per performance core]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// Print one JSON object per variant and program
    #[arg(long)]
    json: bool,
}

/// One line of the table: a job's variant.
#[derive(Clone, Copy)]
struct PeerVariant {
    config: WorkloadConfig,
    dtype: Dtype,
    recompute: Recompute,
}

pub fn run(arguments: &BenchPeersArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let mut all = Vec::new();
    for config in &arguments.config {
        for dtype in &arguments.dtype {
            for recompute in &arguments.recompute {
                let variant = PeerVariant { config: *config, dtype: *dtype, recompute: *recompute };
                let figures = compare(arguments, variant)?;
                for figures in figures.iter().filter(|_| arguments.json) {
                    let line = serde_json::to_string(figures).map_err(std::io::Error::from)?;
                    writeln!(out, "{line}")?;
                }
                all.extend(figures);
            }
        }
    }
    if !arguments.json {
        write!(out, "{}", render::bench::peers(&all))?;
    }
    Ok(CommandOutcome::Done)
}

fn compare(arguments: &BenchPeersArgs, variant: PeerVariant) -> Result<Vec<PeerFigures>, Failure> {
    let threads = arguments.threads.map_or_else(machine::cores::compute_threads, usize::from);
    let mut programs = vec![
        (BenchProgram::Hearth, hearth(arguments, variant, threads)?),
        (BenchProgram::PytorchEager, pytorch(arguments, variant, threads, false)),
    ];
    if arguments.compile {
        programs.push((BenchProgram::PytorchCompiled, pytorch(arguments, variant, threads, true)));
    }
    let figures = |beside| PeerFigures {
        config: variant.config.name,
        dtype: named_value::value_name(&variant.dtype),
        recompute: named_value::value_name(&variant.recompute),
        figures: beside,
    };
    Ok(compare::measure(arguments.rounds, &mut programs)?.into_iter().map(figures).collect())
}

fn hearth(
    arguments: &BenchPeersArgs,
    variant: PeerVariant,
    threads: usize,
) -> Result<Command, Failure> {
    let (dtype, recompute) =
        (named_value::value_name(&variant.dtype), named_value::value_name(&variant.recompute));
    let (steps, threads) = (arguments.steps.to_string(), threads.to_string());
    compare::hearth(&[
        "bench",
        "step",
        "--json",
        "--config",
        variant.config.name,
        "--dtype",
        &dtype,
        "--recompute",
        &recompute,
        "--steps",
        &steps,
        "--threads",
        &threads,
    ])
}

fn pytorch(
    arguments: &BenchPeersArgs,
    variant: PeerVariant,
    threads: usize,
    compile: bool,
) -> Command {
    let WorkloadConfig { name, width, n_blocks, tokens, samples } = variant.config;
    let job = serde_json::json!({
        "config": name, "width": width, "n_blocks": n_blocks, "tokens": tokens, "samples": samples,
        "dtype": named_value::value_name(&variant.dtype), "recompute": named_value::value_name(&variant.recompute),
        "compile": compile, "steps": arguments.steps, "threads": threads,
    });
    let script = include_str!("../../../../../benches/peers/step.py");
    compare::python(&arguments.python, script, &job, threads)
}
