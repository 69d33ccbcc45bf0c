//! `[sample]`: images drawn while training, to see what it does.

use super::section::section;
use super::value::{ImageSize, Switch};
use crate::model::diffusion::family::DiffusionFamily;

section! {
    /// Images drawn while training.
    pub RawSample => SampleConfig {
        /// What is drawn, an image each
        prompts: Vec<String> = Default(Vec::new()), Any;
        /// Steps of training between two drawings
        every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Size of images in pixels; this is SD3's default, other families have their own
        size: ImageSize = Default(default_size()), Multiple(16.0, 8192.0);
        /// Steps from noise to image; this is SD3's default, other families have their own
        steps: usize = Default(DiffusionFamily::fallback().sampling.steps), Within(1.0, 1000.0);
        /// How closely the prompt is followed; 1 is without guidance. This is SD3's default, other families have
        /// their own
        guidance: f64 = Default(DiffusionFamily::fallback().sampling.guidance), Within(1.0, 100.0);
        /// What the noise follows from
        seed: u64 = Default(42), AtLeast(0.0);
        /// What images shall not be like
        negative: String = Default(String::new()), Any;
    }
}

/// Where the base does not tell its family.
fn default_size() -> ImageSize {
    let side = DiffusionFamily::fallback().sampling.resolution;
    ImageSize { width: side, height: side }
}
