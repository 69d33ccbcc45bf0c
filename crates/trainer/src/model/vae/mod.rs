//! Autoencoders between images or clips and latents: convolutions that down- or upsample the image a few times, one
//! attention in the middle. No gradients flow through them. A folder for each kind has its config, its layers by name and
//! shape, and their names in files; `forward.rs` computes all kinds.

pub mod flux2;
mod forward;
pub mod hunyuan_video;
pub mod kl;
pub mod qwen_image;
mod tiles;

use std::path::Path;

use serde::Deserialize;
use weights::Catalog;

pub use flux2::Flux2VaeConfig;
pub use forward::{VaeDecoder, VaeEncoder};
pub use hunyuan_video::HunyuanVideoVaeConfig;
pub use kl::KlVaeConfig;
pub use qwen_image::QwenImageVaeConfig;
pub use tiles::{LatentView, Tiling, VaeScale, decode_tiled, encode_tiled};

use super::build::{TensorSpec, tensor_specs};
use super::config::{Unsupported, read_checked};
use super::diffusion::vae::LatentStatistics;
use super::files::CheckpointLayout;
use crate::error::Result;

/// Prefixes in checkpoints that hold other models too: Stability's, and ComfyUI's.
const PREFIXES: [&str; 2] = ["first_stage_model.", "vae."];

/// What `vae/config.json` says, by its class.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "_class_name")]
pub enum VaeConfig {
    /// SD3, FLUX.
    #[serde(rename = "AutoencoderKL")]
    Kl(KlVaeConfig),
    /// Qwen-Image.
    #[serde(rename = "AutoencoderKLQwenImage")]
    QwenImage(QwenImageVaeConfig),
    /// HunyuanVideo, Kandinsky 5: of clips.
    #[serde(rename = "AutoencoderKLHunyuanVideo")]
    HunyuanVideo(HunyuanVideoVaeConfig),
    /// FLUX.2.
    #[serde(rename = "AutoencoderKLFlux2")]
    Flux2(Flux2VaeConfig),
}

impl VaeConfig {
    /// The classes of all kinds.
    pub const CLASSES: [&str; 4] = [
        "AutoencoderKL",
        "AutoencoderKLQwenImage",
        "AutoencoderKLHunyuanVideo",
        "AutoencoderKLFlux2",
    ];

    /// Reads `vae/config.json`.
    pub fn read(path: &Path) -> Result<Self> {
        read_checked(path, Self::check)
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        match self {
            Self::Kl(config) => config.check(),
            Self::QwenImage(config) => config.check(),
            Self::HunyuanVideo(config) => config.check(),
            Self::Flux2(config) => config.check(),
        }
    }

    /// Infers the config of a file in the original layout, whose names have this prefix, from its shapes, and from
    /// this config what they do not tell.
    pub fn infer(&self, catalog: &Catalog, prefix: &str) -> Option<Self> {
        match self {
            Self::Kl(like) => kl::names::infer(catalog, prefix, like).map(Self::Kl),
            Self::QwenImage(like) => {
                qwen_image::names::infer(catalog, prefix, like).map(Self::QwenImage)
            }
            Self::HunyuanVideo(like) => {
                hunyuan_video::names::infer(catalog, prefix, like).map(Self::HunyuanVideo)
            }
            Self::Flux2(like) => flux2::names::infer(catalog, prefix, like).map(Self::Flux2),
        }
    }

