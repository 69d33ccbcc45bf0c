//! `[sample]`: pictures drawn while training, to see what it does.

use super::section::section;
use super::value::{Size, Switch};
use crate::model::diffusion::family::Family;

section! {
    /// Pictures drawn while training.
    pub RawSample => Sample {
        /// What is drawn, a picture each
        prompts: Vec<String> = Default(Vec::new()), Any;
        /// Steps of training between two drawings
        every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Size of pictures in pixels; this is SD3's default, other families have their own
        size: Size = Default(usual_size()), Multiple(16.0, 8192.0);
        /// Steps from noise to picture; this is SD3's default, other families have their own
        steps: usize = Default(Family::usual().sampling.steps), Within(1.0, 1000.0);
        /// How closely the prompt is followed; 1 is without guidance. This is SD3's default, other families have
        /// their own
        guidance: f64 = Default(Family::usual().sampling.guidance), Within(1.0, 100.0);
        /// What the noise follows from
        seed: u64 = Default(42), AtLeast(0.0);
        /// What pictures shall not be like
        negative: String = Default(String::new()), Any;
    }
}

/// Where the base does not tell its family.
fn usual_size() -> Size {
    let side = Family::usual().sampling.side;
    Size { width: side, height: side }
}
