//! `hearth bench calibrate`: times the kernels that training calls, at sizes from a tiny model's to
//! a large one's, and keeps the curves for whoever predicts (`trainer::plan::rates`).
//!
//! A kernel is as fast as what ran before lets it be: of what it reads, some is in caches, and most is
//! not. So most are timed where they belong, in steps of training on stacks of blocks, by the device's
//! own tally; what those steps do not call is timed alone.

mod kernels;
mod steps;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use compute::{BlockSwap, Device, DeviceKind, Dtype, Params, Tape, Var, WorkStats};
use machine::{Machine, ProbeSource};
use trainer::plan::rates::{self, CallSizeUnit, LINK, LOAD, PASS, RateCurve, Rates};

use self::kernels::KernelCase;
use self::steps::CalibrationStack;
use super::load;
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::output;
use crate::failure::Failure;
use crate::interrupt;
use crate::render;
use crate::render::line::ProgressLine;
use crate::render::progress::{clear, redraw};
use crate::render::rates::CalibrationReport;

/// Time the training kernels on this machine, so that plans predict step times.
///
/// Takes a minute or two. The result is stored in the user's cache folder for this device, this number of
/// threads and this version of hearth. Close other busy programs: they make all predictions too long.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench calibrate
  hearth bench calibrate --threads 4 --json
  hearth bench calibrate --folder . && hearth bench predict --folder .")]
pub struct CalibrateArgs {
    /// Folder where rates are stored [default: hearth in the user's cache folder]
    #[arg(long)]
    folder: Option<PathBuf>,

    /// One repetition of the smallest sizes
    #[arg(long, hide = true)]
    quick: bool,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object: device, file and all curves
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &CalibrateArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let begun = Instant::now();
    let folder = arguments.folder.clone().or_else(rates::folder);
    if let Some(folder) = &folder {
        output::check_file(&folder.join("rates"))?;
    }
    let rates = measure(&arguments.engine, arguments.quick)?;
    let owner = arguments.engine.owner(&Machine::probe(&mut ProbeSource::live()));
    let path = folder.map(|folder| rates.save(&folder, &owner)).transpose()?;
    let calibrated = CalibrationReport { owner, path, secs: begun.elapsed().as_secs_f64(), rates };
    if arguments.json {
        render::json::line(out, &calibrated)?;
    } else {
        write!(out, "{}", render::rates::calibrated(&calibrated))?;
    }
    Ok(CommandOutcome::Done)
}

/// Chosen: more than anything here needs; only what is touched is taken.
const ARENA_BYTES: usize = 4 << 30;
/// Rounds over everything, so that a slow spell of the machine does not meet one kernel alone.
const ROUNDS: usize = 2;
/// How long a thing is repeated in a round. Chosen: all together take less than two minutes
/// (docs/measured.md).
const KERNEL_REPEATED: Duration = Duration::from_millis(20);
const STEP_REPEATED: Duration = Duration::from_millis(300);
/// Chosen: one of so many is hardly disturbed.
const FEWEST: usize = 3;
/// Chosen: beyond this the best does not change.
const MOST: usize = 40;
/// Bytes of files that are read. Chosen: a small adapter's, and enough for the disk's own rate.
const FILES: [u64; 2] = [1 << 20, 64 << 20];

/// Something that is timed.
enum CalibrationCase {
    Step(CalibrationStack),
    Kernel(KernelCase),
}

/// Measures everything.
pub fn measure(engine: &DeviceArgs, is_quick: bool) -> Result<Rates, Failure> {
    let device = engine.open(ARENA_BYTES)?;
    device.time_calls(true);
    let is_card = matches!(engine.kind(), DeviceKind::Cuda { .. });
    let mut all = CalibrationCase::all(is_card);
    if is_quick {
        all.retain(CalibrationCase::is_smallest);
    }
    let n_rounds = if is_quick { 1 } else { ROUNDS };
    let interrupted = interrupt::flag()?;
    let mut works: Vec<Vec<WorkStats>> = vec![Vec::new(); all.len()];
    let mut drawn = None;
    for round in 0..n_rounds {
        for (index, timed) in all.iter().enumerate() {
            let done = round * all.len() + index;
            redraw(&mut drawn, || line(done, n_rounds * all.len(), timed));
            if interrupted.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(weights::WeightsError::Cancelled.into());
            }
            works[index].extend(timed.repeat(&device, is_quick)?);
        }
    }
    clear();
    let asking = match engine.kind() {
        DeviceKind::Cpu { .. } => CallOverhead::default(),
        DeviceKind::Cuda { .. } | DeviceKind::Gpu { .. } => {
            CallOverhead::measure(&device, is_card, is_quick)?
        }
    };
    let mut rates = fit_rates(all.iter().zip(&works), asking);
    rates.curves.insert(LOAD.into(), load_curve(is_quick)?);
    rates.curves.insert(LINK.into(), offload_curve(&device, is_quick)?);
    Ok(rates)
}