    /// The prefix of names in a file of the original layout; `None` if it holds no VAE of this kind in that layout.
    pub fn original_prefix(&self, catalog: &Catalog) -> Option<&'static str> {
        match self {
            Self::Kl(_) => kl::names::prefix(catalog),
            Self::QwenImage(_) => qwen_image::names::prefix(catalog),
            Self::HunyuanVideo(_) => hunyuan_video::names::prefix(catalog),
            Self::Flux2(_) => flux2::names::prefix(catalog),
        }
    }

    /// How a file names its tensors: in the original layout if names have a prefix there, else as diffusers does. The
    /// encoder or the decoder is loaded at a time.
    pub fn layout<'a>(
        &self,
        catalog: &'a Catalog,
        original: Option<&'static str>,
    ) -> CheckpointLayout<'a> {
        match (self, original) {
            (Self::Kl(config), Some(prefix)) => kl::names::original(config, prefix),
            (Self::HunyuanVideo(config), Some(prefix)) => {
                hunyuan_video::names::original(config, catalog, prefix)
            }
            (Self::Kl(_) | Self::HunyuanVideo(_), None) => kl::names::diffusers(catalog),
            (Self::QwenImage(config), Some(prefix)) => {
                qwen_image::names::original(config, catalog, prefix)
            }
            (Self::QwenImage(_), None) => qwen_image::names::diffusers(catalog),
            (Self::Flux2(config), Some(prefix)) => flux2::names::original(config, catalog, prefix),
            (Self::Flux2(_), None) => flux2::names::diffusers(catalog),
        }
    }

    /// The tensors of a file that diffusers saved.
    pub fn stored_tensors(&self) -> Result<Vec<TensorSpec>> {
        let mut tensors = tensor_specs(|build| VaeEncoder::new(self, build))?;
        tensors.extend(tensor_specs(|build| VaeDecoder::new(self, build))?);
        Ok(match self {
            Self::Kl(_) | Self::HunyuanVideo(_) => tensors,
            Self::Flux2(config) => [tensors, config.statistics_specs()].concat(),
            Self::QwenImage(config) => qwen_image::names::stored(config, &tensors),
        })
    }

    /// Channels of a latent.
    pub fn latent_channels(&self) -> usize {
        match self {
            Self::Kl(config) => config.latent_channels,
            Self::QwenImage(config) => config.z_dim,
            Self::HunyuanVideo(config) => config.latent_channels,
            Self::Flux2(config) => config.latent_channels,
        }
    }

    /// Image pixels per latent pixel, along a side.
    pub fn vae_scale_factor(&self) -> usize {
        match self {
            Self::Kl(config) => config.vae_scale_factor(),
            Self::QwenImage(config) => config.vae_scale_factor(),
            Self::HunyuanVideo(config) => config.spatial_compression_ratio,
            Self::Flux2(config) => config.layers().vae_scale_factor(),
        }
    }

    /// Frames of a clip per latent frame after the first; 1 of a VAE of images.
    pub fn temporal_scale_factor(&self) -> usize {
        match self {
            Self::Kl(_) | Self::QwenImage(_) | Self::Flux2(_) => 1,
            Self::HunyuanVideo(config) => config.temporal_compression_ratio,
        }
    }

    /// How latents are scaled for models, as far as the settings say it.
    pub fn statistics(&self) -> LatentStatistics {
        match self {
            Self::Kl(config) => config.statistics(),
            Self::QwenImage(config) => config.statistics(),
            Self::HunyuanVideo(config) => config.statistics(),
            Self::Flux2(config) => config.neutral_statistics(),
        }
    }

    /// The same of a model's files, which have a prefix before names of the original layout.
    pub fn stored_statistics(
        &self,
        catalog: &Catalog,
        original: Option<&str>,
    ) -> Result<LatentStatistics> {
        match self {
            Self::Flux2(config) => config.stored_statistics(catalog, original.unwrap_or_default()),
            _ => Ok(self.statistics()),
        }
    }

    /// Names under which files of the original layout are shared, for messages.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Kl(_) => "give ae.safetensors, or the folder vae of a diffusers model",
            Self::QwenImage(_) => {
                "give qwen_image_vae.safetensors, or the folder vae of a diffusers model"
            }
            Self::HunyuanVideo(_) => {
                "give hunyuan_video_vae_bf16.safetensors, or the folder vae of a diffusers model"
            }
            Self::Flux2(_) => "give flux2-vae.safetensors, or the folder vae of a diffusers model",
        }
    }
}

impl From<KlVaeConfig> for VaeConfig {
    fn from(config: KlVaeConfig) -> Self {
        Self::Kl(config)
    }
}

impl From<QwenImageVaeConfig> for VaeConfig {
    fn from(config: QwenImageVaeConfig) -> Self {
        Self::QwenImage(config)
    }
}

impl From<HunyuanVideoVaeConfig> for VaeConfig {
    fn from(config: HunyuanVideoVaeConfig) -> Self {
        Self::HunyuanVideo(config)
    }
}

impl From<Flux2VaeConfig> for VaeConfig {
    fn from(config: Flux2VaeConfig) -> Self {
        Self::Flux2(config)
    }
}
