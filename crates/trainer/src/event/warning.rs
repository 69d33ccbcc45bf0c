//! Warnings, each with its cause as a value: programs read `kind` and its figures, people read `text`
//! and `hint`. What another version of hearth warned of is kept as its text.

use std::fmt;

use machine::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::{null_is_nan, rename_tag};

/// Something to look at; the run goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Warning {
    /// Steps taken so far.
    pub step: u64,
    /// What it is.
    pub kind: WarningKind,
}

/// What a run warns of. `kind` is its name in files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum WarningKind {
    /// The loss rises.
    LossRising {
        /// Steps that were compared with as many before.
        steps: usize,
        /// Mean of the last ones, but for the largest.
        now: f64,
        /// The same of those before.
        before: f64,
    },
    /// The loss of a step says little about that of the next.
    #[serde(alias = "loss_scattered")]
    LossUnstable {
        /// Steps that were looked at.
        steps: usize,
        /// Standard deviation of their losses, but for what is a trend.
        spread: f64,
        /// Their mean, but for the largest.
        mean: f64,
    },
    /// Gradients are much longer than they were.
    GradientsExploding {
        /// Steps in which they are ...
        steps: usize,
        /// ... of the last so many.
        of: usize,
        /// More than so many times as long.
        times: f64,
        /// Median norm of the steps before.
        usual: f64,
    },
    /// There is next to no gradient any more.
    GradientsVanished {
        /// Steps that were looked at.
        steps: usize,
        /// Their largest norm.
        largest: f64,
        /// Median norm of the first steps.
        first: f64,
    },
    /// Now and then a gradient is not finite.
    StepsSkipped {
        /// Steps so far that changed nothing.
        steps: u64,
    },
    /// Nothing is finite any more: the run ends.
    NotFinite {
        /// Steps in a row.
        steps: u32,
    },
    /// The run is over, and what came of it is of no use.
    Diverged(Divergence),
    /// Gradients do not reach some of the layers.
    LayersWithoutGradient {
        /// Their names.
        layers: Vec<String>,
        /// Of how many that are trained.
        of: usize,
        /// Whether the whole model is trained, and not an adapter.
        is_full: bool,
    },
    /// The held-out loss does not fall, so the learning rate was lowered.
    RateLowered {
        /// The learning rate from here on.
        learning_rate: f64,
    },
    /// There is no room to make samples.
    #[serde(alias = "no_room_for_samples")]
    NoMemoryForSamples {
        /// Bytes that there was no room for.
        asked_bytes: usize,
        /// Bytes that were taken then.
        in_use_bytes: usize,
        /// The most that could be.
        limit_bytes: usize,
    },
    /// A file of samples could not be written; the run goes on without.
    SamplesNotWritten {
        /// Which, and what the system said.
        problem: String,
    },
    /// A limit was set for a temperature that cannot be read.
    TemperatureUnknown {
        /// The limit.
        limit_celsius: f64,
        /// Whether the run rests if steps become slower.
        uses_step_times: bool,
    },
    /// A checkpoint is broken: the run goes on from the one before.
    #[serde(alias = "checkpoint_passed_over")]
    CheckpointSkipped {
        /// What is wrong with it.
        problem: String,
    },
    /// A run that goes on has another value, as it was asked to.
    SettingChanged(ChangedSetting),
    /// Sequences are longer than those the model was made for.
    SequencesTooLong {
        /// Tokens of a sequence.
        tokens: usize,
        /// Tokens that the model was made for.
        made_for: usize,
    },
    /// The policy of a compressed model keeps the same places of every sequence.
    PolicyCollapsed {
        /// Steps that were looked at.
        steps: usize,
        /// The share of kept positions that were kept at the same place of another sequence.
        same_places: f64,
    },
    /// The base is distilled to few steps, which training undoes.
    Distilled {
        /// What it is.
        model: String,
        /// What to do instead.
        advice: String,
    },
    /// Layers that were to be multiplied in fp8 are not: they lost too much.
    Fp8Inexact {
        /// Their names.
        layers: Vec<String>,
        /// Of how many.
        of: usize,
        /// The largest error of one, relative to its result.
        #[serde(deserialize_with = "null_is_nan")]
        error: f64,
        /// What is allowed.
        allowed: f64,
    },
    /// The policy of a compressed model is certain of every choice, and tries no others.
    PolicyCertain {
        /// Steps that were looked at.
        steps: usize,
        /// The entropy of its choices, as a share of the largest.
        entropy: f64,
    },
    /// All completions of every prompt had the same reward for many steps, so that nothing was learnt.
    RewardsEqual {
        /// Steps in a row.
        steps: usize,
        /// The mean reward of the last.
        reward: f64,
    },
    /// Something is odd about the images or texts.
    Data {
        /// What it is.
        problem: String,
    },
    /// As another version of hearth put it.
    #[serde(skip)]
    Other {
        /// What it is.
        text: String,
        /// What can be done about it.
        hint: Option<String>,
    },
}

