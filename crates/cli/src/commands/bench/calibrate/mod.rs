//! `hearth bench calibrate`: times the kernels that training calls, at sizes from a tiny model's to
//! a large one's, and keeps the curves for whoever predicts (`trainer::plan::rates`).
//!
//! What a case called is read off the device's tally, so a case need not know the names and sizes of
//! its calls, only the kernel that it is there for. Other calls of the case must have been measured
//! by earlier cases: their time is taken off.

mod cases;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use compute::{Device, Dtype, Params, Tape, Var, Work};
use machine::{Machine, Source};
use serde::Serialize;
use trainer::plan::rates::{self, Curve, LOAD, Measure, Owner, PASS, Rates};

use self::cases::{Case, cases};
use super::{load, median};
use crate::commands::Outcome;
use crate::commands::engine::Engine;
use crate::failure::Failure;
use crate::interrupt;
use crate::render;
use crate::render::progress::{clear, redraw};

/// Time the kernels of training on this machine, for predictions.
///
/// Takes a minute or two. The result is kept in the user's cache folder for this processor, this
/// number of threads and this version of hearth. Other programs that compute meanwhile make all
/// predictions too long.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench calibrate
  hearth bench calibrate --threads 4 --json
  hearth bench calibrate --folder . && hearth bench predict --folder .")]
pub struct Arguments {
    /// Folder where rates are kept [default: hearth in the user's cache folder]
    #[arg(long)]
    folder: Option<PathBuf>,

    /// One repetition of the smallest sizes
    #[arg(long, hide = true)]
    quick: bool,

    #[command(flatten)]
    engine: Engine,

    /// Print one JSON object: whose rates they are, where they are kept, and all curves
    #[arg(long)]
    json: bool,
}

/// Rates with whose they are.
#[derive(Debug, Serialize)]
pub struct Calibrated {
    pub owner: Owner,
    /// Nothing where the user has no cache folder.
    pub path: Option<PathBuf>,
    pub secs: f64,
    #[serde(flatten)]
    pub rates: Rates,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let begun = Instant::now();
    let rates = measure(&arguments.engine, arguments.quick)?;
    let owner = Owner::of(&Machine::probe(&mut Source::live()), arguments.engine.kind());
    let folder = arguments.folder.clone().or_else(rates::folder);
    let path = folder.map(|folder| rates.keep(&folder, &owner)).transpose()?;
    let calibrated = Calibrated { owner, path, secs: begun.elapsed().as_secs_f64(), rates };
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string(&calibrated).map_err(std::io::Error::from)?)?;
    } else {
        write!(out, "{}", render::rates::calibrated(&calibrated))?;
    }
    Ok(Outcome::Done)
}

/// Chosen: more than any case needs; only what is touched is taken.
const ARENA_BYTES: usize = 4 << 30;
/// Rounds over all cases, so that a slow spell of the machine does not meet one kernel alone.
const ROUNDS: usize = 2;
/// How long a case is repeated in a round. Chosen: all cases together take less than two minutes
/// (docs/measured.md).
const REPEATED: Duration = Duration::from_millis(50);
/// Chosen: a median of fewer would be one measurement.
const FEWEST: usize = 3;
/// Chosen: beyond this a median does not change.
const MOST: usize = 40;
/// Bytes of files that are read. Chosen: a small adapter's, and enough for the disk's own rate.
const FILES: [u64; 2] = [1 << 20, 64 << 20];

