//! The forward pass of all VAEs. They differ in their norms and convolutions, and in names and widths of layers, which
//! the folder of each kind has.
//!
//! Shapes: S samples, C channels, images [S, 3, height, width], latents a power of two smaller. VAEs of clips have frames
//! after the channels, [S, 3, frames, height, width], and see only those up to the current one.

use compute::ops::{Activation, Attention, Conv2d, Conv3d, ConvPadding, PatchOrder};
use compute::{Result as Computed, Shape, Tape, Tensor, Var};

use super::{VaeConfig, VaeScale, flux2, hunyuan_video, kl, qwen_image};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::LinearLayer;

const EPSILON: f32 = 1e-6;

/// Images to latents.
pub struct VaeEncoder {
    pub(super) first: VaeConv,
    /// From the image's size down: resnet blocks, and all but the last a downsampling convolution.
    pub(super) down_blocks: Vec<(Vec<ResnetBlock>, Option<Resample>)>,
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
            VaeConfig::HunyuanVideo(config) => hunyuan_video::encoder(config, build),
            VaeConfig::Flux2(config) => flux2::encoder(config, build),
        }
    }

    /// How much larger its input is than its output.
    pub fn scale(&self) -> VaeScale {
        scale_of(&self.down_blocks)
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
                x = halve.conv.downsample(tape, &x, halve.scale)?;
            }
        }
        x = self.mid_block.forward(tape, x)?;
        x = self.norm.forward(tape, &x, Activation::Silu)?;
        x = self.last.same(tape, &x)?;
        self.quant.as_ref().map_or(Ok(x.clone()), |quant| quant.point(tape, &x))
    }
}

/// Latents to images.
pub struct VaeDecoder {
    pub(super) quant: Option<VaeConv>,
    pub(super) first: VaeConv,
    pub(super) mid_block: MidBlock,
    /// From the latent's size up: resnet blocks, and all but the last a convolution after upsampling.
    pub(super) up_blocks: Vec<(Vec<ResnetBlock>, Option<Resample>)>,
    pub(super) norm: VaeNorm,
    pub(super) last: VaeConv,
}

impl VaeDecoder {
    /// Builds it.
    pub fn new(config: &VaeConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        match config {
            VaeConfig::Kl(config) => kl::decoder(config, build),
            VaeConfig::QwenImage(config) => qwen_image::decoder(config, build),
            VaeConfig::HunyuanVideo(config) => hunyuan_video::decoder(config, build),
            VaeConfig::Flux2(config) => flux2::decoder(config, build),
        }
    }

    /// How much larger its output is than its input.
    pub fn scale(&self) -> VaeScale {
        scale_of(&self.up_blocks)
    }

    /// Images, -1 to 1, of latents [S, C, ..].
    pub fn forward(&self, tape: &Tape<'_>, latents: &Tensor) -> Computed<Var> {
        let latents = Var::from(latents.clone());
        let x =
            self.quant.as_ref().map_or(Ok(latents.clone()), |quant| quant.point(tape, &latents))?;
        let x = self.first.same(tape, &x)?;
        let mut x = self.mid_block.forward(tape, x)?;
        for (blocks, double) in &self.up_blocks {
            for block in blocks {
                x = block.forward(tape, &x)?;
            }
            if let Some(double) = double {
                x = double.upsample(tape, &x)?;
                x = double.conv.same(tape, &x)?;
            }
        }
        x = self.norm.forward(tape, &x, Activation::Silu)?;
        self.last.same(tape, &x)
    }
}

/// Of all resampling layers together.
fn scale_of(blocks: &[(Vec<ResnetBlock>, Option<Resample>)]) -> VaeScale {
    let layers = blocks.iter().filter_map(|(_, layer)| layer.as_ref());
    layers.fold(VaeScale::SAME, |all, layer| VaeScale {
        side: all.side * layer.scale.side,
        frames: all.frames * layer.scale.frames,
    })
}

/// A convolution that downsamples, or that follows upsampling.
pub(super) struct Resample {
    pub conv: VaeConv,
    pub scale: VaeScale,
}

impl Resample {
    fn upsample(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        let VaeScale { side, frames } = self.scale;
        match self.conv.kind() {
            ConvKind::Image => tape.upsample(x, side),
            ConvKind::CausalClip => tape.upsample_clip(x, frames, side),
        }
    }
}

