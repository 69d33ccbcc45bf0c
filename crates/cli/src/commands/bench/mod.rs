//! `hearth bench`: the measured figures of this machine, optionally beside a peer's.

pub mod beside;
pub mod calibrate;
pub mod load;
pub mod models;
pub mod ops;
pub mod peers;
pub mod predict;
pub mod step;
pub mod text;
pub mod train;

use std::io::Write;
use std::time::Instant;

use compute::Work;
use machine::{Machine, Source};
use trainer::plan::rates;

use crate::commands::Outcome;
use crate::commands::engine::Engine;
use crate::failure::Failure;

/// Measure this machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench step                        a training step, its time and its memory
  hearth bench ops                         each op alone
  hearth bench peers --python .venv/bin/python    the step beside PyTorch's
  hearth bench models                      SD3, text encoders, the autoencoder
  hearth bench text                        a language model, all of it trained
  hearth bench train                       a whole job: encoding its pictures, and its steps
  hearth bench calibrate                   time every kernel, once, for predictions
  hearth bench predict                     how long steps take, beside how long they were to take
  hearth bench load                        how fast model files come into memory, and go to disk
  hearth bench load --python .venv/bin/python --json")]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Step(step::Arguments),
    Ops(ops::Arguments),
    Peers(peers::Arguments),
    Models(models::Arguments),
    Text(text::Arguments),
    Train(train::Arguments),
    Load(load::Arguments),
    Calibrate(calibrate::Arguments),
    Predict(predict::Arguments),
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    match &arguments.what {
        What::Step(arguments) => step::run(arguments, out),
        What::Ops(arguments) => ops::run(arguments, out),
        What::Peers(arguments) => peers::run(arguments, out),
        What::Models(arguments) => models::run(arguments, out),
        What::Text(arguments) => text::run(arguments, out),
        What::Train(arguments) => train::run(arguments, out),
        What::Load(arguments) => load::run(arguments, out),
        What::Calibrate(arguments) => calibrate::run(arguments, out),
        What::Predict(arguments) => predict::run(arguments, out),
    }
}

/// Milliseconds that work was to take by the rates of this machine, if it was calibrated.
fn predicted_ms(engine: &Engine, work: &Work) -> Option<f64> {
    let machine = Machine::probe(&mut Source::live());
    let rates = engine.kept_rates(&machine, rates::folder())?;
    Some(1e3 * rates.seconds(work))
}

/// Wall time and processor time of one piece of work, in milliseconds. Processor time is divided by
/// the threads: what the wall time would be with the cores to itself.
#[derive(Clone, Copy)]
struct Timed {
    wall_ms: f64,
    cpu_ms: f64,
}

impl Timed {
    fn of<T, E>(threads: usize, work: impl FnOnce() -> Result<T, E>) -> Result<(Self, T), E> {
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
