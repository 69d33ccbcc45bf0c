//! A computer on disk: every question a probe asked and the answer it got.
//!
//! ```text
//! title  = "NVIDIA DGX Spark"
//! origin = "documented"            # or "recorded"
//! basis  = "where the facts come from"
//! os     = "linux"                 # decides which probes run
//! arch   = "aarch64"
//!
//! [answers]
//! "file /proc/meminfo" = '''
//! MemTotal:       125513980 kB
//! '''
//! "file /proc/pressure/memory" = { unknown = "no such file" }
//! ```
//!
//! A question that is not in the file is unknown, so a half-present machine is a shorter file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::reading::Unknown;
use crate::source::ProbeAnswer;

/// How a recording came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordingOrigin {
    /// Asked on the machine itself.
    Recorded,
    /// Written by hand from published facts; nobody measured it.
    Documented,
}

/// A recorded or documented computer.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRecording {
    /// What people call the machine; empty while nobody has named it.
    #[serde(default)]
    pub title: String,
    /// Asked or written by hand.
    pub origin: RecordingOrigin,
    /// Program and version that asked, or the documents the facts were taken from.
    pub basis: String,
    /// As in [`std::env::consts::OS`].
    pub os: String,
    /// As in [`std::env::consts::ARCH`].
    pub arch: String,
    /// Question to answer.
    pub answers: BTreeMap<String, RecordedAnswer>,
}

/// An answer as it stands in the file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RecordedAnswer {
    /// The text.
    Text(String),
    /// There was none.
    Unknown {
        /// Why.
        unknown: String,
    },
}

impl From<ProbeAnswer> for RecordedAnswer {
    fn from(answer: ProbeAnswer) -> Self {
        match answer {
            Ok(text) => Self::Text(text),
            Err(Unknown(unknown)) => Self::Unknown { unknown },
        }
    }
}

impl From<RecordedAnswer> for ProbeAnswer {
    fn from(recorded: RecordedAnswer) -> Self {
        match recorded {
            RecordedAnswer::Text(text) => Ok(text),
            RecordedAnswer::Unknown { unknown } => Err(Unknown(unknown)),
        }
    }
}

/// Why a recording could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file could not be read.
    #[error("cannot read machine file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The text is no recording.
    #[error("not a machine file: {}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        source: toml::de::Error,
    },
    /// There is a file of that name already.
    #[error("file exists already: {}", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The file could not be written.
    #[error("cannot write machine file {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

impl RecordingError {
    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Read { .. } => "give the path of a file made by `hearth doctor --record FILE`",
            Self::Parse { .. } => {
                "make one with `hearth doctor --record FILE`, or compare with a file in machines/"
            }
            Self::Exists { .. } => "choose another name, or remove the file first",
            Self::Write { .. } => "choose a folder you may write to",
        }
    }
}

impl MachineRecording {
    /// An empty recording of the computer this program runs on.
    pub fn of_this_computer() -> Self {
        Self {
            title: String::new(),
            origin: RecordingOrigin::Recorded,
            basis: format!("hearth {}", env!("CARGO_PKG_VERSION")),
            os: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            answers: BTreeMap::new(),
        }
    }

    /// The recorded answer.
    pub fn answer(&self, key: &str) -> ProbeAnswer {
        match self.answers.get(key) {
            Some(recorded) => recorded.clone().into(),
            None => Err(Unknown::because("not in the recording")),
        }
    }

    /// Reads a recording.
    pub fn load(path: &Path) -> Result<Self, RecordingError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| RecordingError::Read { path: path.into(), source })?;
        toml::from_str(&text).map_err(|source| RecordingError::Parse { path: path.into(), source })
    }

    /// Writes the recording to a new file; one that exists is left alone.
    pub fn save(&self, path: &Path) -> Result<(), RecordingError> {
        let failed = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::AlreadyExists => RecordingError::Exists { path: path.into() },
            _ => RecordingError::Write { path: path.into(), source },
        };
        let text = toml::to_string_pretty(self).expect("strings and tables always form TOML");
        let mut file = File::create_new(path).map_err(failed)?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.inspect_err(|_| _ = std::fs::remove_file(path)).map_err(failed)
    }
}

/// For the tests of the probes: a machine that answers a few questions.
#[cfg(test)]
pub mod testing {
    use super::{MachineRecording, RecordedAnswer};
    use crate::source::ProbeSource;

    /// Answers these questions and no others.
    pub fn source(answers: &[(&str, &str)]) -> ProbeSource {
        let mut recording = MachineRecording::of_this_computer();
        let text = |(question, text): &(&str, &str)| {
            ((*question).into(), RecordedAnswer::Text((*text).into()))
        };
        recording.answers = answers.iter().map(text).collect();
        ProbeSource::replay(recording)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> MachineRecording {
        let mut recording = MachineRecording::of_this_computer();
        let lines = "MemTotal: 1 kB\nodd: \"'''\\ ünï \u{1}\ttab\n";
        recording.answers.insert("file /proc/meminfo".into(), RecordedAnswer::Text(lines.into()));
        recording.answers.insert("nvml".into(), Err(Unknown::because("no library")).into());
        recording
    }

    #[test]
    fn what_was_saved_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.toml");
        sample().save(&path).unwrap();
        let loaded = MachineRecording::load(&path).unwrap();
        assert_eq!(loaded.answer("file /proc/meminfo"), sample().answer("file /proc/meminfo"));
        assert_eq!(loaded.answer("nvml"), Err(Unknown::because("no library")));
        assert_eq!(loaded.answer("cuda"), Err(Unknown::because("not in the recording")));
    }

    #[test]
    fn an_existing_file_is_not_touched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("precious");
        std::fs::write(&path, "keep me").unwrap();
        let error = sample().save(&path).unwrap_err();
        assert!(matches!(error, RecordingError::Exists { .. }), "{error:?}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "keep me");
    }

    #[test]
    fn a_key_nobody_knows_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("machine.toml");
        std::fs::write(&path, "title = 'x'\ncolour = 'red'\n").unwrap();
        let error = MachineRecording::load(&path).unwrap_err();
        assert!(matches!(error, RecordingError::Parse { .. }), "{error:?}");
    }
}
