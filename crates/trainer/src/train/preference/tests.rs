//! Losses and gradients against TRL, and runs of a small model on the CPU.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use compute::ops::RowWeights;
use compute::{CancelToken, Device, DeviceKind, Dtype, Gradients, Tape};
use machine::held::MemoryPlace;
use machine::{Machine, ProbeSource};
use serde_json::Value;
use weights::Catalog;
use weights::load::load_f32;

use super::batch::{PreferenceMicroBatch, PreferenceSample, RewardLog};
use crate::config::RawConfig;
use crate::error::{Result, TrainerError};
use crate::event::{EndReason, Event, EventRecord, RewardMetrics, RunEnd};
use crate::model::adapter::Adapters;
use crate::model::adapter::factors::Factors;
use crate::model::adapter::read::{AdapterFile, Component, TargetModule};
use crate::model::build::Precision;
use crate::model::host::relative_error;
use crate::model::llama::TokenTargets;
use crate::model::llama::language_model::LanguageModel;
use crate::model::recompute::Recompute;
use crate::objective::preference::{DpoLoss, KtoLoss, PreferenceObjective};
use crate::plan::Rates;
use crate::text::preference::{AnswerTokens, Preference};
use crate::train::{DeviceSetup, TrainOptions, train};

pub(super) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

pub(super) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

pub(super) fn answer(prompt: &Value, answer: &Value) -> AnswerTokens {
    let (prompt, answer) = (ids(prompt), ids(answer));
    let is_answer = [vec![false; prompt.len()], vec![true; answer.len()]].concat();
    AnswerTokens { ids: [prompt, answer].concat(), is_answer }
}

fn pairs(golden: &Value) -> Vec<Preference> {
    let pair = |pair: &Value| Preference {
        answers: ["chosen", "rejected"].map(|kind| answer(&pair["prompt"], &pair[kind])).into(),
        is_desirable: true,
        record: String::new(),
    };
    golden["pairs"].as_array().unwrap().iter().map(pair).collect()
}

fn singles(golden: &Value) -> Vec<Preference> {
    let single = |sample: &Value| Preference {
        answers: vec![answer(&sample["prompt"], &sample["completion"])],
        is_desirable: sample["label"].as_bool().unwrap(),
        record: String::new(),
    };
    golden["samples"].as_array().unwrap().iter().map(single).collect()
}

