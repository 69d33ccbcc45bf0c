//! `adapter.targets`: layers by the ends of their names, or words that stand for lists of them.

use super::error::ConfigError;
use super::source::{RawValue, ValueOrigin};
use super::value::ConfigValue;
use crate::model::adapter::{PRESET_NAMES, TargetPreset};

/// Names of layers and words, as they were typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetNames(pub Vec<String>);

impl TargetNames {
    /// Whether there is nothing but words.
    pub fn is_presets(&self) -> bool {
        self.0.iter().all(|name| PRESET_NAMES.contains(&name.as_str()))
    }

    /// The layers, with those that words stand for; each once. A word that these models do not have is refused.
    pub fn expand(
        &self,
        presets: &[TargetPreset],
        origin: Option<&ValueOrigin>,
    ) -> Result<Self, ConfigError> {
        let mut layers: Vec<String> = Vec::new();
        for name in &self.0 {
            let patterns = match presets.iter().find(|preset| preset.name == name) {
                Some(preset) => preset.patterns.concat().into_iter().map(str::to_owned).collect(),
                None if PRESET_NAMES.contains(&name.as_str()) => {
                    return Err(refuse(name, presets, origin));
                }
                None => vec![name.clone()],
            };
            for pattern in patterns {
                if !layers.contains(&pattern) {
                    layers.push(pattern);
                }
            }
        }
        Ok(Self(layers))
    }
}

fn refuse(name: &str, presets: &[TargetPreset], origin: Option<&ValueOrigin>) -> ConfigError {
    let known: Vec<&str> = presets.iter().map(|preset| preset.name).collect();
    ConfigError::Value {
        key: "adapter.targets".into(),
        typed: format!("{name:?}"),
        accepted: format!("for this model {} or names of layers", known.join(", ")),
        advice: String::new(),
        origin: origin.cloned().unwrap_or(ValueOrigin::Default),
    }
}

impl ConfigValue for TargetNames {
    fn accepted() -> String {
        "a text or a list of texts".into()
    }

    /// A word may stand alone.
    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        match typed.value.as_str() {
            Some(one) => Ok(Self(vec![one.to_owned()])),
            None => Vec::read(typed).map(Self).map_err(|_| typed.refuse(Self::accepted())),
        }
    }

    fn write(&self) -> Option<String> {
        self.0.write()
    }

    fn measures(&self) -> Vec<f64> {
        self.0.measures()
    }
}
