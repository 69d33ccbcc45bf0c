//! Stable Diffusion 3 and 3.5: one transformer over image patches and prompt tokens, each stream
//! with weights of its own, that meet in attention (Esser et al., "Scaling Rectified Flow
//! Transformers for High-Resolution Image Synthesis", arXiv 2403.03206). As diffusers'
//! `SD3Transformer2DModel` computes it.

mod forward;
pub mod initial;
pub mod names;
pub mod pipeline;
pub mod prompts;
pub mod published;
mod words;

use serde::Deserialize;

pub use forward::{Input, Sd3};

use crate::model::config::Unsupported;

/// What `transformer/config.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Config {
    /// Channels of a latent.
    pub in_channels: usize,
    /// Channels that are predicted.
    pub out_channels: Option<usize>,
    /// Pixels of a latent along a token's side.
    pub patch_size: usize,
    /// Blocks.
    pub num_layers: usize,
    /// Heads of every attention.
    pub num_attention_heads: usize,
    /// Width of a head.
    pub attention_head_dim: usize,
    /// Width of a prompt token.
    pub joint_attention_dim: usize,
    /// Width of prompt tokens inside; the same as that of patches.
    pub caption_projection_dim: usize,
    /// Width of the vector that stands for the whole prompt.
    pub pooled_projection_dim: usize,
    /// Tokens along a side of the table of positions.
    pub pos_embed_max_size: usize,
    /// Side of the latents that the model is made for.
    #[serde(default = "published_sample_size")]
    pub sample_size: usize,
    /// Whether queries and keys are normed.
    #[serde(default)]
    pub qk_norm: Option<QkNorm>,
    /// Blocks in which patches also attend to themselves alone.
    #[serde(default)]
    pub dual_attention_layers: Vec<usize>,
}

/// Taken: the default of diffusers' `SD3Transformer2DModel`.
fn published_sample_size() -> usize {
    128
}

/// How queries and keys are normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// By their root mean square.
    RmsNorm,
}

impl Config {
    /// Width of tokens inside.
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Channels that are predicted.
    pub fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }

    /// That all of it can be computed.
    pub fn check(&self) -> Result<(), Unsupported> {
        Unsupported::unless(
            self.caption_projection_dim == self.width(),
            format!(
                "caption_projection_dim {} is not {} heads of {}",
                self.caption_projection_dim, self.num_attention_heads, self.attention_head_dim
            ),
        )?;
        let sizes = [self.patch_size, self.num_layers, self.width(), self.pos_embed_max_size];
        Unsupported::unless(!sizes.contains(&0), "a size is 0".into())?;
        let beyond = self.dual_attention_layers.iter().find(|index| **index >= self.num_layers);
        match beyond {
            Some(index) => Err(Unsupported(format!(
                "dual_attention_layers names block {index}, there are {}",
                self.num_layers
            ))),
            None => Ok(()),
        }
    }
}
