//! GRPO: losses and gradients against TRL, and runs of a small model on the CPU whose completions a program rewards.

use std::fs;
use std::path::Path;

use compute::ops::RowWeights;
use compute::{Device, Dtype, Gradients, Tape};
use serde_json::Value;
use weights::Catalog;
use weights::load::load_f32;

use super::batch::{PreferenceMicroBatch, PreferenceSample, RewardLog};
use super::tests::{PreferenceRun, adapter, answer, golden, ids};
use crate::error::{Result, TrainerError};
use crate::event::{EndReason, Event};
use crate::model::adapter::Adapters;
use crate::model::adapter::factors::Factors;
use crate::model::adapter::read::{AdapterFile, Component, TargetModule};
use crate::model::build::Precision;
use crate::model::host::relative_error;
use crate::model::llama::TokenTargets;
use crate::model::llama::language_model::LanguageModel;
use crate::model::recompute::Recompute;
use crate::objective::grpo::{GrpoLoss, GrpoObjective, RewardScale};
use crate::objective::preference::PreferenceObjective;
use crate::text::Tokenizer;
use crate::text::preference::Preference;

/// The loss and every gradient of the LoRA are those of TRL's trainer, with the reference that it finds itself; whole and
/// in parts.
#[test]
fn losses_and_gradients_of_completions_are_those_of_trl() {
    let text = fs::read(golden("grpo/grpo.json")).unwrap();
    let cases: Value = serde_json::from_slice(&text).unwrap();
    let expected = Catalog::open(&golden("grpo/gradients.safetensors")).unwrap();
    let device = Device::cpu(2, 64 << 20).unwrap();
    let base = LanguageModel::open(&golden("llama/qwen2")).unwrap();
    let mut file = AdapterFile::open(&golden("llama/qwen2/peft")).unwrap();
    let modules = TargetModule::from_specs(&base.tensor_specs().unwrap(), |_| Vec::new());
    let layers = file.take(Component::Language, None, &modules).unwrap();
    let mut adapters = Adapters::loaded(layers);
    let model = base.load(&device, Precision::plain(Dtype::F32), &mut adapters, &|_| true).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        let number = |key: &str| case[key].as_f64().unwrap();
        let (name, temperature) = (case["name"].as_str().unwrap(), number("temperature"));
        let grpo = GrpoObjective {
            loss: match case["loss_type"].as_str().unwrap() {
                "grpo" => GrpoLoss::Grpo,
                "dr_grpo" => GrpoLoss::DrGrpo,
                _ => GrpoLoss::Dapo,
            },
            beta: number("beta"),
            scale_rewards: RewardScale::Group,
            num_generations: 2,
            max_completion_length: cases["max_completion_length"].as_u64().unwrap() as usize,
        };
        let samples = samples(&cases, &grpo);
        let objective = PreferenceObjective::Grpo(grpo);
        for parts in [1, 2] {
            let (log, mut gradients, mut loss) = (RewardLog::default(), Gradients::default(), 0.0);
            for part in samples.chunks(samples.len() / parts) {
                let micro_batch = PreferenceMicroBatch::new(part, &objective, 0);
                let tape = Tape::training(&device, &adapters.params, 0);
                let upload = |values: &[u32]| device.upload(micro_batch.sizes, values).unwrap();
                let (ids, targets) = (upload(&micro_batch.ids), upload(&micro_batch.targets));
                let tokens = TokenTargets { ids: &ids, targets: &targets, temperature };
                let reference = objective
                    .has_reference()
                    .then(|| model.token_losses(&tape.without_adapters(), tokens).unwrap());
                let recompute = if parts == 1 { Recompute::None } else { Recompute::Block };
                let part_loss = model
                    .weighted_loss(&tape, tokens, recompute, |losses| -> Result<RowWeights> {
                        Ok(micro_batch.weigh(&objective, losses, reference.as_deref(), &log))
                    })
                    .unwrap();
                loss += f64::from(part_loss.tensor().to_f32_vec()[0]) / parts as f64;
                let share = device.upload([], &[1.0 / parts as f32]).unwrap();
                tape.backward_from(part_loss, share, &mut gradients).unwrap();
            }
            assert!((loss - number("loss")).abs() < 1e-5, "{name}: {loss} {case}");
            if let Some(kl) = case["kl"].as_f64() {
                assert!((log.means().unwrap()["kl"] / kl - 1.0).abs() < 1e-3, "{name}");
            }
            let mut seen = 0;
            for layer in &adapters.layers {
                let Factors::Lora { down, up } = layer.factors else { unreachable!("a LoRA") };
                for (factor, key) in [("lora_A", down), ("lora_B", up)] {
                    let name = format!("{name}.{}.{factor}.weight", layer.module);
                    let tensor = expected.find(&name).unwrap();
                    let values = load_f32(&expected, tensor, 0..tensor.numel()).unwrap();
                    let apart = relative_error(&values, &gradients.get(key).unwrap().to_f32_vec());
                    assert!(apart < 2e-4, "{name}: {apart:e}");
                    seen += 1;
                }
            }
            assert!(seen >= 8, "{seen}");
        }
    }
}

