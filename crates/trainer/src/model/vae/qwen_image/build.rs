//! The layers of diffusers' `AutoencoderKLQwenImage` that an image needs, by name and shape.

use super::QwenImageVaeConfig;
use crate::error::{Result, TrainerError};
use crate::model::build::ModelBuilder;
use crate::model::vae::VaeScale;
use crate::model::vae::forward::{
    AttentionNames, ConvKind, LayerKind, MidBlock, NormKind, Resample, ResnetBlock, VaeConv,
    VaeDecoder, VaeEncoder, VaeNorm, resnets,
};

const KIND: LayerKind = LayerKind { norm: NormKind::Rms, conv: ConvKind::Image };
const HALF: VaeScale = VaeScale { side: 2, frames: 1 };

/// In files q, k and v are one matrix, `to_qkv`.
const ATTENTION: AttentionNames = AttentionNames { norm: "norm", out: "proj" };

/// The encoder. Blocks and downsampling layers of all sizes are one list.
pub fn encoder(config: &QwenImageVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeEncoder> {
    let (channels, latent) = (config.channels(), 2 * config.z_dim);
    let mut b = build.at("encoder");
    let first =
        VaeConv::new(&mut b, KIND.conv, "conv_in", [config.input_channels, config.base_dim], 3)?;
    let mut names = (0..).map(|index| format!("down_blocks.{index}"));
    let mut next = || names.next().expect("there is no end");
    let (mut levels, mut before) = (Vec::with_capacity(channels.len()), config.base_dim);
    for (level, out) in channels.iter().enumerate() {
        let mut blocks = Vec::new();
        for _ in 0..config.num_res_blocks {
            blocks.push(ResnetBlock::new(b.at(next()), KIND, [before, *out])?);
            before = *out;
        }
        let is_last = level + 1 == channels.len();
        let halve = if is_last {
            None
        } else {
            let conv = VaeConv::new(&mut b.at(next()), KIND.conv, "resample.1", [*out, *out], 3)?;
            Some(Resample { conv, scale: HALF })
        };
        levels.push((blocks, halve));
    }
    let mid_block = MidBlock::new(b.at("mid_block"), KIND, before, Some(ATTENTION))?;
    let norm = VaeNorm::new(&mut b, "norm_out", NormKind::Rms, before)?;
    let last = VaeConv::new(&mut b, KIND.conv, "conv_out", [before, latent], 3)?;
    let quant = Some(VaeConv::new(build, KIND.conv, "quant_conv", [latent, latent], 1)?);
    Ok(VaeEncoder { first, down_blocks: levels, mid_block, norm, last, quant })
}

/// The decoder. Upsampling halves the number of channels.
pub fn decoder(config: &QwenImageVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeDecoder> {
    let (mut channels, latent) = (config.channels(), config.z_dim);
    channels.reverse();
    let quant = Some(VaeConv::new(build, KIND.conv, "post_quant_conv", [latent, latent], 1)?);
    let mut b = build.at("decoder");
    let mut before = channels[0];
    let first = VaeConv::new(&mut b, KIND.conv, "conv_in", [latent, before], 3)?;
    let mid_block = MidBlock::new(b.at("mid_block"), KIND, before, Some(ATTENTION))?;
    let mut levels = Vec::with_capacity(channels.len());
    for (level, out) in channels.iter().enumerate() {
        let mut b = b.at(format!("up_blocks.{level}"));
        let blocks = resnets(&mut b, KIND, [before, *out], config.num_res_blocks + 1)?;
        let is_last = level + 1 == channels.len();
        before = if is_last { *out } else { out / 2 };
        let double = |b: &mut ModelBuilder<'_>| {
            let name = "upsamplers.0.resample.1";
            let conv = VaeConv::new(b, KIND.conv, name, [*out, before], 3)?;
            Ok::<_, TrainerError>(Resample { conv, scale: HALF })
        };
        levels.push((blocks, if is_last { None } else { Some(double(&mut b)?) }));
    }
    let norm = VaeNorm::new(&mut b, "norm_out", NormKind::Rms, before)?;
    let last = VaeConv::new(&mut b, KIND.conv, "conv_out", [before, config.input_channels], 3)?;
    Ok(VaeDecoder { quant, first, mid_block, up_blocks: levels, norm, last })
}
