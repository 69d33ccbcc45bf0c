//! `[data]`: the images and their captions.

use std::path::PathBuf;

use toml::de::DeValue;

use super::error::ConfigError;
use super::section::section;
use super::source::RawValue;
use super::value::{ConfigValue, quoted, words};
use crate::data::MaskSource;
use crate::data::caption_choice::CaptionChoice;

/// How images of the demo are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DemoStyle {
    /// Filled shapes on light backgrounds: what the built-in model knows.
    Flat,
    /// Glowing outlines in the dark: what the demo teaches it.
    Neon,
}

section! {
    /// The images, their captions, and what is done to both.
    pub RawData => DataConfig {
        /// Folder of images, each with its caption beside it
        images: PathBuf = Required, Any;
        /// Folder of reference images, named like those in `images`, or up to four (other trainers: `control_dir`)
        references: ReferenceFolders = Default(ReferenceFolders::default()), Within(0.0, 4.0);
        /// Use images, captions and references outside these folders too: by links, or by paths in metadata
        follow_links: bool = Default(false), Any;
        /// Demo images that hearth draws into `images` if there is no such folder
        draw: Option<DemoStyle> = Default(None), Any;
        /// Number of demo images
        draw_count: usize = Default(12), Within(1.0, 1_000_000.0);
        /// Training resolution in pixels, the side of a square; other aspect ratios get the same area. Of a list, each image is seen at each. Shown: for images, video models have their own
        resolution: Resolutions = Default(Resolutions::one(1024)), Multiple(16.0, 8192.0);
        /// Sides of aspect ratio buckets are multiples of this (kohya: `bucket_reso_steps`)
        bucket_step: usize = Default(64), Multiple(16.0, 1024.0);
        /// Reference images of an editing model are scaled to the area of a square with this side (musubi: `control_resolution`)
        reference_resolution: usize = Default(1024), Multiple(32.0, 8192.0);
        /// Frames of a training clip, for a video model: 4·k + 1; shorter clips have fewer. Not set: as the model was trained (musubi: `target_frames`)
        frames: Option<usize> = Default(None), Within(1.0, 10_000.0);
        /// Frames per second that clips are resampled to, for a video model. Not set: as the model was trained
        fps: Option<usize> = Default(None), Within(1.0, 240.0);
        /// Segments of a clip, spread evenly from its beginning to its end, for a video model; 1 is its beginning
        segments: usize = Default(1), Within(1.0, 10_000.0);
        /// Horizontal flip of half of the images, references too (kohya: `flip_aug`)
        flip: bool = Default(false), Any;
        /// How often each image is seen in an epoch (kohya: `num_repeats`)
        repeats: u64 = Default(1), AtLeast(1.0);
        /// Weight of the loss of these images (ai-toolkit: `loss_multiplier`)
        loss_weight: f64 = Default(1.0), Within(0.0, 1000.0);
        /// Regularisation images: repeated, or left out, so that an epoch shows as many of them as of the other sets (kohya: `is_reg`, with `loss_weight` as `prior_loss_weight`)
        regularisation: bool = Default(false), Any;
        /// What is learnt of the images: `images`, themselves, or `base`, what the base predicts of them without the adapter (OneTrainer: prior prediction)
        target: LearningTarget = Default(LearningTarget::Images), Any;
        /// Masks: the loss counts what is white in them. `beside`: `NAME-masklabel.png` (OneTrainer); `alpha`: the images' alpha channels; or a folder of masks named like the images (ai-toolkit: `mask_path`, kohya: `conditioning_data_dir`)
        masks: MaskSource = Default(MaskSource::None), Any;
        /// Weight of the loss where a mask is black (OneTrainer's name, ai-toolkit: `mask_min_value`)
        unmasked_weight: f64 = Default(0.0), Within(0.0, 1.0);
        /// Share of steps in which all of an image counts (OneTrainer's name)
        unmasked_probability: f64 = Default(0.0), Within(0.0, 1.0);
        /// Which part of an image is kept if it does not fit its bucket
        crop: CropMode = Default(CropMode::Centre), Any;
        /// Trigger word put before every caption
        trigger: Option<String> = Default(None), Filled;
        /// Share of steps that train without the caption (kohya: `caption_dropout_rate`)
        caption_dropout: f64 = Default(0.1), Within(0.0, 1.0);
        /// What of a caption is taken: `whole`; `line`: in each step one of its lines, by chance; `wildcards`: and one of the alternatives in braces (kohya: `enable_wildcard`)
        caption_choice: CaptionChoice = Default(CaptionChoice::Whole), Any;
        /// Shuffle the comma-separated tags of a caption (kohya: `shuffle_caption`)
        shuffle_tags: bool = Default(false), Any;
        /// Tags at the start of a caption that are not shuffled (kohya: `keep_tokens`)
        keep_tags: u64 = Default(1), AtLeast(0.0);
        /// Images held out for validation: a count, or a share below 1
        validation: ValidationSplit = Default(ValidationSplit::None), Any;
        /// Folder of cached latents and text embeddings, may be shared by jobs. Not set: `cache` in `output.folder`
        cache: Option<PathBuf> = Default(None), Any;
    }
}

