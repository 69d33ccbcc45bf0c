//! The loop on a tiny model, in micro-batches of every size, and with an allocation that fails.
//!
//! Some allocations are tried, spread over a run. `HEARTH_ALLOCATIONS=1000000 cargo test -p trainer --lib
//! train::tests` tries so many, or all that there are; a second for each.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cluster::{Launcher, World};
use compute::gpu::{GpuAdapterKind, GpuChoice, adapters};
use compute::{Device, DeviceKind, Tensor};
use machine::governor::{Cause, Pace, PaceDecision};
use machine::held::MemoryPlace;
use machine::{Machine, ProbeSource};

use super::checkpoint::TrainProgress;
use super::data_parallel::DataParallel;
use super::diffusion::batch::EncodedSample;
use super::diffusion::{DiffusionTask, ImageLoader};
use super::folder::RunFolder;
use super::run::TrainingRun;
use super::*;
use crate::cache::{CacheBuilder, CacheRequest};
use crate::config::RawConfig;
use crate::config::batch::BatchSettings;
use crate::data::SampleSize;
use crate::error::TrainerError;
use crate::event::{EndReason, MemoryFallback, Warning, WarningKind};
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::paths::PartPaths;
use crate::model::host::relative_error;
use crate::model::recompute::Recompute;
use crate::plan::{MemoryLevel, PlanRequest, Rates, dry_run, memory_levels};
use crate::task::traits::DatasetSummary;
use crate::task::traits::{DataLoader as _, TrainBatch};

const JOB: &str = "
[base]
dtype = 'f32'
[data]
images = 'images'
draw = 'neon'
draw_count = 4
resolution = 64
bucket_step = 16
validation = 1
[adapter]
rank = 4
dropout = 0.1
[train]
steps = 2
batch_size = 3
ema = 0.9
validate_every = 50
[optimizer]
learning_rate = 1e-2
[output]
folder = 'run'
save_every = 'off'
";

/// Everything that has state, with one image at a time: more gradient checkpointing is the only fallback, and
/// changes no bit.
const SINGLE: [&str; 7] = [
    "train.batch_size=1",
    "train.gradient_accumulation=2",
    "optimizer.kind=adamw_8bit",
    "adapter.kind=dora",
    "sample.prompts=['a fox']",
    "sample.size=64",
    "sample.steps=1",
];

/// Keeps steps smooth where a gradient is near zero: without it the last bit of a sum would decide the
/// direction of a step.
const SMOOTH: &str = "optimizer.epsilon=1e-2";

/// Allocations that are tried in a test, unless set otherwise.
const TRIED: u64 = 8;

/// Relative to the largest number of a tensor. Measured: 1.9e-7 after a step, at any of its allocations.
const APART: f64 = 1e-5;

/// Events, each with the bytes in use then.
type EventLog = Mutex<Vec<(Event, usize)>>;

/// Sets a job up and lets `work` have its loop.
fn with_run(set: &[&str], work: impl FnOnce(&mut TrainingRun<'_, ImageLoader<'_>>, &EventLog)) {
    with_job(JOB, set, work);
}

fn with_job(
    job: &str,
    set: &[&str],
    work: impl FnOnce(&mut TrainingRun<'_, ImageLoader<'_>>, &EventLog),
) {
    // One thread: the arithmetic is too small to share.
    with_job_on(DeviceKind::cpu(1), &|bytes| Device::cpu(1, bytes), job, set, work);
}

