//! diffusers' `AutoencoderKL`, as SD3 and FLUX use it: group norms, one scale and shift for all channels of a latent.

mod build;
pub mod names;

use serde::Deserialize;

pub(super) use build::KlLayers;
pub use build::{decoder, encoder};

use crate::model::config::Unsupported;
use crate::model::diffusion::vae::LatentStatistics;

/// What `vae/config.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct KlVaeConfig {
    /// Channels of an image.
    pub in_channels: usize,
    /// Channels of a decoded image.
    pub out_channels: usize,
    /// Channels at each size, the image's own first.
    pub block_out_channels: Vec<usize>,
    /// Blocks at each size; the decoder has one more.
    pub layers_per_block: usize,
    /// Channels of a latent.
    pub latent_channels: usize,
    /// Groups of every norm.
    pub norm_num_groups: usize,
    /// Latents are multiplied by this ...
    pub scaling_factor: f32,
    /// ... after this was subtracted.
    pub shift_factor: Option<f32>,
    /// Whether there is a convolution after the encoder.
    #[serde(default = "yes")]
    pub use_quant_conv: bool,
    /// Whether there is a convolution before the decoder.
    #[serde(default = "yes")]
    pub use_post_quant_conv: bool,
    /// Whether there is an attention in the middle.
    #[serde(default = "yes")]
    pub mid_block_add_attention: bool,
    /// The activation between convolutions.
    #[serde(default = "silu")]
    pub act_fn: String,
    #[serde(default)]
    pub(in crate::model::vae) down_block_types: Vec<String>,
    #[serde(default)]
    pub(in crate::model::vae) up_block_types: Vec<String>,
}

fn yes() -> bool {
    true
}

fn silu() -> String {
    "silu".into()
}

impl KlVaeConfig {
    /// The VAE of SD3 and FLUX, each with its own shift and scale.
    pub fn published(shift_factor: f32, scaling_factor: f32) -> Self {
        Self {
            in_channels: 3,
            out_channels: 3,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            latent_channels: 16,
            norm_num_groups: 32,
            scaling_factor,
            shift_factor: Some(shift_factor),
            use_quant_conv: false,
            use_post_quant_conv: false,
            mid_block_add_attention: true,
            act_fn: silu(),
            down_block_types: Vec::new(),
            up_block_types: Vec::new(),
        }
    }

    /// Image pixels per latent pixel, along a side.
    pub fn vae_scale_factor(&self) -> usize {
        1 << (self.block_out_channels.len() - 1)
    }

    /// How latents are scaled for models.
    pub fn statistics(&self) -> LatentStatistics {
        let n = self.latent_channels;
        let shift = vec![self.shift_factor.unwrap_or(0.0); n];
        LatentStatistics::by_channel(shift, vec![self.scaling_factor; n])
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> Result<(), Unsupported> {
        let known = ["DownEncoderBlock2D", "UpDecoderBlock2D"];
        for kind in self.down_block_types.iter().chain(&self.up_block_types) {
            Unsupported::unless(
                known.contains(&kind.as_str()),
                format!("block type {kind} is not one of {}", known.join(", ")),
            )?;
        }
        Unsupported::unless(self.act_fn == "silu", format!("act_fn {} is not silu", self.act_fn))?;
        check_levels("block_out_channels", self.block_out_channels.len())?;
        check_groups(self.norm_num_groups, &self.block_out_channels)
    }
}

/// Most sizes that an image has on its way. Chosen: twice those of any VAE, and a pixel becomes no more than memory holds.
const MOST_LEVELS: usize = 8;

/// Checks that a VAE has some sizes, and not too many.
pub(in crate::model::vae) fn check_levels(name: &str, n: usize) -> Result<(), Unsupported> {
    let problem = format!("{name} has {n} values, expected 1 to {MOST_LEVELS}");
    Unsupported::unless((1..=MOST_LEVELS).contains(&n), problem)
}

/// Checks that the channels of every size are a multiple of the groups of norms.
pub(super) fn check_groups(groups: usize, channels: &[usize]) -> Result<(), Unsupported> {
    let is_uneven = |width: &&usize| groups == 0 || !width.is_multiple_of(groups) || **width == 0;
    match channels.iter().find(is_uneven) {
        Some(width) => {
            Err(Unsupported(format!("{width} channels are not a multiple of {groups} groups")))
        }
        None => Ok(()),
    }
}
