//! `[sample]`: images drawn while training, to see what it does.

use std::path::PathBuf;

use super::error::ConfigError;
use super::section::section;
use super::source::RawValue;
use super::value::{ConfigValue, ImageSize, Switch};
use crate::model::diffusion::family::DiffusionFamily;
use crate::model::diffusion::guidance::GuidanceScales;

section! {
    /// Images drawn while training.
    pub RawSample => SampleConfig {
        /// Prompts of sample images, one image each
        prompts: Vec<String> = Default(Vec::new()), Any;
        /// Reference images of sample images, for an editing model: a path or a list of paths for each prompt, or one for all
        references: ReferenceLists = Default(ReferenceLists::default()), Any;
        /// Training steps between sample images
        every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Size of sample images in pixels. Shown: for SD3, other families have their own
        size: ImageSize = Default(default_size()), Multiple(16.0, 8192.0);
        /// Frames of sample clips, for a model of videos; 1 draws images. Not set: as many as `data.frames`
        frames: Option<usize> = Default(None), Within(1.0, 1025.0);
        /// Sampling (inference) steps. Shown: for SD3, other families have their own
        steps: usize = Default(DiffusionFamily::fallback().sampling.steps), Within(1.0, 1000.0);
        /// Guidance scale: classifier-free guidance (CFG), where 1 is without, and 0 for Z-Image; FLUX.1 dev takes it as an input. Shown: for SD3, other families have their own
        guidance_scale: f64 = Default(DiffusionFamily::fallback().sampling.guidance), Within(0.0, 100.0);
        /// Classifier-free guidance with the negative prompt on top, for families that do without (FLUX.1); 1 is off, above it sampling takes twice the time
        true_cfg_scale: f64 = Default(1.0), Within(1.0, 100.0);
        /// Seed of the first sample image; the next prompt has the next seed
        seed: u64 = Default(42), AtLeast(0.0);
        /// Negative prompt of sample images
        negative_prompt: String = Default(String::new()), Any;
    }
}

/// Reference images of several images: of each, or one list for all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReferenceLists(pub Vec<Vec<PathBuf>>);

impl ConfigValue for ReferenceLists {
    fn accepted() -> String {
        "a path, or a list of paths or of lists of paths".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        let refused = |_| typed.refuse(Self::accepted());
        let Some(parts) = typed.parts() else {
            return PathBuf::read(typed).map(|path| Self(vec![vec![path]])).map_err(refused);
        };
        let list = |part: RawValue<'_>| match part.parts() {
            None => PathBuf::read(&part).map(|path| vec![path]),
            Some(_) => Vec::<PathBuf>::read(&part),
        };
        parts.map(list).collect::<Result<_, _>>().map(Self).map_err(refused)
    }

    fn write(&self) -> Option<String> {
        let lists: Vec<String> = self.0.iter().filter_map(ConfigValue::write).collect();
        Some(format!("[{}]", lists.join(", ")))
    }
}

impl SampleConfig {
    /// The guidance scales.
    pub fn guidance(&self) -> GuidanceScales {
        let Self { guidance_scale, true_cfg_scale, .. } = self;
        GuidanceScales { guidance: *guidance_scale as f32, true_cfg: *true_cfg_scale as f32 }
    }
}

/// Where the base does not tell its family.
fn default_size() -> ImageSize {
    let side = DiffusionFamily::fallback().sampling.resolution;
    ImageSize { width: side, height: side }
}
