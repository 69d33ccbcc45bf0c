//! Text encoders that are trained together with an image model: which, and how fast.

use super::adapter::AdapterKind;
use super::error::ConfigError;
use super::section::ResolvedKeys;
use super::source::{RawValue, ValueOrigin};
use super::train::exclude;
use super::training_data::TrainingData;
use super::value::{ConfigValue, quoted};

/// The key of their learning rates.
pub(super) const RATE_KEY: &str = "adapter.text_encoder_learning_rate";

/// Keys that only trained text encoders have.
const OWN_KEYS: [&str; 2] = ["adapter.text_encoder_targets", RATE_KEY];

/// Learning rates of text encoders: one for all, or one for each.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderRates(Vec<f64>);

impl EncoderRates {
    /// That of each of so many encoders; an error where their numbers differ.
    pub(super) fn of_each(
        &self,
        n_encoders: usize,
        rows: &ResolvedKeys,
    ) -> Result<Vec<f64>, ConfigError> {
        match self.0[..] {
            [of_all] => Ok(vec![of_all; n_encoders]),
            _ if self.0.len() == n_encoders => Ok(self.0.clone()),
            _ => Err(ConfigError::Value {
                key: RATE_KEY.into(),
                typed: rows.value(RATE_KEY).into(),
                accepted: format!(
                    "a number, or a list of {n_encoders}, as many as adapter.text_encoders has"
                ),
                advice: String::new(),
                origin: rows.origin(RATE_KEY).cloned().unwrap_or(ValueOrigin::Default),
            }),
        }
    }
}

impl ConfigValue for EncoderRates {
    fn accepted() -> String {
        "a number, or a list of them".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let refused = |_| typed.refuse(Self::accepted());
        let Some(parts) = typed.parts() else {
            return f64::read(typed).map(|rate| Self(vec![rate])).map_err(refused);
        };
        let rates: Result<Vec<f64>, _> = parts.map(|part| f64::read(&part)).collect();
        let rates = rates.map_err(refused)?;
        if rates.is_empty() {
            return Err(typed.refuse(Self::accepted()));
        }
        Ok(Self(rates))
    }

    fn write(&self) -> Option<String> {
        match self.0[..] {
            [of_all] => of_all.write(),
            _ => Some(format!("{:?}", self.0)),
        }
    }

    fn measures(&self) -> Vec<f64> {
        self.0.clone()
    }
}

/// Taken: the layers of CLIP in diffusers' `train_dreambooth_lora_sd3.py` and `train_dreambooth_lora_flux.py`.
pub(super) fn clip_targets() -> Vec<String> {
    ["q_proj", "k_proj", "v_proj", "out_proj"].map(str::to_owned).into()
}

/// Text encoders are those of image models, and their layers get a `LoRA` alone.
pub(super) fn refuse_idle_encoders(
    kind: AdapterKind,
    names: &[String],
    material: &TrainingData,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    if material.images().is_err() {
        rows.leave_out("adapter.text_encoders", "[text]")?;
    }
    if names.is_empty() {
        for key in OWN_KEYS {
            rows.leave_out(key, "adapter.text_encoders = []")?;
        }
        return Ok(());
    }
    if kind != AdapterKind::Lora {
        return exclude("adapter.text_encoders", "adapter.kind", quoted("lora"), rows);
    }
    Ok(())
}
