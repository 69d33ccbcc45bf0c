//! Captions for a folder of images, by Qwen2.5-VL. `folder` says which images have none and writes what they are given,
//! `captioner` asks the model, `predictor` is the model while it answers.
//!
//! One image after the other: its prompt is read in one forward pass (prefill), then the caption is decoded token by token
//! with a KV cache. Several at once would be faster on a GPU, but the cache holds one text.

pub mod captioner;
pub mod folder;
mod predictor;
#[cfg(test)]
mod tests;
