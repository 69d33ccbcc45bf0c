//! Runs of compressed models, small ones on the CPU.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use compute::{CancelToken, Device, DeviceKind, Dtype, RandomSequence, Tape};
use machine::held::MemoryPlace;
use machine::{Machine, ProbeSource};

use crate::config::RawConfig;
use crate::error::{Result, TrainerError};
use crate::event::{EndReason, Event, EventRecord, PolicyMetrics, RunEnd};
use crate::model::adapter::Adapters;
use crate::model::build::Precision;
use crate::model::compress::{CompressedModel, CompressorInputs, CompressorTraining};
use crate::model::recompute::Recompute;
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

fn policy_of(event: &Event) -> Option<&PolicyMetrics> {
    match event {
        Event::Policy(metrics) => Some(metrics),
        _ => None,
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
        ("ratio", "compress.estimator=ratio"),
        ("reconstruct", "compress.mode=reconstruct"),
        ("all", "compress.select=all"),
        ("stride", "compress.select=stride"),
        ("random", "compress.select=random"),
        ("spaces", "compress.select=spaces"),
        ("rarest", "compress.select=rarest"),
    ] {
        // A model that reconstructs continues no text.
        let settings =
            if name == "reconstruct" { &[setting, "generate.prompts=[]"][..] } else { &[setting] };
        let run = TestRun::new(place, name, settings, None);
        let end = run.end.as_ref().unwrap();
        assert_eq!((end.step, &end.reason), (6, &EndReason::Finished), "{name}");
        let losses = run.losses();
        assert!(losses[5] < losses[0] - 0.1, "{name}: {losses:?}");
        for event in &run.events {
            if let Event::Memory { planned_bytes, peak_bytes, .. } = event {
                assert!(peak_bytes <= planned_bytes, "{name}: {event:?}");
            }
        }
        // A policy tells of each step, a rule has none.
        let policy: Vec<&PolicyMetrics> = run.events.iter().filter_map(policy_of).collect();
        let has_policy = !setting.contains("select");
        assert_eq!(policy.len(), if has_policy { 6 } else { 0 }, "{name}");
        for metrics in policy {
            let PolicyMetrics { entropy, same_places, word_ends, reward, .. } = metrics;
            assert!(*entropy > 0.5 && *entropy <= 1.001, "{name}: {metrics:?}");
            assert!((0.0..=1.0).contains(same_places), "{name}: {metrics:?}");
            assert!((0.0..1.0).contains(word_ends), "{name}: {metrics:?}");
            assert!(reward.abs() < 9.0, "{name}: {metrics:?}");
            let has_advantages = matches!(name, "reinforce" | "grpo" | "reconstruct");
            assert_eq!(metrics.advantage_spread.is_some(), has_advantages, "{name}");
        }
        let again = format!("{name}-again");
        assert_eq!(TestRun::new(place, &again, settings, None).losses(), losses, "{name}");
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
    for estimator in ["reinforce", "grpo", "gumbel", "ratio"] {
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
    let reconstructs = "compress.mode=reconstruct";
    assert!(said("e", &[reconstructs]).contains("cannot continue them"));
    let gumbel = [reconstructs, "compress.estimator=gumbel"];
    assert!(said("f", &gumbel).contains("needs what the trunk makes of all tokens"));
    let options = TrainOptions::default();
    let small = TestRun::within(4 << 20, folder.path(), "d", &[], None, options);
    let error = small.end.unwrap_err();
    assert!(matches!(error, TrainerError::TooLarge { .. }), "{error}");
}

/// Words that begin with one of 16 capitals, followed by three letters that it decides, and by one to three others at
/// random, which decide nothing.
fn planted(n_words: usize, seed: u64) -> String {
    let random = RandomSequence::new(seed, 0);
    let word = |at: usize| {
        let draw = |of: usize, n: f32| (random.uniform(5 * at + of) * n) as u8;
        let capital = draw(0, 16.0);
        let letter = |first: u8, shift: u8| first + (capital >> shift) % 4;
        let decided = [b'A' + capital, letter(b'a', 0), letter(b'e', 2), letter(b'i', 1)];
        let noise = (2..3 + draw(1, 3.0)).map(|of| b'q' + draw(usize::from(of), 8.0));
        String::from_utf8(decided.into_iter().chain(noise).collect()).unwrap()
    };
    (0..n_words).map(word).collect()
}

/// The share of capitals that a model keeps, without looking ahead.
fn kept_capitals(folder: &Path, text: &str) -> f64 {
    let base = CompressedModel::open(folder, CompressorTraining::default()).unwrap();
    let device = Device::cpu(2, 256 << 20).unwrap();
    let mut adapters = Adapters::none();
    let precision = Precision::plain(Dtype::F32);
    let model = base.load(&device, precision, &mut adapters, &|_| true).unwrap();
    let ids: Vec<u32> = text.bytes().map(u32::from).collect();
    let tape = Tape::inference(&device, &adapters.params, 0);
    let zeros = vec![0; ids.len()];
    let inputs =
        CompressorInputs { sizes: [1, ids.len()], ids: &ids, targets: &ids, first_keys: &zeros };
    let kept = model.loss(&tape, inputs, &base.training, Recompute::None).unwrap().kept.concat();
    let is_capital = |at: &&u32| text.as_bytes()[**at as usize].is_ascii_uppercase();
    let n_capitals = text.bytes().filter(u8::is_ascii_uppercase).count();
    kept.iter().filter(is_capital).count() as f64 / n_capitals as f64
}

/// All tokens that a capital decides follow from it, and the rest says nothing. At random, one capital in four would be
/// kept. The policy must not choose before the model knows what capitals are good for: hence `exploration`.
#[test]
#[ignore = "minutes: just sweep"]
fn a_policy_learns_planted_structure() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let text = format!("text.path={}", place.join("planted.txt").display());
    let settings = [
        "compress.mode=reconstruct",
        "compress.exploration=0.05",
        "compress.layers=2",
        "compress.width=64",
        &text,
        "text.length=96",
        "train.steps=900",
        "train.batch_size=8",
        "train.validate_every=900",
        "optimizer.learning_rate=1e-3",
        "optimizer.warmup_steps=20",
        "optimizer.betas=[0.9, 0.95]",
        "generate.prompts=[]",
    ];
    fs::write(place.join("planted.txt"), planted(4000, 1)).unwrap();
    let run = TestRun::new(place, "run", &settings, None);
    run.end.as_ref().unwrap();
    assert!(run.losses().iter().all(|loss| loss.is_finite()), "{:?}", run.losses());
    let share = kept_capitals(&place.join("run/model"), &planted(300, 2));
    let last = run.events.iter().filter_map(policy_of).next_back();
    assert!(share > 0.95, "{share}: {last:?}");
}
