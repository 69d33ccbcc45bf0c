//! The loop on a tiny model, with batches in portions and with memory refused at any allocation.
//!
//! Some allocations are tried, spread over a run. `HEARTH_ALLOCATIONS=1000000 cargo test -p trainer --lib
//! train::tests` tries so many, or all that there are; a second for each.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex};

use compute::{Device, Kind};
use machine::governor::{Cause, Decision, Pace};
use machine::{Machine, Source};

use super::checkpoint::Progress;
use super::pictures::read::ReadySample;
use super::pictures::{Drawing, Feed};
use super::run::Run;
use super::*;
use crate::cache::{Caching, Request};
use crate::config::RawConfig;
use crate::config::how::How;
use crate::data::Bucket;
use crate::error::TrainerError;
use crate::event::{Tightened, Warning, WarningKind, Why};
use crate::model::diffusion::Pipeline;
use crate::model::host::difference;
use crate::model::recompute::Recompute;
use crate::plan::{Job, Rates, Rung, ladder, rehearse};
use crate::task::lesson::Outlook;
use crate::task::lesson::{Feed as _, Ready};

const JOB: &str = "
[base]
dtype = 'f32'
[data]
images = 'pictures'
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
batch = 3
ema = 0.9
validate_every = 50
[optimizer]
learning_rate = 1e-2
[output]
folder = 'run'
save_every = 'off'
";

/// All that remembers something, with one picture at a time: to compute more of it twice is the only
/// tighter way, and changes no bit.
const SINGLE: [&str; 7] = [
    "train.batch=1",
    "train.accumulation=2",
    "optimizer.kind=adamw_8bit",
    "adapter.kind=dora",
    "sample.prompts=['a fox']",
    "sample.size=64",
    "sample.steps=1",
];

/// Keeps steps smooth where a gradient is near zero: without it the last bit of a sum would decide the
/// direction of a step.
const SMOOTH: &str = "optimizer.epsilon=1e-2";

/// Allocations that are tried in a test, unless told otherwise.
const TRIED: u64 = 8;

/// Relative to the largest number of a tensor. Measured: 1.9e-7 after a step, at any of its allocations.
const APART: f64 = 1e-5;

/// Events, each with the bytes in use then.
type Told = Mutex<Vec<(Event, usize)>>;

