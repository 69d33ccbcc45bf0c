//! `[preference]`: learning from preferences instead of texts. A job with this section reads `[text]` as prompts with
//! answers; docs/preferences.md explains it. Keys are named as TRL names them.

use super::error::ConfigError;
use super::section::{ResolvedKeys, Section, section};
use super::training_data::{ANSWER, PAIR, SEQUENCE};
use super::value::words;
use crate::objective::preference::{DpoLoss, KtoLoss, PreferenceObjective};
use crate::text::RecordKind;

section! {
    /// Learning from preferences.
    pub RawPreference => PreferenceConfig {
        /// `dpo` and `orpo` learn from pairs (`prompt`, `chosen`, `rejected`), `kto` from answers with a label (`prompt`, `completion`, `label`)
        method: PreferenceMethod = Required, Any;
        /// How strongly preferences count against staying near the base: larger stays nearer. Of ORPO the weight of the odds ratio
        beta: f64 = Default(0.1), Above(0.0);
        /// Variant of the loss, by its name in TRL. Not set: `sigmoid` for `dpo`, `kto` for `kto`
        loss_type: Option<PreferenceLoss> = Default(None), Any;
        /// Share of labels that are taken to be wrong, for the losses `sigmoid` and `robust`
        label_smoothing: f64 = Default(0.0), Within(0.0, 0.49);
        /// Weight of desirable answers, for `kto`
        desirable_weight: f64 = Default(1.0), Above(0.0);
        /// Weight of undesirable answers, for `kto`
        undesirable_weight: f64 = Default(1.0), Above(0.0);
    }
}

/// How preferences are learnt from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreferenceMethod {
    /// Direct preference optimisation.
    Dpo,
    /// Odds ratio preference optimisation.
    Orpo,
    /// Kahneman-Tversky optimisation.
    Kto,
}

words!(PreferenceMethod {
    "dpo" => Self::Dpo,
    "orpo" => Self::Orpo,
    "kto" => Self::Kto,
});

/// Variants of the losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreferenceLoss {
    /// Of pairs.
    Dpo(DpoLoss),
    /// Of single answers.
    Kto(KtoLoss),
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
});

/// The learning rate of a job that does not give one. Chosen: ten times what TRL takes for all weights, as is usual for
/// a LoRA; at the rate of texts the answers soon stop being language.
pub(super) const LEARNING_RATE: f64 = 1e-5;

impl PreferenceConfig {
    /// A value that belongs to another method would be ignored, so it is refused.
    pub(super) fn new(raw: RawPreference, rows: &mut ResolvedKeys) -> Result<Self, ConfigError> {
        let config = raw.decide("preference", rows)?;
        let method = format!("preference.method = {}", rows.value("preference.method"));
        let is_of_another = matches!(
            (config.method, config.loss_type),
            (PreferenceMethod::Dpo, Some(PreferenceLoss::Kto(_)))
                | (PreferenceMethod::Kto, Some(PreferenceLoss::Dpo(_)))
                | (PreferenceMethod::Orpo, Some(_))
        );
        if is_of_another || config.method == PreferenceMethod::Orpo {
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

    /// The loss.
    pub fn objective(&self) -> PreferenceObjective {
        let Self { method, beta, loss_type, label_smoothing, desirable_weight, .. } = *self;
        let undesirable_weight = self.undesirable_weight;
        match (method, loss_type) {
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
        }
    }

    /// What records say.
    pub fn record_kind(&self) -> RecordKind {
        match self.method {
            PreferenceMethod::Dpo | PreferenceMethod::Orpo => RecordKind::Pairs,
            PreferenceMethod::Kto => RecordKind::Labelled,
        }
    }
}
