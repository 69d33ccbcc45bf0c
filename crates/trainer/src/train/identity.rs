//! What a checkpoint belongs to: a run cannot be resumed with another model, other samples or other settings.
//!
//! ```text
//! RUN/checkpoints/step-000250/progress.json   settings, one checksum of the model and one of the samples
//! RUN/.inputs.json                            checksums of tensors, images and captions or texts by name,
//!                                             so that what changed can be named
//! ```

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};
use weights::plain_file::read_plain;

use super::folder::RunFolder;
use crate::config::{RunConfig, ValueOrigin, renamed};
use crate::error::{Result, TrainerError};
use crate::event::warning::ChangedSetting;
use crate::fingerprint::{Fingerprint, PartHashes, difference};
use crate::task::traits::{DataLoader, Task};

/// A job's settings, model and samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// By key, as TOML; those that change what is learnt.
    #[serde(deserialize_with = "settings_of_before")]
    settings: BTreeMap<String, String>,
    /// Names, shapes and sizes of the model's tensors, hashed.
    base: String,
    /// What it is trained on, hashed.
    #[serde(alias = "pictures")]
    samples: String,
    /// Of the job at hand only: keys that were typed on the command line.
    #[serde(skip)]
    typed: BTreeSet<String>,
    /// Of the job at hand only; a run has those it began with in a file.
    #[serde(skip)]
    inputs: RunInputs,
}

/// What model and samples consist of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct RunInputs {
    base: PartHashes,
    samples: PartHashes,
}

/// What a run's folder calls them.
pub const INPUTS: &str = ".inputs.json";

/// Parts that are kept by name. Chosen: some ten megabytes.
const MOST_PARTS: usize = 200_000;

/// Keys that may change when a run is resumed: its length, its samples and outputs, and paths, whose contents
/// are compared instead.
const FREE_KEYS: [&str; 19] = [
    "train.steps",
    "train.epochs",
    "train.validate_every",
    "train.stop_after_plateau",
    "base.path",
    "base.rest",
    "base.vae",
    "base.text_encoders",
    "base.training_adapter",
    "data.images",
    "data.references",
    "data.masks",
    "data.cache",
    "text.path",
    "text.cache",
    "train.micro_batch",
    "train.recompute",
    "cluster.nccl",
    "cluster.shard_optimizer",
];
const FREE_SECTIONS: [&str; 4] = ["sample.", "generate.", "machine.", "output."];

/// Keys that runs of before do not have, with the values that they had in effect.
const NEW_KEYS: [(&str, &str); 16] = [
    ("base.compute", "\"dtype\""),
    ("data.caption_choice", "\"whole\""),
    ("data.loss_weight", "1.0"),
    ("data.regularisation", "false"),
    ("data.target", "\"images\""),
    ("train.timestep_min", "0.0"),
    ("train.timestep_max", "1000.0"),
    ("train.timestep_bias", "\"none\""),
    ("train.loss", "\"mse\""),
    ("train.loss_weighting", "\"none\""),
    ("train.fused_backward_pass", "false"),
    ("train.weight_dtype", "\"f32\""),
    ("cluster.sync_every", "\"off\""),
    ("cluster.wire", "\"f32\""),
    ("adapter.text_encoders", "[]"),
    ("adapter.train_norm", "false"),
];

/// Keys that may change when they are typed on the command line that resumes: a learning rate is lowered on
/// purpose, but a job file may have changed for other reasons.
const RATE_KEYS: [&str; 8] = [
    "optimizer.learning_rate",
    "optimizer.lr_scheduler",
    "optimizer.warmup_steps",
    "optimizer.cycles",
    "optimizer.power",
    "optimizer.lr_end",
    "optimizer.decay",
    "optimizer.decay_curve",
];

impl Identity {
    /// Of a job.
    pub fn new<D: DataLoader>(config: &RunConfig, task: &D::Task, loader: &D) -> Result<Self> {
        let is_free = |key: &str| {
            FREE_KEYS.contains(&&*of_any_set(key))
                || FREE_SECTIONS.iter().any(|section| key.starts_with(section))
        };
        let settings = config.values().filter(|(key, _)| !is_free(key));
        let is_new = |key: &str, value: &str| NEW_KEYS.contains(&(&of_any_set(key), value));
        let settings = settings.filter(|(key, value)| !is_new(key, value));
        let settings: BTreeMap<_, _> = settings.collect();
        let is_typed =
            |key: &&str| matches!(config.origin(key), Some(ValueOrigin::CommandLine { .. }));
        let typed = RATE_KEYS.into_iter().filter(is_typed).map(str::to_owned).collect();
        let Fingerprint { whole: base, parts: of_base } = task.fingerprint()?;
        let Fingerprint { whole: samples, parts: of_samples } = loader.fingerprint();
        let inputs = RunInputs { base: of_base, samples: of_samples };
        Ok(Self { settings, base, samples, typed, inputs })
    }