/// Sets a job up and lets `work` have its loop.
fn with_run(set: &[&str], work: impl FnOnce(&mut Run<'_, Feed<'_>>, &Told)) {
    let place = tempfile::tempdir().unwrap();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/sd3/pipeline");
    let mut raw = RawConfig::from_text(JOB, &place.path().join("job.toml")).unwrap();
    raw.set_path("base.path", &base).unwrap();
    for argument in set {
        raw.set(argument).unwrap();
    }
    let config = raw.resolve().unwrap();

    // One thread: the arithmetic is too small to share.
    let (kind, limit_bytes) = (Kind::cpu(1), 1 << 30);
    let open = |bytes| Device::cpu(1, bytes);
    let rates = Rates::documented(&Machine::probe(&mut Source::live()), kind);
    let on = On {
        kind,
        name: "test".into(),
        limit_bytes,
        host_bytes: None,
        rates,
        open: Box::new(open),
        feel: Box::new(|| None),
    };
    let folder = Folder::open(&config.output.folder, Start::default()).unwrap();
    let pipeline = Pipeline::open(&base, None).unwrap();
    let caching = Caching::new(&pipeline, Request::of(&config).unwrap(), &|_| true).unwrap();
    let lesson = Drawing::of(&config, &pipeline).unwrap();
    let outlook = Outlook::of(&caching);
    let job = Job { lesson: &lesson, config: &config, outlook: &outlook };
    let room = on.room();
    let plan = rehearse(job, room).unwrap();
    let ladder = ladder(job, room).unwrap();
    let mut place = Workplace::open(&on, &plan).unwrap();
    let device = place.device.clone();
    let index = Arc::new(caching.run(&device, plan.t5, &|_| true).unwrap());
    let told = Told::default();
    let listener = |record: &EventRecord| {
        told.lock().unwrap().push((record.event.clone(), device.usage().in_use));
    };
    let (listeners, stop) = ([&listener as Listener<'_>], AtomicBool::new(false));
    let events = Sink::open(&folder.path, false, &listeners, &stop).unwrap();
    let setup = Setup { on: &on, plan: &plan, ladder: &ladder };
    let mut feed = Feed::new(lesson, &config, index, plan.tiling).unwrap();
    let on = (setup, &mut place);
    work(&mut begin(&config, &lesson, &mut feed, on, (&folder, &events)).unwrap(), &told);
    assert_eq!(device.usage().in_use, 0);
}

/// Everything that is trained, or remembered of it, by name.
fn state(run: &mut Run<'_, Feed<'_>>) -> Vec<(String, Vec<u8>)> {
    let tensors = run.session.tensors().unwrap();
    tensors.into_iter().map(|(name, tensor)| (name, tensor.read_bytes().unwrap())).collect()
}

fn put_back(run: &mut Run<'_, Feed<'_>>, state: &[(String, Vec<u8>)]) {
    for ((_, tensor), (_, bytes)) in run.session.tensors().unwrap().into_iter().zip(state) {
        let fill = |_, mut parts: Vec<compute::Part<'_>>| -> Result<()> {
            parts.remove(0).fill(&mut |to| {
                to.copy_from_slice(bytes);
                Ok(())
            })
        };
        compute::fill_all(vec![tensor], fill).unwrap();
    }
}

/// Goes from the beginning to the end, in this way at first.
fn again(run: &mut Run<'_, Feed<'_>>, ladder: &[Rung], start: &[(String, Vec<u8>)]) -> Result<End> {
    put_back(run, start);
    (run.progress, run.is_showing_warned) = (Progress::default(), false);
    run.pacing = run.pacing.on(ladder);
    run.go()
}

/// The largest difference between trained numbers, relative to the largest of their tensor.
fn apart(a: &[(String, Vec<u8>)], b: &[(String, Vec<u8>)]) -> f64 {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let pairs = a.iter().zip(b).filter(|((name, _), _)| !name.starts_with("optimizer."));
    let apart = pairs.map(|((_, a), (_, b))| difference(&floats(a), &floats(b)));
    apart.fold(0.0, f64::max)
}

/// Some of the allocations from the first to the last.
fn tried(last: u64) -> impl Iterator<Item = u64> {
    let asked = std::env::var("HEARTH_ALLOCATIONS").ok().and_then(|n| n.parse().ok());
    let n = last.min(asked.unwrap_or(TRIED));
    (0..n).map(move |at| 1 + at * last / n)
}

/// Goes through the loop once for each allocation that is tried, which fails. `check` gets what the run
/// came to without and with it, and what was told.
fn refuse_each(set: &[&str], check: impl Fn(&[(String, Vec<u8>)], &[(String, Vec<u8>)], &[Event])) {
    with_run(set, |run, told| {
        let (ladder, start) = (run.pacing.ladder.clone(), state(run));
        let before = run.device.n_allocations();
        run.go().unwrap();
        let (whole, n) = (state(run), run.device.n_allocations() - before);
        assert!(apart(&start, &whole) > 0.1, "nothing was learnt");
        for nth in tried(n) {
            told.lock().unwrap().clear();
            let in_use = run.device.usage().in_use;
            run.device.fail_allocation(nth);
            let end = again(run, &ladder, &start).unwrap();
            assert_eq!((end.step, end.why), (2, Why::Finished));
            let told = told.lock().unwrap();
            assert!(told.iter().all(|(_, then)| *then == in_use), "{nth}: {told:?}");
            let events: Vec<Event> = told.iter().map(|(event, _)| event.clone()).collect();
            check(&whole, &state(run), &events);
        }
    });
}

fn tightened(events: &[Event]) -> Vec<(How, How)> {
    let mut all = Vec::new();
    for event in events {
        if let Event::Tightened(Tightened { from, to, .. }) = event {
            all.push((*from, *to));
        }
    }
    all
}

#[test]
fn a_refused_allocation_changes_no_bit_where_portions_stay() {
    refuse_each(&SINGLE, |whole, refused, events| {
        assert!(whole == refused, "other bytes");
        let is_left_out = |event: &&Event| {
            matches!(
                event,
                Event::Warning(Warning { kind: WarningKind::NoRoomForSamples { .. }, .. })
            )
        };
        let n_left_out = events.iter().filter(is_left_out).count();
        let tightened = tightened(events);
        assert_eq!(tightened.len() + n_left_out, 1, "{events:?}");
        for (from, to) in tightened {
            assert_eq!((from.recompute, to.recompute), (Recompute::None, Recompute::Queries));
        }
    });
}

#[test]
fn a_refused_allocation_changes_the_order_of_sums_at_most() {
    refuse_each(&[SMOOTH], |whole, refused, events| {
        let apart = apart(whole, refused);
        assert!(apart < APART, "{apart:e}");
        let [(from, to)] = tightened(events)[..] else { panic!("{events:?}") };
        assert_eq!((from.micro, to.micro, from.recompute), (3, 2, to.recompute));
    });
}

#[test]
fn portions_of_every_size_learn_the_same() {
    with_run(&[SMOOTH], |run, told| {
        let (ladder, start) = (run.pacing.ladder.clone(), state(run));
        run.go().unwrap();
        let whole = state(run);
        let losses = || -> Vec<f64> {
            let told = std::mem::take(&mut *told.lock().unwrap());
            let steps = told.into_iter().filter_map(|(event, _)| match event {
                Event::Step(step) => Some(step.loss),
                _ => None,
            });
            steps.collect()
        };
        let whole_losses = losses();
        for (at, micro) in [(1, 2), (2, 1)] {
            assert_eq!(ladder[at].how.micro, micro);
            again(run, &ladder[at..], &start).unwrap();
            let apart = apart(&whole, &state(run));
            assert!(apart < APART, "{micro}: {apart:e}");
            for (whole, found) in whole_losses.iter().zip(losses()) {
                assert!((found / whole - 1.0).abs() < APART, "{micro}: {found} {whole}");
            }
        }
    });
}

#[test]
fn a_step_that_fits_in_no_way_leaves_what_was_learnt() {
    with_run(&[], |run, told| {
        let mut ahead = run.feed.read_from(run.progress.batches);
        run.step(&mut ahead).unwrap();
        let (before, in_use) = (state(run), run.device.usage().in_use);
        run.device.set_limit(in_use + 1024);
        let error = run.step(&mut ahead).unwrap_err();
        assert!(matches!(error, TrainerError::NoRoom { step: 1, .. }), "{error}");
        assert_eq!(run.pacing.how(), How { micro: 1, recompute: Recompute::Block });
        assert!(state(run) == before && run.device.usage().in_use == in_use);
        let told = told.lock().unwrap();
        assert!(matches!(told.last(), Some((Event::Checkpoint { step: 1, .. }, _))), "{told:?}");
    });
}

/// One that takes more memory than a step does.
const LARGE_PICTURE: [&str; 4] =
    ["train.batch=1", "sample.prompts=['a fox']", "sample.size=192", "sample.steps=1"];

#[test]
fn a_tighter_way_has_less_of_the_arena_and_the_plans_own_all() {
    with_run(&LARGE_PICTURE, |run, _| {
        let limit = |device: &Device| match device.alloc([1 << 40], compute::Dtype::U8) {
            Err(compute::ComputeError::OutOfMemory { limit, .. }) => limit,
            other => panic!("{other:?}"),
        };
        let whole = limit(run.device);
        let of = |rung| Pace { rung, duty: 1.0, is_paused: false };
        for (from, to) in [(0, 2), (2, 0)] {
            let cause = Cause::MemoryCritical;
            run.keep_to(vec![Decision { from: of(from), to: of(to), cause }]).unwrap();
            let planned = if to == 0 { whole } else { run.pacing.ladder[to].peak_bytes };
            assert_eq!(limit(run.device), planned);
        }
        assert!(run.pacing.ladder[0].peak_bytes < whole, "no picture takes more than a step");
    });
}

#[test]
fn an_update_is_made_whole_or_not_at_all() {
    with_run(&["optimizer.kind=adamw_8bit"], |run, _| {
        let (ready, _) = run.feed.read_from(0).next_batch().unwrap();
        let accumulate = |run: &mut Run<'_, Feed<'_>>| {
            run.session.forget();
            run.forward_backward(&ready, 3.0, 1.0).unwrap();
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
fn gathered(
    run: &mut Run<'_, Feed<'_>>,
    ready: &Ready<Bucket, ReadySample>,
    samples: Range<usize>,
) -> Vec<Option<Vec<f32>>> {
    let samples = ready.samples[samples].to_vec();
    run.session.forget();
    run.forward_backward(&Ready { samples, ..*ready }, 3.0, 1.0).unwrap();
    let keys = run.session.learner().params.keys();
    keys.map(|key| run.session.gradients.read(key).unwrap()).collect()
}

/// As two machines would: each gathers its own samples, both apply the sum.
#[test]
fn gradients_that_are_added_up_outside_are_applied_as_the_batchs_own() {
    with_run(&[SMOOTH, "adapter.dropout=0"], |run, _| {
        let (ready, _) = run.feed.read_from(0).next_batch().unwrap();
        let start = state(run);
        gathered(run, &ready, 0..3);
        run.session.update(1e-2, 0, 1.0).unwrap();
        let whole = state(run);
        put_back(run, &start);
        let [ours, theirs] = [0..1, 1..3].map(|samples| gathered(run, &ready, samples));
        assert!(ours != theirs, "both gathered the same");
        for ((key, ours), theirs) in run.session.learner().params.keys().zip(&ours).zip(&theirs) {
            let (Some(ours), Some(theirs)) = (ours, theirs) else { panic!("{key:?}") };
            let sum: Vec<f32> = ours.iter().zip(theirs).map(|(a, b)| a + b).collect();
            run.session.gradients.write(key, &sum).unwrap();
        }
        run.session.update(1e-2, 0, 1.0).unwrap();
        let apart = apart(&whole, &state(run));
        assert!(apart < APART, "{apart:e}");
    });
}