fn with_job_on(
    kind: DeviceKind,
    open: &dyn Fn(usize) -> compute::Result<Device>,
    job: &str,
    set: &[&str],
    work: impl FnOnce(&mut TrainingRun<'_, ImageLoader<'_>>, &EventLog),
) {
    let place = tempfile::tempdir().unwrap();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/pipeline");
    let mut raw = RawConfig::from_text(job, &place.path().join("job.toml")).unwrap();
    raw.set_path("base.path", &base).unwrap();
    for argument in set {
        raw.set(argument).unwrap();
    }
    let config = raw.resolve().unwrap();

    let rates = Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind);
    let device_setup = DeviceSetup {
        kind,
        name: "test".into(),
        limit_bytes: 1 << 30,
        host_bytes: None,
        raisable: None,
        rates,
        open: Box::new(open),
        memory_place: MemoryPlace::Process,
        start_sampler: Box::new(|_| None),
        world: None,
    };
    let folder = RunFolder::open(&config.output.folder, TrainOptions::default()).unwrap();
    let pipeline = Pipeline::open(&base, &PartPaths::default()).unwrap();
    let caching =
        CacheBuilder::new(&pipeline, CacheRequest::from_config(&config).unwrap(), &|_| true)
            .unwrap();
    let task = DiffusionTask::new(&config, &pipeline).unwrap();
    let dataset = DatasetSummary::from_caching(&caching);
    let job = PlanRequest { task: &task, config: &config, dataset: &dataset };
    let budget = device_setup.budget();
    let plan = dry_run(job, budget).unwrap();
    let levels = memory_levels(job, budget).unwrap();
    let mut metered = MeteredDevice::open(&config, &device_setup, &plan).unwrap();
    let device = metered.device.clone();
    // A software driver takes minutes to compile the kernels of encoders.
    let encoder = match kind {
        DeviceKind::Gpu { .. } => Device::cpu(1, 1 << 30).unwrap(),
        _ => device.clone(),
    };
    let index = Arc::new(
        caching.run(&encoder, plan.encoder_loading, plan.decoding_bytes, &|_| true).unwrap(),
    );
    let log = EventLog::default();
    let listener = |record: &EventRecord| {
        log.lock().unwrap().push((record.event.clone(), device.usage().in_use));
    };
    let (listeners, stop) = ([&listener as EventListener<'_>], CancelToken::default());
    let events = EventSink::open(&folder.path, false, &listeners, &stop).unwrap();
    let setup = RunSetup { device_setup: &device_setup, plan: &plan, levels: &levels };
    let mut loader = ImageLoader::new(task, &config, index, plan.tiling).unwrap();
    let output = RunOutput { folder: &folder, events: &events };
    work(&mut begin(&config, &task, &mut loader, setup, &mut metered, output).unwrap(), &log);
    assert_eq!(device.usage().in_use, 0);
}

/// All tensors of a checkpoint, by name.
fn state(run: &mut TrainingRun<'_, ImageLoader<'_>>) -> Vec<(String, Vec<u8>)> {
    let tensors = run.session.state_dict().unwrap();
    let bytes = |tensor: &Tensor| {
        let mut bytes = Vec::new();
        tensor.write_to(&mut bytes).unwrap();
        bytes
    };
    tensors.into_iter().map(|(name, tensor)| (name, bytes(tensor))).collect()
}

fn put_back(run: &mut TrainingRun<'_, ImageLoader<'_>>, state: &[(String, Vec<u8>)]) {
    for ((_, tensor), (_, bytes)) in run.session.state_dict().unwrap().into_iter().zip(state) {
        let fill = |_, mut parts: Vec<compute::FillPart<'_>>| -> Result<()> {
            parts.remove(0).fill(&mut |to| {
                to.copy_from_slice(bytes);
                Ok(())
            })
        };
        compute::fill_all(vec![tensor], fill).unwrap();
    }
}

/// Runs from the start to the end, from the first of these memory levels.
fn again(
    run: &mut TrainingRun<'_, ImageLoader<'_>>,
    levels: &[MemoryLevel],
    start: &[(String, Vec<u8>)],
) -> Result<RunEnd> {
    put_back(run, start);
    (run.progress, run.is_sampling_warned) = (TrainProgress::before_first_step(), false);
    run.pacing = run.pacing.with_levels(levels);
    run.train_loop()
}

/// The largest difference between trained parameters, relative to the largest of their tensor.
fn apart(a: &[(String, Vec<u8>)], b: &[(String, Vec<u8>)]) -> f64 {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let pairs = a.iter().zip(b).filter(|((name, _), _)| !name.starts_with("optimizer."));
    let apart = pairs.map(|((_, a), (_, b))| relative_error(&floats(a), &floats(b)));
    apart.fold(0.0, f64::max)
}