/// Why what came of a run is of no use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Divergence {
    /// The last loss is not finite.
    Loss,
    /// The last steps changed nothing.
    Skipped {
        /// How many, in a row.
        steps: u32,
    },
    /// The loss is many times what it was.
    #[serde(alias = "grown")]
    LossGrown {
        /// At the end.
        now: f64,
        /// Of the first step.
        first: f64,
    },
    /// A weight that is not finite, or is not in the formats that adapters are used in.
    Weight {
        /// Of which tensor.
        tensor: String,
        /// The weight.
        #[serde(deserialize_with = "null_is_nan")]
        value: f64,
        /// The largest that can be used.
        largest: f64,
    },
}

/// A value of the job that is not what it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedSetting {
    /// Its key.
    pub key: String,
    /// As it was.
    pub was: String,
    /// As it is.
    pub is: String,
}

impl fmt::Display for ChangedSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, was, is } = self;
        write!(f, "{key} was {was}, is {is}")
    }
}

impl WarningKind {
    /// Its name in files.
    pub fn name(&self) -> &'static str {
        match self {
            Self::LossRising { .. } => "loss_rising",
            Self::LossUnstable { .. } => "loss_unstable",
            Self::GradientsExploding { .. } => "gradients_exploding",
            Self::GradientsVanished { .. } => "gradients_vanished",
            Self::StepsSkipped { .. } => "steps_skipped",
            Self::NotFinite { .. } => "not_finite",
            Self::Diverged(_) => "diverged",
            Self::LayersWithoutGradient { .. } => "layers_without_gradient",
            Self::RateLowered { .. } => "rate_lowered",
            Self::NoMemoryForSamples { .. } => "no_memory_for_samples",
            Self::SamplesNotWritten { .. } => "samples_not_written",
            Self::TemperatureUnknown { .. } => "temperature_unknown",
            Self::CheckpointSkipped { .. } => "checkpoint_skipped",
            Self::SettingChanged(_) => "setting_changed",
            Self::SequencesTooLong { .. } => "sequences_too_long",
            Self::PolicyCollapsed { .. } => "policy_collapsed",
            Self::PolicyCertain { .. } => "policy_certain",
            Self::RewardsEqual { .. } => "rewards_equal",
            Self::Distilled { .. } => "distilled",
            Self::Fp8Inexact { .. } => "fp8_inexact",
            Self::Data { .. } => "data",
            Self::Other { .. } => "other",
        }
    }

    /// What can be done about it.
    pub fn hint(&self) -> Option<String> {
        let fixed = match self {
            Self::LossRising { .. } => {
                "begin a new run with a lower optimizer.learning_rate or a longer optimizer.warmup_steps"
            }
            Self::LossUnstable { .. } => {
                "a larger train.batch_size or train.gradient_accumulation evens it out; if images are as they \
                 should be, a lower optimizer.learning_rate"
            }
            Self::GradientsExploding { .. } => {
                "begin a new run with a lower optimizer.learning_rate or a longer optimizer.warmup_steps; \
                 train.max_grad_norm at 1 or below bounds what one step can spoil"
            }
            Self::GradientsVanished { .. } => {
                "end the run if its samples are good; if not, begin a new one with a lower \
                 optimizer.learning_rate, and with bf16 if base.dtype is f16"
            }
            Self::StepsSkipped { .. } | Self::NotFinite { .. } => {
                "begin a new run with bf16 if base.dtype is f16, else with a lower \
                 optimizer.learning_rate"
            }
            Self::Diverged(_) => {
                "begin a new run with a lower optimizer.learning_rate or a longer \
                 optimizer.warmup_steps; --resume --force writes the result all the same"
            }
            Self::LayersWithoutGradient { is_full: true, .. } => {
                "they stay as they are; the others learn"
            }
            Self::LayersWithoutGradient { layers, .. } => {
                return Some(format!(
                    "adapter.exclude = {layers:?} leaves them out; the others learn the same"
                ));
            }
            Self::RateLowered { .. } => "train.stop_after_plateau ends a run that learns no more",
            Self::NoMemoryForSamples { .. } => {
                "a smaller sample, or a higher --limit; what is learnt is the same"
            }
            Self::SamplesNotWritten { .. } => "make room on the disk, or remove what is in the way",
            Self::TemperatureUnknown { uses_step_times: true, .. } => {
                "steps that become slower are taken for heat instead, and the run then rests; --mode quiet rests from \
                 the start"
            }
            Self::TemperatureUnknown { .. } => {
                "--mode full looks at nothing else; with another mode, steps that become slower are taken for heat"
            }
            Self::SequencesTooLong { made_for, .. } => {
                return Some(format!("text.length = {made_for} shows it what it knows"));
            }
            Self::PolicyCollapsed { .. } => {
                "begin a new run with a lower compress.policy_weight or optimizer.learning_rate; \
                 compress.discount at 0.9 or below credits a position for the tokens after it"
            }
            Self::PolicyCertain { .. } => {
                "what it keeps will not change any more; if the loss should be lower, begin a new run with a lower \
                 compress.policy_weight"
            }
            Self::RewardsEqual { .. } => {
                "give a reward that tells better completions from worse, in part too; prompts that the model can answer now \
                 and then; or a higher preference.num_generations or preference.temperature"
            }
            Self::Distilled { advice, .. } => return Some(advice.clone()),
            Self::Fp8Inexact { .. } => {
                "they are multiplied in base.dtype, which takes longer; without base.compute all are"
            }
            Self::CheckpointSkipped { .. } | Self::SettingChanged(_) | Self::Data { .. } => {
                return None;
            }
            Self::Other { hint, .. } => return hint.clone(),
        };
        Some(fixed.into())
    }
}

