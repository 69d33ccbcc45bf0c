//! The published models of this family, by their configs. Names and shapes of all tensors follow from them; there are
//! no weights, and loading any is an error.
//!
//! Taken: `config.json` of each part at huggingface.co/stabilityai. Compared with diffusers and
//! transformers by `tests/golden/shapes`.

use super::{QkNorm, Sd3Config};
use crate::model::diffusion::denoiser;
use crate::model::diffusion::family::{ModelLicense, PublishedPipeline};
use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing};
use crate::model::diffusion::text::EncoderConfig;
use crate::model::encoder::{clip, t5};
use crate::model::vae::KlVaeConfig;

/// Stable Diffusion 3 medium; 3.5 medium; 3.5 large, and its turbo.
pub const ALL: &[PublishedPipeline] = &[
    PublishedPipeline {
        name: "stable-diffusion-3-medium",
        hint: "`hearth fetch stabilityai/stable-diffusion-3-medium-diffusers` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            (
                "stable-diffusion-3-medium-diffusers",
                "stabilityai/stable-diffusion-3-medium-diffusers",
            ),
            ("sd3_medium", "stabilityai/stable-diffusion-3-medium"),
        ],
        config: || sd3_medium().into(),
        ..COMMON
    },
    PublishedPipeline {
        name: "stable-diffusion-3.5-medium",
        hint: "`hearth fetch stabilityai/stable-diffusion-3.5-medium` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("stable-diffusion-3.5-medium", "stabilityai/stable-diffusion-3.5-medium"),
            ("sd3.5_medium", "stabilityai/stable-diffusion-3.5-medium"),
        ],
        config: || sd35_medium().into(),
        ..COMMON
    },
    PublishedPipeline {
        name: "stable-diffusion-3.5-large",
        hint: "`hearth fetch stabilityai/stable-diffusion-3.5-large` downloads it, give that name as the base; a plan needs its \
               name alone",
        hub: &[
            ("stable-diffusion-3.5-large", "stabilityai/stable-diffusion-3.5-large"),
            ("stable-diffusion-3.5-large-turbo", "stabilityai/stable-diffusion-3.5-large-turbo"),
            ("sd3.5_large", "stabilityai/stable-diffusion-3.5-large"),
        ],
        config: || sd35_large().into(),
        ..COMMON
    },
];

/// What all of them have in common.
const COMMON: PublishedPipeline = PublishedPipeline {
    name: "",
    hint: "",
    hub: &[],
    license: ModelLicense {
        id: "other",
        name: Some("stabilityai-ai-community"),
        summary: "It is the Stability AI Community License, which allows research, non-commercial use, and \
                  commercial use up to a yearly revenue.",
    },
    config: || -> denoiser::DenoiserConfig { sd3_medium().into() },
    vae: || KlVaeConfig::published(0.0609, 1.5305).into(),
    encoders: || {
        let [l, g] = clip::ClipConfig::published();
        vec![EncoderConfig::Clip(l), EncoderConfig::Clip(g), EncoderConfig::T5(t5::T5Config::xxl())]
    },
    schedule: || FlowMatchScheduler::fixed(3.0, SigmaSpacing::Trained),
};

/// Stable Diffusion 3 medium.
pub(crate) fn sd3_medium() -> Sd3Config {
    with_layers(24)
}

fn sd35_medium() -> Sd3Config {
    let dual_attention_layers = (0..13).collect();
    let qk_norm = Some(QkNorm::RmsNorm);
    Sd3Config { pos_embed_max_size: 384, qk_norm, dual_attention_layers, ..with_layers(24) }
}

/// Stable Diffusion 3.5 large.
pub(crate) fn sd35_large() -> Sd3Config {
    Sd3Config { qk_norm: Some(QkNorm::RmsNorm), ..with_layers(38) }
}

