//! The models of this family that are published, by their settings: a plan can be made for a model
//! that nobody has downloaded yet. Names and shapes of all tensors follow from the settings, by the
//! code that asks files for them; there are no numbers, and loading any is an error.
//!
//! Taken: `config.json` of each part at huggingface.co/stabilityai. Held against diffusers and
//! transformers by `tests/golden/shapes`.

use std::path::Path;

use super::pipeline::{Part, Pipeline, check_fit};
use super::prompts::TextEncoders;
use super::{Config, QkNorm, Sd3};
use crate::error::Result;
use crate::model::build::wants;
use crate::model::encoder::{clip, t5};
use crate::model::vae::{self, Decoder, Encoder};
use crate::sample::schedule;

/// A published model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// Stable Diffusion 3 medium.
    Sd3Medium,
    /// Stable Diffusion 3.5 medium.
    Sd35Medium,
    /// Stable Diffusion 3.5 large, and its turbo.
    Sd35Large,
}

impl Published {
    /// The one that a folder is called after: its name begins with the model's, in any case.
    pub fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_string_lossy().to_lowercase();
        let all = [Self::Sd3Medium, Self::Sd35Medium, Self::Sd35Large];
        all.into_iter().find(|model| name.starts_with(model.name()))
    }

    /// As its folder is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sd3Medium => "stable-diffusion-3-medium",
            Self::Sd35Medium => "stable-diffusion-3.5-medium",
            Self::Sd35Large => "stable-diffusion-3.5-large",
        }
    }

    /// How to come by it.
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Sd3Medium => {
                "download huggingface.co/stabilityai/stable-diffusion-3-medium-diffusers to that \
                 folder; a plan needs its name alone"
            }
            Self::Sd35Medium => {
                "download huggingface.co/stabilityai/stable-diffusion-3.5-medium to that folder; a \
                 plan needs its name alone"
            }
            Self::Sd35Large => {
                "download huggingface.co/stabilityai/stable-diffusion-3.5-large to that folder; a \
                 plan needs its name alone"
            }
        }
    }

    /// What `transformer/config.json` says.
    pub(crate) fn transformer(self) -> Config {
        // Blocks and heads, positions along a side, blocks with a second attention.
        let (size, pos_embed_max_size, n_dual) = match self {
            Self::Sd3Medium => (24, 192, 0),
            Self::Sd35Medium => (24, 384, 13),
            Self::Sd35Large => (38, 192, 0),
        };
        Config {
            in_channels: 16,
            out_channels: Some(16),
            patch_size: 2,
            num_layers: size,
            num_attention_heads: size,
            attention_head_dim: 64,
            joint_attention_dim: 4096,
            caption_projection_dim: size * 64,
            pooled_projection_dim: 2048,
            pos_embed_max_size,
            sample_size: 128,
            qk_norm: (self != Self::Sd3Medium).then_some(QkNorm::RmsNorm),
            dual_attention_layers: (0..n_dual).collect(),
        }
    }

    /// The model as far as it is known without its files, as if it lay at `path`.
    pub fn open(self, path: &Path) -> Result<Pipeline> {
        let config = self.transformer();
        let tensors = wants(|build| Sd3::new(&config, build))?;
        let transformer = Part::hollow(&path.join("transformer"), config, tensors);
        let config = vae::Config::published(0.0609, 1.5305);
        let mut tensors = wants(|build| Encoder::new(&config, build))?;
        tensors.extend(wants(|build| Decoder::new(&config, build))?);
        let vae = Part::hollow(&path.join("vae"), config, tensors);
        check_fit(path, &transformer, &vae)?;
        let (clips, t5) = (clip::Config::published(), t5::Config::xxl());
        let encoders = TextEncoders::hollow(path, &transformer.config, clips, t5)?;
        Ok(Pipeline::new(path, (transformer, vae), encoders, schedule::Config::published()))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    use compute::{Device, Dtype, Kind};
    use weights::Catalog;

    use super::*;
    use crate::model::build::Precision;

    /// Tensors of the same shape, in all blocks that have them: `block.*.name [sizes]` to the
    /// numbers of the blocks.
    type Shapes = BTreeMap<String, Vec<usize>>;

    /// What other programs make of the published settings.
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
        Pipeline::open_or_published(&PathBuf::from("nowhere").join(name), None).unwrap()
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
        for model in [Published::Sd3Medium, Published::Sd35Medium, Published::Sd35Large] {
            let pipeline = opened(model.name());
            compare(model.name(), &pipeline.transformer.catalog);
            compare("vae", &pipeline.vae.catalog);
            let encoders: Vec<_> = pipeline.encoders.beside().map(|part| part.catalog).collect();
            for (name, catalog) in ["clip-l", "clip-g", "t5-xxl"].into_iter().zip(encoders) {
                compare(name, catalog);
            }
        }
    }

    #[test]
    fn folders_are_told_by_how_their_names_begin() {
        for (name, expected) in [
            ("stable-diffusion-3-medium", Some(Published::Sd3Medium)),
            ("Stable-Diffusion-3-medium-diffusers", Some(Published::Sd3Medium)),
            ("models/stable-diffusion-3.5-medium", Some(Published::Sd35Medium)),
            ("stable-diffusion-3.5-large-turbo", Some(Published::Sd35Large)),
            ("stable-diffusion-3.5-large/transformer", None),
            ("stable-diffusion-2", None),
            ("my-stable-diffusion-3-medium", None),
            ("..", None),
        ] {
            assert_eq!(Published::of(Path::new(name)), expected, "{name}");
        }
    }

    #[test]
    fn there_is_nothing_to_load() {
        let pipeline = opened("stable-diffusion-3.5-medium");
        assert!(pipeline.is_published());
        let load = |device: &Device| {
            let precision = Precision::plain(Dtype::Bf16);
            pipeline.load_encoder(device, precision, &|_| true).map(drop)
        };
        load(&Device::meta(Kind::cpu(1), usize::MAX / 2)).unwrap();
        let said = load(&Device::cpu(1, 1 << 28).unwrap()).unwrap_err().to_string();
        assert!(said.contains("weights are not there"), "{said}");
        assert!(said.ends_with("stable-diffusion-3.5-medium/vae"), "{said}");
        assert!(pipeline.fingerprint().is_err());
    }

    #[test]
    fn a_model_that_is_not_there_says_where_it_is() {
        let refused = |name: &str| {
            let error = Pipeline::open(Path::new(name), None).err().unwrap();
            format!("{error}, {}", error.hint())
        };
        let said = refused("nowhere/stable-diffusion-3.5-large");
        assert!(said.contains("no model at nowhere/stable-diffusion-3.5-large"), "{said}");
        assert!(said.contains("stabilityai/stable-diffusion-3.5-large to that folder"), "{said}");
        let said = refused("nowhere/my-model");
        assert!(said.contains("no model at nowhere/my-model, check the path"), "{said}");
    }
}