/// Some of the allocations from the first to the last.
fn tried(last: u64) -> impl Iterator<Item = u64> {
    let asked = std::env::var("HEARTH_ALLOCATIONS").ok().and_then(|n| n.parse().ok());
    let n = last.min(asked.unwrap_or(TRIED));
    (0..n).map(move |at| 1 + at * last / n)
}

/// Runs the loop once for each allocation that is tried, which fails. `check` gets the state without and with
/// the failure, and the events.
fn refuse_each(set: &[&str], check: impl Fn(&[(String, Vec<u8>)], &[(String, Vec<u8>)], &[Event])) {
    refuse_each_of(JOB, set, check);
}

fn refuse_each_of(
    job: &str,
    set: &[&str],
    check: impl Fn(&[(String, Vec<u8>)], &[(String, Vec<u8>)], &[Event]),
) {
    with_job(job, set, |run, log| {
        let (levels, start) = (run.pacing.levels.clone(), state(run));
        let before = run.device.n_allocations();
        run.train_loop().unwrap();
        let (whole, n) = (state(run), run.device.n_allocations() - before);
        assert!(apart(&start, &whole) > 0.1, "nothing was trained");
        for nth in tried(n) {
            log.lock().unwrap().clear();
            let in_use = run.device.usage().in_use;
            run.device.fail_allocation(nth);
            let end = again(run, &levels, &start).unwrap();
            assert_eq!((end.step, end.reason), (2, EndReason::Finished));
            let log = log.lock().unwrap();
            assert!(log.iter().all(|(_, then)| *then == in_use), "{nth}: {log:?}");
            let events: Vec<Event> = log.iter().map(|(event, _)| event.clone()).collect();
            check(&whole, &state(run), &events);
        }
    });
}

fn fallbacks(events: &[Event]) -> Vec<(BatchSettings, BatchSettings)> {
    let mut all = Vec::new();
    for event in events {
        if let Event::MemoryFallback(MemoryFallback { from, to, .. }) = event {
            all.push((*from, *to));
        }
    }
    all
}

/// Adapters that are computed by several ops.
#[test]
fn a_failed_allocation_changes_no_bit_of_loha_and_lokr() {
    let job = JOB.replace("dropout = 0.1\n", "");
    for kind in ["adapter.kind=loha", "adapter.kind=lokr"] {
        let set = SINGLE.map(|key| if key == "adapter.kind=dora" { kind } else { key });
        refuse_each_of(&job, &set, |whole, refused, _| assert!(whole == refused, "{kind}"));
    }
}

#[test]
fn a_failed_allocation_changes_no_bit_where_micro_batches_stay() {
    refuse_each(&SINGLE, |whole, refused, events| {
        assert!(whole == refused, "other bytes");
        let is_left_out = |event: &&Event| {
            matches!(
                event,
                Event::Warning(Warning { kind: WarningKind::NoMemoryForSamples { .. }, .. })
            )
        };
        let n_left_out = events.iter().filter(is_left_out).count();
        let fallbacks = fallbacks(events);
        assert_eq!(fallbacks.len() + n_left_out, 1, "{events:?}");
        for (from, to) in fallbacks {
            assert_eq!((from.recompute, to.recompute), (Recompute::None, Recompute::Queries));
        }
    });
}

#[test]
fn a_failed_allocation_changes_the_order_of_sums_at_most() {
    refuse_each(&[SMOOTH], |whole, refused, events| {
        let apart = apart(whole, refused);
        assert!(apart < APART, "{apart:e}");
        let [(from, to)] = fallbacks(events)[..] else { panic!("{events:?}") };
        assert_eq!((from.micro_batch, to.micro_batch, from.recompute), (3, 2, to.recompute));
    });
}

/// A world of this process, by an MPI that is installed; none where none is.
fn world() -> Option<&'static World> {
    let found =
        [Launcher::Hydra, Launcher::OpenMpi].into_iter().find_map(|of| World::alone(of).ok());
    found.map(|world| &*Box::leak(Box::new(world)))
}

