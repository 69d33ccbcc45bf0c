//! `hearth bench`: benchmarks of this machine, optionally against PyTorch.

pub mod calibrate;
pub mod cluster;
pub mod compare;
pub mod compress;
pub mod load;
pub mod models;
pub mod ops;
pub mod peers;
pub mod predict;
pub mod step;
pub mod text;
pub mod train;

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use compute::WorkStats;
use machine::{Machine, ProbeSource};
use tempfile::TempDir;
use trainer::plan::rates;

use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::failure::Failure;

/// Benchmark this machine, optionally against PyTorch.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench step                        a training step: time and memory
  hearth bench ops                         each op alone
  hearth bench peers --python .venv/bin/python    the step, compared with PyTorch
  hearth bench models                      SD3, text encoders, VAE
  hearth bench text                        a language model from scratch
  hearth bench compress --text DIR --validation DIR    ways to choose tokens, at equal FLOPs
  hearth bench cluster job.toml --nodes a,b    several machines together, beside the sum of their speeds
  hearth bench train                       a whole job: encoding images, and training steps
  hearth bench calibrate                   time every kernel, once, for time estimates in plans
  hearth bench predict                     predicted and measured step times
  hearth bench load                        how fast model files are loaded and written
  hearth bench load --python .venv/bin/python --json")]
pub struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    Step(step::BenchStepArgs),
    Ops(ops::BenchOpsArgs),
    Peers(peers::BenchPeersArgs),
    Models(models::BenchModelsArgs),
    Text(text::BenchTextArgs),
    Compress(compress::BenchCompressArgs),
    Cluster(Box<cluster::BenchClusterArgs>),
    Train(train::BenchTrainArgs),
    Load(load::BenchLoadArgs),
    Calibrate(calibrate::CalibrateArgs),
    Predict(predict::PredictArgs),
}

pub fn run(arguments: &BenchArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    match &arguments.command {
        BenchCommand::Step(arguments) => step::run(arguments, out),
        BenchCommand::Ops(arguments) => ops::run(arguments, out),
        BenchCommand::Peers(arguments) => peers::run(arguments, out),
        BenchCommand::Models(arguments) => models::run(arguments, out),
        BenchCommand::Text(arguments) => text::run(arguments, out),
        BenchCommand::Compress(arguments) => compress::run(arguments, out),
        BenchCommand::Cluster(arguments) => cluster::run(arguments, out),
        BenchCommand::Train(arguments) => train::run(arguments, out),
        BenchCommand::Load(arguments) => load::run(arguments, out),
        BenchCommand::Calibrate(arguments) => calibrate::run(arguments, out),
        BenchCommand::Predict(arguments) => predict::run(arguments, out),
    }
}

/// A new folder within another, of which nobody else can know the name or look inside. It is removed when dropped.
fn private_folder(within: &Path) -> Result<TempDir, Failure> {
    let made = tempfile::Builder::new().prefix(".hearth-bench-").tempdir_in(within);
    made.map_err(|error| Failure::Write { path: within.into(), error })
}

/// Milliseconds that work was to take by the rates of this machine, if it was calibrated.
fn predicted_ms(engine: &DeviceArgs, work: &WorkStats) -> Option<f64> {
    let machine = Machine::probe(&mut ProbeSource::live());
    let rates = engine.kept_rates(&machine, rates::folder())?;
    Some(1e3 * rates.seconds(work))
}

/// Wall time and CPU time of one piece of work, in milliseconds. CPU time is divided by
/// the threads: what the wall time would be with the cores to itself.
#[derive(Clone, Copy)]
struct Timing {
    wall_ms: f64,
    cpu_ms: f64,
}

impl Timing {
    fn measure<T, E>(threads: usize, work: impl FnOnce() -> Result<T, E>) -> Result<(Self, T), E> {
        let (wall, cpu) = (Instant::now(), machine::process::cpu_time());
        let done = work()?;
        let cpu = machine::process::cpu_time().saturating_sub(cpu);
        let wall_ms = wall.elapsed().as_secs_f64() * 1e3;
        Ok((Self { wall_ms, cpu_ms: cpu.as_secs_f64() * 1e3 / threads as f64 }, done))
    }
}

/// The middle one of some measurements.
fn median(of: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = of.collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Removes what a run left.
fn remove(folder: &Path) -> Result<(), Failure> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::Write { path: folder.into(), error })
        }
        _ => Ok(()),
    }
}
