//! The forward pass of the VAE.
//!
//! Shapes: S samples, C channels, images [S, 3, height, width], latents a power of two smaller.

use compute::ops::{Activation, Attention, Conv2d, PatchOrder};
use compute::{Result as Computed, Tape, Tensor, Var};

use super::VaeConfig;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::LinearLayer;

const EPSILON: f32 = 1e-6;

/// Images to latents.
pub struct VaeEncoder {
    first: VaeConv,
    /// From the image's size down: resnet blocks, and all but the last a downsampling convolution.
    down_blocks: Vec<(Vec<ResnetBlock>, Option<VaeConv>)>,
    mid_block: MidBlock,
    norm: VaeNorm,
    last: VaeConv,
    quant: Option<VaeConv>,
}

impl VaeEncoder {
    /// Builds it.
    pub fn new(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let channels = &config.block_out_channels;
        let (n_levels, groups) = (channels.len(), config.norm_num_groups);
        let latent = 2 * config.latent_channels;
        let mut b = build.at("encoder");
        let first = VaeConv::new(&mut b, "conv_in", [config.in_channels, channels[0]], 3)?;
        let mut levels = Vec::with_capacity(n_levels);
        for (level, out) in channels.iter().enumerate() {
            let mut b = b.at(format!("down_blocks.{level}"));
            let before = channels[level.saturating_sub(1)];
            let blocks = resnets(&mut b, groups, [before, *out], config.layers_per_block)?;
            let is_last = level + 1 == n_levels;
            let halve =
                |b: &mut ModelBuilder<'_>| VaeConv::new(b, "downsamplers.0.conv", [*out, *out], 3);
            levels.push((blocks, if is_last { None } else { Some(halve(&mut b)?) }));
        }
        let deepest = channels[n_levels - 1];
        let middle = MidBlock::new(config, b.at("mid_block"), deepest)?;
        let norm = VaeNorm::new(&mut b, "conv_norm_out", groups, deepest)?;
        let last = VaeConv::new(&mut b, "conv_out", [deepest, latent], 3)?;
        let quant =
            config.use_quant_conv.then(|| VaeConv::new(build, "quant_conv", [latent, latent], 1));
        Ok(Self {
            first,
            down_blocks: levels,
            mid_block: middle,
            norm,
            last,
            quant: quant.transpose()?,
        })
    }

    /// Means and log variances of latents, concatenated by channel: [S, 2 C, ..].
    pub fn forward(&self, tape: &Tape<'_>, images: &Tensor) -> Computed<Var> {
        let mut x = self.first.same(tape, &images.clone().into())?;
        for (blocks, halve) in &self.down_blocks {
            for block in blocks {
                x = block.forward(tape, &x)?;
            }
            if let Some(halve) = halve {
                x = halve.downsample(tape, &x)?;
            }
        }
        let x = self.mid_block.forward(tape, &x)?;
        let x = self.last.same(tape, &self.norm.forward(tape, &x, Activation::Silu)?)?;
        self.quant.as_ref().map_or(Ok(x.clone()), |quant| quant.point(tape, &x))
    }
}

/// Latents to images.
pub struct VaeDecoder {
    quant: Option<VaeConv>,
    first: VaeConv,
    mid_block: MidBlock,
    /// From the latent's size up: resnet blocks, and all but the last a convolution after upsampling.
    up_blocks: Vec<(Vec<ResnetBlock>, Option<VaeConv>)>,
    norm: VaeNorm,
    last: VaeConv,
}