/// Memory is refused while gradients are on their way to other ranks: what was sent is kept, the step is repeated, and only the
/// rest is sent. One that is given up leaves nothing behind. The library can be started once in a process.
#[test]
fn a_step_whose_gradients_are_partly_sent_is_repeated_without_a_difference() {
    let Some(world) = world() else { return };
    let one_level = [SINGLE[0], SINGLE[1], SINGLE[2], SINGLE[3], SMOOTH];
    for set in [&one_level[..], &[&one_level[..], &["machine.deterministic=true"]].concat()] {
        with_run(set, |run, log| {
            if run.config.machine.deterministic {
                run.session.sum_exactly();
            }
            assert_eq!(run.session.sum_over(world).unwrap(), None, "there is no GPU");
            let joined = DataParallel::join(world, run.config, &run.identity, "test", 0);
            run.parallel = Some(joined.unwrap());
            let (levels, start) = (run.pacing.levels.clone(), state(run));
            let before = run.device.n_allocations();
            run.train_loop().unwrap();
            let (whole, n) = (state(run), run.device.n_allocations() - before);
            // Few of them fall between the first bucket that is sent and the end of backward.
            for nth in (0..40).map(|at| 1 + at * n / 40) {
                log.lock().unwrap().clear();
                run.device.fail_allocation(nth);
                again(run, &levels, &start).unwrap();
                assert!(state(run) == whole, "allocation {nth} of {n}");
                if run.session.n_sums_kept() > 0 {
                    break;
                }
            }
            assert!(
                run.session.n_sums_kept() > 0,
                "nothing was on its way when memory was refused"
            );
            // At the last level there is nothing to repeat: zeros are sent, and nothing stays.
            put_back(run, &start);
            run.progress = TrainProgress::before_first_step();
            run.device.set_limit(run.device.usage().in_use + 1024);
            let error = run.step(&mut run.loader.read_from(0)).unwrap_err();
            assert!(matches!(error, TrainerError::OutOfMemory { step: 0, .. }), "{error}");
            run.device.set_limit(1 << 30);
            again(run, &levels, &start).unwrap();
            assert!(state(run) == whole, "after a step that was given up");
        });
    }
}

#[test]
fn micro_batches_of_every_size_train_the_same() {
    with_run(&[SMOOTH], |run, log| {
        let (levels, start) = (run.pacing.levels.clone(), state(run));
        run.train_loop().unwrap();
        let whole = state(run);
        let losses = || -> Vec<f64> {
            let events = std::mem::take(&mut *log.lock().unwrap());
            let steps = events.into_iter().filter_map(|(event, _)| match event {
                Event::Step(step) => Some(step.loss),
                _ => None,
            });
            steps.collect()
        };
        let whole_losses = losses();
        for (at, micro) in [(1, 2), (2, 1)] {
            assert_eq!(levels[at].settings.micro_batch, micro);
            again(run, &levels[at..], &start).unwrap();
            let apart = apart(&whole, &state(run));
            assert!(apart < APART, "{micro}: {apart:e}");
            for (whole, found) in whole_losses.iter().zip(losses()) {
                assert!((found / whole - 1.0).abs() < APART, "{micro}: {found} {whole}");
            }
        }
    });
}

/// One held-out image, whose loss is measured four times: in micro-batches of 3 and 1, of 2, and of 1.
#[test]
fn validation_in_micro_batches_of_every_size_measures_the_same() {
    with_run(&[], |run, log| {
        let levels = run.pacing.levels.clone();
        let mut measured = Vec::new();
        for at in 0..3 {
            run.progress = TrainProgress::before_first_step();
            run.pacing = run.pacing.with_levels(&levels[at..]);
            log.lock().unwrap().clear();
            run.evaluate().unwrap();
            for (event, _) in &*log.lock().unwrap() {
                match event {
                    Event::Validation { loss, .. } => measured.push(*loss),
                    // Emitted for the first: the others take less.
                    Event::Memory { phase: Phase::Validate(_), planned_bytes, peak_bytes } => {
                        assert_eq!((at, peak_bytes), (0, planned_bytes));
                    }
                    _ => {}
                }
            }
        }
        let [whole, rest @ ..] = &measured[..] else { panic!("nothing was measured") };
        assert_eq!(rest.len(), 2);
        for found in rest {
            assert!((found / whole - 1.0).abs() < APART, "{found} {whole}");
        }
    });
}