fn samples(cases: &Value, grpo: &GrpoObjective) -> Vec<PreferenceSample> {
    let all = cases["samples"].as_array().unwrap();
    let lengths: Vec<usize> = all.iter().map(|it| ids(&it["completion"]).len()).collect();
    let sample = |(sample, token_weight): (&Value, f64)| PreferenceSample {
        preference: Preference {
            answers: vec![answer(&sample["prompt"], &sample["completion"])],
            is_desirable: true,
            record: String::new(),
        },
        length: 14,
        kl: 0.0,
        advantage: sample["advantage"].as_f64().unwrap(),
        token_weight,
    };
    all.iter().zip(grpo.token_weights(&lengths)).map(sample).collect()
}

/// As many points as there are letters `e` in a line: what the model writes differs, the rest is the same for a group.
const LETTERS: &str = "while IFS= read -r line; do e=${line//[^e]/}; echo ${#e}; done\n";

/// Writes prompts of one length and a reward program; the settings of a job about them.
fn settings(place: &Path, script: &str, more: &[&str]) -> Vec<String> {
    let prompt = |n: usize| format!("{{\"prompt\": \"q{n} \", \"answer\": {n}}}");
    let prompts = (0..8).map(prompt).collect::<Vec<_>>().join("\n");
    fs::write(place.join("prompts.jsonl"), prompts).unwrap();
    fs::write(place.join("reward.sh"), script).unwrap();
    let program = place.join("reward.sh");
    let own = [
        "preference.method=grpo".to_owned(),
        format!("preference.reward=['bash', '{}']", program.display()),
        format!("text.path={}", place.join("prompts.jsonl").display()),
        "preference.num_generations=4".into(),
        "preference.max_completion_length=12".into(),
        "train.batch_size=8".into(),
        "optimizer.learning_rate=3e-2".into(),
        "generate.prompts=[]".into(),
    ];
    own.into_iter().chain(more.iter().map(|setting| (*setting).to_owned())).collect()
}

fn run(place: &Path, out: &str, settings: &[String], stop_after: Option<u64>) -> PreferenceRun {
    let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
    PreferenceRun::new(place, out, &settings, stop_after)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// A program rewards one letter, and the model writes more of it; stopped in the middle, it comes to the same bytes.
#[test]
fn a_rewarded_letter_is_learnt_within_the_plan_and_resumes_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let all = settings(place, LETTERS, &["train.steps=30", "train.validate_every=15"]);
    let whole = run(place, "whole", &all, None);
    let end = whole.end.as_ref().unwrap();
    assert_eq!((end.step, &end.reason), (30, &EndReason::Finished));
    let metrics = whole.metrics();
    let rewards: Vec<f64> = metrics.iter().map(|metrics| metrics["reward"]).collect();
    let [first, last] = [&rewards[..5], &rewards[25..]].map(mean);
    assert!(last > first + 2.0, "{rewards:?}");
    for name in ["reward_std", "frac_reward_zero_std", "completions/clipped_ratio"] {
        assert!(metrics.iter().all(|metrics| metrics[name] >= 0.0), "{name}: {metrics:?}");
    }
    assert!(metrics.iter().all(|it| (1.0..=12.0).contains(&it["completions/mean_length"])));
    let held_out = |event: &Event| match event {
        Event::Validation { loss, .. } => Some(-loss),
        _ => None,
    };
    let held_out: Vec<f64> = whole.events.iter().filter_map(held_out).collect();
    assert!(held_out.len() == 3 && held_out[2] > held_out[0], "{held_out:?}");
    let is_same = |event: &&Event| matches!(event, Event::Rewards(it) if it.metrics.get("eval_reward") == Some(&held_out[2]));
    assert_eq!(whole.events.iter().filter(is_same).count(), 1, "{held_out:?}");

    let end = run(place, "stopped", &all, Some(13)).end.unwrap();
    assert_eq!((end.step, end.reason), (13, EndReason::Interrupted));
    assert_eq!(run(place, "stopped", &all, None).end.unwrap().step, 30);
    assert!(adapter(place, "whole") == adapter(place, "stopped"), "other bytes after a stop");
}

