//! Configs of other trainers as jobs of hearth. Every key of a config becomes a line of the job, or a note that says
//! why it does not; a value that a config leaves out is the other trainer's default, not ours.
//!
//! ```text
//! config ─▶ Document ─▶ which trainer? ─▶ its file here ─▶ Mapping: lines and notes ─▶ job text ─▶ config::RawConfig
//!           JSON, TOML,                    keys it reads,                                          checks it
//!           YAML, shell                    rules for the rest
//! ```
//!
//! A trainer is one file and one line in `TRAINERS`. Nothing is written here, and nothing of a config is executed.

mod ai_toolkit;
mod command_line;
mod data_folder;
mod diffusion_pipe;
mod document;
mod error;
mod family;
mod flymyai;
mod foreign;
mod job_text;
mod kohya;
mod loss;
mod mapping;
mod mlx_lm;
mod notes;
mod one_trainer;
mod optimization;
mod places;
mod precision;
mod prompts;
mod simple_tuner;
mod text_encoders;
mod training_adapter;
mod yaml;

use std::path::{Path, PathBuf};

use serde::Serialize;

pub use error::ImportError;
pub use job_text::HEADINGS;
pub use mapping::JobLine;
pub use notes::{KeyNote, KeyVerdict};

use crate::config::{ConfigError, RawConfig};
use document::Document;
use foreign::ForeignConfig;
use mapping::Mapping;
use notes::KeyRule;
use places::Places;

/// A trainer whose configs are understood.
struct ForeignTrainer {
    name: &'static str,
    /// What its configs have and others have not.
    told_by: &'static str,
    recognises: fn(&Document) -> bool,
    /// The config with its keys as its documentation names them.
    keys: fn(&Document) -> Result<ForeignConfig, ImportError>,
    /// Writes the job.
    map: fn(&mut Mapping) -> Result<(), ImportError>,
    /// What is known of the keys that `map` does not ask for.
    rules: &'static [&'static [KeyRule]],
}

/// Those that are known; of two that recognise a config, the first.
const TRAINERS: &[&ForeignTrainer] = &[
    &ai_toolkit::TRAINER,
    &flymyai::TRAINER,
    &simple_tuner::TRAINER,
    &one_trainer::TRAINER,
    &diffusion_pipe::TRAINER,
    &kohya::SD_SCRIPTS,
    &kohya::MUSUBI_TUNER,
    &mlx_lm::TRAINER,
];

/// A job that was made of another trainer's config.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ImportedJob {
    /// The other trainer.
    pub trainer: &'static str,
    /// Its config.
    pub source: PathBuf,
    /// Keys of the job.
    pub lines: Vec<JobLine>,
    /// Keys of the config that are not in the job, or not as they were.
    pub notes: Vec<KeyNote>,
    /// The job file.
    pub text: String,
}

/// Imports a config, for a job file that will be at `job`. Relative paths of both, and of the config, start at `current`.
pub fn import(config: &Path, job: &Path, current: &Path) -> Result<ImportedJob, ImportError> {
    from_document(&Document::read(&current.join(config))?, job, current)
}

/// The same of a text that is, or would be, the config.
pub fn import_text(text: &str, config: &Path, job: &Path) -> Result<ImportedJob, ImportError> {
    let current = config.parent().unwrap_or(Path::new(""));
    from_document(&Document::parse(text, config)?, job, current)
}

fn from_document(
    document: &Document,
    job: &Path,
    current: &Path,
) -> Result<ImportedJob, ImportError> {
    let path = &document.path;
    let trainer = TRAINERS.iter().find(|trainer| (trainer.recognises)(document));
    let trainer = trainer.ok_or_else(|| ImportError::UnknownTrainer {
        looked_for: TRAINERS.iter().map(|it| format!("{}: {}", it.name, it.told_by)).collect(),
        path: path.clone(),
    })?;
    let places = Places::new(path, current, job);
    let mut mapping = Mapping::new(trainer.name, (trainer.keys)(document)?, places);
    (trainer.map)(&mut mapping)?;
    mapping.deal_with_rest(trainer.rules);
    let lines = mapping.take_lines();
    let Mapping { notes, .. } = mapping;
    let (refused, notes): (Vec<_>, Vec<_>) =
        notes.into_iter().partition(|note| note.verdict == KeyVerdict::Refused);
    if !refused.is_empty() {
        return Err(ImportError::Refused { refused, path: path.clone() });
    }
    let mut imported = ImportedJob {
        trainer: trainer.name,
        source: path.clone(),
        lines,
        notes,
        text: String::new(),
    };
    imported.text = job_text::text(&imported);
    check(&imported, &current.join(job))?;
    Ok(imported)
}

/// That hearth itself accepts the job.
fn check(imported: &ImportedJob, job: &Path) -> Result<(), ImportError> {
    let resolved = RawConfig::from_text(&imported.text, job).and_then(RawConfig::resolve);
    resolved.map(drop).map_err(|source| {
        let key = match &source {
            ConfigError::Value { key, .. } | ConfigError::NoEffect { key, .. } => key.as_str(),
            ConfigError::Excluded { key, .. } => key,
            _ => "",
        };
        let from = imported.lines.iter().find(|line| line.names(key));
        let from = from.map_or_else(|| "the config".into(), |line| format!("`{}`", line.from));
        // The place is in a file that is not written.
        let problem = source.to_string();
        let place = format!(": {}:", job.display());
        let problem = problem.split(&place).next().unwrap_or(&problem).to_owned();
        ImportError::Job { from, problem }
    })
}
