//! Prompt templates of diffusion models with a language model as text encoder.

use crate::model::encoder::tokenizer::{PromptTemplate, TemplateImages};

/// Qwen-Image's: an instruction to describe the image, the user's turn, and the beginning of the answer. Taken: diffusers
/// 0.42.1's `QwenImagePipeline`.
pub const QWEN_IMAGE_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, \
             spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n",
    suffix: "<|im_end|>\n<|im_start|>assistant\n",
    n_dropped: 34,
    images: TemplateImages::None,
};

/// Qwen-Image-Edit's: an instruction to describe the image and its change, then the image and the prompt. The image stays
/// in the context. Taken: diffusers 0.42.1's `QwenImageEditPipeline`, whose prompts are never truncated.
pub const QWEN_IMAGE_EDIT_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, \
             background), then explain how the user's text instruction should alter or modify the image. Generate a \
             new image that meets the user's requirements while maintaining consistency with the original input where \
             appropriate.<|im_end|>\n<|im_start|>user\n",
    suffix: QWEN_IMAGE_TEMPLATE.suffix,
    n_dropped: 64,
    images: TemplateImages::One,
};

/// Qwen-Image-Edit-2509's and 2511's: any number of images, each with its number. Taken: diffusers 0.42.1's
/// `QwenImageEditPlusPipeline`.
pub const QWEN_IMAGE_EDIT_PLUS_TEMPLATE: PromptTemplate =
    PromptTemplate { images: TemplateImages::Numbered, ..QWEN_IMAGE_EDIT_TEMPLATE };
