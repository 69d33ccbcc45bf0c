//! The forward pass of all VAEs. They differ in their norms, and in names and widths of layers, which the folder of each
//! kind has.
//!
//! Shapes: S samples, C channels, images [S, 3, height, width], latents a power of two smaller.

use compute::ops::{Activation, Attention, Conv2d, PatchOrder};
use compute::{Result as Computed, Tape, Tensor, Var};

use super::{VaeConfig, VaeScale, kl, qwen_image};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::LinearLayer;

const EPSILON: f32 = 1e-6;

/// Images to latents.
pub struct VaeEncoder {
    pub(super) first: VaeConv,
    /// From the image's size down: resnet blocks, and all but the last a downsampling convolution.
    pub(super) down_blocks: Vec<(Vec<ResnetBlock>, Option<VaeConv>)>,
    pub(super) mid_block: MidBlock,
    pub(super) norm: VaeNorm,
    pub(super) last: VaeConv,
    pub(super) quant: Option<VaeConv>,
}

impl VaeEncoder {
    /// Builds it.
    pub fn new(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        match config {
            VaeConfig::Kl(config) => kl::encoder(config, build),
            VaeConfig::QwenImage(config) => qwen_image::encoder(config, build),
        }
    }

    /// How much larger its input is than its output.
    pub fn scale(&self) -> VaeScale {
        let n_halved = self.down_blocks.iter().filter(|(_, halve)| halve.is_some()).count();
        VaeScale { side: 1 << n_halved, frames: 1 }
    }

    /// Channels of a latent.
    pub fn latent_channels(&self) -> usize {
        self.last.outputs() / 2
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
    pub(super) quant: Option<VaeConv>,
    pub(super) first: VaeConv,
    pub(super) mid_block: MidBlock,
    /// From the latent's size up: resnet blocks, and all but the last a convolution after upsampling.
    pub(super) up_blocks: Vec<(Vec<ResnetBlock>, Option<VaeConv>)>,
    pub(super) norm: VaeNorm,
    pub(super) last: VaeConv,
}

impl VaeDecoder {
    /// Builds it.
    pub fn new(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        match config {
            VaeConfig::Kl(config) => kl::decoder(config, build),
            VaeConfig::QwenImage(config) => qwen_image::decoder(config, build),
        }
    }

