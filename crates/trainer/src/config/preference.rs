//! `[preference]`: learning from preferences or rewards instead of texts. A job with this section reads `[text]` as prompts
//! with answers, or as prompts alone; docs/preferences.md explains it. Keys are named as TRL names them.

use super::error::ConfigError;
use super::reward::RewardSource;
use super::section::{ResolvedKeys, Section, section};
use super::source::ValueOrigin;
use super::training_data::{ANSWER, COMPLETION, PAIR, SEQUENCE};
use super::value::{Switch, words};
use crate::objective::grpo::{GrpoLoss, GrpoObjective, RewardScale};
use crate::objective::preference::{DpoLoss, KtoLoss, PreferenceObjective};
use crate::text::RecordKind;

section! {
    /// Learning from preferences.
    pub RawPreference => PreferenceConfig {
        /// `dpo` and `orpo` learn from pairs (`prompt`, `chosen`, `rejected`), `kto` from answers with a label (`prompt`, `completion`, `label`), `grpo` from a `reward` for completions that the model makes itself (`prompt`)
        method: PreferenceMethod = Required, Any;
        /// How strongly preferences count against staying near the base: larger stays nearer. Of ORPO the weight of the odds ratio. Of GRPO the weight of the KL divergence from the base; 0, its default, computes none
        beta: f64 = Default(0.1), AtLeast(0.0);
        /// Variant of the loss, by its name in TRL. Not set: `sigmoid` for `dpo`, `kto` for `kto`, `dapo` for `grpo`
        loss_type: Option<PreferenceLoss> = Default(None), Any;
        /// Share of labels that are taken to be wrong, for the losses `sigmoid` and `robust`
        label_smoothing: f64 = Default(0.0), Within(0.0, 0.49);
        /// Weight of desirable answers, for `kto`
        desirable_weight: f64 = Default(1.0), Above(0.0);
        /// Weight of undesirable answers, for `kto`
        undesirable_weight: f64 = Default(1.0), Above(0.0);
        /// What a completion is worth, for `grpo`: `exact_match` or `last_number` with the record's `answer`, or a program, such as `["python3", "reward.py"]`; docs/preferences.md has its protocol
        reward: Option<RewardSource> = Default(None), Any;
        /// Seconds that a reward program may take for the completions of a batch
        reward_timeout: f64 = Default(120.0), Above(0.0);
        /// Completions of each prompt, which are compared with each other, for `grpo`. `train.batch_size` counts completions
        num_generations: usize = Default(8), Within(2.0, 4096.0);
        /// Most tokens of a completion, for `grpo`
        max_completion_length: usize = Default(256), Within(1.0, 65536.0);
        /// Sampling temperature of completions, for `grpo`
        temperature: f64 = Default(1.0), UpTo(0.0, 10.0);
        /// Top-k sampling of completions: only the k most likely tokens, for `grpo`
        top_k: Switch<usize> = Default(Switch::Off), AtLeast(1.0);
        /// Top-p (nucleus) sampling of completions: only the most likely tokens up to this probability, for `grpo`
        top_p: f64 = Default(1.0), UpTo(0.0, 1.0);
        /// What rewards are divided by, for `grpo`: the standard deviation of their `group`, of the `batch`, or `none`
        scale_rewards: RewardScale = Default(RewardScale::Group), Any;
    }
}

/// Keys that mean something for `grpo` alone.
const GRPO_KEYS: [&str; 8] = [
    "preference.reward",
    "preference.reward_timeout",
    "preference.num_generations",
    "preference.max_completion_length",
    "preference.temperature",
    "preference.top_k",
    "preference.top_p",
    "preference.scale_rewards",
];

/// How preferences are learnt from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreferenceMethod {
    /// Direct preference optimisation.
    Dpo,
    /// Odds ratio preference optimisation.
    Orpo,
    /// Kahneman-Tversky optimisation.
    Kto,
    /// Group relative policy optimisation.
    Grpo,
}

words!(PreferenceMethod {
    "dpo" => Self::Dpo,
    "orpo" => Self::Orpo,
    "kto" => Self::Kto,
    "grpo" => Self::Grpo,
});

words!(RewardScale {
    "group" => Self::Group,
    "batch" => Self::Batch,
    "none" => Self::None,
});

/// Variants of the losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreferenceLoss {
    /// Of pairs.
    Dpo(DpoLoss),
    /// Of single answers.
    Kto(KtoLoss),
    /// Of completions that the model makes.
    Grpo(GrpoLoss),
}

words!(PreferenceLoss {
    "sigmoid" => Self::Dpo(DpoLoss::Sigmoid),
    "hinge" => Self::Dpo(DpoLoss::Hinge),
    "ipo" => Self::Dpo(DpoLoss::Ipo),
    "robust" => Self::Dpo(DpoLoss::Robust),
    "nca_pair" => Self::Dpo(DpoLoss::NcaPair),
    "sppo_hard" => Self::Dpo(DpoLoss::SppoHard),
    "apo_zero" => Self::Dpo(DpoLoss::ApoZero),
    "apo_down" => Self::Dpo(DpoLoss::ApoDown),
    "sigmoid_norm" => Self::Dpo(DpoLoss::SigmoidNorm),
    "kto" => Self::Kto(KtoLoss::Kto),
    "apo_zero_unpaired" => Self::Kto(KtoLoss::ApoZeroUnpaired),
    "grpo" => Self::Grpo(GrpoLoss::Grpo),
    "dr_grpo" => Self::Grpo(GrpoLoss::DrGrpo),
    "dapo" => Self::Grpo(GrpoLoss::Dapo),
});

