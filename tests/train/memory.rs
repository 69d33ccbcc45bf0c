//! Runs that are out of memory: by a limit that is lowered during the run, at every memory level, and before they
//! begin. Single failed allocations are tested beside the loop.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use compute::{CancelToken, Device, DeviceKind};
use machine::held::MemoryPlace;
use machine::{Machine, ProbeSource};
use trainer::TrainerError;
use trainer::config::RawConfig;
use trainer::event::{Event, EventRecord, RunEnd};
use trainer::plan::Rates;
use trainer::train::{DeviceSetup, TrainOptions, train};

use super::{Job, check_memory, events, trained};
use crate::models::LIMIT;
use crate::text;

const SET: [&str; 7] = [
    "train.steps=3",
    "train.validate_every=1",
    "train.batch_size=3",
    "train.ema=0.9",
    "adapter.dropout=0.1",
    "data.draw_count=4",
    "output.save_every=off",
];

/// Called when the device is opened, and at each event.
type Trouble<'a> = &'a (dyn Fn(&Device, Option<&Event>) + Sync);

/// What came of a run in this process.
struct Outcome {
    end: Result<RunEnd, TrainerError>,
    folder: PathBuf,
    events: Vec<Event>,
    /// How often memory was asked for before the first step ...
    n_before: u64,
    /// ... and in all.
    n_allocations: u64,
}

/// Runs a job, or goes on with it. Nothing that it took may be left over, after a step or at the end.
fn run(job: &Job, out: &str, trouble: Trouble<'_>) -> Outcome {
    run_with(job, out, &SET, trouble)
}

fn run_with(job: &Job, out: &str, set: &[&str], trouble: Trouble<'_>) -> Outcome {
    let folder = job.path(out);
    let mut raw = RawConfig::from_file(&job.file).unwrap();
    raw.set_path("output.folder", &folder).unwrap();
    raw.set_path("data.cache", &job.path("cache")).unwrap();
    for argument in set {
        raw.set(argument).unwrap();
    }
    let (device, held) = (OnceLock::<Device>::new(), Mutex::new(Vec::new()));
    let open = |bytes| {
        let opened = Device::cpu(1, bytes)?;
        trouble(device.get_or_init(|| opened.clone()), None);
        Ok(opened)
    };
    let listener = |record: &EventRecord| {
        if let Some(device) = device.get() {
            if let Event::Begin(_) | Event::Step(_) | Event::MemoryFallback(_) = &record.event {
                held.lock().unwrap().push((device.usage().in_use, device.n_allocations()));
            }
            trouble(device, Some(&record.event));
        }
    };
    let (kind, name) = (DeviceKind::cpu(1), "test".into());
    let rates = Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind);
    let (open, start_sampler) = (Box::new(open), Box::new(|_| None));
    let device_setup = DeviceSetup {
        kind,
        name,
        limit_bytes: LIMIT,
        host_bytes: None,
        raisable: None,
        rates,
        memory_place: MemoryPlace::Process,
        open,
        start_sampler,
        world: None,
    };
    let options = TrainOptions { resume: folder.join("checkpoints").exists(), force: false };
    let stop = CancelToken::default();
    let end = train(&raw.resolve().unwrap(), &device_setup, options, &[&listener], &stop);
    assert_eq!(device.get().unwrap().usage().in_use, 0);
    let held = held.into_inner().unwrap();
    assert!(held.windows(2).all(|pair| pair[0].0 == pair[1].0), "{held:?}");
    let n_before = held.first().map_or(0, |(_, n)| *n);
    let n_allocations = device.get().unwrap().n_allocations();
    Outcome { end, events: events(&folder), folder, n_before, n_allocations }
}

#[test]
fn a_run_that_fits_at_no_level_stops_and_can_be_resumed() {
    let job = Job::new();
    let whole = run(&job, "whole", &|_, _| {});
    let stopped = run(&job, "run", &|device, event| {
        if let Some(Event::Step(_) | Event::MemoryFallback(_)) = event {
            device.fail_allocation(1);
        }
    });
    let error = stopped.end.unwrap_err();
    assert!(matches!(error, TrainerError::OutOfMemory { step: 1, .. }), "{error}");
    let resumed = run(&job, "run", &|_, _| {});
    assert!(resumed.end.is_ok());
    // The first step's measurement, which did not fit, is made up for.
    let mut measured = Vec::new();
    for event in &resumed.events {
        if let Event::Validation { step, .. } = event {
            measured.push(*step);
        }
    }
    assert_eq!(measured, [0, 1, 2, 3]);
    assert!(trained(&whole.folder) == trained(&resumed.folder), "other bytes than without trouble");
    let page = fs::read_to_string(resumed.folder.join("report.html")).unwrap();
    for way in [
        "micro-batch 2 instead of micro-batch 3",
        "micro-batch 1 instead of micro-batch 2",
        "micro-batch 1, every second block recomputed instead of micro-batch 1",
        "micro-batch 1, every block recomputed instead of",
    ] {
        assert!(page.contains(way), "{way} is not in the report");
    }
}

