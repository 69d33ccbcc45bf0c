//! Keys that may change while a run works: none of them changes what is learnt.

use std::path::Path;

use super::training_data::TrainingData;
use super::{ConfigError, HEADER, RawConfig, RunConfig};

/// The keys.
pub const CHANGEABLE: [&str; 6] = [
    "machine.mode",
    "output.save_every",
    "sample.prompts",
    "sample.every",
    "generate.prompts",
    "generate.every",
];

impl RunConfig {
    /// The same job with another value of one of these keys. What a plan may choose stays free.
    pub fn with_change(&self, key: &str, value: &str) -> Result<Self, ConfigError> {
        if !CHANGEABLE.contains(&key) {
            return Err(ConfigError::NotChangeable { key: key.into() });
        }
        let text = format!("{HEADER}\n{}", self.resolved());
        let mut raw = RawConfig::from_text(&text, Path::new("config.toml"))?;
        raw.set(&format!("{key}={value}"))?;
        let changed = raw.resolve()?;
        let mut config = self.clone();
        config.machine.mode = changed.machine.mode;
        config.output.save_every = changed.output.save_every;
        config.data.take_samples(changed.data);
        config.rows.take(key, changed.rows);
        Ok(config)
    }

    /// A value as TOML; empty if it is absent.
    pub fn value(&self, key: &str) -> &str {
        self.rows.value(key)
    }

    /// The key of the prompts of samples, and the prompts.
    pub fn sample_prompts(&self) -> (&'static str, &[String]) {
        match &self.data {
            TrainingData::Images { sample, .. } => ("sample.prompts", &sample.prompts),
            TrainingData::Texts { generate, .. } => ("generate.prompts", &generate.prompts),
        }
    }
}

impl TrainingData {
    /// What is shown on the way, of another job.
    fn take_samples(&mut self, other: Self) {
        match (self, other) {
            (Self::Images { sample, .. }, Self::Images { sample: other, .. }) => *sample = other,
            (Self::Texts { generate, .. }, Self::Texts { generate: other, .. }) => {
                *generate = other;
            }
            _ => {}
        }
    }
}
