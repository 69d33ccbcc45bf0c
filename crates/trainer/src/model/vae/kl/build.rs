//! The layers of diffusers' `AutoencoderKL`, by name and shape.

use super::KlVaeConfig;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::vae::forward::{
    AttentionNames, MidBlock, NormKind, VaeConv, VaeDecoder, VaeEncoder, VaeNorm, resnets,
};

/// The encoder.
pub fn encoder(config: &KlVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeEncoder> {
    let channels = &config.block_out_channels;
    let (n_levels, kind) = (channels.len(), NormKind::Group(config.norm_num_groups));
    let latent = 2 * config.latent_channels;
    let mut b = build.at("encoder");
    let first = VaeConv::new(&mut b, "conv_in", [config.in_channels, channels[0]], 3)?;
    let mut levels = Vec::with_capacity(n_levels);
    for (level, out) in channels.iter().enumerate() {
        let mut b = b.at(format!("down_blocks.{level}"));
        let before = channels[level.saturating_sub(1)];
        let blocks = resnets(&mut b, kind, [before, *out], config.layers_per_block)?;
        let is_last = level + 1 == n_levels;
        let halve =
            |b: &mut ModelBuilder<'_>| VaeConv::new(b, "downsamplers.0.conv", [*out, *out], 3);
        levels.push((blocks, if is_last { None } else { Some(halve(&mut b)?) }));
    }
    let deepest = channels[n_levels - 1];
    let middle = mid_block(config, b.at("mid_block"), deepest)?;
    let norm = VaeNorm::new(&mut b, "conv_norm_out", kind, deepest)?;
    let last = VaeConv::new(&mut b, "conv_out", [deepest, latent], 3)?;
    let quant =
        config.use_quant_conv.then(|| VaeConv::new(build, "quant_conv", [latent, latent], 1));
    Ok(VaeEncoder {
        first,
        down_blocks: levels,
        mid_block: middle,
        norm,
        last,
        quant: quant.transpose()?,
    })
}

/// The decoder.
pub fn decoder(config: &KlVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeDecoder> {
    let channels: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
    let (n_levels, kind, latent) =
        (channels.len(), NormKind::Group(config.norm_num_groups), config.latent_channels);
    let quant = config
        .use_post_quant_conv
        .then(|| VaeConv::new(build, "post_quant_conv", [latent, latent], 1))
        .transpose()?;
    let mut b = build.at("decoder");
    let first = VaeConv::new(&mut b, "conv_in", [latent, channels[0]], 3)?;
    let middle = mid_block(config, b.at("mid_block"), channels[0])?;
    let mut levels = Vec::with_capacity(n_levels);
    for (level, out) in channels.iter().enumerate() {
        let mut b = b.at(format!("up_blocks.{level}"));
        let before = channels[level.saturating_sub(1)];
        let blocks = resnets(&mut b, kind, [before, *out], config.layers_per_block + 1)?;
        let is_last = level + 1 == n_levels;
        let double =
            |b: &mut ModelBuilder<'_>| VaeConv::new(b, "upsamplers.0.conv", [*out, *out], 3);
        levels.push((blocks, if is_last { None } else { Some(double(&mut b)?) }));
    }
    let widest = channels[n_levels - 1];
    let norm = VaeNorm::new(&mut b, "conv_norm_out", kind, widest)?;
    let last = VaeConv::new(&mut b, "conv_out", [widest, config.out_channels], 3)?;
    Ok(VaeDecoder { quant, first, mid_block: middle, up_blocks: levels, norm, last })
}

fn mid_block(config: &KlVaeConfig, build: ModelBuilder<'_>, width: usize) -> Result<MidBlock> {
    let names = AttentionNames { norm: "group_norm", out: "to_out.0" };
    let attention = config.mid_block_add_attention.then_some(names);
    MidBlock::new(build, NormKind::Group(config.norm_num_groups), width, attention)
}
