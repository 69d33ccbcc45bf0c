//! The models of this family that are published, by their settings.
//!
//! Taken: `config.json` of each part at huggingface.co/black-forest-labs.

use super::{FluxConfig, published_axes};
use crate::model::diffusion::denoiser;
use crate::model::diffusion::family::{ModelLicense, PublishedPipeline};
use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing};
use crate::model::diffusion::text::EncoderConfig;
use crate::model::encoder::{clip, t5};
use crate::model::vae::KlVaeConfig;

/// FLUX.1 dev; Krea dev; schnell; Kontext dev.
pub const ALL: &[PublishedPipeline] = &[
    DEV,
    PublishedPipeline {
        name: "flux.1-krea-dev",
        hint: "`hearth fetch black-forest-labs/FLUX.1-Krea-dev` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("FLUX.1-Krea-dev", "black-forest-labs/FLUX.1-Krea-dev"),
            ("flux1-krea-dev", "black-forest-labs/FLUX.1-Krea-dev"),
        ],
        ..DEV
    },
    PublishedPipeline {
        name: "flux.1-schnell",
        hint: "`hearth fetch black-forest-labs/FLUX.1-schnell` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("FLUX.1-schnell", "black-forest-labs/FLUX.1-schnell"),
            ("flux1-schnell", "black-forest-labs/FLUX.1-schnell"),
        ],
        license: ModelLicense {
            id: "apache-2.0",
            name: None,
            summary: "It is the Apache License 2.0, which allows commercial use.",
        },
        config: || FluxConfig { guidance_embeds: false, ..flux1_dev() }.into(),
        schedule: || FlowMatchScheduler::fixed(1.0, SigmaSpacing::Reciprocal),
        ..DEV
    },
    PublishedPipeline {
        name: "flux.1-kontext-dev",
        hint: "`hearth fetch black-forest-labs/FLUX.1-Kontext-dev` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("FLUX.1-Kontext-dev", "black-forest-labs/FLUX.1-Kontext-dev"),
            ("flux1-kontext-dev", "black-forest-labs/FLUX.1-Kontext-dev"),
            ("flux1-dev-kontext_fp8_scaled", "black-forest-labs/FLUX.1-Kontext-dev"),
        ],
        config: || FluxConfig { is_kontext: true, ..flux1_dev() }.into(),
        ..DEV
    },
];

const DEV: PublishedPipeline = PublishedPipeline {
    name: "flux.1-dev",
    hint: "`hearth fetch black-forest-labs/FLUX.1-dev` downloads it, give that name as the base; a plan needs its \
               name alone",
    hub: &[
        ("FLUX.1-dev", "black-forest-labs/FLUX.1-dev"),
        ("flux1-dev", "black-forest-labs/FLUX.1-dev"),
    ],
    license: ModelLicense {
        id: "other",
        name: Some("flux-1-dev-non-commercial-license"),
        summary: "It is the FLUX.1 [dev] Non-Commercial License, which allows non-commercial use of the model and of \
                  what is derived from it, as this adapter is.",
    },
    config: || -> denoiser::DenoiserConfig { flux1_dev().into() },
    vae: || KlVaeConfig::published(0.1159, 0.3611).into(),
    encoders: || {
        let [l, _] = clip::ClipConfig::published();
        vec![EncoderConfig::Clip(l.without_projection()), EncoderConfig::T5(t5::T5Config::xxl())]
    },
    schedule: || FlowMatchScheduler::dynamic(0.5, 1.15, 4096),
};

/// FLUX.1 dev.
pub(crate) fn flux1_dev() -> FluxConfig {
    FluxConfig {
        in_channels: 64,
        out_channels: None,
        num_layers: 19,
        num_single_layers: 38,
        num_attention_heads: 24,
        attention_head_dim: 128,
        joint_attention_dim: 4096,
        pooled_projection_dim: 768,
        guidance_embeds: true,
        axes_dims_rope: published_axes(),
        is_kontext: false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::model::adapter::name_matches;
    use crate::model::diffusion::Pipeline;
    use crate::model::diffusion::paths::PartPaths;

    /// Counted by diffusers on the meta device.
    #[test]
    fn published_models_have_their_number_of_parameters() {
        for (name, expected) in [
            ("FLUX.1-dev", 11_901_408_320_usize),
            ("FLUX.1-Krea-dev", 11_901_408_320),
            ("FLUX.1-schnell", 11_891_178_560),
            ("FLUX.1-Kontext-dev", 11_901_408_320),
        ] {
            let pipeline =
                Pipeline::open_or_published(Path::new(name), &PartPaths::default()).unwrap();
            let tensors = pipeline.transformer.config.tensor_specs().unwrap();
            let n: usize = tensors.iter().map(|want| want.shape.elements()).sum();
            assert_eq!(n, expected, "{name}");
        }
        let tensors = denoiser::DenoiserConfig::from(flux1_dev()).tensor_specs().unwrap();
        assert_eq!(tensors.len(), 1160);
    }
    /// Layers of each preset, and the layers of the original checkpoints that hold them: sd-scripts says it trains 304,
    /// ai-toolkit 494.
    #[test]
    fn presets_of_targets_are_those_of_other_trainers() {
        let model =
            Pipeline::open_or_published(Path::new("FLUX.1-dev"), &PartPaths::default()).unwrap();
        let config = &model.transformer.config;
        let tensors = config.tensor_specs().unwrap();
        let layers: Vec<&str> =
            tensors.iter().filter_map(|spec| spec.name.strip_suffix(".weight")).collect();
        for (name, n_layers, n_fused) in [
            ("attention", 19 * 8 + 38 * 3, 19 * 4 + 38),
            ("all", 19 * 12 + 38 * 5, 19 * 8 + 38 * 2),
            ("kohya", 494, 304),
            ("ai-toolkit", 494, 304),
        ] {
            let preset = model.family().target_presets.iter().find(|preset| preset.name == name);
            let patterns = preset.unwrap().patterns.concat();
            let is_target =
                |layer: &&str| patterns.iter().any(|pattern| name_matches(pattern, layer));
            let targets: Vec<&str> = layers.iter().copied().filter(is_target).collect();
            let fused: BTreeSet<String> =
                targets.iter().map(|layer| config.original_module(layer)[0].key.clone()).collect();
            assert_eq!((targets.len(), fused.len()), (n_layers, n_fused), "{name}");
        }
    }
}