/// The loss and every gradient of the LoRA are those of TRL's trainers, with the reference that they find themselves.
#[test]
fn losses_and_gradients_are_those_of_trl() {
    let text = fs::read(golden("preferences/losses.json")).unwrap();
    let golden_losses: Value = serde_json::from_slice(&text).unwrap();
    let expected = Catalog::open(&golden("preferences/gradients.safetensors")).unwrap();
    let device = Device::cpu(2, 64 << 20).unwrap();
    let base = LanguageModel::open(&golden("llama/qwen2")).unwrap();
    let mut file = AdapterFile::open(&golden("llama/qwen2/peft")).unwrap();
    let modules = TargetModule::from_specs(&base.tensor_specs().unwrap(), |_| Vec::new());
    let layers = file.take(Component::Language, None, &modules).unwrap();
    let mut adapters = Adapters::loaded(layers);
    let model = base.load(&device, Precision::plain(Dtype::F32), &mut adapters, &|_| true).unwrap();
    for batch in golden_losses["batches"].as_array().unwrap() {
        let number = |key: &str| batch[key].as_f64().unwrap();
        let loss_type = batch["loss_type"].as_str().unwrap();
        let (beta, label_smoothing) = (number("beta"), 0.0);
        let (objective, samples) = match loss_type {
            "orpo" => {
                (PreferenceObjective::Orpo { beta }, pairs(&golden_losses).drain(..1).collect())
            }
            "kto" => {
                let loss = KtoLoss::Kto;
                let desirable_weight = number("desirable_weight");
                let undesirable_weight = number("undesirable_weight");
                let kto =
                    PreferenceObjective::Kto { loss, beta, desirable_weight, undesirable_weight };
                (kto, singles(&golden_losses))
            }
            dpo => {
                let loss = if dpo == "ipo" { DpoLoss::Ipo } else { DpoLoss::Sigmoid };
                let dpo = PreferenceObjective::Dpo { loss, beta, label_smoothing };
                (dpo, pairs(&golden_losses))
            }
        };
        let kl = batch["metrics"]["kl"].as_f64().unwrap_or(0.0);
        let samples: Vec<_> = samples
            .into_iter()
            .map(|preference| PreferenceSample {
                preference,
                length: 14,
                kl,
                advantage: 0.0,
                token_weight: 0.0,
            })
            .collect();
        let micro_batch = PreferenceMicroBatch::new(&samples, &objective, 0);
        let log = RewardLog::default();
        for recompute in [Recompute::None, Recompute::Block] {
            log.reset();
            let tape = Tape::training(&device, &adapters.params, 0);
            let upload = |values: &[u32]| device.upload(micro_batch.sizes, values).unwrap();
            let (ids, targets) = (upload(&micro_batch.ids), upload(&micro_batch.targets));
            let tokens = TokenTargets { ids: &ids, targets: &targets, temperature: 1.0 };
            let reference = model.token_losses(&tape.without_adapters(), tokens).unwrap();
            let reference = objective.has_reference().then_some(reference);
            let loss = model
                .weighted_loss(&tape, tokens, recompute, |losses| -> Result<RowWeights> {
                    Ok(micro_batch.weigh(&objective, losses, reference.as_deref(), &log))
                })
                .unwrap();
            let got = f64::from(loss.tensor().to_f32_vec()[0]);
            assert!((got / number("loss") - 1.0).abs() < 1e-4, "{loss_type}: {got} {batch}");
            let mut gradients = Gradients::default();
            tape.backward(&loss, &mut gradients).unwrap();
            let mut seen = 0;
            for layer in &adapters.layers {
                let Factors::Lora { down, up } = layer.factors else { unreachable!("a LoRA") };
                for (name, key) in [("lora_A", down), ("lora_B", up)] {
                    let method = batch["method"].as_str().unwrap();
                    let name = format!("{method}.{loss_type}.{}.{name}.weight", layer.module);
                    let tensor = expected.find(&name).unwrap();
                    let values = load_f32(&expected, tensor, 0..tensor.numel()).unwrap();
                    let got = gradients.get(key).unwrap().to_f32_vec();
                    let apart = relative_error(&values, &got);
                    assert!(apart < 2e-4, "{name}: {apart:e}");
                    seen += 1;
                }
            }
            assert!(seen >= 8, "{seen}");
            let means = log.means().unwrap();
            for (name, value) in batch["metrics"].as_object().unwrap() {
                let (got, expected) = (means[name], value.as_f64().unwrap());
                let scale = expected.abs().max(0.1);
                assert!((got - expected).abs() < 1e-4 * scale, "{loss_type} {name}: {means:?}");
            }
        }
    }
}

const JOB: &str = "
[base]
dtype = 'f32'
[text]
path = 'pairs.jsonl'
length = 64
validation = 0.2
[preference]
method = 'dpo'
[train]
steps = 6
batch_size = 4
validate_every = 3
[optimizer]
learning_rate = 3e-3
[generate]
prompts = ['q0 ']
max_tokens = 4
[output]
";

