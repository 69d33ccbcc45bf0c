//! What a job learns from, and what is shown on the way: images, or texts. Whichever sections were
//! typed decide.

use std::path::{Path, PathBuf};

use super::adapter::AdapterKind;
use super::compress::{CompressConfig, RawCompress};
use super::data::Resolutions;
use super::data_sets::{DataSets, RawDataSets};
use super::error::ConfigError;
use super::generate::{GenerationConfig, RawGenerate};
use super::preference::{PreferenceConfig, RawPreference};
use super::sample::{RawSample, SampleConfig};
use super::section::{ResolvedKeys, Section};
use super::source::ValueOrigin;
use super::text::{RawText, TextConfig};
use super::value::{ImageSize, Switch};
use crate::error::{Result, TrainerError};
use crate::model::adapter::TargetPreset;
use crate::model::diffusion::family::{DiffusionFamily, SamplingDefaults, VideoDefaults};
use crate::model::diffusion::guidance::Guidance;
use crate::model::kind;
use crate::text::HeldOut;

/// What a job learns from, and what is shown on the way.
#[derive(Clone, Debug, PartialEq)]
pub enum TrainingData {
    /// Images with captions, by a model that draws.
    Images {
        /// The images.
        data: DataSets,
        /// Images drawn while training.
        sample: SampleConfig,
    },
    /// Texts, by a language model.
    Texts {
        /// The texts.
        text: TextConfig,
        /// Texts written while training.
        generate: GenerationConfig,
        /// Which tokens the largest part of the model sees, if not all.
        compress: Option<CompressConfig>,
        /// How preferences are learnt from, if the texts are those.
        preference: Option<Box<PreferenceConfig>>,
    },
}

/// Sections of a job about images, as typed.
pub(super) struct RawImageSections {
    pub data: RawDataSets,
    pub sample: RawSample,
}

/// Sections of a job about texts, as typed.
pub(super) struct RawTextSections {
    pub text: RawText,
    pub compress: RawCompress,
    pub preference: RawPreference,
    pub generate: RawGenerate,
}

/// What samples of texts are called.
pub const SEQUENCE: &str = "sequence";

/// What samples of preferences are called.
pub const PAIR: &str = "pair";
/// The same of single answers.
pub const ANSWER: &str = "answer";
/// The same of answers that the model makes itself.
pub const COMPLETION: &str = "completion";

/// Whether samples that are called so are about texts.
pub fn is_text(noun: &str) -> bool {
    [SEQUENCE, PAIR, ANSWER, COMPLETION].contains(&noun)
}

/// Keys that mean nothing where texts are learnt from.
const IMAGE_ONLY_KEYS: [&str; 25] = [
    "base.rest",
    "base.vae",
    "base.text_encoders",
    "base.training_adapter",
    "base.implementation",
    "base.quantise_encoders",
    "train.weighting_scheme",
    "train.timestep_shift",
    "train.timestep_min",
    "train.timestep_max",
    "train.guidance_scale",
    "train.logit_mean",
    "train.logit_std",
    "train.mode_scale",
    "train.timestep_bias",
    "train.timestep_bias_multiplier",
    "train.timestep_bias_share",
    "train.timestep_bias_begin",
    "train.timestep_bias_end",
    "train.loss",
    "train.huber_c",
    "train.huber_schedule",
    "train.loss_weighting",
    "train.min_snr_gamma",
    // PEFT's is the one that readers of language models know.
    "output.formats",
];

/// Keys that mean nothing where a model makes images.
const VIDEO_KEYS: [&str; 4] = ["data.frames", "data.fps", "data.segments", "sample.frames"];