impl fmt::Display for WarningKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LossRising { steps, now, before } => write!(
                f,
                "the loss rises: mean of the last {steps} steps {now:.4}, of the {steps} before \
                 {before:.4}"
            ),
            Self::LossUnstable { steps, spread, mean } => write!(
                f,
                "the loss scatters: deviation of the last {steps} steps {spread:.4}, mean {mean:.4}"
            ),
            Self::GradientsExploding { steps, of, times, usual } => write!(
                f,
                "gradients explode: norms of {steps} of the last {of} steps are more than {times} \
                 times as large as before, {usual:.2e}"
            ),
            Self::GradientsVanished { steps, largest, first } => write!(
                f,
                "gradients have vanished: norms of the last {steps} steps are at most \
                 {largest:.2e}, at first {first:.2e}"
            ),
            Self::Fp8Inexact { layers, of, error, allowed } => write!(
                f,
                "{} of {of} layers are not precise enough in fp8: their results are off by up to {:.0} %, allowed are \
                 {:.0} %: {}",
                layers.len(),
                100.0 * error,
                100.0 * allowed,
                layers.join(", ")
            ),
            Self::StepsSkipped { steps } => {
                write!(f, "{steps} steps so far changed nothing, since a gradient was not finite")
            }
            Self::NotFinite { steps } => {
                write!(f, "{steps} steps in a row had gradients that are not finite")
            }
            Self::Diverged(divergence) => write!(f, "the run diverged: {divergence}"),
            Self::LayersWithoutGradient { layers, of, .. } => {
                let (n, shown) = (layers.len(), layers.len().min(SHOWN));
                let more = if n > shown { ", …" } else { "" };
                let names = layers[..shown].join(", ");
                write!(f, "{n} of {of} layers have no gradient: {names}{more}")
            }
            Self::RateLowered { learning_rate } => write!(
                f,
                "the loss does not fall: the learning rate is {learning_rate:.2e} from here"
            ),
            Self::NoMemoryForSamples { asked_bytes, in_use_bytes, limit_bytes } => {
                let [asked, in_use, limit] =
                    [asked_bytes, in_use_bytes, limit_bytes].map(|bytes| Bytes(*bytes as u64));
                write!(
                    f,
                    "no sample is shown where there is no room: asked {asked}, in use {in_use} of \
                     {limit}"
                )
            }
            Self::SamplesNotWritten { problem } => {
                write!(f, "samples are not written: {problem}; the run goes on")
            }
            Self::TemperatureUnknown { limit_celsius, .. } => write!(
                f,
                "max_temp {limit_celsius} °C cannot be held: no temperature can be read here"
            ),
            Self::CheckpointSkipped { problem } => {
                write!(f, "checkpoint passed over: {problem}")
            }
            Self::SettingChanged(changed) => write!(f, "{changed} from here on"),
            Self::SequencesTooLong { tokens, made_for } => {
                write!(f, "sequences have {tokens} tokens, the model was made for {made_for}")
            }
            Self::PolicyCollapsed { steps, same_places } => write!(
                f,
                "the policy has collapsed: in the last {steps} steps {:.0} % of what it kept was at the same places of \
                 every sequence, whatever the text",
                100.0 * same_places
            ),
            Self::Distilled { model, .. } => {
                write!(f, "{model} is distilled to few steps, which training undoes")
            }
            Self::PolicyCertain { steps, entropy } => write!(
                f,
                "the policy explores no more: in the last {steps} steps the entropy of its choices was {:.1} % of the \
                 largest",
                100.0 * entropy
            ),
            Self::RewardsEqual { steps, reward } => write!(
                f,
                "nothing is learnt: in the last {steps} steps all completions of every prompt had the same reward, on \
                 average {reward:.4}"
            ),
            Self::Data { problem } => f.write_str(problem),
            Self::Other { text, .. } => f.write_str(text),
        }
    }
}