    /// Each setting, and what model and samples are, for comparison with another rank.
    pub fn described(&self) -> impl Iterator<Item = (String, String)> {
        let inputs = [("the base", &self.base), ("the dataset", &self.samples)];
        let inputs = inputs.map(|(what, hash)| (what.to_owned(), format!("{hash:.8}")));
        self.settings.clone().into_iter().chain(inputs)
    }

    /// Writes the inputs by name, for comparison when the run is resumed.
    pub fn write_inputs(&self, folder: &RunFolder) -> Result<()> {
        let RunInputs { base, samples } = &self.inputs;
        if base.len() + samples.len() > MOST_PARTS {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(&self.inputs).expect("it is plain JSON");
        folder.write(INPUTS, &(text + "\n"))
    }

    /// Fails unless a checkpoint with this identity is one of `job`; returns what was changed on purpose.
    pub fn check(&self, job: &Self, checkpoint: &Path) -> Result<Vec<ChangedSetting>> {
        let keys: BTreeSet<&String> = self.settings.keys().chain(job.settings.keys()).collect();
        let changed =
            keys.into_iter().filter(|key| self.settings.get(*key) != job.settings.get(*key));
        let (typed, others): (Vec<_>, Vec<_>) = changed.partition(|key| job.has_typed(key));
        let refuse =
            |problem, hint| Err(TrainerError::OtherJob { problem, hint, path: checkpoint.into() });
        let changed = |key: &String| {
            let of = |identity: &Self| {
                identity.settings.get(key).cloned().unwrap_or_else(|| "not set".into())
            };
            ChangedSetting { key: key.clone(), was: of(self), is: of(job) }
        };
        if !others.is_empty() {
            let is_rate = others.iter().all(|key| RATE_KEYS.contains(&key.as_str()));
            let hint = if is_rate { TYPE_IT_HINT } else { UNDO_HINT };
            let problems = others.into_iter().map(|key| changed(key).to_string());
            return refuse(problems.collect::<Vec<_>>().join("; "), hint);
        }
        let before = inputs_of(checkpoint);
        for (what, [was, is], [of_before, of_job]) in [
            ("the base", [&self.base, &job.base], [&before.base, &job.inputs.base]),
            ("the dataset", [&self.samples, &job.samples], [&before.samples, &job.inputs.samples]),
        ] {
            if was == is {
                continue;
            }
            // Old runs have no parts, and a changed order shows in none.
            let named = difference(of_before, of_job).filter(|_| !of_before.is_empty());
            let problem = named.map_or_else(
                || format!("{what} was {was:.8}, is {is:.8}"),
                |named| format!("{what} has changed: {named}"),
            );
            return refuse(problem, UNDO_HINT);
        }
        Ok(typed.into_iter().map(changed).collect())
    }

    /// Whether a change was asked for. What belongs to a schedule comes and goes with it.
    fn has_typed(&self, key: &str) -> bool {
        let with_schedule = RATE_KEYS.iter().position(|of| *of == key).is_some_and(|at| at > 2);
        self.typed.contains(key) || (with_schedule && self.typed.contains("optimizer.lr_scheduler"))
    }
}

/// `data.flip` of `data[1].flip`.
fn of_any_set(key: &str) -> Cow<'_, str> {
    match key.split_once('[').zip(key.split_once(']')) {
        Some(((section, _), (_, name))) => format!("{section}{name}").into(),
        None => key.into(),
    }
}

/// Settings of a checkpoint, whose keys may have had other names when it was saved.
fn settings_of_before<'de, D: Deserializer<'de>>(
    from: D,
) -> std::result::Result<BTreeMap<String, String>, D::Error> {
    let saved = BTreeMap::<String, String>::deserialize(from)?;
    Ok(saved.iter().map(|(key, value)| renamed::under_new_names(key, value)).collect())
}

const UNDO_HINT: &str = "undo the change, or start a new run with another --out";
const TYPE_IT_HINT: &str = "to change the learning rate or its schedule from here on, type it: \
                       --resume --set optimizer.learning_rate=VALUE; or undo the change in the job";

/// What the run of a checkpoint began with; nothing where that is not known.
fn inputs_of(checkpoint: &Path) -> RunInputs {
    let run = checkpoint.ancestors().nth(2).unwrap_or(checkpoint);
    let text = read_plain(&run.join(INPUTS)).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}