#[test]
fn a_lowered_limit_is_kept_to() {
    let job = Job::new();
    let limit = OnceLock::new();
    let lowered = run(&job, "run", &|device, event| {
        if let Some(Event::Step(step)) = event {
            let in_use = device.usage().in_use;
            device.set_limit(*limit.get_or_init(|| in_use + (step.peak_bytes - in_use) / 2));
        }
    });
    assert_eq!(lowered.end.unwrap().step, 3);
    check_memory(&lowered.events);
    let limit = limit.into_inner().unwrap();
    let mut kept = Vec::new();
    for event in &lowered.events {
        match event {
            Event::MemoryFallback(tightened) => assert_eq!(tightened.limit_bytes, limit),
            Event::Step(step) => kept.push(step.peak_bytes <= limit),
            _ => {}
        }
    }
    assert_eq!(kept, [false, true, true]);
}

/// No step was taken, and encoded samples stay cached.
#[test]
fn out_of_memory_before_the_first_step_leaves_nothing_half_done() {
    let job = Job::new();
    let whole = run(&job, "whole", &|_, _| {});
    let mut found = whole.n_before;
    // Among images, among texts, and while the model is loaded.
    for nth in [whole.n_before / 9, whole.n_before / 2, whole.n_before] {
        fs::remove_dir_all(job.path("cache")).unwrap();
        let refused = run(&job, "run", &|device, event| {
            if event.is_none() {
                device.fail_allocation(nth);
            }
        });
        let error = refused.end.unwrap_err().to_string();
        assert!(error.starts_with("out of memory for "), "{nth}: {error}");
        let left = partial(&job.path(""));
        assert!(left.is_empty(), "{left:?}");
        let again = run(&job, "run", &|_, _| {});
        assert!(again.end.is_ok() && again.n_before <= found, "{nth}");
        found = again.n_before;
        assert!(trained(&whole.folder) == trained(&again.folder), "{nth}: other bytes");
        fs::remove_dir_all(again.folder).unwrap();
    }
    assert!(found < whole.n_before / 2, "encoded samples are not in the cache");
}

/// The smallest run that encodes, loads, measures, draws, learns and saves.
const SHORT: [&str; 4] =
    ["train.steps=1", "train.validate_every=1", "data.draw_count=2", "output.save_every=off"];

/// A failure before the first step ends the run, and the next run does the rest; after it the run falls back. The
/// result is the same to the bit, and nothing is left over.
#[test]
#[ignore = "long: `just sweep` runs it"]
fn every_single_allocation_of_a_run_may_fail() {
    check_allocations(&Job::new(), 1);
}

#[test]
#[ignore = "long: `just sweep` runs it"]
fn every_single_allocation_of_a_run_of_flux_may_fail() {
    check_allocations(&Job::flux(), 1);
}

#[test]
#[ignore = "long: `just sweep` runs it"]
fn every_single_allocation_of_a_run_of_qwen_image_may_fail() {
    check_allocations(&Job::qwen_image(), 1);
}

/// Some of them, from the images to the last step, in the default suite.
#[test]
fn allocations_of_runs_of_other_families_may_fail() {
    check_allocations(&Job::flux(), 499);
    check_allocations(&Job::qwen_image(), 499);
    check_allocations(&Job::z_image(), 499);
    // Its text encoder has many layers.
    check_allocations(&Job::flux2(), 1499);
}

/// The same where text encoders are trained too: they take memory in every step.
#[test]
fn allocations_of_trained_text_encoders_may_fail() {
    let job = Job::new();
    let (file, rank) = (fs::read_to_string(&job.file).unwrap(), "rank = 4\n");
    let with_encoders = format!("{rank}text_encoders = ['clip-l', 'clip-g']\n");
    fs::write(&job.file, file.replacen(rank, &with_encoders, 1)).unwrap();
    check_allocations(&job, 499);
}

/// Every `step`-th.
fn check_allocations(job: &Job, step: usize) {
    let whole = run_with(job, "whole", &SHORT, &|_, _| {});
    for nth in (1..=whole.n_allocations).step_by(step) {
        fs::remove_dir_all(job.path("cache")).unwrap();
        let refused = run_with(job, "run", &SHORT, &|device, event| {
            if event.is_none() {
                device.fail_allocation(nth);
            }
        });
        assert_eq!(refused.end.is_err(), nth <= whole.n_before, "{nth}: {:?}", refused.end);
        assert!(partial(&job.path("")).is_empty(), "{nth}");
        let done = match refused.end {
            Ok(_) => refused,
            Err(_) => run_with(job, "run", &SHORT, &|_, _| {}),
        };
        assert!(done.end.is_ok(), "{nth}: {:?}", done.end);
        assert!(trained(&whole.folder) == trained(&done.folder), "{nth}: other bytes");
        fs::remove_dir_all(done.folder).unwrap();
    }
}

/// Files that are not whole.
fn partial(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if text(&path).ends_with(".partial") {
            found.push(path);
        } else if path.is_dir() {
            found.extend(partial(&path));
        }
    }
    found
}
