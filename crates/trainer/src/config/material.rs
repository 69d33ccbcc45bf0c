//! What a job learns from, and what is shown on the way: pictures, or texts. Whichever sections were
//! typed decide.

use std::path::{Path, PathBuf};

use super::data::{Data, RawData, Validation};
use super::error::ConfigError;
use super::sample::{RawSample, Sample};
use super::section::{Rows, Section};
use super::source::Origin;
use super::text::{RawText, Text};
use super::value::{Size, Switch};
use super::writing::{RawWriting, Writing};
use crate::error::{Result, TrainerError};
use crate::model::diffusion::family::{Family, Sampling};
use crate::model::kind;
use crate::text::HeldOut;

/// What a job learns from, and what is shown on the way.
#[derive(Clone, Debug, PartialEq)]
pub enum Material {
    /// Pictures with captions, by a model that draws.
    Pictures {
        /// The pictures.
        data: Data,
        /// Pictures drawn while training.
        sample: Sample,
    },
    /// Texts, by a language model.
    Texts {
        /// The texts.
        text: Text,
        /// Texts written while training.
        writing: Writing,
    },
}

/// What samples of texts are called.
pub const SEQUENCE: &str = "sequence";

/// Keys that mean nothing where texts are learnt from.
const OF_PICTURES: [&str; 7] = [
    "base.rest",
    "base.quantise_encoders",
    "train.scheme",
    "train.logit_mean",
    "train.logit_deviation",
    "train.mode_scale",
    // PEFT's is the one that readers of language models know.
    "output.formats",
];

/// Taken: all linear layers of a block, as the `QLoRA` paper trains them (Dettmers et al., arXiv
/// 2305.14314, section 4).
const TEXT_TARGETS: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

impl Material {
    /// Of the sections as typed. Those of the other kind would be ignored, so they are refused.
    pub(super) fn decide(
        (data, sample): (RawData, RawSample),
        (text, writing): (RawText, RawWriting),
        rows: &mut Rows,
    ) -> std::result::Result<Self, ConfigError> {
        let typed = |section, found: Option<(&str, Origin)>| {
            found.map(|(key, origin)| (format!("{section}.{key}"), origin))
        };
        let of_texts =
            typed("text", text.first_typed()).or(typed("writing", writing.first_typed()));
        let Some((with, _)) = of_texts else {
            let (data, sample) = (data.decide("data", rows)?, sample.decide("sample", rows)?);
            return Ok(Self::Pictures { data, sample });
        };
        let of_pictures =
            typed("data", data.first_typed()).or(typed("sample", sample.first_typed()));
        if let Some((key, origin)) = of_pictures {
            return Err(ConfigError::NoEffect { key, with, origin });
        }
        let (text, writing) = (text.decide("text", rows)?, writing.decide("writing", rows)?);
        Ok(Self::Texts { text, writing })
    }

    /// Leaves out what means nothing for this kind, and puts its own defaults.
    pub(super) fn settle(&self, rows: &mut Rows) -> std::result::Result<(), ConfigError> {
        if let Self::Texts { .. } = self {
            for key in OF_PICTURES {
                rows.leave_out(key, "[text]")?;
            }
        }
        Ok(())
    }

    /// The family of the base, where it tells.
    pub(super) fn family(&self, base: &Path) -> Option<&'static Family> {
        match self {
            Self::Pictures { .. } => kind::family(base),
            Self::Texts { .. } => None,
        }
    }

    /// What samples of a family's models are like unless told otherwise.
    pub(super) fn settle_family(&mut self, family: &Family, rows: &mut Rows) {
        let Self::Pictures { sample, .. } = self else { return };
        let Sampling { steps, guidance, side } = family.sampling;
        rows.of_family(family, "sample.steps", &mut sample.steps, steps);
        rows.of_family(family, "sample.guidance", &mut sample.guidance, guidance);
        let size = Size { width: side, height: side };
        rows.of_family(family, "sample.size", &mut sample.size, size);
    }

    /// Layers that get an adapter unless told otherwise.
    pub(super) fn usual_targets(&self) -> Option<Vec<String>> {
        match self {
            Self::Pictures { .. } => None,
            Self::Texts { .. } => Some(TEXT_TARGETS.map(str::to_owned).into()),
        }
    }

    /// Whether nothing is held out; then the key that says so.
    pub(super) fn holds_nothing_out(&self) -> Option<&'static str> {
        match self {
            Self::Pictures { data, .. } => {
                (data.validation == Validation::None).then_some("data.validation = 0")
            }
            Self::Texts { text, .. } => {
                (text.validation == HeldOut::None).then_some("text.validation = 0")
            }
        }
    }

    /// Where what was prepared is kept, if that was typed.
    pub(super) fn cache(&self) -> Option<&PathBuf> {
        match self {
            Self::Pictures { data, .. } => data.cache.as_ref(),
            Self::Texts { text, .. } => text.cache.as_ref(),
        }
    }

    /// Steps between two looks at what the model does.
    pub fn shown_every(&self) -> Switch<u64> {
        match self {
            Self::Pictures { sample, .. } => sample.every,
            Self::Texts { writing, .. } => writing.every,
        }
    }

    /// The pictures; an error where texts are learnt from.
    pub fn pictures(&self) -> Result<(&Data, &Sample)> {
        match self {
            Self::Pictures { data, sample } => Ok((data, sample)),
            Self::Texts { text, .. } => Err(TrainerError::Request {
                problem: format!("the job is about texts, not pictures: {}", text.path.display()),
                hint: "give it data.images instead of text.path",
            }),
        }
    }

    /// The texts; an error where pictures are learnt from.
    pub fn texts(&self) -> Result<(&Text, &Writing)> {
        match self {
            Self::Texts { text, writing } => Ok((text, writing)),
            Self::Pictures { data, .. } => Err(TrainerError::Request {
                problem: format!("the job is about pictures, not texts: {}", data.images.display()),
                hint: "give it text.path instead of data.images",
            }),
        }
    }

    /// What samples are called.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Pictures { .. } => "picture",
            Self::Texts { .. } => SEQUENCE,
        }
    }
}
