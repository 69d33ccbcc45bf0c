//! `hearth bench peers`: the benchmark job by hearth and by PyTorch, one after the other and round
//! after round, each in a process of its own, so that anyone can repeat our claim.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use trainer::workload::Config;

use super::step::{Again, Format, config};
use super::{default_threads, median, name_of};
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::render;

/// Measure a training step beside PyTorch's.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  python3 -m venv .venv && .venv/bin/pip install torch
  hearth bench peers --python .venv/bin/python
  hearth bench peers --python .venv/bin/python --config cpu-mid --dtype bf16 --compile --json")]
pub struct Arguments {
    /// A Python with torch
    #[arg(long)]
    python: PathBuf,

    /// How large the job is; several may be given
    #[arg(long, default_values = ["cpu-small"], value_parser = config)]
    config: Vec<Config>,

    /// Formats of weights and activations
    #[arg(long, default_values = ["f32", "bf16"])]
    dtype: Vec<Format>,

    /// Which blocks are computed twice
    #[arg(long, default_values = ["none", "block"])]
    recompute: Vec<Again>,

    /// PyTorch with torch.compile as well
    #[arg(long)]
    compile: bool,

    /// Measured steps of each process
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

/// Who computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    Hearth,
    PytorchEager,
    PytorchCompiled,
}

/// What one process measured.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Sample {
    ms_median: f64,
    cpu_ms_median: f64,
    rss_peak_bytes: Option<u64>,
    rss_before_bytes: Option<u64>,
}

/// One program on one variant.
#[derive(Debug, Serialize)]
pub struct Figures {
    pub program: Program,
    pub config: &'static str,
    pub dtype: String,
    pub recompute: String,
    pub ms_median: f64,
    pub cpu_ms_median: f64,
    /// Peak of the process, less what it had before the job began.
    pub memory_bytes: Option<u64>,
    /// Hearth's figure over this one.
    pub hearth_time_ratio: f64,
    pub hearth_cpu_ratio: f64,
    pub hearth_memory_ratio: Option<f64>,
}

/// One line of the table: a job's variant.
#[derive(Clone, Copy)]
struct Variant {
    config: Config,
    dtype: Format,
    recompute: Again,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let mut all = Vec::new();
    for config in &arguments.config {
        for dtype in &arguments.dtype {
            for recompute in &arguments.recompute {
                let variant = Variant { config: *config, dtype: *dtype, recompute: *recompute };
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
    Ok(Outcome::Done)
}

fn compare(arguments: &Arguments, variant: Variant) -> Result<Vec<Figures>, Failure> {
    let mut programs = vec![Program::Hearth, Program::PytorchEager];
    programs.extend(arguments.compile.then_some(Program::PytorchCompiled));
    let mut samples: Vec<Vec<Sample>> = programs.iter().map(|_| Vec::new()).collect();
    // Round after round, so that a slow spell of the machine meets all alike.
    for _ in 0..arguments.rounds {
        for (program, samples) in programs.iter().zip(&mut samples) {
            samples.push(sample(arguments, variant, *program)?);
        }
    }
    let ours = Medians::of(&samples[0]);
    let of = |(program, samples): (Program, &Vec<Sample>)| {
        let Medians { ms, cpu_ms, memory } = Medians::of(samples);
        Figures {
            program,
            config: variant.config.name,
            dtype: name_of(&variant.dtype),
            recompute: name_of(&variant.recompute),
            ms_median: ms,
            cpu_ms_median: cpu_ms,
            memory_bytes: memory,
            hearth_time_ratio: ours.ms / ms,
            hearth_cpu_ratio: ours.cpu_ms / cpu_ms,
            hearth_memory_ratio: ours
                .memory
                .zip(memory)
                .map(|(ours, its)| ours as f64 / its as f64),
        }
    };
    Ok(programs.into_iter().zip(&samples).map(of).collect())
}

struct Medians {
    ms: f64,
    cpu_ms: f64,
    memory: Option<u64>,
}

impl Medians {
    fn of(samples: &[Sample]) -> Self {
        let memory = |sample: &Sample| Some(sample.rss_peak_bytes? - sample.rss_before_bytes?);
        Self {
            ms: median(samples.iter().map(|sample| sample.ms_median)),
            cpu_ms: median(samples.iter().map(|sample| sample.cpu_ms_median)),
            memory: samples.iter().filter_map(memory).max(),
        }
    }
}

fn sample(arguments: &Arguments, variant: Variant, program: Program) -> Result<Sample, Failure> {
    let threads = arguments.threads.map_or_else(default_threads, usize::from);
    let mut command = match program {
        Program::Hearth => hearth(arguments, variant, threads)?,
        Program::PytorchEager => pytorch(arguments, variant, threads, false),
        Program::PytorchCompiled => pytorch(arguments, variant, threads, true),
    };
    let failed =
        |said: String| Failure::Peer { what: format!("measuring {program:?} failed"), said };
    let output = command.output().map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.lines().last().unwrap_or_default())
        .map_err(|_| failed(String::from_utf8_lossy(&output.stderr).into_owned()))
}

fn hearth(arguments: &Arguments, variant: Variant, threads: usize) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["bench", "step", "--json", "--config", variant.config.name]);
    command.args([
        "--dtype",
        &name_of(&variant.dtype),
        "--recompute",
        &name_of(&variant.recompute),
    ]);
    command.args(["--steps", &arguments.steps.to_string(), "--threads", &threads.to_string()]);
    Ok(command)
}

fn pytorch(arguments: &Arguments, variant: Variant, threads: usize, compile: bool) -> Command {
    let Config { name, width, n_blocks, tokens, samples } = variant.config;
    let job = serde_json::json!({
        "config": name, "width": width, "n_blocks": n_blocks, "tokens": tokens, "samples": samples,
        "dtype": name_of(&variant.dtype), "recompute": name_of(&variant.recompute),
        "compile": compile, "steps": arguments.steps, "threads": threads,
    });
    let script = include_str!("../../../../../benches/peers/step.py");
    let mut command = Command::new(Path::new(&arguments.python));
    command.args(["-c", script, &job.to_string()]);
    // Threads that spin while they wait would take the cores from whoever is measured next, and
    // make processor time meaningless.
    command.env("OMP_WAIT_POLICY", "PASSIVE").env("OMP_NUM_THREADS", threads.to_string());
    command
}