/// The learning rate of a job that does not give one. Chosen: ten times what TRL takes for all weights, as is usual for
/// a LoRA; at the rate of texts the answers soon stop being language.
pub(super) const LEARNING_RATE: f64 = 1e-5;

impl PreferenceConfig {
    /// A value that belongs to another method would be ignored, so it is refused.
    pub(super) fn new(raw: RawPreference, rows: &mut ResolvedKeys) -> Result<Self, ConfigError> {
        let mut config = raw.decide("preference", rows)?;
        let method = format!("preference.method = {}", rows.value("preference.method"));
        config.decide_beta(rows)?;
        if config.method != PreferenceMethod::Grpo {
            for key in GRPO_KEYS {
                rows.leave_out(key, &method)?;
            }
        } else if config.reward.is_none() {
            return Err(ConfigError::Missing { key: "preference.reward".into() });
        }
        let is_own = matches!(
            (config.method, config.loss_type),
            (_, None)
                | (PreferenceMethod::Dpo, Some(PreferenceLoss::Dpo(_)))
                | (PreferenceMethod::Kto, Some(PreferenceLoss::Kto(_)))
                | (PreferenceMethod::Grpo, Some(PreferenceLoss::Grpo(_)))
        );
        if !is_own || config.method == PreferenceMethod::Orpo {
            rows.leave_out("preference.loss_type", &method)?;
        }
        if config.method != PreferenceMethod::Kto {
            for key in ["preference.desirable_weight", "preference.undesirable_weight"] {
                rows.leave_out(key, &method)?;
            }
        }
        let is_smoothed = matches!(
            config.objective(),
            PreferenceObjective::Dpo { loss: DpoLoss::Sigmoid | DpoLoss::Robust, .. }
        );
        if !is_smoothed {
            let loss = rows.value("preference.loss_type");
            let with =
                if loss.is_empty() { method } else { format!("preference.loss_type = {loss}") };
            rows.leave_out("preference.label_smoothing", &with)?;
        }
        Ok(config)
    }

    /// A policy may leave its base; preferences without one are none.
    fn decide_beta(&mut self, rows: &mut ResolvedKeys) -> Result<(), ConfigError> {
        let origin = rows.origin("preference.beta").cloned().unwrap_or(ValueOrigin::Default);
        if self.method != PreferenceMethod::Grpo && self.beta == 0.0 {
            return Err(ConfigError::Excluded {
                key: "preference.beta",
                typed: "0".into(),
                other: "preference.method",
                value: rows.value("preference.method").into(),
                needed: "\"grpo\"".into(),
                origin,
            });
        }
        if self.method == PreferenceMethod::Grpo && origin.is_default() {
            self.beta = 0.0;
            rows.replace("preference.beta", &self.beta);
        }
        Ok(())
    }

    /// The loss.
    pub fn objective(&self) -> PreferenceObjective {
        let &Self { method, beta, loss_type, label_smoothing, desirable_weight, .. } = self;
        let undesirable_weight = self.undesirable_weight;
        match (method, loss_type) {
            (PreferenceMethod::Grpo, loss) => PreferenceObjective::Grpo(GrpoObjective {
                loss: match loss {
                    Some(PreferenceLoss::Grpo(loss)) => loss,
                    _ => GrpoLoss::Dapo,
                },
                beta,
                scale_rewards: self.scale_rewards,
                num_generations: self.num_generations,
                max_completion_length: self.max_completion_length,
            }),
            (PreferenceMethod::Orpo, _) => PreferenceObjective::Orpo { beta },
            (PreferenceMethod::Kto, loss) => {
                let loss = match loss {
                    Some(PreferenceLoss::Kto(loss)) => loss,
                    _ => KtoLoss::Kto,
                };
                PreferenceObjective::Kto { loss, beta, desirable_weight, undesirable_weight }
            }
            (PreferenceMethod::Dpo, loss) => {
                let loss = match loss {
                    Some(PreferenceLoss::Dpo(loss)) => loss,
                    _ => DpoLoss::Sigmoid,
                };
                PreferenceObjective::Dpo { loss, beta, label_smoothing }
            }
        }
    }

    /// What samples are called.
    pub fn sample_noun(&self) -> &'static str {
        match self.record_kind() {
            RecordKind::Texts => SEQUENCE,
            RecordKind::Pairs => PAIR,
            RecordKind::Labelled => ANSWER,
            RecordKind::Prompts => COMPLETION,
        }
    }

    /// What records are called.
    pub fn record_noun(&self) -> &'static str {
        match self.record_kind() {
            RecordKind::Prompts => "prompt",
            _ => self.sample_noun(),
        }
    }

    /// What records say.
    pub fn record_kind(&self) -> RecordKind {
        match self.method {
            PreferenceMethod::Dpo | PreferenceMethod::Orpo => RecordKind::Pairs,
            PreferenceMethod::Kto => RecordKind::Labelled,
            PreferenceMethod::Grpo => RecordKind::Prompts,
        }
    }
}
