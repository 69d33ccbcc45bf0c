//! Tokenizers and text encoders of image models. They run while caching and sampling, never inside a
//! training step.

pub mod clip;
mod image_processor;
pub mod qwen25vl;
pub mod qwen3;
pub mod stack;
pub mod t5;
pub mod tokenizer;
