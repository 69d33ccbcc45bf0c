//! Prompt templates of diffusion models with a language model as text encoder, as token ids of its vocabulary.

use crate::model::encoder::tokenizer::PromptTemplate;

/// Qwen-Image's: an instruction to describe the image, the user's turn, and the beginning of the answer. Taken: the ids
/// that diffusers 0.42.1's `QwenImagePipeline` gets for an empty prompt; it drops the first 34 hidden states.
pub const QWEN_IMAGE_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: &[
        151_644, 8948, 198, 74_785, 279, 2168, 553, 44_193, 279, 1894, 11, 6083, 11, 1379, 11,
        10_434, 11, 12_194, 11, 1467, 11, 27_979, 11_871, 315, 279, 6171, 323, 4004, 25, 151_645,
        198, 151_644, 872, 198,
    ],
    suffix: &[151_645, 198, 151_644, 77_091, 198],
};