/// As where memory gets short between two micro-batches of a step.
#[test]
fn the_rest_of_a_batch_at_another_level_trains_the_same() {
    with_run(&[SMOOTH], |run, _| {
        let (batch, _) = run.loader.read_from(0).next_batch().unwrap();
        let (levels, start) = (run.pacing.levels.clone(), state(run));
        run.forward_backward(&batch, 0..batch.samples.len(), 3.0, 1.0).unwrap();
        run.session.update(1e-2, 0, 1.0).unwrap();
        let whole = state(run);
        put_back(run, &start);
        run.pacing = run.pacing.with_levels(&levels[1..]);
        run.micro_batch(&batch, 0..2, 3.0, 1.0).unwrap();
        assert_eq!(run.pacing.fall_back().unwrap().micro_batch, 1);
        run.micro_batch(&batch, 2..3, 3.0, 1.0).unwrap();
        run.session.update(1e-2, 0, 1.0).unwrap();
        let apart = apart(&whole, &state(run));
        assert!(apart < APART && whole != start, "{apart:e}");
    });
}

#[test]
fn a_step_that_fits_at_no_level_saves_and_fails() {
    with_run(&[], |run, log| {
        let mut ahead = run.loader.read_from(run.progress.batches);
        run.step(&mut ahead).unwrap();
        let (before, in_use) = (state(run), run.device.usage().in_use);
        run.device.set_limit(in_use + 1024);
        let error = run.step(&mut ahead).unwrap_err();
        assert!(matches!(error, TrainerError::OutOfMemory { step: 1, .. }), "{error}");
        assert_eq!(
            run.pacing.batch_settings(),
            BatchSettings { micro_batch: 1, recompute: Recompute::Block }
        );
        assert!(state(run) == before && run.device.usage().in_use == in_use);
        let log = log.lock().unwrap();
        assert!(matches!(log.last(), Some((Event::Checkpoint { step: 1, .. }, _))), "{log:?}");
    });
}

/// Once a parameter was updated a step is neither repeated nor saved; before that it is repeated as any other.
#[test]
fn a_fused_backward_pass_that_fails_halfway_ends_the_run() {
    let job = JOB.replace("rank = 4\ndropout = 0.1", "kind = 'full'");
    let set = ["train.fused_backward_pass=true", "data.resolution=128"];
    with_job(&job, &set, |run, log| {
        run.step(&mut run.loader.read_from(0)).unwrap();
        let (progress, start) = (run.progress.clone(), state(run));
        let (levels, in_use) = (run.pacing.levels.clone(), run.device.usage().in_use);
        let n_before = run.device.n_allocations();
        run.step(&mut run.loader.read_from(progress.batches)).unwrap();
        let (whole, n) = (state(run), run.device.n_allocations() - n_before);
        let (mut n_repeated, mut n_ended) = (0, 0);
        for nth in tried(n) {
            put_back(run, &start);
            (run.progress, run.pacing) = (progress.clone(), run.pacing.with_levels(&levels));
            log.lock().unwrap().clear();
            run.device.fail_allocation(nth);
            let done = run.step(&mut run.loader.read_from(progress.batches));
            assert_eq!(run.device.usage().in_use, in_use, "{nth}");
            let events: Vec<Event> =
                log.lock().unwrap().iter().map(|(event, _)| event.clone()).collect();
            match done {
                Ok(_) => {
                    n_repeated += fallbacks(&events).len();
                    assert!(state(run) == whole, "{nth}");
                }
                Err(TrainerError::HalfUpdated { step: 1, .. }) => {
                    n_ended += 1;
                    assert!(events.is_empty() && state(run) != start, "{nth}: {events:?}");
                    run.session.update(0.0, 0, 1.0).unwrap();
                }
                Err(error) => panic!("{nth}: {error}"),
            }
        }
        assert!(n_repeated > 0 && n_ended > 0, "{n_repeated} {n_ended}");
    });
}