    /// How much larger its output is than its input.
    pub fn scale(&self) -> VaeScale {
        let n_doubled = self.up_blocks.iter().filter(|(_, double)| double.is_some()).count();
        VaeScale { side: 1 << n_doubled, frames: 1 }
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

/// Resnet blocks `resnets.0`, `resnets.1`, …
pub(super) fn resnets(
    build: &mut ModelBuilder<'_>,
    norm: NormKind,
    [before, out]: [usize; 2],
    n: usize,
) -> Result<Vec<ResnetBlock>> {
    let input = |index| if index == 0 { before } else { out };
    (0..n)
        .map(|index| {
            ResnetBlock::new(build.at(format!("resnets.{index}")), norm, [input(index), out])
        })
        .collect()
}

/// A convolution, its weight and bias.
pub(super) struct VaeConv {
    weight: Tensor,
    bias: Tensor,
    allows_tf32: bool,
}

impl VaeConv {
    pub fn new(
        build: &mut ModelBuilder<'_>,
        name: &str,
        [inputs, outputs]: [usize; 2],
        size: usize,
    ) -> Result<Self> {
        let weight = build.array(format!("{name}.weight"), [outputs, inputs, size, size])?;
        let bias = build.vector(format!("{name}.bias"), outputs)?;
        let [weight, bias] = [weight, bias].map(Var::into_tensor);
        Ok(Self { weight, bias, allows_tf32: build.allows_tf32() })
    }

    fn outputs(&self) -> usize {
        self.weight.shape().sizes()[0]
    }

    fn layer(&self) -> Conv2d<'_> {
        let (bias, allows_tf32) = (Some(&self.bias), self.allows_tf32);
        Conv2d { bias, allows_tf32, ..Conv2d::new(&self.weight) }
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

/// How a VAE normalises.
#[derive(Clone, Copy)]
pub(super) enum NormKind {
    /// Over pixels and the channels of each of so many groups.
    Group(usize),
    /// Over the channels of each pixel, by their root mean square.
    Rms,
}

/// A norm and its weights.
pub(super) enum VaeNorm {
    Group { n_groups: usize, weight: Tensor, bias: Tensor },
    Rms { weight: Tensor },
}

impl VaeNorm {
    pub fn new(
        build: &mut ModelBuilder<'_>,
        name: &str,
        kind: NormKind,
        width: usize,
    ) -> Result<Self> {
        let mut vector = |end: &str| -> Result<Tensor> {
            Ok(build.vector(format!("{name}.{end}"), width)?.into_tensor())
        };
        Ok(match kind {
            NormKind::Group(n_groups) => {
                Self::Group { n_groups, weight: vector("weight")?, bias: vector("bias")? }
            }
            NormKind::Rms => Self::Rms { weight: vector("gamma")? },
        })
    }

    fn forward(&self, tape: &Tape<'_>, x: &Var, activation: Activation) -> Computed<Var> {
        match self {
            Self::Group { n_groups, weight, bias } => {
                tape.group_norm(x, *n_groups, weight, bias, EPSILON, activation)
            }
            Self::Rms { weight } => tape.channel_rms_norm(x, weight, activation),
        }
    }
}

/// Two convolutions with a residual connection.
pub(super) struct ResnetBlock {
    norms: [VaeNorm; 2],
    convs: [VaeConv; 2],
    /// Where the number of channels changes.
    shortcut: Option<VaeConv>,
}

impl ResnetBlock {
    pub fn new(
        mut build: ModelBuilder<'_>,
        norm: NormKind,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Self> {
        let b = &mut build;
        Ok(Self {
            norms: [
                VaeNorm::new(b, "norm1", norm, inputs)?,
                VaeNorm::new(b, "norm2", norm, outputs)?,
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
pub(super) struct MidBlock {
    blocks: [ResnetBlock; 2],
    attention: Option<PixelAttention>,
}

impl MidBlock {
    pub fn new(
        mut build: ModelBuilder<'_>,
        norm: NormKind,
        width: usize,
        attention: Option<AttentionNames>,
    ) -> Result<Self> {
        let mut block = |index: usize| {
            ResnetBlock::new(build.at(format!("resnets.{index}")), norm, [width, width])
        };
        let blocks = [block(0)?, block(1)?];
        let attention = attention
            .map(|names| PixelAttention::new(build.at("attentions.0"), norm, width, names));
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

/// Names that differ among VAEs.
#[derive(Clone, Copy)]
pub(super) struct AttentionNames {
    /// The norm before it.
    pub norm: &'static str,
    /// Its last layer.
    pub out: &'static str,
}

struct PixelAttention {
    norm: VaeNorm,
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    out: LinearLayer,
    allows_tf32: bool,
}

impl PixelAttention {
    fn new(
        mut b: ModelBuilder<'_>,
        norm: NormKind,
        width: usize,
        names: AttentionNames,
    ) -> Result<Self> {
        Ok(Self {
            norm: VaeNorm::new(&mut b, names.norm, norm, width)?,
            q: b.linear_unquantised("to_q", width, width)?,
            k: b.linear_unquantised("to_k", width, width)?,
            v: b.linear_unquantised("to_v", width, width)?,
            out: b.linear_unquantised(names.out, width, width)?,
            allows_tf32: b.allows_tf32(),
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
        let allows_tf32 = self.allows_tf32;
        let how = Attention { allows_tf32, ..Attention::full(1, channels) };
        let h = tape.attention(&q, &k, &v, how)?;
        let h = self.out.forward(tape, &h)?;
        let h = tape.unpatchify(&h, [height, width], 1, PatchOrder::ChannelsFirst)?;
        tape.add(x, &h)
    }
}
