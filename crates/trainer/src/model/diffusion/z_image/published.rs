//! The models of this family that are published, by their settings.
//!
//! Taken: `config.json` of each part at huggingface.co/Tongyi-MAI.

use super::{
    PATCH, ZImageConfig, published_axes, published_epsilon, published_lengths, published_scale,
    published_theta,
};
use crate::model::diffusion::family::{ModelLicense, PublishedPipeline};
use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing};
use crate::model::diffusion::text::EncoderConfig;
use crate::model::encoder::qwen3::Qwen3Config;
use crate::model::vae::KlVaeConfig;

/// Z-Image, and Z-Image Turbo.
pub const ALL: &[PublishedPipeline] = &[
    BASE,
    PublishedPipeline {
        name: "z-image-turbo",
        hint: "`hearth fetch Tongyi-MAI/Z-Image-Turbo` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("Z-Image-Turbo", "Tongyi-MAI/Z-Image-Turbo"),
            ("z_image_turbo_bf16", "Tongyi-MAI/Z-Image-Turbo"),
        ],
        config: || ZImageConfig { is_turbo: true, ..z_image() }.into(),
        schedule: || FlowMatchScheduler::fixed(3.0, SigmaSpacing::Reciprocal),
        ..BASE
    },
];

const BASE: PublishedPipeline = PublishedPipeline {
    name: "z-image",
    hint: "`hearth fetch Tongyi-MAI/Z-Image` downloads it, give that name as the base; a plan needs its \
               name alone",
    hub: &[("Z-Image", "Tongyi-MAI/Z-Image"), ("z_image_bf16", "Tongyi-MAI/Z-Image")],
    license: ModelLicense {
        id: "apache-2.0",
        name: None,
        summary: "It is the Apache License 2.0, which allows commercial use.",
    },
    config: || z_image().into(),
    // The VAE of FLUX.1.
    vae: || KlVaeConfig::published(0.1159, 0.3611).into(),
    encoders: || vec![EncoderConfig::Qwen3(Qwen3Config::published_4b())],
    schedule: || FlowMatchScheduler::fixed(6.0, SigmaSpacing::Reciprocal),
};

/// Z-Image.
pub fn z_image() -> ZImageConfig {
    ZImageConfig {
        all_patch_size: vec![PATCH],
        all_f_patch_size: vec![1],
        in_channels: 16,
        dim: 3840,
        n_layers: 30,
        n_refiner_layers: 2,
        n_heads: 30,
        n_kv_heads: 30,
        norm_eps: published_epsilon(),
        qk_norm: true,
        cap_feat_dim: 2560,
        siglip_feat_dim: None,
        rope_theta: published_theta(),
        t_scale: published_scale(),
        axes_dims: published_axes(),
        axes_lens: published_lengths(),
        is_turbo: false,
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
        for (name, title, steps) in
            [("Z-Image", "a Z-Image", 50), ("Z-Image-Turbo", "a Z-Image Turbo", 8)]
        {
            let pipeline =
                Pipeline::open_or_published(Path::new(name), &PartPaths::default()).unwrap();
            let tensors = pipeline.transformer.config.tensor_specs().unwrap();
            let n: usize = tensors.iter().map(|want| want.shape.elements()).sum();
            assert_eq!((n, tensors.len()), (6_154_908_736, 521), "{name}");
            assert_eq!(pipeline.family().title, title);
            assert_eq!(pipeline.family().sampling.steps, steps);
        }
    }

    /// Of 30 layers, two blocks of images and two of prompts. musubi-tuner and ai-toolkit train the layers alone.
    #[test]
    fn presets_of_targets_are_those_of_other_trainers() {
        let tensors = DenoiserConfig::from(z_image()).tensor_specs().unwrap();
        let layers: Vec<&str> =
            tensors.iter().filter_map(|spec| spec.name.strip_suffix(".weight")).collect();
        for (name, n_layers) in
            [("attention", 34 * 4), ("all", 34 * 7), ("kohya", 30 * 7), ("ai-toolkit", 30 * 8)]
        {
            let preset = super::super::FAMILY.target_presets.iter().find(|it| it.name == name);
            let patterns = preset.unwrap().patterns.concat();
            let is_target =
                |layer: &&&str| patterns.iter().any(|pattern| name_matches(pattern, layer));
            assert_eq!(layers.iter().filter(is_target).count(), n_layers, "{name}");
        }
    }
}
