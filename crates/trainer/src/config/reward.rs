//! `preference.reward`: what a completion is worth. The name of a reward that hearth has, or a program.

use super::error::ConfigError;
use super::source::RawValue;
use super::value::{ConfigValue, quoted};

/// What a completion is worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RewardSource {
    /// 1 if it is the `answer` of its record, else 0.
    ExactMatch,
    /// 1 if its last number is that of the `answer` of its record, else 0.
    LastNumber,
    /// What a program says, given as its path and its arguments. It is run without a shell.
    Program(Vec<String>),
}

/// The names of those that hearth has.
const NAMES: [(&str, RewardSource); 2] =
    [("exact_match", RewardSource::ExactMatch), ("last_number", RewardSource::LastNumber)];

impl ConfigValue for RewardSource {
    fn accepted() -> String {
        "exact_match, last_number, or a program with its arguments as a list of texts".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let refuse = || typed.refuse(Self::accepted());
        if let Some(word) = typed.word() {
            let found = NAMES.into_iter().find(|(name, _)| *name == word);
            return found.map(|(_, source)| source).ok_or_else(refuse);
        }
        let words = Vec::<String>::read(typed).map_err(|_| refuse())?;
        if words.first().is_none_or(|program| program.trim().is_empty()) {
            return Err(refuse());
        }
        let words = words.into_iter().enumerate();
        Ok(Self::Program(words.map(|(index, word)| located(typed, index, word)).collect()))
    }

    fn write(&self) -> Option<String> {
        match self {
            Self::Program(words) => words.write(),
            named => NAMES.iter().find(|(_, it)| it == named).map(|(name, _)| quoted(name)),
        }
    }
}

/// A word that names a file is relative to the job, as paths are. A program without a slash is one that the system finds.
fn located(typed: &RawValue<'_>, index: usize, word: String) -> String {
    let path = typed.folder().join(&word);
    if (index > 0 || word.contains('/')) && path.is_file() {
        path.to_string_lossy().into_owned()
    } else {
        word
    }
}
