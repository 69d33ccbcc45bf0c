//! The models of this family that are published, by their settings.
//!
//! Taken: `config.json` of each part at huggingface.co/Qwen.

use super::{QwenImageConfig, QwenImageEdit, published_axes, published_patch};
use crate::model::diffusion::family::{ModelLicense, PublishedPipeline};
use crate::model::diffusion::scheduler::FlowMatchScheduler;
use crate::model::diffusion::text::EncoderConfig;
use crate::model::encoder::qwen25vl::Qwen25VlConfig;
use crate::model::vae::QwenImageVaeConfig;

/// Qwen-Image of August 2025, and of December; the editing models.
pub const ALL: &[PublishedPipeline] = &[
    FIRST,
    PublishedPipeline {
        name: "qwen-image-2512",
        hint: "`hearth fetch Qwen/Qwen-Image-2512` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("Qwen-Image-2512", "Qwen/Qwen-Image-2512"),
            ("qwen_image_2512_bf16", "Qwen/Qwen-Image-2512"),
            ("qwen_image_2512_fp8_e4m3fn", "Qwen/Qwen-Image-2512"),
        ],
        ..FIRST
    },
    PublishedPipeline {
        name: "qwen-image-edit",
        hint: "`hearth fetch Qwen/Qwen-Image-Edit` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("Qwen-Image-Edit", "Qwen/Qwen-Image-Edit"),
            ("qwen_image_edit_bf16", "Qwen/Qwen-Image-Edit"),
            ("qwen_image_edit_fp8_e4m3fn", "Qwen/Qwen-Image-Edit"),
        ],
        config: || QwenImageConfig { edit: Some(QwenImageEdit::First), ..qwen_image() }.into(),
        ..FIRST
    },
    PublishedPipeline {
        name: "qwen-image-edit-2509",
        hint: "`hearth fetch Qwen/Qwen-Image-Edit-2509` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("Qwen-Image-Edit-2509", "Qwen/Qwen-Image-Edit-2509"),
            ("qwen_image_edit_2509_bf16", "Qwen/Qwen-Image-Edit-2509"),
            ("qwen_image_edit_2509_fp8_e4m3fn", "Qwen/Qwen-Image-Edit-2509"),
        ],
        config: || QwenImageConfig { edit: Some(QwenImageEdit::Plus), ..qwen_image() }.into(),
        ..FIRST
    },
    PublishedPipeline {
        name: "qwen-image-edit-2511",
        hint: "`hearth fetch Qwen/Qwen-Image-Edit-2511` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("Qwen-Image-Edit-2511", "Qwen/Qwen-Image-Edit-2511"),
            ("qwen_image_edit_2511_bf16", "Qwen/Qwen-Image-Edit-2511"),
            ("qwen_image_edit_2511_fp8mixed", "Qwen/Qwen-Image-Edit-2511"),
        ],
        config: || {
            let edit = Some(QwenImageEdit::Plus);
            QwenImageConfig { edit, zero_cond_t: true, ..qwen_image() }.into()
        },
        ..FIRST
    },
];

const FIRST: PublishedPipeline = PublishedPipeline {
    name: "qwen-image",
    hint: "`hearth fetch Qwen/Qwen-Image` downloads it, give that name as the base; a plan needs its \
               name alone",
    hub: &[
        ("Qwen-Image", "Qwen/Qwen-Image"),
        ("qwen_image_bf16", "Qwen/Qwen-Image"),
        ("qwen_image_fp8_e4m3fn", "Qwen/Qwen-Image"),
    ],
    license: ModelLicense {
        id: "apache-2.0",
        name: None,
        summary: "It is the Apache License 2.0, which allows commercial use.",
    },
    config: || qwen_image().into(),
    vae: || QwenImageVaeConfig::published().into(),
    encoders: || vec![EncoderConfig::Qwen25Vl(Qwen25VlConfig::published())],
    schedule: || FlowMatchScheduler::dynamic(0.5, 0.9, 8192).with_terminal(0.02),
};

/// Qwen-Image.
pub(crate) fn qwen_image() -> QwenImageConfig {
    QwenImageConfig {
        patch_size: published_patch(),
        in_channels: 64,
        out_channels: Some(16),
        num_layers: 60,
        num_attention_heads: 24,
        attention_head_dim: 128,
        joint_attention_dim: 3584,
        axes_dims_rope: published_axes(),
        guidance_embeds: false,
        zero_cond_t: false,
        use_additional_t_cond: false,
        use_layer3d_rope: false,
        edit: None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::adapter::name_matches;
    use crate::model::diffusion::Pipeline;
    use crate::model::diffusion::denoiser::DenoiserConfig;
    use crate::model::diffusion::paths::PartPaths;

    /// Counted by diffusers on the meta device.
    #[test]
    fn published_models_have_their_number_of_parameters() {
        let edits = ["Qwen-Image-Edit", "Qwen-Image-Edit-2509", "Qwen-Image-Edit-2511"];
        for name in ["Qwen-Image", "Qwen-Image-2512"].into_iter().chain(edits) {
            let pipeline =
                Pipeline::open_or_published(Path::new(name), &PartPaths::default()).unwrap();
            let tensors = pipeline.transformer.config.tensor_specs().unwrap();
            let n: usize = tensors.iter().map(|want| want.shape.elements()).sum();
            assert_eq!(n, 20_430_401_088, "{name}");
        }
    }

    /// ai-toolkit says that it trains 840 layers.
    #[test]
    fn presets_of_targets_are_those_of_other_trainers() {
        let tensors = DenoiserConfig::from(qwen_image()).tensor_specs().unwrap();
        let layers: Vec<&str> =
            tensors.iter().filter_map(|spec| spec.name.strip_suffix(".weight")).collect();
        for (name, n_layers) in
            [("attention", 480), ("all", 720), ("kohya", 720), ("ai-toolkit", 840)]
        {
            let preset = super::super::FAMILY.target_presets.iter().find(|it| it.name == name);
            let patterns = preset.unwrap().patterns.concat();
            let is_target =
                |layer: &&&str| patterns.iter().any(|pattern| name_matches(pattern, layer));
            assert_eq!(layers.iter().filter(is_target).count(), n_layers, "{name}");
        }
    }
}