impl VaeDecoder {
    /// Builds it.
    pub fn new(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let channels: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
        let (n_levels, groups, latent) =
            (channels.len(), config.norm_num_groups, config.latent_channels);
        let quant = config
            .use_post_quant_conv
            .then(|| VaeConv::new(build, "post_quant_conv", [latent, latent], 1))
            .transpose()?;
        let mut b = build.at("decoder");
        let first = VaeConv::new(&mut b, "conv_in", [latent, channels[0]], 3)?;
        let middle = MidBlock::new(config, b.at("mid_block"), channels[0])?;
        let mut levels = Vec::with_capacity(n_levels);
        for (level, out) in channels.iter().enumerate() {
            let mut b = b.at(format!("up_blocks.{level}"));
            let before = channels[level.saturating_sub(1)];
            let blocks = resnets(&mut b, groups, [before, *out], config.layers_per_block + 1)?;
            let is_last = level + 1 == n_levels;
            let double =
                |b: &mut ModelBuilder<'_>| VaeConv::new(b, "upsamplers.0.conv", [*out, *out], 3);
            levels.push((blocks, if is_last { None } else { Some(double(&mut b)?) }));
        }
        let widest = channels[n_levels - 1];
        let norm = VaeNorm::new(&mut b, "conv_norm_out", groups, widest)?;
        let last = VaeConv::new(&mut b, "conv_out", [widest, config.out_channels], 3)?;
        Ok(Self { quant, first, mid_block: middle, up_blocks: levels, norm, last })
    }

    /// Images, -1 to 1, of latents [S, C, ..].
    pub fn forward(&self, tape: &Tape<'_>, latents: &Tensor) -> Computed<Var> {
        let latents = Var::from(latents.clone());
        let x =
            self.quant.as_ref().map_or(Ok(latents.clone()), |quant| quant.point(tape, &latents))?;
        let x = self.first.same(tape, &x)?;
        let mut x = self.mid_block.forward(tape, &x)?;
        for (blocks, double) in &self.up_blocks {
            for block in blocks {
                x = block.forward(tape, &x)?;
            }
            if let Some(double) = double {
                let large = tape.upsample(&x, 2)?;
                drop(x);
                x = double.same(tape, &large)?;
            }
        }
        let x = self.norm.forward(tape, &x, Activation::Silu)?;
        self.last.same(tape, &x)
    }
}

fn resnets(
    build: &mut ModelBuilder<'_>,
    groups: usize,
    [before, out]: [usize; 2],
    n: usize,
) -> Result<Vec<ResnetBlock>> {
    let input = |index| if index == 0 { before } else { out };
    (0..n)
        .map(|index| {
            ResnetBlock::new(build.at(format!("resnets.{index}")), groups, [input(index), out])
        })
        .collect()
}

/// A convolution, its weight and bias.
struct VaeConv {
    weight: Tensor,
    bias: Tensor,
}

impl VaeConv {
    fn new(
        build: &mut ModelBuilder<'_>,
        name: &str,
        [inputs, outputs]: [usize; 2],
        size: usize,
    ) -> Result<Self> {
        let weight = build.array(format!("{name}.weight"), [outputs, inputs, size, size])?;
        let bias = build.vector(format!("{name}.bias"), outputs)?;
        Ok(Self { weight: weight.into_tensor(), bias: bias.into_tensor() })
    }

    fn layer(&self) -> Conv2d<'_> {
        Conv2d { bias: Some(&self.bias), ..Conv2d::new(&self.weight) }
    }

    /// 3x3, to the same size.
    fn same(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        tape.conv2d(x, Conv2d { padding: [1; 4], ..self.layer() })
    }

    /// 3x3 with stride 2, padded below and to the right.
    fn downsample(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        tape.conv2d(x, Conv2d { stride: 2, padding: [0, 1, 0, 1], ..self.layer() })
    }

    /// 1x1.
    fn point(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        tape.conv2d(x, self.layer())
    }
}

struct VaeNorm {
    n_groups: usize,
    weight: Tensor,
    bias: Tensor,
}

impl VaeNorm {
    fn new(
        build: &mut ModelBuilder<'_>,
        name: &str,
        n_groups: usize,
        width: usize,
    ) -> Result<Self> {
        let weight = build.vector(format!("{name}.weight"), width)?.into_tensor();
        let bias = build.vector(format!("{name}.bias"), width)?.into_tensor();
        Ok(Self { n_groups, weight, bias })
    }