/// In which resolutions an image is seen: at least one, the smallest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolutions(Vec<usize>);

impl Resolutions {
    /// One of them.
    pub fn one(side: usize) -> Self {
        Self(vec![side])
    }

    /// All of them, the smallest first.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.0.iter().copied()
    }

    /// How many there are.
    pub fn n_sides(&self) -> usize {
        self.0.len()
    }

    /// The largest.
    pub fn largest(&self) -> usize {
        self.0.last().copied().unwrap_or(0)
    }

    /// The same with none above this.
    #[must_use]
    pub fn at_most(&self, side: usize) -> Self {
        let mut sides: Vec<usize> = self.iter().map(|own| own.min(side)).collect();
        sides.dedup();
        Self(sides)
    }
}

impl ConfigValue for Resolutions {
    fn accepted() -> String {
        "a whole number, or a list of different ones".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let refused = |_| typed.refuse(Self::accepted());
        let Some(parts) = typed.parts() else {
            return usize::read(typed).map(Self::one).map_err(refused);
        };
        let sides: Result<Vec<usize>, _> = parts.map(|part| usize::read(&part)).collect();
        let mut sides = sides.map_err(refused)?;
        let n_typed = sides.len();
        sides.sort_unstable();
        sides.dedup();
        if sides.is_empty() || sides.len() < n_typed {
            return Err(typed.refuse(Self::accepted()));
        }
        Ok(Self(sides))
    }

    fn write(&self) -> Option<String> {
        match self.0[..] {
            [side] => side.write(),
            _ => Some(format!("{:?}", self.0)),
        }
    }

    fn measures(&self) -> Vec<f64> {
        self.iter().map(|side| side as f64).collect()
    }
}

words!(Option<DemoStyle> {
    "none" => None,
    "flat" => Some(DemoStyle::Flat),
    "neon" => Some(DemoStyle::Neon),
});

/// Where the reference images are: reference 1 first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReferenceFolders(pub Vec<PathBuf>);

impl ConfigValue for ReferenceFolders {
    fn accepted() -> String {
        format!("{}, or {}", PathBuf::accepted(), Vec::<PathBuf>::accepted())
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        match typed.value {
            // On a command line, a list that is refused is tried as a text.
            DeValue::String(text) if !text.starts_with('[') => {
                PathBuf::read(typed).map(|folder| Self(vec![folder]))
            }
            DeValue::Array(_) => Vec::<PathBuf>::read(typed).map(Self),
            _ => Err(typed.refuse(Self::accepted())),
        }
    }

    fn write(&self) -> Option<String> {
        self.0.write()
    }

    fn measures(&self) -> Vec<f64> {
        self.0.measures()
    }
}

/// What a model is to predict of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearningTarget {
    /// The images.
    Images,
    /// What the base predicts, so that it is not forgotten.
    Base,
}

words!(LearningTarget {
    "images" => Self::Images,
    "base" => Self::Base,
});

impl ConfigValue for MaskSource {
    fn accepted() -> String {
        format!("none, beside, alpha, or {}", PathBuf::accepted())
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        match typed.value.as_str() {
            Some("none") => Ok(Self::None),
            Some("beside") => Ok(Self::Beside),
            Some("alpha") => Ok(Self::Alpha),
            _ => PathBuf::read(typed).map(Self::Folder),
        }
    }

    fn write(&self) -> Option<String> {
        match self {
            Self::None => Some(quoted("none")),
            Self::Beside => Some(quoted("beside")),
            Self::Alpha => Some(quoted("alpha")),
            Self::Folder(folder) => folder.write(),
        }
    }
}

words!(CaptionChoice {
    "whole" => Self::Whole,
    "line" => Self::Line,
    "wildcards" => Self::Wildcards,
});

/// Which part of an image is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CropMode {
    /// The middle.
    Centre,
    /// One that follows from the seed and the image.
    Random,
}

words!(CropMode {
    "centre" => Self::Centre,
    "random" => Self::Random,
});

/// How many images are held out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValidationSplit {
    /// None: all are trained on.
    None,
    /// So many.
    Count(u64),
    /// This share of them, between 0 and 1.
    Share(f64),
}

impl ConfigValue for ValidationSplit {
    fn accepted() -> String {
        "a whole number, or a share below 1".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let refused = |_| typed.refuse(Self::accepted());
        let share = match typed.value {
            DeValue::Float(_) => f64::read(typed).map_err(refused)?,
            _ => match u64::read(typed).map_err(refused)? {
                0 => return Ok(Self::None),
                count => return Ok(Self::Count(count)),
            },
        };
        match share {
            0.0 => Ok(Self::None),
            share if (0.0..1.0).contains(&share) => Ok(Self::Share(share)),
            _ => Err(typed.refuse(Self::accepted())),
        }
    }

    fn write(&self) -> Option<String> {
        match self {
            Self::None => Some("0".into()),
            Self::Count(count) => count.write(),
            Self::Share(share) => share.write(),
        }
    }
}
