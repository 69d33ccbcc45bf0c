//! The layers of diffusers' `AutoencoderKL`, by name and shape, and of what is built as it is.

use super::KlVaeConfig;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::vae::VaeScale;
use crate::model::vae::forward::{
    AttentionNames, ConvKind, LayerKind, MidBlock, NormKind, Resample, VaeConv, VaeDecoder,
    VaeEncoder, VaeNorm, resnets,
};

const ATTENTION: AttentionNames = AttentionNames { norm: "group_norm", out: "to_out.0" };

/// What the layers of such an autoencoder are made from.
pub(in crate::model::vae) struct KlLayers<'a> {
    /// Channels of what is encoded, and of what is decoded.
    pub pixel_channels: [usize; 2],
    /// Channels of a latent.
    pub latent_channels: usize,
    /// Channels at each size, the image's own first.
    pub channels: &'a [usize],
    /// Blocks at each size; the decoder has one more.
    pub n_blocks: usize,
    /// Groups of every norm.
    pub n_groups: usize,
    pub conv: ConvKind,
    /// Whether there is an attention in the middle.
    pub has_attention: bool,
    /// Whether there is a convolution after the encoder, and before the decoder.
    pub has_quant: [bool; 2],
    /// What the resampling layer of a size does, where it has one. Encoder and decoder each count from their own input.
    pub resample: &'a dyn Fn(usize) -> Option<VaeScale>,
}

/// The encoder.
pub fn encoder(config: &KlVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeEncoder> {
    config.layers(&|level| config.resample(level)).encoder(build)
}

/// The decoder.
pub fn decoder(config: &KlVaeConfig, build: &mut ModelBuilder<'_>) -> Result<VaeDecoder> {
    config.layers(&|level| config.resample(level)).decoder(build)
}

impl KlVaeConfig {
    fn resample(&self, level: usize) -> Option<VaeScale> {
        (level + 1 < self.block_out_channels.len()).then_some(VaeScale { side: 2, frames: 1 })
    }

    fn layers<'a>(&'a self, resample: &'a dyn Fn(usize) -> Option<VaeScale>) -> KlLayers<'a> {
        KlLayers {
            pixel_channels: [self.in_channels, self.out_channels],
            latent_channels: self.latent_channels,
            channels: &self.block_out_channels,
            n_blocks: self.layers_per_block,
            n_groups: self.norm_num_groups,
            conv: ConvKind::Image,
            has_attention: self.mid_block_add_attention,
            has_quant: [self.use_quant_conv, self.use_post_quant_conv],
            resample,
        }
    }
}

impl KlLayers<'_> {
    fn kind(&self) -> LayerKind {
        LayerKind { norm: NormKind::Group(self.n_groups), conv: self.conv }
    }

    /// A convolution of 3x3, to be called `name`.
    fn conv(&self, b: &mut ModelBuilder<'_>, name: &str, sizes: [usize; 2]) -> Result<VaeConv> {
        VaeConv::new(b, self.conv, &self.conv.name(name), sizes, 3)
    }

    /// A convolution of 1x1 beside the encoder or the decoder, which is called by its own name.
    fn quant(
        &self,
        build: &mut ModelBuilder<'_>,
        is_there: bool,
        name: &str,
        width: usize,
    ) -> Result<Option<VaeConv>> {
        is_there.then(|| VaeConv::new(build, self.conv, name, [width, width], 1)).transpose()
    }

    fn resample(
        &self,
        b: &mut ModelBuilder<'_>,
        level: usize,
        name: &str,
        width: usize,
    ) -> Result<Option<Resample>> {
        let layer = |scale| Ok(Resample { conv: self.conv(b, name, [width, width])?, scale });
        (self.resample)(level).map(layer).transpose()
    }

    fn mid_block(&self, build: ModelBuilder<'_>, width: usize) -> Result<MidBlock> {
        MidBlock::new(build, self.kind(), width, self.has_attention.then_some(ATTENTION))
    }

    pub fn encoder(&self, build: &mut ModelBuilder<'_>) -> Result<VaeEncoder> {
        let (channels, kind) = (self.channels, self.kind());
        let latent = 2 * self.latent_channels;
        let mut b = build.at("encoder");
        let first = self.conv(&mut b, "conv_in", [self.pixel_channels[0], channels[0]])?;
        let mut levels = Vec::with_capacity(channels.len());
        for (level, out) in channels.iter().enumerate() {
            let mut b = b.at(format!("down_blocks.{level}"));
            let before = channels[level.saturating_sub(1)];
            let blocks = resnets(&mut b, kind, [before, *out], self.n_blocks)?;
            levels.push((blocks, self.resample(&mut b, level, "downsamplers.0.conv", *out)?));
        }
        let deepest = channels[channels.len() - 1];
        let mid_block = self.mid_block(b.at("mid_block"), deepest)?;
        let norm = VaeNorm::new(&mut b, "conv_norm_out", kind.norm, deepest)?;
        let last = self.conv(&mut b, "conv_out", [deepest, latent])?;
        let quant = self.quant(build, self.has_quant[0], "quant_conv", latent)?;
        Ok(VaeEncoder { first, down_blocks: levels, mid_block, norm, last, quant })
    }

    pub fn decoder(&self, build: &mut ModelBuilder<'_>) -> Result<VaeDecoder> {
        let channels: Vec<usize> = self.channels.iter().rev().copied().collect();
        let (kind, latent) = (self.kind(), self.latent_channels);
        let quant = self.quant(build, self.has_quant[1], "post_quant_conv", latent)?;
        let mut b = build.at("decoder");
        let first = self.conv(&mut b, "conv_in", [latent, channels[0]])?;
        let mid_block = self.mid_block(b.at("mid_block"), channels[0])?;
        let mut levels = Vec::with_capacity(channels.len());
        for (level, out) in channels.iter().enumerate() {
            let mut b = b.at(format!("up_blocks.{level}"));
            let before = channels[level.saturating_sub(1)];
            let blocks = resnets(&mut b, kind, [before, *out], self.n_blocks + 1)?;
            levels.push((blocks, self.resample(&mut b, level, "upsamplers.0.conv", *out)?));
        }
        let widest = channels[channels.len() - 1];
        let norm = VaeNorm::new(&mut b, "conv_norm_out", kind.norm, widest)?;
        let last = self.conv(&mut b, "conv_out", [widest, self.pixel_channels[1]])?;
        Ok(VaeDecoder { quant, first, mid_block, up_blocks: levels, norm, last })
    }
}
