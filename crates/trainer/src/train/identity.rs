//! What a checkpoint belongs to: going on with another model, other samples or other settings would
//! give a result that no run gives.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::lesson::{Feed, Lesson};
use crate::config::RunConfig;
use crate::error::{Result, TrainerError};

/// A job's settings, model and samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// By key, as TOML; those that change what is learnt.
    settings: BTreeMap<String, String>,
    /// Names, shapes and sizes of the model's tensors, hashed.
    base: String,
    /// What it is trained on, hashed.
    #[serde(alias = "pictures")]
    samples: String,
}

/// Keys that may change when a run goes on: how long, what is shown and written, and paths, since
/// what lies there is compared instead.
const FREE: [&str; 12] = [
    "train.steps",
    "train.epochs",
    "train.validate_every",
    "train.stop_after_plateau",
    "base.path",
    "base.rest",
    "data.images",
    "data.cache",
    "text.path",
    "text.cache",
    "train.micro_batch",
    "train.recompute",
];
const FREE_SECTIONS: [&str; 4] = ["sample.", "writing.", "machine.", "output."];

impl Identity {
    /// Of a job.
    pub fn new<F: Feed>(config: &RunConfig, lesson: &F::Lesson, feed: &F) -> Result<Self> {
        let is_free = |key: &str| {
            FREE.contains(&key) || FREE_SECTIONS.iter().any(|section| key.starts_with(section))
        };
        let settings = config.values().filter(|(key, _)| !is_free(key)).collect();
        Ok(Self { settings, base: lesson.fingerprint()?, samples: feed.fingerprint() })
    }

    /// That a checkpoint with this identity is one of `job`.
    pub fn check(&self, job: &Self, folder: &Path) -> Result<()> {
        let keys: BTreeSet<&String> = self.settings.keys().chain(job.settings.keys()).collect();
        let of = |identity: &Self, key: &String| {
            identity.settings.get(key).cloned().unwrap_or_else(|| "not set".into())
        };
        let changed: Vec<String> = keys
            .into_iter()
            .filter(|key| self.settings.get(*key) != job.settings.get(*key))
            .map(|key| format!("{key} was {}, is {}", of(self, key), of(job, key)))
            .collect();
        let problem = if !changed.is_empty() {
            changed.join("; ")
        } else if self.base != job.base {
            format!("the base was {:.8}, is {:.8}", self.base, job.base)
        } else if self.samples != job.samples {
            format!("what it learns from was {:.8}, is {:.8}", self.samples, job.samples)
        } else {
            return Ok(());
        };
        Err(TrainerError::OtherJob { problem, path: folder.into() })
    }
}
