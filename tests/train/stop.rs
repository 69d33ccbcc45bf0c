//! Runs that are asked to stop at any moment: while they encode, load, validate, write samples, within a step, between
//! two. Each ends as interrupted, its checkpoint has the bytes of an uninterrupted run at that step, and the run that
//! resumes trains and measures the same.
//!
//! Some moments are tried. `HEARTH_STOPS=1000` tries so many, spread over the run.

use std::fs;
use std::path::{Path, PathBuf};

use compute::{CancelToken, Device, DeviceKind};
use machine::held::MemoryPlace;
use machine::{Machine, ProbeSource};
use trainer::config::RawConfig;
use trainer::event::history::{History, SampleImage, SampleText};
use trainer::event::{EndReason, Event, RunEnd};
use trainer::plan::Rates;
use trainer::train::{DeviceSetup, TrainOptions, train};

use super::texts::Place;
use super::{Job, events, losses};
use crate::models::LIMIT;

/// Moments that are tried after those that grow threefold, unless set otherwise.
const TRIED: u64 = 6;

/// All that has state between steps; the last step's evaluation lowers the learning rate of nobody.
const IMAGES: [&str; 13] = [
    "train.steps=2",
    "train.batch_size=3",
    "train.micro_batch=1",
    "train.gradient_accumulation=2",
    "train.validate_every=1",
    "train.ema=0.9",
    "optimizer.lr_scheduler=plateau",
    "adapter.dropout=0.1",
    "sample.prompts=['a fox']",
    "sample.size=64",
    "sample.steps=1",
    "sample.every=1",
    "output.save_every=2",
];

const TEXTS: [&str; 11] = [
    "train.steps=3",
    "train.micro_batch=2",
    "train.gradient_accumulation=2",
    "train.validate_every=2",
    "train.ema=0.9",
    "text.validation=0.2",
    "generate.prompts=['the fire ']",
    "generate.max_tokens=4",
    "generate.every=1",
    "optimizer.lr_scheduler=plateau",
    "output.save_every=2",
];

/// Each step is one micro-batch, whose parameters are updated within backward.
const FUSED: [&str; 5] = [
    "train.steps=3",
    "adapter.kind=full",
    "train.fused_backward_pass=true",
    "text.validation=0.2",
    "train.validate_every=1",
];

/// A job file with other values for some keys.
struct Trial<'a> {
    job: &'a Path,
    cache_key: &'static str,
    set: &'a [&'a str],
}

