//! A model folder for benchmarks of whole jobs: SD3's autoencoder and a transformer of a chosen size, both with
//! random weights, with the text encoders, tokenizers and scheduler of another folder. diffusers loads it like
//! any other.
//!
//! The weights of `diffusion::init` would not do: their blocks are zero-initialised, and an adapter on such a block
//! gets no gradient.

use std::collections::BTreeMap;
use std::path::Path;

use compute::RandomSequence;
use serde_json::{Value, json};
use weights::FileDtype;

use super::{MID, SEED, TINY, autoencoder, sd3_config};
use crate::error::Result;
use crate::export::model::copy_rest;
use crate::model::build::{INIT_STD, TensorRole, TensorSpec, tensor_specs};
use crate::model::config;
use crate::model::diffusion::sd3::{self, Sd3};
use crate::model::files::save;
use crate::model::vae::{KlVaeConfig, kl};
use crate::report::write_text;

/// How large the transformer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchModelSize {
    /// That of [`super::BenchCase::Sd3Tiny`].
    Tiny,
    /// That of [`super::BenchCase::Sd3Mid`].
    Mid,
}

/// As diffusers calls the file of a part.
const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

/// Writes the folder. Prompts are as wide as the encoders of `rest` make them.
pub fn write(rest: &Path, size: BenchModelSize, out: &Path) -> Result<()> {
    copy_rest(rest, out)?;
    let theirs: sd3::Sd3Config = config::read(&rest.join("transformer/config.json"))?;
    let size = match size {
        BenchModelSize::Tiny => TINY,
        BenchModelSize::Mid => MID,
    };
    let transformer = sd3::Sd3Config {
        joint_attention_dim: theirs.joint_attention_dim,
        pooled_projection_dim: theirs.pooled_projection_dim,
        ..sd3_config(size)
    };
    let folder = out.join("transformer");
    write_text(&folder.join("config.json"), &transformer_settings(&transformer).to_string())?;
    let all = tensor_specs(|build| Sd3::new(&transformer, build))?;
    write_random(&folder.join(WEIGHTS), &all, FileDtype::F32)?;

    let vae = autoencoder();
    let folder = out.join("vae");
    write_text(&folder.join("config.json"), &vae_settings(&vae).to_string())?;
    let mut all = tensor_specs(|build| kl::encoder(&vae, build))?;
    all.extend(tensor_specs(|build| kl::decoder(&vae, build))?);
    write_random(&folder.join(WEIGHTS), &all, FileDtype::Bf16)
}

fn transformer_settings(config: &sd3::Sd3Config) -> Value {
    json!({
        "_class_name": "SD3Transformer2DModel",
        "attention_head_dim": config.attention_head_dim,
        "caption_projection_dim": config.caption_projection_dim,
        "in_channels": config.in_channels,
        "joint_attention_dim": config.joint_attention_dim,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_layers,
        "out_channels": config.out_channels(),
        "patch_size": config.patch_size,
        "pooled_projection_dim": config.pooled_projection_dim,
        "pos_embed_max_size": config.pos_embed_max_size,
        "sample_size": config.sample_size,
    })
}

fn vae_settings(config: &KlVaeConfig) -> Value {
    let levels = config.block_out_channels.len();
    json!({
        "_class_name": "AutoencoderKL",
        "block_out_channels": config.block_out_channels,
        "down_block_types": vec!["DownEncoderBlock2D"; levels],
        "in_channels": config.in_channels,
        "latent_channels": config.latent_channels,
        "layers_per_block": config.layers_per_block,
        "norm_num_groups": config.norm_num_groups,
        "out_channels": config.out_channels,
        "scaling_factor": config.scaling_factor,
        "shift_factor": config.shift_factor,
        "up_block_types": vec!["UpDecoderBlock2D"; levels],
        "use_post_quant_conv": config.use_post_quant_conv,
        "use_quant_conv": config.use_quant_conv,
    })
}

/// Writes random values for these tensors, as `build::RandomWeights` has them in memory.
fn write_random(path: &Path, all: &[TensorSpec], dtype: FileDtype) -> Result<()> {
    // Transformers requires it in every file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    save(path, &metadata, all, dtype, &mut |at, want| {
        let random = RandomSequence::new(SEED, at as u64);
        let is_norm = want.role == TensorRole::Vector && want.name.ends_with("weight");
        let value = |index| if is_norm { 1.0 } else { INIT_STD * random.normal(index) };
        Ok((0..want.shape.elements()).map(value).collect())
    })
}

#[cfg(test)]
mod tests {
    use weights::Catalog;

    use super::*;

    #[test]
    fn settings_are_read_as_they_were_meant() {
        let transformer = sd3_config(TINY);
        let read: sd3::Sd3Config =
            serde_json::from_value(transformer_settings(&transformer)).unwrap();
        assert_eq!(read, transformer);
        let vae = autoencoder();
        let read: KlVaeConfig = serde_json::from_value(vae_settings(&vae)).unwrap();
        assert!(KlVaeConfig::check(&read).is_ok());
        let names =
            |config: &KlVaeConfig| tensor_specs(|build| kl::decoder(config, build)).unwrap();
        assert_eq!(names(&read), names(&vae));
    }

    #[test]
    fn no_tensor_is_zero() {
        let small = sd3::Sd3Config { pos_embed_max_size: 4, ..sd3_config(TINY) };
        let small = sd3::Sd3Config { joint_attention_dim: 32, pooled_projection_dim: 16, ..small };
        let all = tensor_specs(|build| Sd3::new(&small, build)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(WEIGHTS);
        write_random(&path, &all, FileDtype::F32).unwrap();
        let catalog = Catalog::open(&path).unwrap();
        assert_eq!(catalog.tensors.len(), all.len());
        for tensor in &catalog.tensors {
            let values = weights::load::load_f32(&catalog, tensor, 0..tensor.numel()).unwrap();
            assert!(values.iter().any(|value| *value != 0.0), "{}", tensor.name);
        }
    }
}