/// Measures all cases.
pub fn measure(engine: &Engine, is_quick: bool) -> Result<Rates, Failure> {
    let device = engine.open(ARENA_BYTES)?;
    let mut cases = cases();
    if is_quick {
        cases.retain(Case::is_smallest);
    }
    let n_rounds = if is_quick { 1 } else { ROUNDS };
    let interrupted = interrupt::flag()?;
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); cases.len()];
    let mut works = vec![Work::default(); cases.len()];
    let mut drawn = None;
    for round in 0..n_rounds {
        for (index, case) in cases.iter().enumerate() {
            let done = round * cases.len() + index;
            redraw(&mut drawn, || line(done, n_rounds * cases.len(), case));
            if interrupted.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(weights::WeightsError::Cancelled.into());
            }
            let (work, more) = repeat(&device, case, is_quick)?;
            works[index] = work;
            times[index].extend(more);
        }
    }
    clear();
    let seconds = times.into_iter().map(|times| median(times.into_iter()));
    let mut rates = learn(cases.iter().zip(works).zip(seconds));
    rates.curves.insert(LOAD.into(), loading(is_quick)?);
    Ok(rates)
}

fn line(done: usize, total: usize, case: &Case) -> String {
    format!(
        "calibrating {} {done} of {total}: {case}",
        crate::text::bar(done as f64 / total as f64)
    )
}

/// Numbers of each of two tensors. Chosen: with their sum they are larger than the second-level caches
/// of any core.
const SWEPT: usize = 2 << 20;

/// Something else that every core reads and writes: in a step, a kernel finds little of what it needs
/// in the caches that are a core's own.
struct Sweep {
    device: Device,
    tensors: [Var; 2],
}

impl Sweep {
    fn new(device: &Device) -> Result<Self, Failure> {
        let zeros = || device.zeros([SWEPT], Dtype::F32);
        Ok(Self { device: device.clone(), tensors: [zeros()?.into(), zeros()?.into()] })
    }

    fn run(&self) -> Result<(), Failure> {
        let params = Params::default();
        let [a, b] = &self.tensors;
        Tape::inference(&self.device, &params, 0).add(a, b)?;
        Ok(())
    }
}

/// What a case calls, and the seconds of each repetition.
fn repeat(device: &Device, case: &Case, is_quick: bool) -> Result<(Work, Vec<f64>), Failure> {
    let mut ready = case.prepare(device)?;
    let sweep = Sweep::new(device)?;
    let (mut times, mut work) = (Vec::new(), Work::default());
    // The first is not counted: memory is touched for the first time.
    let mut spent = Duration::ZERO;
    for index in 0..=MOST {
        sweep.run()?;
        let (took, done) = ready.run()?;
        work = done;
        if index > 0 {
            times.push(took.as_secs_f64());
            spent += took;
        }
        if times.len() >= FEWEST && spent >= REPEATED || is_quick && index > 0 {
            break;
        }
    }
    Ok((work, times))
}

/// Curves from what cases called and how long they took, in their order.
fn learn<'c>(measured: impl Iterator<Item = ((&'c Case, Work), f64)>) -> Rates {
    let mut points: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut rates = Rates { is_measured: true, curves: BTreeMap::new() };
    for ((case, work), seconds) in measured {
        let measure = Measure::of(case.kernel);
        let (mut others, mut count, mut size, mut name) = (0.0, 0, 0.0, None);
        for (class, calls) in &work.calls {
            if case.is_for(class.kernel) {
                name = Some(class.to_string());
                count += calls.count;
                size += measure.mean(calls) * calls.count as f64;
            } else {
                others += rates.seconds_of(class, calls);
            }
        }
        let Some(name) = name else { continue };
        // Noise may leave less than nothing; a tenth is left in any case.
        let own = (seconds - others).max(0.1 * seconds) / count as f64;
        let all = points.entry(name.clone()).or_default();
        all.push((size / count as f64, own));
        rates.curves.insert(name, Curve::through(measure, all.clone()));
    }
    if let Some(add) = rates.curves.get("add, f32").cloned() {
        rates.curves.insert(PASS.into(), add);
    }
    rates
}

/// Reading files that the system has at hand, as a model's are on the second run.
fn loading(is_quick: bool) -> Result<Curve, Failure> {
    let sizes = if is_quick { &FILES[..1] } else { &FILES[..] };
    let mut points = Vec::new();
    for bytes in sizes {
        points.push((*bytes as f64, load::time_cached(*bytes)?));
    }
    Ok(Curve::through(Measure::Bytes, points))
}
