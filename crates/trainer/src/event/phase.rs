//! What a run is doing: its parts that take a while, or memory of their own. One name for each, in
//! plans, in `events.jsonl` and on screens.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A part of a run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum Phase {
    /// Files are opened and looked through. The first event each time the program works on a run.
    Open,
    /// Files are read, to tell whether they are those of before.
    Checksums,
    /// Images are encoded.
    Images,
    /// Texts become tokens.
    Tokens,
    /// The model is loaded, and what lives as long as the run.
    Load,
    /// A step with samples of this size.
    Train(String),
    /// The loss of a held-out sample of this size.
    Validate(String),
    /// Samples are made.
    Sample,
    /// A checkpoint is written.
    Save,
    /// The result is written for other programs. The memory of training is free by then.
    Export,
    /// A text encoder, by its name; and whatever other versions of hearth have.
    Other(String),
}

impl Phase {
    /// A step with samples of a size.
    pub fn train(size: impl fmt::Display) -> Self {
        Self::Train(size.to_string())
    }

    /// The loss of a held-out sample of a size.
    pub fn validate(size: impl fmt::Display) -> Self {
        Self::Validate(size.to_string())
    }
}

/// Names that stand for one phase.
const NAMES: [(&str, Phase); 8] = [
    ("open", Phase::Open),
    ("checksums", Phase::Checksums),
    ("images", Phase::Images),
    ("texts", Phase::Tokens),
    ("load", Phase::Load),
    ("sample", Phase::Sample),
    ("save", Phase::Save),
    ("export", Phase::Export),
];

/// The same in files of before.
const NAMES_BEFORE: [(&str, Phase); 3] =
    [("pictures", Phase::Images), ("load the model", Phase::Load), ("show", Phase::Sample)];

const TRAIN: &str = "train";
const VALIDATE: &str = "validate";

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sized = |f: &mut fmt::Formatter<'_>, name: &str, size: &str| match size {
            "" => f.write_str(name),
            size => write!(f, "{name} {size}"),
        };
        match self {
            Self::Train(size) => sized(f, TRAIN, size),
            Self::Validate(size) => sized(f, VALIDATE, size),
            Self::Other(name) => f.write_str(name),
            plain => {
                let name = NAMES.iter().find(|(_, phase)| phase == plain);
                f.write_str(name.expect("every other phase has a name").0)
            }
        }
    }
}

impl From<&str> for Phase {
    fn from(name: &str) -> Self {
        if let Some((_, phase)) = NAMES.iter().chain(&NAMES_BEFORE).find(|(of, _)| *of == name) {
            return phase.clone();
        }
        let (first, size) = name.split_once(' ').unwrap_or((name, ""));
        match first {
            TRAIN => Self::train(size),
            VALIDATE => Self::validate(size),
            _ => Self::Other(name.into()),
        }
    }
}

impl From<String> for Phase {
    fn from(name: String) -> Self {
        name.as_str().into()
    }
}

impl From<Phase> for String {
    fn from(phase: Phase) -> Self {
        phase.to_string()
    }
}

/// A phase and its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedPhase {
    /// Which.
    pub name: Phase,
    /// Bytes at its peak, as planned.
    pub peak_bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_read_back_from_its_name() {
        let sized = [Phase::train("64x96"), Phase::validate("512 tokens"), Phase::train("")];
        let other = Phase::Other("t5".into());
        for phase in NAMES.into_iter().map(|(_, phase)| phase).chain(sized).chain([other]) {
            let text = serde_json::to_string(&phase).unwrap();
            assert_eq!(serde_json::from_str::<Phase>(&text).unwrap(), phase, "{text}");
        }
        for (name, phase) in NAMES_BEFORE {
            assert_eq!(Phase::from(name), phase);
        }
        assert_eq!(Phase::from("trained").to_string(), "trained");
    }
}
