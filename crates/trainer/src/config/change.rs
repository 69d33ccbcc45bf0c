//! Keys that may change while a run works: none of them changes what is learnt.

use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use super::training_data::TrainingData;
use super::value::{ConfigValue, word};
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

/// A key that may change, for a form.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChangeableSetting {
    /// The key.
    pub key: &'static str,
    /// Its value: a text, or a list of them.
    pub value: Value,
    /// What is accepted, in words.
    pub accepted: String,
}

impl ChangeableSetting {
    fn of(key: &'static str, value: &impl ConfigValue) -> Self {
        Self { key, value: json!(word(value)), accepted: accepted(value) }
    }
}

fn accepted<T: ConfigValue>(_: &T) -> String {
    T::accepted()
}

impl RunConfig {
    /// The keys that have a value in this job.
    pub fn changeable(&self) -> Vec<ChangeableSetting> {
        let (every, prompts) = match &self.data {
            TrainingData::Images { sample, .. } => {
                (ChangeableSetting::of("sample.every", &sample.every), &sample.prompts)
            }
            TrainingData::Texts { generate, .. } => {
                (ChangeableSetting::of("generate.every", &generate.every), &generate.prompts)
            }
        };
        let (key, _) = self.sample_prompts();
        vec![
            ChangeableSetting::of("machine.mode", &self.machine.mode),
            ChangeableSetting::of("output.save_every", &self.output.save_every),
            every,
            ChangeableSetting { key, value: json!(prompts), accepted: accepted(prompts) },
        ]
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_form_shows_is_taken_as_it_is() {
        for (data, samples) in [("data.images", "sample"), ("text.path", "generate")] {
            let job = format!(
                "base.path = 'b'\n{data} = 'd'\noutput.folder = 'o'\ntrain.steps = 9\n\
                 {samples}.prompts = ['a \"fox\"']\n{samples}.every = 5"
            );
            let config = RawConfig::from_text(&job, Path::new("job.toml")).unwrap();
            let config = config.resolve().unwrap();
            let settings = config.changeable();
            let keys: Vec<&str> = settings.iter().map(|setting| setting.key).collect();
            assert!(keys.iter().all(|key| CHANGEABLE.contains(key)), "{keys:?}");
            let shown: Vec<&Value> = settings.iter().map(|setting| &setting.value).collect();
            assert_eq!(
                shown,
                [&json!("balanced"), &json!("250"), &json!("5"), &json!(["a \"fox\""])]
            );
            for setting in &settings {
                let text = match &setting.value {
                    Value::String(text) => text.clone(),
                    list => list.to_string(),
                };
                let same = config.with_change(setting.key, &text).unwrap();
                assert_eq!(same.value(setting.key), config.value(setting.key), "{text}");
            }
        }
    }
}
