//! Prompt templates of diffusion models with a language model as text encoder.

use crate::model::encoder::tokenizer::PromptTemplate;

/// Qwen-Image's: an instruction to describe the image, the user's turn, and the beginning of the answer. Taken: diffusers
/// 0.42.1's `QwenImagePipeline`.
pub const QWEN_IMAGE_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, \
             spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n",
    suffix: "<|im_end|>\n<|im_start|>assistant\n",
    n_dropped: 34,
};
