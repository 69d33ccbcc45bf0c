//! `[sample]`: images drawn while training, to see what it does.

use super::section::section;
use super::value::{ImageSize, Switch};
use crate::model::diffusion::family::DiffusionFamily;

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
        /// Classifier-free guidance scale (CFG); 1 is without guidance. Shown: for SD3, other families have their own
        guidance_scale: f64 = Default(DiffusionFamily::fallback().sampling.guidance), Within(1.0, 100.0);
        /// Seed of the first sample image; the next prompt has the next seed
        seed: u64 = Default(42), AtLeast(0.0);
        /// Negative prompt of sample images
        negative_prompt: String = Default(String::new()), Any;
    }
}

/// Where the base does not tell its family.
fn default_size() -> ImageSize {
    let side = DiffusionFamily::fallback().sampling.resolution;
    ImageSize { width: side, height: side }
}
