//! `[sample]`: pictures drawn while training, to see what it does.

use super::section::section;
use super::value::{Size, Switch};

section! {
    /// Pictures drawn while training.
    pub RawSample => Sample {
        /// What is drawn, a picture each
        prompts: Vec<String> = Default(Vec::new()), Any;
        /// Steps of training between two drawings
        every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Size of pictures in pixels; this is SD3's default, other families have their own
        size: Size = Default(Size { width: 1024, height: 1024 }), Multiple(16.0, 8192.0);
        /// Steps from noise to picture; this is SD3's default, other families have their own
        steps: usize = Default(28), Within(1.0, 1000.0);
        /// How closely the prompt is followed; 1 is without guidance. This is SD3's default, other families have
        /// their own
        guidance: f64 = Default(7.0), Within(1.0, 100.0);
        /// What the noise follows from
        seed: u64 = Default(42), AtLeast(0.0);
        /// What pictures shall not be like
        negative: String = Default(String::new()), Any;
    }
}
