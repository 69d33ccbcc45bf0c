//! `[writing]`: texts written while training, to see what it does.

use super::section::section;
use super::value::Switch;

section! {
    /// Texts written while training.
    pub RawWriting => GenerationConfig {
        /// What texts begin with, a text each
        prompts: Vec<String> = Default(Vec::new()), Any;
        /// Steps of training between two writings
        every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Tokens of a text
        max_tokens: usize = Default(64), Within(1.0, 65536.0);
        /// How far from the likeliest token a choice may be; 0 always takes that one
        temperature: f64 = Default(0.8), Within(0.0, 10.0);
        /// How many of the likeliest tokens may be chosen
        top_k: Switch<usize> = Default(Switch::Off), AtLeast(1.0);
        /// The share of all likelihood among which is chosen, from the likeliest on
        top_p: f64 = Default(1.0), Within(0.0, 1.0);
        /// What the choices follow from
        seed: u64 = Default(42), AtLeast(0.0);
    }
}
