//! The models of this family that are published, by their settings.
//!
//! Taken: `config.json` of each part at huggingface.co/black-forest-labs.

use super::{Flux2Config, published_axes, published_epsilon, published_theta};
use crate::model::diffusion::family::{ModelLicense, PublishedPipeline};
use crate::model::diffusion::scheduler::FlowMatchScheduler;
use crate::model::diffusion::text::EncoderConfig;
use crate::model::encoder::qwen3::{Qwen3Config, Qwen3Output};
use crate::model::vae::Flux2VaeConfig;

/// FLUX.2 klein: base, which is trained, and distilled; each of 4 and of 9 billion parameters.
pub const ALL: &[PublishedPipeline] = &[
    BASE_4B,
    PublishedPipeline {
        name: "flux.2-klein-base-9b",
        hint: "`hearth fetch black-forest-labs/FLUX.2-klein-base-9B` downloads it, give that name as the base; a plan \
               needs its name alone",
        hub: &[
            ("FLUX.2-klein-base-9B", "black-forest-labs/FLUX.2-klein-base-9B"),
            ("flux-2-klein-base-9b", "black-forest-labs/FLUX.2-klein-base-9B"),
        ],
        config: || klein_9b(false).into(),
        ..OF_9B
    },
    PublishedPipeline {
        name: "flux.2-klein-4b",
        hint: "`hearth fetch black-forest-labs/FLUX.2-klein-4B` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-4B"),
            ("flux-2-klein-4b", "black-forest-labs/FLUX.2-klein-4B"),
        ],
        config: || klein_4b(true).into(),
        ..BASE_4B
    },
    PublishedPipeline {
        name: "flux.2-klein-9b",
        hint: "`hearth fetch black-forest-labs/FLUX.2-klein-9B` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("FLUX.2-klein-9B", "black-forest-labs/FLUX.2-klein-9B"),
            ("flux-2-klein-9b", "black-forest-labs/FLUX.2-klein-9B"),
        ],
        config: || klein_9b(true).into(),
        ..OF_9B
    },
];

const BASE_4B: PublishedPipeline = PublishedPipeline {
    name: "flux.2-klein-base-4b",
    hint: "`hearth fetch black-forest-labs/FLUX.2-klein-base-4B` downloads it, give that name as the base; a plan needs \
           its name alone",
    hub: &[
        ("FLUX.2-klein-base-4B", "black-forest-labs/FLUX.2-klein-base-4B"),
        ("flux-2-klein-base-4b", "black-forest-labs/FLUX.2-klein-base-4B"),
    ],
    license: ModelLicense {
        id: "apache-2.0",
        name: None,
        summary: "It is the Apache License 2.0, which allows commercial use.",
    },
    config: || klein_4b(false).into(),
    vae: || Flux2VaeConfig::published().into(),
    encoders: || vec![encoder(Qwen3Config::published_4b())],
    schedule: FlowMatchScheduler::empirical,
};

const OF_9B: PublishedPipeline = PublishedPipeline {
    license: ModelLicense {
        id: "other",
        name: Some("flux-non-commercial-license"),
        summary: "It is the FLUX Non-Commercial License, which allows non-commercial use of the model and of what is \
                  derived from it, as this adapter is.",
    },
    encoders: || vec![encoder(Qwen3Config::published_8b())],
    ..BASE_4B
};

fn encoder(config: Qwen3Config) -> EncoderConfig {
    EncoderConfig::Qwen3(config.with_output(Qwen3Output::Three))
}

/// klein of 4 billion parameters.
pub fn klein_4b(is_distilled: bool) -> Flux2Config {
    Flux2Config {
        patch_size: 1,
        in_channels: 128,
        out_channels: None,
        num_layers: 5,
        num_single_layers: 20,
        num_attention_heads: 24,
        attention_head_dim: 128,
        joint_attention_dim: 3 * 2560,
        timestep_guidance_channels: 256,
        mlp_ratio: 3.0,
        axes_dims_rope: published_axes(128),
        rope_theta: published_theta(),
        eps: published_epsilon(),
        guidance_embeds: false,
        is_distilled: Some(is_distilled),
    }
}

/// klein of 9 billion.
pub fn klein_9b(is_distilled: bool) -> Flux2Config {
    Flux2Config {
        num_layers: 8,
        num_single_layers: 24,
        num_attention_heads: 32,
        joint_attention_dim: 3 * 4096,
        ..klein_4b(is_distilled)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::model::adapter::name_matches;
    use crate::model::diffusion::Pipeline;
    use crate::model::diffusion::denoiser::DenoiserConfig;
    use crate::model::diffusion::paths::PartPaths;

    /// Counted by diffusers on the meta device.
    #[test]
    fn published_models_have_their_number_of_parameters() {
        let (of_4b, of_9b) = ((3_875_544_576, 169), (9_078_581_248, 233));
        for (name, title, expected, steps, license) in [
            ("FLUX.2-klein-base-4B", "a FLUX.2 klein base 4B", of_4b, 50, "apache-2.0"),
            ("FLUX.2-klein-base-9B", "a FLUX.2 klein base 9B", of_9b, 50, "other"),
            ("FLUX.2-klein-4B", "a FLUX.2 klein 4B", of_4b, 4, "apache-2.0"),
            ("FLUX.2-klein-9B", "a FLUX.2 klein 9B", of_9b, 4, "other"),
        ] {
            let pipeline =
                Pipeline::open_or_published(Path::new(name), &PartPaths::default()).unwrap();
            let tensors = pipeline.transformer.config.tensor_specs().unwrap();
            let n: usize = tensors.iter().map(|want| want.shape.elements()).sum();
            assert_eq!((n, tensors.len()), expected, "{name}");
            let family = pipeline.family();
            assert_eq!((family.title, family.sampling.steps), (title, steps));
            assert_eq!(family.distilled.is_some(), steps == 4, "{name}");
            assert_eq!(family.published_model().license.id, license);
            assert_eq!(pipeline.pixels_per_token(), 16);
        }
    }

    /// Layers of each preset, and the layers of the original checkpoints that hold them.
    #[test]
    fn presets_of_targets_are_those_of_other_trainers() {
        let config = DenoiserConfig::from(klein_4b(false));
        let tensors = config.tensor_specs().unwrap();
        let layers: Vec<&str> =
            tensors.iter().filter_map(|spec| spec.name.strip_suffix(".weight")).collect();
        for (name, n_layers, n_fused) in [
            ("attention", 5 * 8 + 20 * 2, 5 * 4 + 20 * 2),
            ("all", 5 * 12 + 20 * 2, 5 * 8 + 20 * 2),
            ("kohya", 5 * 12 + 20 * 2, 5 * 8 + 20 * 2),
            ("ai-toolkit", 5 * 12 + 20 * 2, 5 * 8 + 20 * 2),
        ] {
            let preset = super::super::FAMILY.target_presets.iter().find(|it| it.name == name);
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