fn line(done: usize, total: usize, timed: &CalibrationCase) -> ProgressLine {
    ProgressLine::new("calibrating")
        .bar(done as f64 / total as f64)
        .part(0, format!("{done} of {total}"))
        .part(1, timed.to_string())
}

impl CalibrationCase {
    fn all(is_gpu: bool) -> Vec<Self> {
        let steps = steps::stacks(is_gpu).into_iter().map(Self::Step);
        steps.chain(kernels::cases(is_gpu).into_iter().map(Self::Kernel)).collect()
    }

    fn is_smallest(&self) -> bool {
        match self {
            Self::Step(stack) => stack.is_smallest(),
            Self::Kernel(case) => case.is_smallest(),
        }
    }

    /// Whether calls of this kernel are what it is there for.
    fn is_for(&self, kernel: &str) -> bool {
        match self {
            Self::Step(_) => true,
            Self::Kernel(case) => case.is_for(kernel),
        }
    }

    /// What it calls, once for each repetition.
    fn repeat(&self, device: &Device, is_quick: bool) -> Result<Vec<WorkStats>, Failure> {
        match self {
            Self::Step(stack) => {
                let mut ready = stack.prepare(device)?;
                repeat(STEP_REPEATED, is_quick, || Ok(ready.run()?))
            }
            Self::Kernel(case) => {
                let (mut ready, sweep) = (case.prepare(device)?, CacheSweep::new(device)?);
                repeat(KERNEL_REPEATED, is_quick, || {
                    sweep.run()?;
                    Ok(ready.run()?)
                })
            }
        }
    }
}

impl fmt::Display for CalibrationCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step(stack) => stack.fmt(f),
            Self::Kernel(case) => case.fmt(f),
        }
    }
}

/// The first is not counted: memory is touched for the first time.
fn repeat(
    long: Duration,
    is_quick: bool,
    mut run: impl FnMut() -> Result<WorkStats, Failure>,
) -> Result<Vec<WorkStats>, Failure> {
    run()?;
    let mut works = Vec::new();
    let begun = Instant::now();
    while works.len() < MOST {
        works.push(run()?);
        if works.len() >= FEWEST && begun.elapsed() >= long || is_quick {
            break;
        }
    }
    Ok(works)
}

/// Numbers of each of two tensors. Chosen: with their sum they are larger than the second-level caches
/// of any core.
const SWEPT: usize = 2 << 20;

/// Something else that every core reads and writes: in a step, a kernel finds little of what it needs
/// in the caches that are a core's own.
struct CacheSweep {
    device: Device,
    tensors: [Var; 2],
}