    fn forward(&self, tape: &Tape<'_>, x: &Var, activation: Activation) -> Computed<Var> {
        tape.group_norm(x, self.n_groups, &self.weight, &self.bias, EPSILON, activation)
    }
}

/// Two convolutions with a residual connection.
struct ResnetBlock {
    norms: [VaeNorm; 2],
    convs: [VaeConv; 2],
    /// Where the number of channels changes.
    shortcut: Option<VaeConv>,
}

impl ResnetBlock {
    fn new(
        mut build: ModelBuilder<'_>,
        groups: usize,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Self> {
        let b = &mut build;
        Ok(Self {
            norms: [
                VaeNorm::new(b, "norm1", groups, inputs)?,
                VaeNorm::new(b, "norm2", groups, outputs)?,
            ],
            convs: [
                VaeConv::new(b, "conv1", [inputs, outputs], 3)?,
                VaeConv::new(b, "conv2", [outputs, outputs], 3)?,
            ],
            shortcut: if inputs == outputs {
                None
            } else {
                Some(VaeConv::new(b, "conv_shortcut", [inputs, outputs], 1)?)
            },
        })
    }

    fn forward(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        let h = self.norms[0].forward(tape, x, Activation::Silu)?;
        let h = self.convs[0].same(tape, &h)?;
        let h = self.norms[1].forward(tape, &h, Activation::Silu)?;
        let h = self.convs[1].same(tape, &h)?;
        match &self.shortcut {
            Some(shortcut) => tape.add(&shortcut.point(tape, x)?, &h),
            None => tape.add(x, &h),
        }
    }
}

/// The middle: a resnet block, an attention over all pixels, a resnet block.
struct MidBlock {
    blocks: [ResnetBlock; 2],
    attention: Option<PixelAttention>,
}

impl MidBlock {
    fn new(config: &VaeConfig, mut build: ModelBuilder<'_>, width: usize) -> Result<Self> {
        let groups = config.norm_num_groups;
        let mut block = |index: usize| {
            ResnetBlock::new(build.at(format!("resnets.{index}")), groups, [width, width])
        };
        let blocks = [block(0)?, block(1)?];
        let attention = config
            .mid_block_add_attention
            .then(|| PixelAttention::new(build.at("attentions.0"), groups, width));
        Ok(Self { blocks, attention: attention.transpose()? })
    }

    fn forward(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        let mut x = self.blocks[0].forward(tape, x)?;
        if let Some(attention) = &self.attention {
            x = attention.forward(tape, &x)?;
        }
        self.blocks[1].forward(tape, &x)
    }
}

struct PixelAttention {
    norm: VaeNorm,
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    out: LinearLayer,
}

impl PixelAttention {
    fn new(mut b: ModelBuilder<'_>, groups: usize, width: usize) -> Result<Self> {
        Ok(Self {
            norm: VaeNorm::new(&mut b, "group_norm", groups, width)?,
            q: b.linear_unquantised("to_q", width, width)?,
            k: b.linear_unquantised("to_k", width, width)?,
            v: b.linear_unquantised("to_v", width, width)?,
            out: b.linear_unquantised("to_out.0", width, width)?,
        })
    }

    fn forward(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        let &[_, channels, height, width] = x.shape().sizes() else {
            unreachable!("convolutions give images")
        };
        let h = self.norm.forward(tape, x, Activation::None)?;
        let h = tape.patchify(&h, 1, PatchOrder::ChannelsFirst)?;
        let (q, k) = (self.q.forward(tape, &h)?, self.k.forward(tape, &h)?);
        let v = self.v.forward(tape, &h)?;
        drop(h);
        let h = tape.attention(&q, &k, &v, Attention::full(1, channels))?;
        let h = self.out.forward(tape, &h)?;
        let h = tape.unpatchify(&h, [height, width], 1, PatchOrder::ChannelsFirst)?;
        tape.add(x, &h)
    }
}