/// Layers that a text names; its hint has all of them.
const SHOWN: usize = 3;

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loss => f.write_str("the loss of the last step is not finite"),
            Self::Skipped { steps } => {
                write!(f, "the last {steps} steps changed nothing, since a gradient was not finite")
            }
            Self::LossGrown { now, first } => {
                write!(f, "the loss was {first:.4} in the first step and is {now:.4} at the end")
            }
            Self::Weight { tensor, value, largest } => {
                write!(f, "a weight of {tensor} is {value:.1e}, the largest usable is {largest}")
            }
        }
    }
}

impl Serialize for Warning {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Written<'a> {
            step: u64,
            #[serde(flatten)]
            kind: Option<&'a WarningKind>,
            text: String,
            #[serde(skip_serializing_if = "Option::is_none")]
            hint: Option<String>,
        }
        let Self { step, kind } = self;
        let (text, hint) = (kind.to_string(), kind.hint());
        let kind = (!matches!(kind, WarningKind::Other { .. })).then_some(kind);
        Written { step: *step, kind, text, hint }.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Warning {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Read {
            step: u64,
            text: String,
            #[serde(default)]
            hint: Option<String>,
            #[serde(flatten)]
            kind: Map<String, Value>,
        }
        let Read { step, text, hint, mut kind } = Read::deserialize(from)?;
        rename_tag(&mut kind);
        // Files of before have no kind, and those of later versions may have others.
        let known = serde_json::from_value(Value::Object(kind));
        Ok(Self { step, kind: known.unwrap_or(WarningKind::Other { text, hint }) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kind, with the figures it may have.
    fn all() -> Vec<WarningKind> {
        let weight = Divergence::Weight { tensor: "norm".into(), value: 8e14, largest: 65504.0 };
        let changed = ChangedSetting { key: "k".into(), was: "1".into(), is: "2".into() };
        let layers = vec!["a".to_owned(), "b".into(), "c".into(), "d".into()];
        vec![
            WarningKind::LossRising { steps: 50, now: 2.0, before: 1.0 },
            WarningKind::LossUnstable { steps: 100, spread: 2.0, mean: 1.0 },
            WarningKind::GradientsExploding { steps: 5, of: 20, times: 10.0, usual: 1.0 },
            WarningKind::GradientsVanished { steps: 100, largest: 1e-9, first: 1.0 },
            WarningKind::StepsSkipped { steps: 3 },
            WarningKind::NotFinite { steps: 25 },
            WarningKind::Diverged(Divergence::Loss),
            WarningKind::Diverged(Divergence::Skipped { steps: 3 }),
            WarningKind::Diverged(Divergence::LossGrown { now: 9.0, first: 0.5 }),
            WarningKind::Diverged(weight),
            WarningKind::LayersWithoutGradient { layers: layers.clone(), of: 9, is_full: false },
            WarningKind::LayersWithoutGradient { layers, of: 9, is_full: true },
            WarningKind::RateLowered { learning_rate: 1e-5 },
            WarningKind::SamplesNotWritten { problem: "no space".into() },
            WarningKind::NoMemoryForSamples { asked_bytes: 3, in_use_bytes: 2, limit_bytes: 4 },
            WarningKind::TemperatureUnknown { limit_celsius: 80.0, uses_step_times: true },
            WarningKind::TemperatureUnknown { limit_celsius: 80.5, uses_step_times: false },
            WarningKind::CheckpointSkipped { problem: "broken".into() },
            WarningKind::SettingChanged(changed),
            WarningKind::SequencesTooLong { tokens: 4096, made_for: 2048 },
            WarningKind::PolicyCollapsed { steps: 20, same_places: 0.97 },
            WarningKind::PolicyCertain { steps: 20, entropy: 0.004 },
            WarningKind::RewardsEqual { steps: 20, reward: 0.0 },
            WarningKind::Distilled {
                model: "a Z-Image Turbo".into(),
                advice: "train the base".into(),
            },
            WarningKind::Data { problem: "no caption".into() },
        ]
    }

    #[test]
    fn a_cause_is_written_with_its_words_and_read_back_as_a_value() {
        for kind in all() {
            let warning = Warning { step: 7, kind };
            let written = serde_json::to_value(&warning).unwrap();
            assert_eq!(written["kind"], warning.kind.name());
            assert_eq!(written["text"], warning.kind.to_string());
            assert_eq!(written.get("hint").and_then(Value::as_str), warning.kind.hint().as_deref());
            assert_eq!(serde_json::from_value::<Warning>(written).unwrap(), warning);
        }
    }

    #[test]
    fn a_warning_without_a_kind_or_of_another_version_keeps_its_words() {
        let other = |hint: Option<&str>| WarningKind::Other {
            text: "odd".into(),
            hint: hint.map(String::from),
        };
        for (more, kind) in [
            ("", other(None)),
            (r#","hint":"look""#, other(Some("look"))),
            (r#","kind":"of_tomorrow","hint":"look""#, other(Some("look"))),
            (r#","kind":"loss_rising","steps":"many""#, other(None)),
        ] {
            let line = format!(r#"{{"step":3,"text":"odd"{more}}}"#);
            let read: Warning = serde_json::from_str(&line).unwrap();
            assert_eq!(read, Warning { step: 3, kind }, "{line}");
        }
        let warning = Warning { step: 3, kind: other(None) };
        assert_eq!(serde_json::to_string(&warning).unwrap(), r#"{"step":3,"text":"odd"}"#);
    }

    #[test]
    fn a_few_layers_are_named_and_all_of_them_are_in_the_hint() {
        let layers = ["a", "b", "c", "d"].map(String::from).to_vec();
        let kind = WarningKind::LayersWithoutGradient { layers, of: 9, is_full: false };
        assert_eq!(kind.to_string(), "4 of 9 layers have no gradient: a, b, c, …");
        assert!(kind.hint().unwrap().contains(r#"["a", "b", "c", "d"]"#));
    }
}