/// With so many blocks and heads.
fn with_layers(size: usize) -> Sd3Config {
    Sd3Config {
        in_channels: 16,
        out_channels: Some(16),
        patch_size: 2,
        num_layers: size,
        num_attention_heads: size,
        attention_head_dim: super::HEAD_DIM,
        joint_attention_dim: 4096,
        caption_projection_dim: size * super::HEAD_DIM,
        pooled_projection_dim: 2048,
        pos_embed_max_size: 192,
        sample_size: 128,
        qk_norm: None,
        dual_attention_layers: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    use compute::{Device, DeviceKind, Dtype};
    use weights::Catalog;

    use super::*;
    use crate::model::build::Precision;
    use crate::model::diffusion::Pipeline;
    use crate::model::diffusion::paths::PartPaths;

    /// Tensors of the same shape, in all blocks that have them: `block.*.name [sizes]` to the
    /// indices of the blocks.
    type Shapes = BTreeMap<String, Vec<usize>>;

    /// The shapes that diffusers and transformers build from the published configs.
    fn recorded() -> BTreeMap<String, Shapes> {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/shapes/published.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn shapes(catalog: &Catalog) -> Shapes {
        let mut shapes = Shapes::new();
        for tensor in &catalog.tensors {
            let mut words: Vec<&str> = tensor.name.split('.').collect();
            let parsed = words.iter().map(|word| word.parse::<usize>().ok());
            let block = parsed.enumerate().find_map(|(at, number)| Some((at, number?)));
            if let Some((at, _)) = block {
                words[at] = "*";
            }
            let name = format!("{} {:?}", words.join("."), tensor.shape);
            shapes.entry(name).or_default().extend(block.map(|(_, number)| number));
        }
        for blocks in shapes.values_mut() {
            blocks.sort_unstable();
        }
        shapes
    }

    fn opened(name: &str) -> Pipeline {
        Pipeline::open_or_published(&PathBuf::from("nowhere").join(name), &PartPaths::default())
            .unwrap()
    }

    #[test]
    fn tensors_are_those_that_diffusers_and_transformers_ask_for() {
        let recorded = recorded();
        let compare = |name: &str, catalog: &Catalog| {
            let theirs = &recorded[name];
            let ours = shapes(catalog);
            for (tensor, blocks) in theirs {
                assert_eq!(ours.get(tensor), Some(blocks), "{name}: {tensor}");
            }
            for tensor in ours.keys() {
                assert!(theirs.contains_key(tensor), "{name}: {tensor} is not theirs");
            }
        };
        for model in ALL {
            let pipeline = opened(model.name);
            compare(model.name, &pipeline.transformer.catalog);
            compare("vae", pipeline.vae.catalog());
            let encoders: Vec<_> =
                pipeline.encoders.adapted_components().map(|part| part.catalog).collect();
            for (name, catalog) in ["clip-l", "clip-g", "t5-xxl"].into_iter().zip(encoders) {
                compare(name, catalog);
            }
        }
    }

    #[test]
    fn folders_are_told_by_how_their_names_begin() {
        for (name, expected) in [
            ("stable-diffusion-3-medium", Some("stable-diffusion-3-medium")),
            ("Stable-Diffusion-3-medium-diffusers", Some("stable-diffusion-3-medium")),
            ("models/stable-diffusion-3.5-medium", Some("stable-diffusion-3.5-medium")),
            ("stable-diffusion-3.5-large-turbo", Some("stable-diffusion-3.5-large")),
            ("stable-diffusion-3.5-large/transformer", None),
            ("stable-diffusion-2", None),
            ("my-stable-diffusion-3-medium", None),
            ("..", None),
        ] {
            let found = PublishedPipeline::by_path(Path::new(name)).map(|(_, model)| model.name);
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn there_is_nothing_to_load() {
        let pipeline = opened("stable-diffusion-3.5-medium");
        assert!(pipeline.is_published());
        let load = |device: &Device| {
            let precision = Precision::plain(Dtype::Bf16);
            pipeline.vae.load_encoder(device, precision, &|_| true).map(drop)
        };
        load(&Device::meta(DeviceKind::cpu(1), usize::MAX / 2)).unwrap();
        let said = load(&Device::cpu(1, 1 << 28).unwrap()).unwrap_err().to_string();
        assert!(said.contains("weights are not there"), "{said}");
        assert!(said.ends_with("stable-diffusion-3.5-medium/vae"), "{said}");
        assert!(pipeline.fingerprint().is_err());
    }

    #[test]
    fn a_model_that_is_not_there_says_where_it_is() {
        let refused = |name: &str| {
            let error = Pipeline::open(Path::new(name), &PartPaths::default()).err().unwrap();
            format!("{error}, {}", error.hint())
        };
        let said = refused("nowhere/stable-diffusion-3.5-large");
        assert!(said.contains("no model at nowhere/stable-diffusion-3.5-large"), "{said}");
        assert!(said.contains("`hearth fetch stabilityai/stable-diffusion-3.5-large`"), "{said}");
        let said = refused("nowhere/my-model");
        assert!(said.contains("no model at nowhere/my-model, check the path"), "{said}");
    }
}
