//! Why a job file was refused: one variant per cause, with the key, what was typed, what is accepted
//! and where it stands.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use super::source::ValueOrigin;

/// Everything that can be wrong with a job.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read job {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is not TOML.
    #[error("not TOML: {problem}: {origin}")]
    Syntax {
        /// What the parser said.
        problem: String,
        /// Where.
        origin: ValueOrigin,
    },
    /// An argument of `--set` that has no `=`.
    #[error("`{argument}` sets nothing, accepted is key=value")]
    NoAssignment {
        /// What was typed.
        argument: String,
    },
    /// A key that a run keeps.
    #[error("{key} cannot change while a run works")]
    NotChangeable {
        /// The key.
        key: String,
    },
    /// A key, or a whole section, that does not exist.
    #[error("unknown key `{key}`, {advice}: {origin}")]
    UnknownKey {
        /// The whole path of it.
        key: String,
        /// The nearest one that exists.
        advice: String,
        /// Where.
        origin: ValueOrigin,
    },
    /// A key, a section or a value that has another name now.
    #[error("unknown {what} `{was}`: {origin}")]
    Renamed {
        /// Which of the three.
        what: &'static str,
        /// The name that was typed.
        was: String,
        /// The name of today.
        now: &'static str,
        /// Where.
        origin: ValueOrigin,
    },
    /// A value of the wrong type, an unknown word, or a number out of bounds.
    #[error("`{key}` is {typed}, accepted is {accepted}{advice}: {origin}")]
    Value {
        /// The whole path of its key.
        key: String,
        /// What was typed.
        typed: String,
        /// What is accepted.
        accepted: String,
        /// The nearest word, if it is near.
        advice: String,
        /// Where.
        origin: ValueOrigin,
    },
    /// A key without which there is no job.
    #[error("`{key}` is not set")]
    Missing {
        /// The whole path of it.
        key: String,
    },
    /// Two keys of which only one can be meant.
    #[error("`{}` and `{}` exclude each other: {}, {}", keys[0], keys[1], origins[0], origins[1])]
    Conflict {
        /// Both.
        keys: [&'static str; 2],
        /// Where they stand.
        origins: Box<[ValueOrigin; 2]>,
    },
    /// A key that two flags of the command line set.
    #[error("`{key}` is set twice: {}, {}", origins[0], origins[1])]
    Twice {
        /// The whole path of it.
        key: String,
        /// Both flags.
        origins: Box<[ValueOrigin; 2]>,
    },
    /// A key of the whole job that two sets of images have with two values.
    #[error(
        "`{key}` holds for all of [[data]], it is {} and {}: {}, {}",
        values[0], values[1], origins[0], origins[1]
    )]
    SetsDiffer {
        /// The key.
        key: String,
        /// Both values, as TOML.
        values: [String; 2],
        /// Where they stand.
        origins: Box<[ValueOrigin; 2]>,
    },
    /// A value that another key excludes.
    #[error("`{key} = {typed}` is not possible with `{other} = {value}`: {origin}")]
    Excluded {
        /// The key.
        key: &'static str,
        /// Its value, as TOML.
        typed: String,
        /// The other key.
        other: &'static str,
        /// Its value, as TOML.
        value: String,
        /// The value that it would need.
        needed: String,
        /// Where the key stands.
        origin: ValueOrigin,
    },
    /// A key that would be ignored.
    #[error("`{key}` has no effect with {with}: {origin}")]
    NoEffect {
        /// The key.
        key: String,
        /// The value of another key that makes it so.
        with: String,
        /// Where.
        origin: ValueOrigin,
    },
}

impl ConfigError {
    /// The remedy.
    pub fn hint(&self) -> Cow<'static, str> {
        let fixed = match self {
            Self::Renamed { now, .. } => return format!("it is called `{now}` now").into(),
            Self::Excluded { key, other, needed, .. } => {
                return format!("set `{other} = {needed}`, or remove `{key}`").into();
            }
            Self::Read { .. } => "check that the path exists and may be accessed",
            Self::Syntax { .. } => {
                "text needs quotes, sections stand in brackets, one key per line"
            }
            Self::NotChangeable { .. } => {
                "these can: machine.mode, output.save_every, and the prompts and every of sample or generate"
            }
            Self::NoAssignment { .. } => "write for example --set train.steps=20",
            Self::UnknownKey { .. } => {
                "correct the key or remove it; docs/config.md lists all keys"
            }
            Self::Value { .. } => "correct the value, or remove the key to have the default",
            Self::Missing { .. } => "write it into the job file, or give it by --set key=value",
            Self::Conflict { .. } | Self::Twice { .. } => "remove one of the two",
            Self::SetsDiffer { .. } => "write it once, in any of the sets",
            Self::NoEffect { .. } => "remove the key, or choose the value that it belongs to",
        };
        fixed.into()
    }
}
