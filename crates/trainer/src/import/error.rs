//! Why a config of another trainer was not imported: one variant per cause.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use super::notes::KeyNote;

/// Everything that can be wrong with a config of another trainer.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// It could not be read.
    #[error("cannot read config {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is larger than any config.
    #[error("config has more than {limit} bytes: {}", path.display())]
    TooLarge {
        /// The most that is read.
        limit: u64,
        /// The file.
        path: PathBuf,
    },
    /// It is written in a format that was recognised, with a mistake.
    #[error("config is not {format}: {problem}: {}", path.display())]
    Syntax {
        /// JSON, TOML, YAML or a shell script.
        format: &'static str,
        /// What the parser said.
        problem: String,
        /// The file.
        path: PathBuf,
    },
    /// No trainer's.
    #[error("not a config of a trainer that hearth knows: {}", path.display())]
    UnknownTrainer {
        /// What the configs of each are told by.
        looked_for: Vec<String>,
        /// The file.
        path: PathBuf,
    },
    /// One of two files that belong together.
    #[error("this is {found} alone: {}", path.display())]
    Half {
        /// Which one it is.
        found: &'static str,
        /// What to give instead.
        needed: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// A value of the wrong type, or an unknown word.
    #[error("`{key}` of the config is {typed}, accepted is {accepted}: {}", path.display())]
    Value {
        /// The key.
        key: String,
        /// Its value.
        typed: String,
        /// What is accepted.
        accepted: String,
        /// The file.
        path: PathBuf,
    },
    /// A key without which there is no job.
    #[error("the config does not set `{key}`: {}", path.display())]
    MissingKey {
        /// The key.
        key: String,
        /// The file.
        path: PathBuf,
    },
    /// Another file of the config.
    #[error("`{key}` names a file that is not there: {}", places(looked_at))]
    MissingFile {
        /// The key that names it.
        key: String,
        /// Where it was looked for.
        looked_at: Vec<PathBuf>,
    },
    /// Something that hearth does not do, and without which the job would be another one.
    #[error("hearth cannot do what this config asks for: {}: {}", reasons(refused), path.display())]
    Refused {
        /// The keys, with the reason of each.
        refused: Vec<KeyNote>,
        /// The file.
        path: PathBuf,
    },
    /// The job would not be valid.
    #[error("{from} has no valid job: {problem}")]
    Job {
        /// The key of the config that leads to it, or the config.
        from: String,
        /// What is wrong with the job.
        problem: String,
    },
}

fn places(looked_at: &[PathBuf]) -> String {
    let paths: Vec<_> = looked_at.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

fn reasons(refused: &[KeyNote]) -> String {
    let notes: Vec<_> = refused.iter().map(ToString::to_string).collect();
    notes.join("; ")
}

impl ImportError {
    /// The remedy.
    pub fn hint(&self) -> Cow<'static, str> {
        let fixed = match self {
            Self::UnknownTrainer { looked_for, .. } => {
                return format!("looked for {}", looked_for.join("; ")).into();
            }
            Self::Half { needed, .. } => return format!("give {needed}").into(),
            Self::Read { .. } => "check that the path exists and may be accessed",
            Self::TooLarge { .. } => {
                "give the file with the settings of a training run, not data or weights"
            }
            Self::Syntax { .. } => {
                "correct the place that it names; the other trainer cannot read it either"
            }
            Self::Value { .. } => {
                "correct the value in the config, or remove the key to have the trainer's default"
            }
            Self::MissingKey { .. } => "set it in the config, as the other trainer needs it too",
            Self::MissingFile { .. } => {
                "run hearth where the other trainer was run, or correct the path in the config"
            }
            Self::Refused { .. } => "remove these keys from a copy of the config, and import that",
            Self::Job { .. } => {
                "correct the value in the config; docs/config.md lists what a job accepts"
            }
        };
        fixed.into()
    }
}