impl Trial<'_> {
    /// Runs into a folder, or continues there, until the token has answered so many questions.
    fn run(&self, folder: &Path, n_asked: Option<u64>, more: &[&str]) -> EndReason {
        let mut raw = RawConfig::from_file(self.job).unwrap();
        raw.set_path("output.folder", folder).unwrap();
        // Of its own: encoding and tokenising are stopped too.
        raw.set_path(self.cache_key, &folder.with_extension("cache")).unwrap();
        for argument in self.set.iter().chain(more) {
            raw.set(argument).unwrap();
        }
        let kind = DeviceKind::cpu(1);
        let device_setup = DeviceSetup {
            kind,
            name: "test".into(),
            limit_bytes: LIMIT,
            host_bytes: None,
            raisable: None,
            rates: Rates::documented(&Machine::probe(&mut ProbeSource::live()), kind),
            open: Box::new(|bytes| Device::cpu(1, bytes)),
            memory_place: MemoryPlace::Process,
            start_sampler: Box::new(|_| None),
            world: None,
        };
        let stop = CancelToken::default();
        if let Some(n_asked) = n_asked {
            stop.cancel_after(n_asked);
        }
        // A run that was stopped before its first evaluation starts again.
        let options = TrainOptions { resume: !states(folder).is_empty(), force: false };
        match train(&raw.resolve().unwrap(), &device_setup, options, &[], &stop) {
            Ok(RunEnd { reason, .. }) => reason,
            Err(error) if error.is_cancelled() => EndReason::Interrupted,
            Err(error) => panic!("{n_asked:?}: {error}"),
        }
    }

    /// Stops a run after so many questions and continues it; returns whether it was not finished by then.
    fn stop(&self, place: &Path, n_asked: u64, whole: &Path) -> bool {
        let folder = place.join(format!("stopped-{n_asked}"));
        let reason = self.run(&folder, Some(n_asked), &[]);
        let is_stopped = reason == EndReason::Interrupted;
        if is_stopped {
            let last = events(&folder).pop();
            assert!(
                matches!(&last, Some(Event::End(end)) if end.reason == reason),
                "{n_asked}: {last:?}"
            );
            check_states(&folder, whole, n_asked);
            assert_eq!(self.run(&folder, None, &[]), EndReason::Finished, "{n_asked}");
        }
        check_states(&folder, whole, n_asked);
        assert_eq!(measured(&folder), measured(whole), "{n_asked}");
        assert_eq!(losses(&events(&folder)), losses(&events(whole)), "{n_asked}");
        assert_eq!(sampled(&folder), sampled(whole), "{n_asked}");
        fs::remove_dir_all(&folder).unwrap();
        is_stopped
    }

    /// Moments that grow threefold until a run finishes first, then some between.
    fn check(&self, place: &Path) {
        let whole = place.join("whole");
        let all = ["output.save_every=1", "output.keep=9"];
        assert_eq!(self.run(&whole, None, &all), EndReason::Finished);
        let is_stopped = |n_asked: &u64| self.stop(place, *n_asked, &whole);
        let n_stopped = (0..30).map(|n| 3_u64.pow(n)).take_while(is_stopped).count();
        assert!(n_stopped > 5, "a run asks only {n_stopped} times");
        let asked = std::env::var("HEARTH_STOPS").ok().and_then(|n| n.parse().ok());
        let (n, most) = (asked.unwrap_or(TRIED), 3_u64.pow(n_stopped as u32));
        for at in 0..n {
            is_stopped(&(1 + at * most / n));
        }
    }
}

/// A run's checkpoints by step.
fn states(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder.join("checkpoints")).into_iter().flatten();
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    let paths = entries.map(|entry| entry.unwrap().path());
    let paths = paths.filter(|path| !name(path).ends_with(".partial"));
    paths.map(|path| (name(&path), fs::read(path.join("state.safetensors")).unwrap())).collect()
}

/// Every checkpoint has the bytes of the uninterrupted run's at that step, which has none before the first.
fn check_states(folder: &Path, whole: &Path, n_asked: u64) {
    let expected = states(whole);
    for (name, state) in states(folder).into_iter().filter(|(name, _)| name != "step-000000") {
        let (_, expected) = expected.iter().find(|(step, _)| *step == name).unwrap();
        assert!(state == *expected, "{n_asked}: other bytes in {name}");
    }
}

/// The step and the loss of each validation.
fn measured(folder: &Path) -> Vec<(u64, f64)> {
    let mut measured = Vec::new();
    for event in events(folder) {
        if let Event::Validation { step, loss } = event {
            measured.push((step, loss));
        }
    }
    measured
}

/// Steps, names and contents of all samples.
fn sampled(folder: &Path) -> Vec<(u64, String, Vec<u8>)> {
    let history = History::open(folder).unwrap();
    let image = |sample: &SampleImage| {
        let bytes = fs::read(folder.join(&sample.path)).unwrap();
        (sample.step, sample.path.display().to_string(), bytes)
    };
    let images = history.samples.iter().map(image);
    let text = |sample: &SampleText| {
        (sample.step, sample.prompt.clone(), sample.text.clone().into_bytes())
    };
    images.chain(history.texts.iter().map(text)).collect()
}

#[test]
fn a_run_on_images_is_stopped_anywhere() {
    let job = Job::new();
    let trial = Trial { job: &job.file, cache_key: "data.cache", set: &IMAGES };
    trial.check(job.folder.path());
}

#[test]
fn a_run_on_texts_is_stopped_anywhere() {
    let place = Place::new();
    let trial = Trial { job: &place.path("job.toml"), cache_key: "text.cache", set: &TEXTS };
    trial.check(&place.path(""));
}

#[test]
fn a_fused_backward_pass_is_stopped_before_its_first_update_or_after_the_step() {
    let place = Place::new();
    let trial = Trial { job: &place.path("job.toml"), cache_key: "text.cache", set: &FUSED };
    trial.check(&place.path(""));
}
