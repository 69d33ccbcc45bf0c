//! The models of this family that are published, by their settings.
//!
//! Taken: `config.json` of each part at huggingface.co/kandinskylab.

use super::{Distillation, Kandinsky5Config, Kandinsky5Task, REGULAR, published_patch};
use crate::model::diffusion::family::{ModelLicense, PublishedPipeline};
use crate::model::diffusion::implementation::Implementation;
use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing};
use crate::model::diffusion::text::EncoderConfig;
use crate::model::encoder::clip::ClipConfig;
use crate::model::encoder::qwen25vl::Qwen25VlConfig;
use crate::model::vae::KlVaeConfig;

/// Kandinsky 5.0 for images.
pub const ALL: &[PublishedPipeline] = &[IMAGE_LITE];

const IMAGE_LITE: PublishedPipeline = PublishedPipeline {
    name: "kandinsky-5.0-t2i-lite",
    hint: "download huggingface.co/kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers to that folder; a plan needs its \
           name alone",
    hub: &[
        (
            "Kandinsky-5.0-T2I-Lite-sft-Diffusers",
            "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
        ),
        (
            "Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
            "kandinskylab/Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
        ),
        ("kandinsky5lite_t2i", "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"),
    ],
    license: ModelLicense {
        id: "mit",
        name: None,
        summary: "It is the MIT License, which allows commercial use.",
    },
    config: || image_lite().into(),
    vae: || KlVaeConfig::published(0.1159, 0.3611).into(),
    encoders: || {
        let [clip, _] = ClipConfig::published();
        vec![
            EncoderConfig::Clip(clip.without_projection()),
            EncoderConfig::Qwen25Vl(Qwen25VlConfig::published()),
        ]
    },
    // Taken: the authors' sampler.
    schedule: || FlowMatchScheduler::fixed(3.0, SigmaSpacing::Reciprocal),
};

/// Kandinsky 5.0 T2I Lite.
pub(super) fn image_lite() -> Kandinsky5Config {
    Kandinsky5Config {
        in_visual_dim: 16,
        out_visual_dim: 16,
        in_text_dim: 3584,
        in_text_dim2: 768,
        time_dim: 512,
        patch_size: published_patch(),
        model_dim: 2560,
        ff_dim: 10_240,
        num_text_blocks: 2,
        num_visual_blocks: 50,
        axes_dims: [32, 48, 48],
        visual_cond: false,
        attention_type: REGULAR.into(),
        task: Some(Kandinsky5Task::Image),
        distillation: Distillation::None,
        implementation: Implementation::Original,
    }
}

#[cfg(test)]
/// Kandinsky 5.0 T2V Lite for 5 s.
pub(super) fn video_lite() -> Kandinsky5Config {
    Kandinsky5Config {
        model_dim: 1792,
        ff_dim: 7168,
        num_visual_blocks: 32,
        axes_dims: [16, 24, 24],
        visual_cond: true,
        task: Some(Kandinsky5Task::Video),
        ..image_lite()
    }
}

#[cfg(test)]
/// Kandinsky 5.0 T2V Pro for 5 s.
pub(super) fn video_pro() -> Kandinsky5Config {
    Kandinsky5Config {
        time_dim: 1024,
        model_dim: 4096,
        ff_dim: 16_384,
        num_text_blocks: 4,
        num_visual_blocks: 60,
        axes_dims: [32, 48, 48],
        ..video_lite()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::adapter::name_matches;
    use crate::model::diffusion::denoiser::DenoiserConfig;

    /// Counted by diffusers on the meta device.
    #[test]
    fn published_models_have_their_number_of_parameters() {
        for (config, expected) in [
            (image_lite(), 6_022_080_576_usize),
            (video_lite(), 2_007_702_848),
            (video_pro(), 19_311_325_248),
        ] {
            let tensors = DenoiserConfig::from(config).tensor_specs().unwrap();
            let n: usize = tensors.iter().map(|want| want.shape.elements()).sum();
            assert_eq!(n, expected);
        }
    }

    /// Layers of each preset in T2I Lite: two text blocks, fifty of images.
    #[test]
    fn presets_of_targets_are_those_of_other_trainers() {
        let tensors = DenoiserConfig::from(image_lite()).tensor_specs().unwrap();
        let layers: Vec<&str> =
            tensors.iter().filter_map(|spec| spec.name.strip_suffix(".weight")).collect();
        for (name, n_layers) in [
            ("attention", 2 * 4 + 50 * 8),
            ("all", 2 * 6 + 50 * 10),
            ("kohya", 2 * 6 + 50 * 10),
            ("simpletuner", 2 * 3 + 50 * 6),
        ] {
            let preset = super::super::FAMILY.target_presets.iter().find(|it| it.name == name);
            let patterns = preset.unwrap().patterns.concat();
            let is_target =
                |layer: &&&str| patterns.iter().any(|pattern| name_matches(pattern, layer));
            assert_eq!(layers.iter().filter(is_target).count(), n_layers, "{name}");
        }
    }
}