impl TrainingData {
    /// Of the sections as typed. Those of the other kind would be ignored, so they are refused.
    pub(super) fn decide(
        RawImageSections { data, sample }: RawImageSections,
        RawTextSections { text, compress, preference, generate }: RawTextSections,
        rows: &mut ResolvedKeys,
    ) -> std::result::Result<Self, ConfigError> {
        let typed = |section, found: Option<(&str, ValueOrigin)>| {
            found.map(|(key, origin)| (format!("{section}.{key}"), origin))
        };
        let of_texts =
            typed("text", text.first_typed()).or(typed("generate", generate.first_typed()));
        let of_texts = of_texts.or(typed("compress", compress.first_typed()));
        let of_preferences = typed("preference", preference.first_typed());
        let of_texts = of_texts.or_else(|| of_preferences.clone());
        let Some((with, _)) = of_texts else {
            let (data, sample) = (data.decide("data", rows)?, sample.decide("sample", rows)?);
            return Ok(Self::Images { data, sample });
        };
        let of_images = typed("data", data.first_typed()).or(typed("sample", sample.first_typed()));
        if let Some((key, origin)) = of_images {
            return Err(ConfigError::NoEffect { key, with, origin });
        }
        let text = text.decide("text", rows)?;
        let is_compressed = compress.first_typed().is_some();
        let compress = is_compressed.then(|| CompressConfig::new(compress, rows)).transpose()?;
        if let (Some((key, origin)), true) = (&of_preferences, is_compressed) {
            let (key, origin) = (key.clone(), origin.clone());
            return Err(ConfigError::NoEffect { key, with: "[compress]".into(), origin });
        }
        let preference = of_preferences
            .map(|_| PreferenceConfig::new(preference, rows))
            .transpose()?
            .map(Box::new);
        let generate = generate.decide("generate", rows)?;
        Ok(Self::Texts { text, generate, compress, preference })
    }

    /// Leaves out what means nothing for this kind, and puts its own defaults.
    pub(super) fn apply_defaults(
        &self,
        rows: &mut ResolvedKeys,
    ) -> std::result::Result<(), ConfigError> {
        if let Self::Texts { .. } = self {
            for key in IMAGE_ONLY_KEYS {
                rows.leave_out(key, "[text]")?;
            }
        }
        Ok(())
    }

    /// Leaves out what means nothing beside other keys.
    pub(super) fn leave_out_idle(
        &self,
        rows: &mut ResolvedKeys,
    ) -> std::result::Result<(), ConfigError> {
        match self {
            Self::Images { data, .. } => data.leave_out_idle(rows),
            Self::Texts { .. } => Ok(()),
        }
    }

    /// A full fine-tune has no base beside the model that it trains.
    pub(super) fn refuse_base_target(
        &self,
        kind: AdapterKind,
        rows: &ResolvedKeys,
    ) -> std::result::Result<(), ConfigError> {
        match (self, rows.origin("data.target")) {
            (Self::Images { data, .. }, Some(origin))
                if kind == AdapterKind::Full && data.has_base_target() =>
            {
                Err(ConfigError::Excluded {
                    key: "data.target",
                    typed: "\"base\"".into(),
                    other: "adapter.kind",
                    value: "\"full\"".into(),
                    needed: "\"lora\"".into(),
                    origin: origin.clone(),
                })
            }
            _ => Ok(()),
        }
    }