/// Resnet blocks `resnets.0`, `resnets.1`, …
pub(super) fn resnets(
    build: &mut ModelBuilder<'_>,
    kind: LayerKind,
    [before, out]: [usize; 2],
    n: usize,
) -> Result<Vec<ResnetBlock>> {
    let input = |index| if index == 0 { before } else { out };
    (0..n)
        .map(|index| {
            ResnetBlock::new(build.at(format!("resnets.{index}")), kind, [input(index), out])
        })
        .collect()
}

/// What the layers of a VAE are.
#[derive(Clone, Copy)]
pub(super) struct LayerKind {
    pub norm: NormKind,
    pub conv: ConvKind,
}

/// What convolutions see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConvKind {
    /// An image, with zeros around it.
    Image,
    /// Of a clip the current frame and those before it. Around it, and before its first frame, the nearest values are
    /// repeated.
    CausalClip,
}

impl ConvKind {
    /// The name of a layer's weights: a causal convolution is a module around one.
    pub fn name(self, layer: &str) -> String {
        match self {
            Self::Image => layer.to_owned(),
            Self::CausalClip => format!("{layer}.conv"),
        }
    }

    /// Sizes of a kernel.
    fn kernel(self, size: usize) -> Vec<usize> {
        match self {
            Self::Image => vec![size; 2],
            Self::CausalClip => vec![size; 3],
        }
    }
}

/// A convolution, its weight and bias.
pub(super) struct VaeConv {
    weight: Tensor,
    bias: Tensor,
    allows_tf32: bool,
}

impl VaeConv {
    /// The one that is called `name` in files.
    pub fn new(
        build: &mut ModelBuilder<'_>,
        kind: ConvKind,
        name: &str,
        [inputs, outputs]: [usize; 2],
        size: usize,
    ) -> Result<Self> {
        let shape = Shape::new(&[&[outputs, inputs][..], &kind.kernel(size)].concat());
        let weight = build.array(format!("{name}.weight"), shape)?;
        let bias = build.vector(format!("{name}.bias"), outputs)?;
        let [weight, bias] = [weight, bias].map(Var::into_tensor);
        Ok(Self { weight, bias, allows_tf32: build.allows_tf32() })
    }

    fn kind(&self) -> ConvKind {
        match self.weight.shape().sizes() {
            [_, _, _, _] => ConvKind::Image,
            _ => ConvKind::CausalClip,
        }
    }

    fn outputs(&self) -> usize {
        self.weight.shape().sizes()[0]
    }

    fn image_layer(&self) -> Conv2d<'_> {
        let (bias, allows_tf32) = (Some(&self.bias), self.allows_tf32);
        Conv2d { bias, allows_tf32, ..Conv2d::new(&self.weight) }
    }

    /// Frames are padded before the first only.
    fn clip_layer(&self) -> Conv3d<'_> {
        let &[_, _, frames, height, width] = self.weight.shape().sizes() else {
            unreachable!("kernels of clips have frames")
        };
        Conv3d {
            bias: Some(&self.bias),
            padding: [[frames - 1, 0], [height / 2; 2], [width / 2; 2]],
            padding_mode: ConvPadding::Replicate,
            allows_tf32: self.allows_tf32,
            ..Conv3d::new(&self.weight)
        }
    }

    /// 3x3, to the same size.
    fn same(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        match self.kind() {
            ConvKind::Image => tape.conv2d(x, Conv2d { padding: [1; 4], ..self.image_layer() }),
            ConvKind::CausalClip => tape.conv3d(x, self.clip_layer()),
        }
    }

    /// 3x3 with a stride; images are padded below and to the right.
    fn downsample(&self, tape: &Tape<'_>, x: &Var, scale: VaeScale) -> Computed<Var> {
        let VaeScale { side, frames } = scale;
        match self.kind() {
            ConvKind::Image => {
                let layer = self.image_layer();
                tape.conv2d(x, Conv2d { stride: side, padding: [0, 1, 0, 1], ..layer })
            }
            ConvKind::CausalClip => {
                tape.conv3d(x, Conv3d { stride: [frames, side, side], ..self.clip_layer() })
            }
        }
    }

    /// 1x1.
    fn point(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        match self.kind() {
            ConvKind::Image => tape.conv2d(x, self.image_layer()),
            ConvKind::CausalClip => tape.conv3d(x, self.clip_layer()),
        }
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
        let pixels = as_image(x);
        let normed = match self {
            Self::Group { n_groups, weight, bias } => {
                tape.group_norm(&pixels, *n_groups, weight, bias, EPSILON, activation)?
            }
            Self::Rms { weight } => tape.channel_rms_norm(&pixels, weight, activation)?,
        };
        Ok(normed.reshape(x.shape()))
    }
}

