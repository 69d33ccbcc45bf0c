//! What turns prompts into numbers: tokenizers and text encoders. They run while caching and
//! sampling, never inside a training step.

pub mod clip;
pub mod t5;
pub mod tokenizer;