/// Samples that take more memory than a step.
const LARGE_IMAGE: [&str; 4] =
    ["train.batch_size=1", "sample.prompts=['a fox']", "sample.size=192", "sample.steps=1"];

#[test]
fn a_lower_memory_level_has_less_of_the_arena_and_the_plans_level_all() {
    with_run(&LARGE_IMAGE, |run, _| {
        let limit = |device: &Device| match device.alloc([1 << 40], compute::Dtype::U8) {
            Err(compute::ComputeError::OutOfMemory { limit, .. }) => limit,
            other => panic!("{other:?}"),
        };
        let whole = limit(run.device);
        let of = |level| Pace { level, duty: 1.0, is_paused: false };
        for (from, to) in [(0, 2), (2, 0)] {
            let cause = Cause::MemoryCritical;
            run.pacer()
                .apply_decisions(vec![PaceDecision { from: of(from), to: of(to), cause }])
                .unwrap();
            let planned = if to == 0 { whole } else { run.pacing.levels[to].peak_bytes };
            assert_eq!(limit(run.device), planned);
        }
        assert!(run.pacing.levels[0].peak_bytes < whole, "no image takes more than a step");
    });
}

/// Goes to another memory level, or to a pause and on again, as the governor would between two steps.
fn go_to(run: &mut TrainingRun<'_, ImageLoader<'_>>, from: usize, to: usize, is_paused: bool) {
    let pace = |level, is_paused| Pace { level, duty: 1.0, is_paused };
    let cause = Cause::MemoryCritical;
    let decision = PaceDecision { from: pace(from, false), to: pace(to, is_paused), cause };
    run.pacer().apply_decisions(vec![decision]).unwrap();
}

#[test]
#[allow(clippy::print_stderr)] // Says why nothing is tested.
fn what_a_lower_level_gives_back_is_measured() {
    const BYTES: usize = 64 << 20;
    if !Path::new("/proc/self/status").exists() {
        return eprintln!("this system takes pages back when it likes");
    }
    let open = |bytes| Device::cpu(1, bytes + BYTES);
    with_job_on(DeviceKind::cpu(1), &open, JOB, &[], |run, log| {
        run.device.set_limit(usize::MAX);
        drop(run.device.upload([BYTES], &vec![1u8; BYTES]).unwrap());
        go_to(run, 0, 1, false);
        go_to(run, 1, 0, false);
        let log = log.lock().unwrap();
        let paced: Vec<_> = log
            .iter()
            .filter_map(|(event, _)| match event {
                Event::Pace(paced) => Some((paced.freed_bytes, paced.to_string())),
                _ => None,
            })
            .collect();
        let [(Some(freed), text), (None, _)] = &paced[..] else { panic!("{paced:?}") };
        assert!(*freed > BYTES as u64 / 10 * 9, "{freed} B of {BYTES}");
        assert!(text.ends_with(" MiB given back"), "{text}");
    });
}

/// The software driver of a GPU, for one test at a time: all tests of a process share it, also when one of
/// them makes it fail. None where there is no such driver.
#[allow(clippy::print_stderr)] // Says why nothing is tested.
pub(crate) fn software_gpu() -> Option<MutexGuard<'static, ()>> {
    static IN_USE: Mutex<()> = Mutex::new(());
    if !adapters().iter().any(|adapter| adapter.kind == GpuAdapterKind::Software) {
        eprintln!("no software driver for Vulkan here");
        return None;
    }
    Some(IN_USE.lock().unwrap_or_else(PoisonError::into_inner))
}