/// A program that fails ends the run; when it is corrected, the run goes on as if nothing had been.
#[test]
fn a_run_goes_on_when_its_reward_program_is_corrected() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let all = settings(place, LETTERS, &[]);
    run(place, "whole", &all, None).end.unwrap();
    let failing = "for n in $(seq 20); do read -r line; e=${line//[^e]/}; echo ${#e}; done; echo broken >&2; exit 7\n";
    fs::write(place.join("reward.sh"), failing).unwrap();
    let error = run(place, "failed", &all, None).end.unwrap_err();
    assert!(matches!(error, TrainerError::Reward { .. }), "{error}");
    let says = "ended with exit status: 7 after 7 of 8 rewards; it said: broken";
    assert!(error.to_string().contains(says), "{error}");
    fs::write(place.join("reward.sh"), LETTERS).unwrap();
    let resumed = run(place, "failed", &all, None);
    assert_eq!(resumed.end.as_ref().unwrap().step, 6);
    assert_eq!(resumed.losses().len(), 4, "it went on after two steps");
    assert!(adapter(place, "whole") == adapter(place, "failed"));
}

#[test]
fn the_plan_of_completions_is_what_they_take() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let tokenizer = Tokenizer::open(&golden("text/bpe")).unwrap();
    let n_prompt = tokenizer.bos().iter().count() + tokenizer.encode("q0 ").unwrap().len();
    let length = format!("text.length={}", n_prompt + 23);
    for (name, more) in [
        ("whole", ["train.micro_batch=8", "train.recompute=none", "preference.beta=0.04"]),
        ("parts", ["train.micro_batch=1", "train.recompute=block", "preference.beta=0"]),
    ] {
        let own = ["preference.max_completion_length=24", "preference.num_generations=8", &length];
        let all = settings(place, LETTERS, &[&own[..], &more].concat());
        let run = run(place, name, &all, None);
        run.end.as_ref().unwrap();
        let mut seen = 0;
        for event in &run.events {
            if let Event::Memory { phase, planned_bytes, peak_bytes } = event {
                assert!(peak_bytes <= planned_bytes, "{event:?}");
                if phase.to_string().starts_with("train") {
                    assert_eq!(peak_bytes, planned_bytes, "{name} {event:?}");
                    seen += 1;
                }
            }
        }
        assert!(seen > 0);
        let has_kl = run.metrics().iter().all(|metrics| metrics.contains_key("kl"));
        assert_eq!(has_kl, name == "whole", "{name}");
    }
}

/// Completions do not depend on how the batch is cut, and less memory gives the same.
#[test]
fn micro_batches_change_sums_only() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let of = |out: &str, micro: &str| {
        let all = settings(place, LETTERS, &[micro, "optimizer.learning_rate=1e-4"]);
        let run = run(place, out, &all, None);
        run.end.as_ref().unwrap();
        (run.losses(), run.metrics())
    };
    let (whole, parts) = (of("a", "train.micro_batch=8"), of("b", "train.micro_batch=3"));
    assert_eq!(whole.1, parts.1);
    for (whole, parts) in whole.0.iter().zip(&parts.0) {
        assert!((whole - parts).abs() < 1e-3, "{whole} {parts}");
    }
}

#[test]
fn what_cannot_be_completed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    let said = |out: &str, more: &[&str]| {
        run(place, out, &settings(place, LETTERS, more), None).end.unwrap_err().to_string()
    };
    assert_eq!(
        said("a", &["train.batch_size=6"]),
        "train.batch_size is 6 completions, and preference.num_generations makes 4 of each prompt"
    );
    let long = said("b", &["preference.max_completion_length=64"]);
    assert!(long.starts_with("text.length is 64 tokens, and a completion may have"), "{long}");
    let full = said("c", &["adapter.kind=full", "preference.beta=0.04"]);
    assert!(full.contains("which a full fine-tune changes"), "{full}");
    let room = said("d", &["preference.max_completion_length=63"]);
    assert!(room.contains("no text to train with"), "{room}");
    let small = settings(place, LETTERS, &[]);
    let small: Vec<&str> = small.iter().map(String::as_str).collect();
    let small = PreferenceRun::within(1 << 20, place, "e", &small, None).end.unwrap_err();
    assert!(matches!(small, TrainerError::TooLarge { .. }), "{small}");
}
