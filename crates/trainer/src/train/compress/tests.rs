//! Runs of compressed models, small ones on the CPU.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use compute::{CancelToken, Device, DeviceKind};
use machine::held::MemoryPlace;
use machine::{Machine, ProbeSource};

use crate::config::RawConfig;
use crate::error::{Result, TrainerError};
use crate::event::{EndReason, Event, EventRecord, RunEnd};
use crate::plan::Rates;
use crate::train::{DeviceSetup, TrainOptions, train};

const JOB: &str = "
[base]
path = 'tiny'
random_init = true
dtype = 'f32'
[text]
path = 'text.txt'
length = 48
validation = 0.1
[compress]
window = 8
layers = 1
width = 32
[adapter]
kind = 'full'
[train]
steps = 6
batch_size = 4
validate_every = 6
[optimizer]
learning_rate = 3e-3
[generate]
prompts = ['the ']
max_tokens = 6
[output]
";

struct TestRun {
    end: Result<RunEnd>,
    events: Vec<Event>,
}

impl TestRun {
    /// Trains in a folder, with further settings; asks to stop after a step, or goes on from there.
    fn new(place: &Path, out: &str, settings: &[&str], stop_after: Option<u64>) -> Self {
        let options = TrainOptions { resume: place.join(out).exists(), force: false };
        Self::within(1 << 30, place, out, settings, stop_after, options)
    }

    fn within(
        limit_bytes: usize,
        place: &Path,
        out: &str,
        settings: &[&str],
        stop_after: Option<u64>,
        options: TrainOptions,
    ) -> Self {
        let text = "the quick brown fox jumps over the lazy dog. ".repeat(40);
        fs::write(place.join("text.txt"), text).unwrap();
        let mut raw = RawConfig::from_text(JOB, &place.join("job.toml")).unwrap();
        raw.set_path("output.folder", &place.join(out)).unwrap();
        for setting in settings {
            raw.set(setting).unwrap();
        }
        let config = raw.resolve().unwrap();
        let kind = DeviceKind::cpu(2);
        let device_setup = DeviceSetup {
            kind,
            name: "cpu".into(),
            limit_bytes,
            host_bytes: None,
            raisable: None,
            rates: Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind),
            open: Box::new(|bytes| Device::cpu(2, bytes)),
            memory_place: MemoryPlace::Process,
            start_sampler: Box::new(|_| None),
            world: None,
        };
        let (events, stop) = (Mutex::new(Vec::new()), CancelToken::default());
        let listener = |record: &EventRecord| {
            if let Event::Step(step) = &record.event
                && Some(step.step) == stop_after
            {
                stop.cancel();
            }
            events.lock().unwrap().push(record.event.clone());
        };
        let end = train(&config, &device_setup, options, &[&listener], &stop);
        Self { end, events: events.into_inner().unwrap() }
    }

    fn losses(&self) -> Vec<f64> {
        let loss = |event: &Event| match event {
            Event::Step(step) => Some(step.loss),
            _ => None,
        };
        self.events.iter().filter_map(loss).collect()
    }
}

fn model(place: &Path, out: &str) -> Vec<u8> {
    fs::read(place.join(out).join("model/model.safetensors")).unwrap()
}

/// Every way to choose tokens and to train the policy, with what the plan promised.
#[test]
fn every_way_trains_within_its_plan_and_repeats_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    for (name, setting) in [
        ("reinforce", "compress.estimator=reinforce"),
        ("grpo", "compress.estimator=grpo"),
        ("gumbel", "compress.estimator=gumbel"),
        ("all", "compress.select=all"),
        ("stride", "compress.select=stride"),
        ("random", "compress.select=random"),
        ("spaces", "compress.select=spaces"),
        ("rarest", "compress.select=rarest"),
    ] {
        let run = TestRun::new(place, name, &[setting], None);
        let end = run.end.as_ref().unwrap();
        assert_eq!((end.step, &end.reason), (6, &EndReason::Finished), "{name}");
        let losses = run.losses();
        assert!(losses[5] < losses[0] - 0.1, "{name}: {losses:?}");
        for event in &run.events {
            if let Event::Memory { planned_bytes, peak_bytes, .. } = event {
                assert!(peak_bytes <= planned_bytes, "{name}: {event:?}");
            }
        }
        let again = format!("{name}-again");
        assert_eq!(TestRun::new(place, &again, &[setting], None).losses(), losses, "{name}");
        assert!(model(place, name) == model(place, &again), "{name}: other bytes");
    }
}

#[test]
fn a_run_that_was_stopped_gives_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    TestRun::new(place, "whole", &[], None).end.unwrap();
    let stopped = TestRun::new(place, "stopped", &[], Some(3)).end.unwrap();
    assert_eq!((stopped.step, stopped.reason), (3, EndReason::Interrupted));
    assert_eq!(TestRun::new(place, "stopped", &[], None).end.unwrap().step, 6);
    assert!(model(place, "whole") == model(place, "stopped"), "other bytes after a stop");
}

/// A sample's draws and advantages do not depend on who is beside it: only the order of sums differs.
#[test]
fn the_size_of_micro_batches_changes_sums_only() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    for estimator in ["reinforce", "grpo", "gumbel"] {
        let estimator = format!("compress.estimator={estimator}");
        let of = |out: &str, micro: &str| {
            let run = TestRun::new(place, out, &[&estimator, micro], None);
            fs::remove_dir_all(place.join(out)).unwrap();
            run.losses()
        };
        let whole = of("whole", "train.micro_batch=4");
        let single = of("single", "train.micro_batch=1");
        for (whole, single) in whole.iter().zip(&single) {
            assert!((whole - single).abs() < 2e-3 * whole, "{estimator}: {whole} {single}");
        }
    }
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = |out: &str, settings: &[&str]| {
        TestRun::new(folder.path(), out, settings, None).end.unwrap_err().to_string()
    };
    assert!(said("a", &["adapter.kind=lora", "base.random_init=false"]).contains("trained whole"));
    assert!(said("b", &["compress.width=40"]).contains("no multiple of the trunk's head_dim 32"));
    let settings = ["text.length=16", "compress.keep_one_in=64"];
    assert!(said("c", &settings).contains("sequences of 16 tokens, of which one in 64 is kept"));
    let options = TrainOptions::default();
    let small = TestRun::within(4 << 20, folder.path(), "d", &[], None, options);
    let error = small.end.unwrap_err();
    assert!(matches!(error, TrainerError::TooLarge { .. }), "{error}");
}
