//! Where values come from: a job file or an argument of the command line, and the place in it.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::DeValue;

use super::error::ConfigError;
use super::renamed;

/// Where a value of a job was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ValueOrigin {
    /// Nobody asked for anything else.
    Default,
    /// The same, and models of this family have a default of their own.
    Family(&'static str),
    /// By the plan, for this machine.
    Plan,
    /// In a file.
    File {
        /// The file, as it was given.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// In characters, from 1.
        column: usize,
    },
    /// On the command line.
    CommandLine {
        /// `--set`, or a flag that stands for one key, such as `--steps`.
        flag: String,
        /// What was typed after it: `train.steps=20`, or `20`.
        value: String,
    },
}

impl fmt::Display for ValueOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Family(family) => write!(f, "{family}'s default"),
            Self::Plan => f.write_str("chosen by the plan"),
            Self::File { path, line, column } => write!(f, "{}:{line}:{column}", path.display()),
            Self::CommandLine { flag, value } => write!(f, "{flag} {value}"),
        }
    }
}

impl ValueOrigin {
    /// Whether nobody asked for anything.
    pub fn is_default(&self) -> bool {
        matches!(self, Self::Default | Self::Family(_))
    }

    /// Whether it stands above the other: the command line is typed for this run, a file for many.
    pub(super) fn beats(&self, other: &Self) -> bool {
        let strength = |origin: &Self| match origin {
            Self::Default | Self::Family(_) | Self::Plan => 0,
            Self::File { .. } => 1,
            Self::CommandLine { .. } => 2,
        };
        strength(self) > strength(other)
    }

    /// Whether both were typed on the command line by different flags, so that neither stands above
    /// the other.
    pub(super) fn contradicts(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::CommandLine { flag, .. }, Self::CommandLine { flag: other, .. }) => {
                flag != other
            }
            _ => false,
        }
    }
}

/// Text that values are read from.
pub(super) struct ConfigSource {
    /// TOML: a job, or one value.
    pub text: String,
    /// What relative paths are relative to; absolute.
    pub folder: PathBuf,
    pub kind: ConfigSourceKind,
    /// Then it may be older than this program, and have names of before.
    pub is_written_by_hearth: bool,
}

/// What kind of text.
pub(super) enum ConfigSourceKind {
    File(PathBuf),
    Argument {
        flag: String,
        value: String,
        /// Whether the key loses its value, whatever the text has for one.
        is_unset: bool,
    },
}

impl ConfigSource {
    /// The name of a key with its section, or of a section, which may be one of before in what hearth wrote.
    pub fn current_name<'a>(&self, name: &'a str) -> &'a str {
        let renamed = self.is_written_by_hearth.then(|| renamed::new_name(name)).flatten();
        renamed.unwrap_or(name)
    }

    /// The place of a piece of it.
    pub fn origin(&self, span: &Range<usize>) -> ValueOrigin {
        match &self.kind {
            ConfigSourceKind::Argument { flag, value, .. } => {
                ValueOrigin::CommandLine { flag: flag.clone(), value: value.clone() }
            }
            ConfigSourceKind::File(path) => {
                let before = self.text.get(..span.start).unwrap_or_default();
                let line = before.rsplit('\n').next().unwrap_or_default();
                ValueOrigin::File {
                    path: path.clone(),
                    line: before.matches('\n').count() + 1,
                    column: line.chars().count() + 1,
                }
            }
        }
    }

    /// What the parser did not understand.
    pub fn syntax(&self, error: &toml::de::Error) -> ConfigError {
        let origin = self.origin(&error.span().unwrap_or_default());
        ConfigError::Syntax { problem: error.message().replace('\n', ", "), origin }
    }

    /// A value of it.
    pub fn typed<'a>(&'a self, key: String, value: &'a Spanned<DeValue<'a>>) -> RawValue<'a> {
        RawValue { key, value: value.get_ref(), span: value.span(), source: self }
    }
}

/// A value as it was typed.
pub(super) struct RawValue<'a> {
    /// The whole path of its key.
    pub key: String,
    pub value: &'a DeValue<'a>,
    span: Range<usize>,
    pub source: &'a ConfigSource,
}

/// Characters of a value that an error shows: enough for any number or word.
const SHOWN: usize = 40;

impl<'a> RawValue<'a> {
    pub fn origin(&self) -> ValueOrigin {
        self.source.origin(&self.span)
    }

    /// Whether the key loses its value.
    pub fn is_unset(&self) -> bool {
        matches!(self.source.kind, ConfigSourceKind::Argument { is_unset: true, .. })
    }

    /// Whether it was typed on the command line.
    pub fn is_argument(&self) -> bool {
        matches!(self.source.kind, ConfigSourceKind::Argument { .. })
    }

    /// The value if it is a word, which may be one of before in what hearth wrote.
    pub fn word(&self) -> Option<&'a str> {
        let word = self.value.as_str()?;
        let is_old = self.source.is_written_by_hearth;
        Some(is_old.then(|| renamed::new_word(&self.key, word)).flatten().unwrap_or(word))
    }

    /// What relative paths are relative to.
    pub fn folder(&self) -> &Path {
        &self.source.folder
    }

    /// The parts of a list.
    pub fn parts(&self) -> Option<impl Iterator<Item = RawValue<'a>>> {
        let parts = self.value.as_array()?.iter().enumerate();
        let (key, source) = (self.key.clone(), self.source);
        Some(parts.map(move |(index, part)| source.typed(format!("{key}[{index}]"), part)))
    }

    /// That something else is accepted.
    pub fn refuse(&self, accepted: impl Into<String>) -> ConfigError {
        ConfigError::Value {
            key: self.key.clone(),
            typed: self.shown(),
            accepted: accepted.into(),
            advice: String::new(),
            origin: self.origin(),
        }
    }

    fn shown(&self) -> String {
        // The text of a table is no more than its first line, or a part of a key.
        if self.value.is_table() {
            return "a table".into();
        }
        let text = self.source.text.get(self.span.clone()).unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        let short: String = line.chars().take(SHOWN).collect();
        if short.len() == text.len() { short } else { format!("{short} …") }
    }
}