#[test]
fn a_gpu_run_that_gives_memory_back_between_steps_trains_the_same() {
    let Some(_in_use) = software_gpu() else { return };
    let kind = DeviceKind::gpu(GpuChoice::Software);
    let open = |bytes| Device::gpu(GpuChoice::Software, bytes);
    let set = ["train.batch_size=1", "train.gradient_accumulation=2", "train.steps=4"];
    with_job_on(kind, &open, JOB, &set, |run, _| {
        let (levels, start) = (run.pacing.levels.clone(), state(run));
        run.train_loop().unwrap();
        let whole = state(run);
        put_back(run, &start);
        run.progress = TrainProgress::default();
        let last = levels.len() - 1;
        assert!(last > 0, "{levels:?}");
        let committed = run.device.committed_bytes();
        let committed = || committed.load(Ordering::Relaxed) as usize;
        let resident = run.device.top();
        let mut ahead = run.loader.read_from(0);
        // Down, a pause, on again, up.
        for (level, next, is_paused) in
            [(0, last, false), (last, last, true), (last, 0, false), (0, 0, true)]
        {
            run.pacing = run.pacing.with_levels(&levels[level..]);
            run.step(&mut ahead).unwrap();
            assert!(committed() > resident, "a step takes more than what stays");
            assert!(level == 0 || committed() == levels[level].peak_bytes, "{}", committed());
            run.pacing = run.pacing.with_levels(&levels);
            go_to(run, level, next, is_paused);
        }
        assert_eq!(committed(), resident, "a pause leaves what lives as long as the run");
        assert!(state(run) == whole, "other bytes than without");
    });
}

#[test]
fn an_update_is_made_whole_or_not_at_all() {
    with_run(&["optimizer.kind=adamw_8bit"], |run, _| {
        let (batch, _) = run.loader.read_from(0).next_batch().unwrap();
        let accumulate = |run: &mut TrainingRun<'_, ImageLoader<'_>>| {
            run.session.zero_grad().unwrap();
            run.forward_backward(&batch, 0..batch.samples.len(), 3.0, 1.0).unwrap();
        };
        let start = state(run);
        accumulate(run);
        let before = run.device.n_allocations();
        run.session.update(1e-2, 0, 1.0).unwrap();
        let (whole, n) = (state(run), run.device.n_allocations() - before);
        assert!(n > 0 && whole != start);
        for nth in 1..=n {
            put_back(run, &start);
            accumulate(run);
            let in_use = run.device.usage().in_use;
            run.device.fail_allocation(nth);
            assert!(run.session.update(1e-2, 0, 1.0).is_err());
            assert!(state(run) == start && run.device.usage().in_use == in_use, "{nth}");
            run.session.update(1e-2, 0, 1.0).unwrap();
            assert!(state(run) == whole, "{nth}");
        }
    });
}

/// Forward and backward of some samples of a batch; the gradients, in the order of the parameters.
fn gradients_of(
    run: &mut TrainingRun<'_, ImageLoader<'_>>,
    batch: &TrainBatch<SampleSize, EncodedSample>,
    samples: Range<usize>,
) -> Vec<Option<Vec<f32>>> {
    run.session.zero_grad().unwrap();
    run.forward_backward(batch, samples, 3.0, 1.0).unwrap();
    let keys = run.session.trainable_model().params.keys();
    keys.map(|key| run.session.gradients.read(key).unwrap()).collect()
}

/// As two machines would: each computes the gradients of its samples, both apply the sum.
#[test]
fn gradients_that_are_summed_outside_are_applied_as_those_of_the_batch() {
    with_run(&[SMOOTH, "adapter.dropout=0"], |run, _| {
        let (batch, _) = run.loader.read_from(0).next_batch().unwrap();
        let start = state(run);
        gradients_of(run, &batch, 0..3);
        run.session.update(1e-2, 0, 1.0).unwrap();
        let whole = state(run);
        put_back(run, &start);
        let [ours, theirs] = [0..1, 1..3].map(|samples| gradients_of(run, &batch, samples));
        assert!(ours != theirs, "both have the same gradients");
        for ((key, ours), theirs) in
            run.session.trainable_model().params.keys().zip(&ours).zip(&theirs)
        {
            let (Some(ours), Some(theirs)) = (ours, theirs) else { panic!("{key:?}") };
            let sum: Vec<f32> = ours.iter().zip(theirs).map(|(a, b)| a + b).collect();
            run.session.gradients.write(key, &sum).unwrap();
        }
        run.session.update(1e-2, 0, 1.0).unwrap();
        let apart = apart(&whole, &state(run));
        assert!(apart < APART, "{apart:e}");
    });
}
