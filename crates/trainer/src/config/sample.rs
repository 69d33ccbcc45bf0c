//! `[sample]`: images drawn while training, to see what it does.

use super::section::section;
use super::value::{ImageSize, Switch};
use crate::model::diffusion::family::DiffusionFamily;
use crate::model::diffusion::guidance::GuidanceScales;

section! {
    /// Images drawn while training.
    pub RawSample => SampleConfig {
        /// Prompts of sample images, one image each
        prompts: Vec<String> = Default(Vec::new()), Any;
        /// Training steps between sample images
        every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Size of sample images in pixels. Shown: for SD3, other families have their own
        size: ImageSize = Default(default_size()), Multiple(16.0, 8192.0);
        /// Sampling (inference) steps. Shown: for SD3, other families have their own
        steps: usize = Default(DiffusionFamily::fallback().sampling.steps), Within(1.0, 1000.0);
        /// Guidance scale: classifier-free guidance (CFG), where 1 is without; FLUX.1 dev takes it as an input. Shown: for SD3, other families have their own
        guidance_scale: f64 = Default(DiffusionFamily::fallback().sampling.guidance), Within(1.0, 100.0);
        /// Classifier-free guidance with the negative prompt on top, for families that do without (FLUX.1); 1 is off, above it sampling takes twice the time
        true_cfg_scale: f64 = Default(1.0), Within(1.0, 100.0);
        /// Seed of the first sample image; the next prompt has the next seed
        seed: u64 = Default(42), AtLeast(0.0);
        /// Negative prompt of sample images
        negative_prompt: String = Default(String::new()), Any;
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
