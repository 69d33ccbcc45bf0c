//! Prompt templates of diffusion models with a language model as text encoder.

use crate::model::encoder::tokenizer::{PromptTemplate, TemplateImages};

/// What Kandinsky 5 asks its text encoder for, of an image; the models were trained with these words.
macro_rules! kandinsky5_image {
    () => {
        "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the \
         objects and background:"
    };
}

/// The same of a clip.
macro_rules! kandinsky5_video {
    () => {
        "Describe the video in detail.\nDescribe how the camera moves or shakes, describe the zoom and view angle, whether \
         it follows the objects.\nDescribe the location of the video, main characters or objects and their \
         action.\nDescribe the dynamism of the video and presented actions.\nName the visual style of the video: whether \
         it is a professional footage, user generated content, some kind of animation, video game or scren \
         content.\nDescribe the visual effects, postprocessing and transitions if they are presented in the video.\nPay \
         attention to the order of key actions shown in the scene."
    };
}

/// Qwen-Image's: an instruction to describe the image, the user's turn, and the beginning of the answer. Taken: diffusers
/// 0.42.1's `QwenImagePipeline`.
pub const QWEN_IMAGE_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, \
             spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n",
    suffix: "<|im_end|>\n<|im_start|>assistant\n",
    n_dropped: 34,
    images: TemplateImages::None,
    is_padded: false,
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
    is_padded: false,
};

/// Qwen-Image-Edit-2509's and 2511's: any number of images, each with its number. Taken: diffusers 0.42.1's
/// `QwenImageEditPlusPipeline`.
pub const QWEN_IMAGE_EDIT_PLUS_TEMPLATE: PromptTemplate =
    PromptTemplate { images: TemplateImages::Numbered, ..QWEN_IMAGE_EDIT_TEMPLATE };

/// Qwen3's chat template of a user's turn and the beginning of the answer, of which the model may think first. Nothing is
/// dropped. Taken: diffusers 0.42.1's `ZImagePipeline`.
pub const QWEN3_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: "<|im_start|>user\n",
    suffix: QWEN_IMAGE_TEMPLATE.suffix,
    n_dropped: 0,
    images: TemplateImages::None,
    is_padded: false,
};

/// The same where the model does not think first, filled up to the full length. Taken: diffusers 0.42.1's
/// `Flux2KleinPipeline`.
pub const QWEN3_WITHOUT_THINKING: PromptTemplate = PromptTemplate {
    suffix: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    is_padded: true,
    ..QWEN3_TEMPLATE
};

/// Kandinsky 5's for images, with the misspelt word that the models were trained with. Taken: the authors' program, as are
/// the tokens that are dropped.
pub const KANDINSKY5_IMAGE_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: concat!(
        "<|im_start|>system\nYou are a promt engineer. ",
        kandinsky5_image!(),
        "<|im_end|>\n<|im_start|>user\n"
    ),
    suffix: "<|im_end|>",
    n_dropped: 41,
    images: TemplateImages::None,
    is_padded: false,
};

/// The same as diffusers 0.42.1's `Kandinsky5T2IPipeline` has it.
pub const KANDINSKY5_IMAGE_DIFFUSERS: PromptTemplate = PromptTemplate {
    prefix: concat!(
        "<|im_start|>system\nYou are a prompt engineer. ",
        kandinsky5_image!(),
        "<|im_end|>\n<|im_start|>user\n"
    ),
    n_dropped: 40,
    ..KANDINSKY5_IMAGE_TEMPLATE
};

/// Kandinsky 5's for clips. Taken: the authors' program.
pub const KANDINSKY5_VIDEO_TEMPLATE: PromptTemplate = PromptTemplate {
    prefix: concat!(
        "<|im_start|>system\nYou are a promt engineer. ",
        kandinsky5_video!(),
        "<|im_end|>\n<|im_start|>user\n"
    ),
    n_dropped: 129,
    ..KANDINSKY5_IMAGE_TEMPLATE
};

/// The same as diffusers 0.42.1's `Kandinsky5T2VPipeline` has it.
pub const KANDINSKY5_VIDEO_DIFFUSERS: PromptTemplate = PromptTemplate {
    prefix: concat!(
        "<|im_start|>system\nYou are a prompt engineer. ",
        kandinsky5_video!(),
        "<|im_end|>\n<|im_start|>user\n"
    ),
    n_dropped: 128,
    ..KANDINSKY5_IMAGE_TEMPLATE
};
