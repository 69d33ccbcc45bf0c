//! `[generate]`: texts written while training, to see what it does.

use super::section::section;
use super::value::Switch;

section! {
    /// Texts written while training.
    pub RawGenerate => GenerationConfig {
        /// Prompts of sample texts, one text each
        prompts: Vec<String> = Default(Vec::new()), Any;
        /// Training steps between sample texts
        every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Most new tokens of a sample text (transformers: `max_new_tokens`)
        max_tokens: usize = Default(64), Within(1.0, 65536.0);
        /// Sampling temperature; 0 is greedy decoding
        temperature: f64 = Default(0.8), Within(0.0, 10.0);
        /// Top-k sampling: only the k most likely tokens
        top_k: Switch<usize> = Default(Switch::Off), AtLeast(1.0);
        /// Top-p (nucleus) sampling: only the most likely tokens up to this probability
        top_p: f64 = Default(1.0), Within(0.0, 1.0);
        /// Seed of the first sample text
        seed: u64 = Default(42), AtLeast(0.0);
    }
}