impl CacheSweep {
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

/// What a call costs besides the work itself where another device does that.
#[derive(Clone, Copy, Default)]
struct CallOverhead {
    /// Seconds that the host takes to ask for one.
    host: f64,
    /// Seconds that one takes longer if it is waited for, as it is to be timed.
    waiting: f64,
}

impl CallOverhead {
    /// By steps of which no call is waited for: a small one, in which the host is what takes time, and one that
    /// keeps the device at work, beside the same with every call waited for.
    fn measure(device: &Device, is_gpu: bool, is_quick: bool) -> Result<Self, Failure> {
        let [small, large] = CalibrationStack::extremes(is_gpu);
        let few = unwaited(device, &small)?;
        let [many, waited] = if is_quick { few } else { unwaited(device, &large)? };
        Ok(Self { host: few[0], waiting: (waited - many).max(0.0) })
    }
}

/// Seconds per call of a stack's steps, without and with waiting for each call: the best of some.
fn unwaited(device: &Device, stack: &CalibrationStack) -> Result<[f64; 2], Failure> {
    let mut ready = stack.prepare(device)?;
    let mut best = [f64::INFINITY; 2];
    for _ in 0..=FEWEST {
        for (best, is_waited_for) in best.iter_mut().zip([false, true]) {
            device.time_calls(is_waited_for);
            device.synchronise()?;
            let begun = Instant::now();
            let work = ready.run()?;
            device.synchronise()?;
            let n_calls: u64 = work.calls.values().map(|calls| calls.count).sum();
            *best = best.min(begun.elapsed().as_secs_f64() / n_calls as f64);
        }
    }
    Ok(best)
}

/// The least that a call can take of the time it took while it was waited for. Chosen: nothing is for free.
const LEAST_SHARE: f64 = 0.1;

/// Curves from what was called: a point for every class of calls of everything that was timed.
fn fit_rates<'w>(
    measured: impl Iterator<Item = (&'w CalibrationCase, &'w Vec<WorkStats>)>,
    CallOverhead { host, waiting }: CallOverhead,
) -> Rates {
    let mut points: BTreeMap<String, (CallSizeUnit, Vec<(f64, f64)>)> = BTreeMap::new();
    for (timed, works) in measured {
        let classes = works.first().into_iter().flat_map(|work| &work.calls);
        for (class, calls) in classes.filter(|(class, _)| timed.is_for(class.kernel)) {
            let seconds = works.iter().filter_map(|work| {
                let calls = work.calls.get(class)?;
                Some(1e-9 * calls.nanos as f64 / calls.count as f64)
            });
            let measure = CallSizeUnit::of(class.kernel);
            let (_, all) = points.entry(class.to_string()).or_insert((measure, Vec::new()));
            // The best of all: what disturbs only makes longer.
            let best = seconds.fold(f64::INFINITY, f64::min);
            all.push((measure.mean(calls), (best - waiting).max(LEAST_SHARE * best)));
        }
    }
    let curve = |(name, (measure, points))| (name, RateCurve::through(measure, points));
    let mut curves: BTreeMap<_, _> = points.into_iter().map(curve).collect();
    if let Some(add) = curves.get("add, f32").cloned() {
        curves.insert(PASS.into(), add);
    }
    Rates { is_measured: true, host_secs: host, curves }
}

/// Blocks that come from main memory, each of three in turn, so that none of them is there already.
fn offload_curve(device: &Device, is_quick: bool) -> Result<RateCurve, Failure> {
    let sizes = if is_quick { &FILES[..1] } else { &FILES[..] };
    let mut points = Vec::new();
    for bytes in sizes {
        let ring = BlockSwap::new(device, &vec![vec![*bytes as usize]; 3])?;
        let mut best = f64::INFINITY;
        for block in (0..3).cycle().take(3 * FEWEST) {
            device.synchronise()?;
            let begun = Instant::now();
            ring.enter(block, None);
            device.synchronise()?;
            best = best.min(begun.elapsed().as_secs_f64());
        }
        points.push((*bytes as f64, best));
    }
    Ok(RateCurve::through(CallSizeUnit::Bytes, points))
}

/// Reading files that the system has at hand, as a model's are on the second run.
fn load_curve(is_quick: bool) -> Result<RateCurve, Failure> {
    let sizes = if is_quick { &FILES[..1] } else { &FILES[..] };
    let mut points = Vec::new();
    for bytes in sizes {
        points.push((*bytes as f64, load::time_cached(*bytes)?));
    }
    Ok(RateCurve::through(CallSizeUnit::Bytes, points))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_timed_fits_the_arena() {
        for kind in [DeviceKind::cpu(2), DeviceKind::Cuda { is_deterministic: false }] {
            let is_card = matches!(kind, DeviceKind::Cuda { .. });
            let device = Device::meta(kind, ARENA_BYTES);
            // Only the CPU uses Winograd, and without AMX its narrow matmuls have other names.
            let elsewhere = if is_card { "winograd" } else { "narrow matmul" };
            for timed in CalibrationCase::all(is_card) {
                let works = timed.repeat(&device, true).unwrap_or_else(|_| panic!("{timed}"));
                let is_called =
                    |work: &WorkStats| work.calls.keys().any(|it| timed.is_for(it.kernel));
                let is_elsewhere = format!("{timed}").starts_with(elsewhere);
                assert!(works.iter().all(is_called) || is_elsewhere, "{kind:?}: {timed}");
            }
        }
    }
}