/// The frames of a clip one below the other.
fn as_image(x: &Var) -> Var {
    match *x.shape().sizes() {
        [samples, channels, frames, height, width] => {
            x.reshape([samples, channels, frames * height, width])
        }
        _ => x.clone(),
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
        kind: LayerKind,
        [inputs, outputs]: [usize; 2],
    ) -> Result<Self> {
        let b = &mut build;
        let LayerKind { norm, conv } = kind;
        let shortcut = |b: &mut ModelBuilder<'_>| {
            VaeConv::new(b, conv, &conv.name("conv_shortcut"), [inputs, outputs], 1)
        };
        Ok(Self {
            norms: [
                VaeNorm::new(b, "norm1", norm, inputs)?,
                VaeNorm::new(b, "norm2", norm, outputs)?,
            ],
            convs: [
                VaeConv::new(b, conv, &conv.name("conv1"), [inputs, outputs], 3)?,
                VaeConv::new(b, conv, &conv.name("conv2"), [outputs, outputs], 3)?,
            ],
            shortcut: if inputs == outputs { None } else { Some(shortcut(b)?) },
        })
    }

    fn forward(&self, tape: &Tape<'_>, x: &Var) -> Computed<Var> {
        // Assigned, not shadowed: what is not needed any more is freed.
        let mut h = self.norms[0].forward(tape, x, Activation::Silu)?;
        h = self.convs[0].same(tape, &h)?;
        h = self.norms[1].forward(tape, &h, Activation::Silu)?;
        h = self.convs[1].same(tape, &h)?;
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
        kind: LayerKind,
        width: usize,
        attention: Option<AttentionNames>,
    ) -> Result<Self> {
        let mut block = |index: usize| {
            ResnetBlock::new(build.at(format!("resnets.{index}")), kind, [width, width])
        };
        let blocks = [block(0)?, block(1)?];
        let attention = attention
            .map(|names| PixelAttention::new(build.at("attentions.0"), kind.norm, width, names));
        Ok(Self { blocks, attention: attention.transpose()? })
    }

    fn forward(&self, tape: &Tape<'_>, mut x: Var) -> Computed<Var> {
        x = self.blocks[0].forward(tape, &x)?;
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
        let h = self.norm.forward(tape, x, Activation::None)?;
        // A row of tokens for each frame.
        let h = tape.patchify(&as_image(&h), 1, PatchOrder::ChannelsFirst)?;
        let (q, k) = (self.q.forward(tape, &h)?, self.k.forward(tape, &h)?);
        let v = self.v.forward(tape, &h)?;
        drop(h);
        let n_frames = if let [_, _, frames, _, _] = x.shape().sizes() { *frames } else { 1 };
        let h = self.attend(tape, [q, k, v], n_frames)?;
        let h = self.out.forward(tape, &h)?;
        let &[.., height, width] = as_image(x).shape().sizes() else {
            unreachable!("convolutions give images")
        };
        let h = tape.unpatchify(&h, [height, width], 1, PatchOrder::ChannelsFirst)?;
        tape.add(x, &h.reshape(x.shape()))
    }

    /// The pixels of a frame see those of all frames up to their own.
    fn attend(&self, tape: &Tape<'_>, [q, k, v]: [Var; 3], n_frames: usize) -> Computed<Var> {
        let &[_, tokens, width] = q.shape().sizes() else { unreachable!("tokens have a width") };
        let allows_tf32 = self.allows_tf32;
        let how = Attention { allows_tf32, ..Attention::full(1, width) };
        if n_frames == 1 {
            return tape.attention(&q, &k, &v, how);
        }
        let per_frame = tokens / n_frames;
        let frame = |frame: usize| {
            let (from, to) = (frame * per_frame, (frame + 1) * per_frame);
            let q = tape.split_tokens(&q, from..to)?;
            let (k, v) = (tape.split_tokens(&k, 0..to)?, tape.split_tokens(&v, 0..to)?);
            tape.attention(&q, &k, &v, how)
        };
        let frames: Vec<Var> = (0..n_frames).map(frame).collect::<Computed<_>>()?;
        tape.concat_tokens(&frames.iter().collect::<Vec<_>>())
    }
}