/// Questions whose good answers say yes.
fn pairs_file() -> String {
    let pair = |n: usize| {
        let more = "!".repeat(n % 7);
        format!(r#"{{"prompt": "q{n} ", "chosen": "yes{more}", "rejected": "no no{more}"}}"#)
    };
    (0..24).map(|n| pair(n) + "\n").collect()
}

/// The same, each answer alone.
fn labelled_file() -> String {
    let mut lines = String::new();
    for n in 0..24 {
        let (completion, label) = if n % 2 == 0 { ("yes", true) } else { ("no no", false) };
        let line =
            format!(r#"{{"prompt": "q{n} ", "completion": "{completion}", "label": {label}}}"#);
        writeln!(lines, "{line}").unwrap();
    }
    lines
}

pub(super) struct PreferenceRun {
    pub end: Result<RunEnd>,
    pub events: Vec<Event>,
}

impl PreferenceRun {
    pub fn new(place: &Path, out: &str, settings: &[&str], stop_after: Option<u64>) -> Self {
        Self::within(1 << 30, place, out, settings, stop_after)
    }

    /// Trains in a folder, with further settings; asks to stop after a step, or goes on from there.
    pub fn within(
        limit_bytes: usize,
        place: &Path,
        out: &str,
        settings: &[&str],
        stop_after: Option<u64>,
    ) -> Self {
        fs::write(place.join("pairs.jsonl"), pairs_file()).unwrap();
        fs::write(place.join("labelled.jsonl"), labelled_file()).unwrap();
        let mut raw = RawConfig::from_text(JOB, &place.join("job.toml")).unwrap();
        raw.set_path("base.path", &golden("llama/llama")).unwrap();
        raw.set_path("text.tokenizer", &golden("text/bpe")).unwrap();
        raw.set_path("output.folder", &place.join(out)).unwrap();
        for setting in settings {
            raw.set(setting).unwrap();
        }
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
        let options = TrainOptions { resume: place.join(out).exists(), force: false };
        let config = raw.resolve().unwrap();
        let end = train(&config, &device_setup, options, &[&listener], &stop);
        Self { end, events: events.into_inner().unwrap() }
    }

    /// Of each step.
    pub fn metrics(&self) -> Vec<BTreeMap<String, f64>> {
        let of = |event: &Event| match event {
            Event::Rewards(rewards) if !rewards.is_held_out() => Some(rewards.metrics.clone()),
            _ => None,
        };
        self.events.iter().filter_map(of).collect()
    }

    pub fn losses(&self) -> Vec<f64> {
        let loss = |event: &Event| match event {
            Event::Step(step) => Some(step.loss),
            _ => None,
        };
        self.events.iter().filter_map(loss).collect()
    }
}

pub(super) fn adapter(place: &Path, out: &str) -> Vec<u8> {
    fs::read(place.join(out).join("adapter/peft/adapter_model.safetensors")).unwrap()
}

/// A job about labelled answers: a path is relative to its file, not to `--set`.
fn labelled(place: &Path) -> String {
    format!("text.path={}", place.join("labelled.jsonl").display())
}

#[test]
fn every_method_learns_within_its_plan_and_resumes_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let labelled = labelled(place);
    for (name, settings) in [
        ("dpo", &["preference.loss_type=sigmoid"][..]),
        ("ipo", &["preference.loss_type=ipo", "optimizer.learning_rate=1e-3"]),
        ("orpo", &["preference.method=orpo"]),
        ("kto", &["preference.method=kto", &labelled]),
        ("apo", &["preference.method=kto", "preference.loss_type=apo_zero_unpaired", &labelled]),
        // Nothing but a full fine-tune trains the table of tokens, which is the head here.
        ("full", &["preference.method=orpo", "adapter.kind=full"]),
    ] {
        let run = PreferenceRun::new(place, name, settings, None);
        let end = run.end.as_ref().unwrap();
        assert_eq!((end.step, &end.reason), (6, &EndReason::Finished), "{name}");
        let losses = run.losses();
        assert!(losses[5] < losses[0], "{name}: {losses:?}");
        for event in &run.events {
            if let Event::Memory { planned_bytes, peak_bytes, .. } = event {
                assert!(peak_bytes <= planned_bytes, "{name}: {event:?}");
            }
        }
        let metrics = run.metrics();
        assert_eq!(metrics.len(), 6, "{name}");
        let margin = |step: usize| metrics[step].get("rewards/margins").copied().unwrap_or(0.0);
        assert!(margin(5) > margin(0), "{name}: {metrics:?}");
        let is_held_out = |event: &&Event| matches!(event, Event::Rewards(it) if it.is_held_out());
        // Before the first step, in the middle and at the end.
        assert_eq!(run.events.iter().filter(is_held_out).count(), 3, "{name}");

        let stopped = format!("{name}-stopped");
        let end = PreferenceRun::new(place, &stopped, settings, Some(3)).end.unwrap();
        assert_eq!((end.step, end.reason), (3, EndReason::Interrupted), "{name}");
        assert_eq!(PreferenceRun::new(place, &stopped, settings, None).end.unwrap().step, 6);
        let bytes = |out: &str| match name {
            "full" => fs::read(place.join(out).join("model/model.safetensors")).unwrap(),
            _ => adapter(place, out),
        };
        assert!(bytes(name) == bytes(&stopped), "{name}: other bytes after a stop");
    }
}

/// The plan of the largest step is what it takes, to the byte.
#[test]
fn a_step_takes_what_was_planned() {
    let folder = tempfile::tempdir().unwrap();
    for (name, settings) in [
        ("whole", ["train.micro_batch=4", "train.recompute=none"]),
        ("parts", ["train.micro_batch=1", "train.recompute=block"]),
    ] {
        let run = PreferenceRun::new(folder.path(), name, &settings, None);
        run.end.as_ref().unwrap();
        let mut trained = 0;
        for event in &run.events {
            if let Event::Memory { phase, planned_bytes, peak_bytes } = event
                && phase.to_string().starts_with("train")
            {
                assert_eq!(peak_bytes, planned_bytes, "{event:?}");
                trained += 1;
            }
        }
        assert!(trained > 0);
    }
}

#[test]
fn the_size_of_micro_batches_changes_sums_only() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let labelled = labelled(place);
    for settings in [&["preference.method=dpo"][..], &["preference.method=kto", &labelled]] {
        let of = |micro: &str| {
            let run = PreferenceRun::new(place, "run", &[settings, &[micro]].concat(), None);
            run.end.as_ref().unwrap();
            fs::remove_dir_all(place.join("run")).unwrap();
            (run.losses(), run.metrics())
        };
        let (whole, single) = (of("train.micro_batch=4"), of("train.micro_batch=1"));
        for (whole, single) in whole.0.iter().zip(&single.0) {
            assert!((whole - single).abs() < 2e-3 * whole, "{settings:?}: {whole} {single}");
        }
        for (whole, single) in whole.1.iter().zip(&single.1) {
            assert!(whole.keys().eq(single.keys()));
            let apart = |(name, value): (&String, &f64)| {
                let scale = value.abs().max(0.1);
                assert!((value - single[name]).abs() < 1e-2 * scale, "{name} {whole:?} {single:?}");
            };
            whole.iter().for_each(apart);
        }
    }
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = |out: &str, settings: &[&str]| {
        PreferenceRun::new(folder.path(), out, settings, None).end.unwrap_err().to_string()
    };
    assert!(said("a", &["adapter.kind=full"]).contains("which a full fine-tune changes"));
    let labelled = labelled(folder.path());
    let single = ["preference.method=kto", "train.batch_size=1", &labelled];
    assert!(said("b", &single).contains("train.batch_size is 1"));
    let error = said("c", &["preference.method=kto"]);
    assert!(error.contains("expected prompt, completion and label"), "{error}");
    let error = said("d", &[&labelled]);
    assert!(error.contains("expected prompt, chosen and rejected"), "{error}");
    let small = PreferenceRun::within(1 << 20, folder.path(), "e", &[], None).end.unwrap_err();
    assert!(matches!(small, TrainerError::TooLarge { .. }), "{small}");
}

#[test]
fn metrics_are_read_back_with_what_is_not_finite() {
    let line = r#"{"event":"rewards","step":2,"metrics":{"rewards/margins":null,"kl":0.5}}"#;
    let EventRecord { event: Event::Rewards(RewardMetrics { metrics, .. }), .. } =
        serde_json::from_str(line).unwrap()
    else {
        panic!("{line}")
    };
    assert!(metrics["rewards/margins"].is_nan() && metrics["kl"] == 0.5);
}