    /// The family of the base, where it tells.
    pub(super) fn family(&self, base: &Path) -> Option<&'static DiffusionFamily> {
        match self {
            Self::Images { .. } => kind::family(base),
            Self::Texts { .. } => None,
        }
    }

    /// What samples of a family's models are like unless told otherwise.
    pub(super) fn apply_family(
        &mut self,
        family: &DiffusionFamily,
        rows: &mut ResolvedKeys,
    ) -> std::result::Result<(), ConfigError> {
        let Self::Images { data, sample } = self else { return Ok(()) };
        let SamplingDefaults { steps, guidance, resolution: side, negative_prompt } =
            family.sampling;
        rows.of_family(family, "sample.steps", &mut sample.steps, steps);
        rows.of_family(family, "sample.guidance_scale", &mut sample.guidance_scale, guidance);
        let size = ImageSize { width: side, height: side };
        rows.of_family(family, "sample.size", &mut sample.size, size);
        if !negative_prompt.is_empty() {
            let negative_prompt = negative_prompt.to_owned();
            let key = "sample.negative_prompt";
            rows.of_family(family, key, &mut sample.negative_prompt, negative_prompt);
        }
        match family.video {
            Some(VideoDefaults { frames, fps }) => {
                for (name, set) in data.each_mut() {
                    let key = |key| format!("{name}.{key}");
                    rows.of_family(family, &key("frames"), &mut set.frames, Some(frames));
                    rows.of_family(family, &key("fps"), &mut set.fps, Some(fps));
                    // Five seconds in the size of images would be millions of tokens.
                    let side = Resolutions::one(side);
                    rows.of_family(family, &key("resolution"), &mut set.resolution, side);
                }
            }
            None => {
                for key in VIDEO_KEYS {
                    rows.leave_out(key, &family.as_base())?;
                }
            }
        }
        if family.guidance.is_classifier_free() {
            rows.leave_out("sample.true_cfg_scale", &family.as_base())?;
        }
        if family.guidance == Guidance::None {
            rows.leave_out("sample.guidance_scale", &family.as_base())?;
        }
        Ok(())
    }

    /// Layers that get an adapter unless told otherwise.
    pub(super) fn default_targets(&self, base: &Path) -> Option<Vec<String>> {
        match self {
            Self::Images { .. } => None,
            Self::Texts { .. } => Some(kind::language_family(base).default_targets()),
        }
    }

    /// The words that stand for targets.
    pub(super) fn target_presets(
        &self,
        family: Option<&DiffusionFamily>,
        base: &Path,
    ) -> &'static [TargetPreset] {
        match self {
            Self::Images { .. } => {
                family.map_or(DiffusionFamily::fallback().target_presets, |it| it.target_presets)
            }
            Self::Texts { .. } => kind::language_family(base).target_presets(),
        }
    }

    /// Whether nothing is held out; then the key that says so.
    pub(super) fn no_validation_key(&self) -> Option<&'static str> {
        match self {
            Self::Images { data, .. } => (!data.has_validation()).then_some("data.validation = 0"),
            Self::Texts { text, .. } => {
                (text.validation == HeldOut::None).then_some("text.validation = 0")
            }
        }
    }

    /// Where what was prepared is kept, if that was typed.
    pub(super) fn cache(&self) -> Option<&PathBuf> {
        match self {
            Self::Images { data, .. } => data.common().cache.as_ref(),
            Self::Texts { text, .. } => text.cache.as_ref(),
        }
    }

    /// Steps between two looks at what the model does.
    pub fn sample_every(&self) -> Switch<u64> {
        match self {
            Self::Images { sample, .. } => sample.every,
            Self::Texts { generate, .. } => generate.every,
        }
    }

    /// The images; an error where texts are learnt from.
    pub fn images(&self) -> Result<(&DataSets, &SampleConfig)> {
        match self {
            Self::Images { data, sample } => Ok((data, sample)),
            Self::Texts { text, .. } => Err(TrainerError::Request {
                problem: format!("the job is about texts, not images: {}", text.path.display()),
                hint: "give it data.images instead of text.path",
            }),
        }
    }

    /// The texts; an error where images are learnt from.
    pub fn texts(&self) -> Result<(&TextConfig, &GenerationConfig)> {
        match self {
            Self::Texts { text, generate, .. } => Ok((text, generate)),
            Self::Images { data, .. } => Err(TrainerError::Request {
                problem: format!(
                    "the job is about images, not texts: {}",
                    data.common().images.display()
                ),
                hint: "give it text.path instead of data.images",
            }),
        }
    }

    /// Which tokens the largest part of a language model sees, if not all.
    pub fn compression(&self) -> Option<&CompressConfig> {
        match self {
            Self::Texts { compress, .. } => compress.as_ref(),
            Self::Images { .. } => None,
        }
    }

    /// How preferences are learnt from, if the texts are those.
    pub fn preference(&self) -> Option<&PreferenceConfig> {
        match self {
            Self::Texts { preference, .. } => preference.as_deref(),
            Self::Images { .. } => None,
        }
    }

    /// What samples are called.
    pub fn sample_noun(&self) -> &'static str {
        match self {
            // Clips and images, of a family of videos.
            Self::Images { data, .. } if data.common().frames.is_some() => "sample",
            Self::Images { .. } => "image",
            Self::Texts { preference: Some(preference), .. } => preference.sample_noun(),
            Self::Texts { preference: None, .. } => SEQUENCE,
        }
    }

    /// Tokens of a sample; none of images.
    pub fn sample_tokens(&self) -> Option<usize> {
        match self {
            // Answers are as long as they are.
            Self::Images { .. } | Self::Texts { preference: Some(_), .. } => None,
            Self::Texts { text, preference: None, .. } => Some(text.length),
        }
    }
}
