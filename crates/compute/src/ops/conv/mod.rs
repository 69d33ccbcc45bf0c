//! Convolution of images and of clips:
//!
//! y[o, i, j] = f(bias`[o]` + Σ weight[o, c, u, v] · x[c, i·stride + u - top, j·stride + v - left])
//!
//! for x [samples, in, height, width] and weight [out, in, kernel height, kernel width]; outside
//! the image x is 0. A clip has frames before the rows, and so has its kernel: x [samples, in, frames, height, width] and
//! weight [out, in, kernel frames, kernel height, kernel width]. Outside a clip x is 0, or its nearest value is repeated;
//! no padded copy is made for that. Forward only: images and clips are encoded and decoded by it, and nothing is trained
//! through it.
//!
//! An image is computed as a clip of one frame. im2col: the windows of a strip of pixels become the columns of a matrix,
//! so that the convolution is a matmul: weight [out, taps] · columns [taps, pixels]. The strip's result is copied to its
//! place with bias, activation and rounding in one pass. For kernels of one value the clip itself has the columns,
//! and is cut into strips of channels instead. Kernels of 3x3 pixels in f32 use Winograd (`winograd.rs`): the frames that
//! a kernel sees count as more channels.

#[cfg(test)]
mod clip_tests;
mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;
mod winograd;

use std::ops::Range;

use super::Activation;
use super::matmul::{FusedMatmul, Matmul};
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::Var;
use crate::{ComputeError, Dtype, Result, Tensor};

/// What a convolution of images consists of.
#[derive(Clone, Copy)]
pub struct Conv2d<'a> {
    /// [out, in, kernel height, kernel width]
    pub weight: &'a Tensor,
    /// `[out]`, f32.
    pub bias: Option<&'a Tensor>,
    /// Pixels from one window to the next, in both directions.
    pub stride: usize,
    /// Zeros around the image: top, bottom, left, right. Some encoders pad one side only.
    pub padding: [usize; 4],
    /// Applied to the result.
    pub activation: Activation,
    /// Whether CUDA may round f32 factors to TF32, as PyTorch does in convolutions.
    pub allows_tf32: bool,
}

impl<'a> Conv2d<'a> {
    /// Every window that fits into the image, and nothing else.
    pub fn new(weight: &'a Tensor) -> Self {
        let activation = Activation::None;
        Self { weight, bias: None, stride: 1, padding: [0; 4], activation, allows_tf32: false }
    }
}

/// What a convolution of clips consists of.
#[derive(Clone, Copy)]
pub struct Conv3d<'a> {
    /// [out, in, kernel frames, kernel height, kernel width]
    pub weight: &'a Tensor,
    /// `[out]`, f32.
    pub bias: Option<&'a Tensor>,
    /// From one window to the next: frames, rows, columns.
    pub stride: [usize; 3],
    /// Frames before and after the clip, rows above and below, columns left and right. A causal convolution pads frames
    /// before the first only.
    pub padding: [[usize; 2]; 3],
    /// What these hold.
    pub padding_mode: ConvPadding,
    /// Applied to the result.
    pub activation: Activation,
    /// Whether CUDA may round f32 factors to TF32.
    pub allows_tf32: bool,
}

impl<'a> Conv3d<'a> {
    /// Every window that fits into the clip, and nothing else.
    pub fn new(weight: &'a Tensor) -> Self {
        Self {
            weight,
            bias: None,
            stride: [1; 3],
            padding: [[0; 2]; 3],
            padding_mode: ConvPadding::Zeros,
            activation: Activation::None,
            allows_tf32: false,
        }
    }
}

/// What lies around a clip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvPadding {
    /// Zeros.
    Zeros,
    /// The clip's nearest value.
    Replicate,
}

/// Bytes of a strip's columns and sums together; tests cut small images into strips too. Chosen: this
/// much still fits the last-level cache. With 16 MiB, 512 channels took a sixth longer
/// on 2 cores of a Xeon.
const STRIP_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };
/// The same with CUDA. Chosen: matmuls of this size keep all of a large GPU busy.
const CUDA_STRIP_BYTES: usize = if cfg!(test) { 4 << 10 } else { 256 << 20 };
/// The same on any other GPU, which has less memory and slower matmuls.
const GPU_STRIP_BYTES: usize = if cfg!(test) { 4 << 10 } else { 64 << 20 };
/// Pixels of a strip with CUDA are a multiple of this. Chosen: rows of columns then begin where tensor cores read them,
/// and tiles of the matmul are full.
const CUDA_STRIP_MULTIPLE: usize = if cfg!(test) { 8 } else { 256 };

fn strip_bytes(kind: DeviceKind) -> usize {
    match kind {
        DeviceKind::Cpu { .. } => STRIP_BYTES,
        DeviceKind::Cuda { .. } => CUDA_STRIP_BYTES,
        DeviceKind::Gpu { .. } => GPU_STRIP_BYTES,
    }
}

/// With fewer channels at a time, reading the whole image for each strip of them costs more than
/// copying it into columns once. Chosen: the smallest side of a tile of the matmul.
const MIN_CHANNELS: usize = 64;
/// FLOPs per element when a strip is put into its place, for the work counter.
const FLOPS: usize = 20;

impl Tape<'_> {
    /// A convolution of images; see the module's comment.
    pub fn conv2d(&self, x: &Var, layer: Conv2d<'_>) -> Result<Var> {
        let op = self.begin_op("conv2d");
        op.expect_no_grad(x)?;
        let [samples, inputs, height, width] = op.expect_rank("x", x.tensor())?;
        let [outputs, _, down, across] = op.expect_rank("weight", layer.weight)?;
        op.expect_shape("weight", layer.weight, [outputs, inputs, down, across])?;
        let clip = x.tensor().reshape([samples, inputs, 1, height, width]);
        let weight = layer.weight.reshape([outputs, inputs, 1, down, across]);
        let [top, bottom, left, right] = layer.padding;
        let layer = Conv3d {
            bias: layer.bias,
            stride: [1, layer.stride, layer.stride],
            padding: [[0; 2], [top, bottom], [left, right]],
            activation: layer.activation,
            allows_tf32: layer.allows_tf32,
            ..Conv3d::new(&weight)
        };
        let y = convolve(&op, &clip, layer)?;
        let &[_, _, _, height, width] = y.shape().sizes() else { unreachable!("made above") };
        Ok(op.result(y.into_shape([samples, outputs, height, width].into())))
    }

    /// A convolution of clips; see the module's comment.
    pub fn conv3d(&self, x: &Var, layer: Conv3d<'_>) -> Result<Var> {
        let op = self.begin_op("conv3d");
        op.expect_no_grad(x)?;
        let [_, inputs, ..] = op.expect_rank::<5>("x", x.tensor())?;
        let [outputs, _, frames, down, across] = op.expect_rank("weight", layer.weight)?;
        op.expect_shape("weight", layer.weight, [outputs, inputs, frames, down, across])?;
        let y = convolve(&op, x.tensor(), layer)?;
        Ok(op.result(y))
    }
}

/// A convolution of clips, whose shapes have been compared with the weight's.
fn convolve(op: &Op<'_>, x: &Tensor, layer: Conv3d<'_>) -> Result<Tensor> {
    let (window, outputs) = check(op, x, layer)?;
    let samples = x.shape().sizes()[0];
    let [frames, height, width] = window.result;
    let mut y = op.alloc([samples, outputs, frames, height, width], x.dtype())?;
    if y.shape().elements() == 0 {
        return Ok(y);
    }
    let kind = op.device.kind();
    if window.is_winograd(kind, outputs, [x.dtype(), layer.weight.dtype()]) {
        winograd::convolve(op.cx, window, x, layer, &mut y)?;
        return Ok(y);
    }
    let n_pixels = frames * height * width;
    let weight = layer.weight.reshape([outputs, window.taps()]);
    for sample in 0..samples {
        let clip = x.narrow(sample..sample + 1);
        if let Some(channels) = window.direct_channels(kind, outputs) {
            let columns = clip.reshape([window.taps(), n_pixels]);
            for channels in strips(outputs, channels) {
                let weight = weight.narrow(channels.clone());
                let strip = ConvStrip { sample, channels, pixels: 0..n_pixels };
                strip.compute(op.cx, &weight, &columns, layer, &mut y)?;
            }
        } else {
            for pixels in strips(n_pixels, window.strip_pixels(kind, outputs, x.dtype())) {
                let columns = window.im2col(op.cx, &clip, pixels.clone())?;
                let strip = ConvStrip { sample, channels: 0..outputs, pixels };
                strip.compute(op.cx, &weight, &columns, layer, &mut y)?;
            }
        }
    }
    Ok(y)
}

/// Checks what is not compared yet; returns the windows and how many outputs there are.
fn check(op: &Op<'_>, x: &Tensor, layer: Conv3d<'_>) -> Result<(ConvWindow, usize)> {
    op.expect_real("x", x)?;
    op.expect_real("weight", layer.weight)?;
    let [_, inputs, clip @ ..] = op.expect_rank::<5>("x", x)?;
    let [outputs, _, kernel @ ..] = op.expect_rank::<5>("weight", layer.weight)?;
    if let Some(bias) = layer.bias {
        op.expect_vector("bias", bias, outputs)?;
    }
    let mut result = [0; 3];
    for (axis, what) in ["kernel frames", "kernel height", "kernel width"].into_iter().enumerate() {
        let size = clip[axis] + layer.padding[axis].iter().sum::<usize>();
        result[axis] = count(op, what, size, kernel[axis], layer.stride[axis])?;
    }
    let window = ConvWindow {
        inputs,
        clip,
        kernel,
        stride: layer.stride,
        corner: layer.padding.map(|[before, _]| before),
        result,
        is_padded: layer.padding != [[0; 2]; 3],
        // Of nothing there is no nearest value.
        replicates: layer.padding_mode == ConvPadding::Replicate && !clip.contains(&0),
    };
    Ok((window, outputs))
}

/// How many windows fit in one direction.
fn count(
    op: &Op<'_>,
    what: &'static str,
    size: usize,
    kernel: usize,
    stride: usize,
) -> Result<usize> {
    let range = |what, got: usize, expected| {
        Err(ComputeError::Range { op: op.name, what, expected, got: got.to_string() })
    };
    if stride == 0 {
        return range("stride", stride, "1 or more".into());
    }
    if kernel == 0 || kernel > size {
        return range(what, kernel, format!("1 to the padded image's {size}"));
    }
    Ok((size - kernel) / stride + 1)
}

/// Which values of a clip each pixel of the result sees.
#[derive(Clone, Copy)]
struct ConvWindow {
    /// Channels of the clip.
    inputs: usize,
    /// Frames, height, width.
    clip: [usize; 3],
    kernel: [usize; 3],
    stride: [usize; 3],
    /// What lies before the clip: frames, rows, columns.
    corner: [usize; 3],
    /// Frames, height, width.
    result: [usize; 3],
    is_padded: bool,
    /// Whether the nearest value lies around the clip, and not zeros.
    replicates: bool,
}

impl ConvWindow {
    /// Values that a pixel of the result is a sum of.
    fn taps(&self) -> usize {
        let [frames, height, width] = self.kernel;
        self.inputs * frames * height * width
    }

    /// How many channels to compute at a time where the clip is its own columns, if it is and that
    /// is worth it.
    fn direct_channels(&self, kind: DeviceKind, outputs: usize) -> Option<usize> {
        let is_own = self.kernel == [1; 3] && self.stride == [1; 3] && !self.is_padded;
        let [frames, height, width] = self.result;
        let channels = strip_bytes(kind) / (Dtype::F32.bytes() * frames * height * width);
        (is_own && channels >= outputs.min(MIN_CHANNELS)).then_some(channels)
    }

    /// How many pixels to compute at a time.
    fn strip_pixels(&self, kind: DeviceKind, outputs: usize, dtype: Dtype) -> usize {
        let bytes = self.taps() * dtype.bytes() + outputs * Dtype::F32.bytes();
        let pixels = (strip_bytes(kind) / bytes.max(1)).max(1);
        match kind {
            DeviceKind::Cuda { .. } if pixels > CUDA_STRIP_MULTIPLE => {
                pixels / CUDA_STRIP_MULTIPLE * CUDA_STRIP_MULTIPLE
            }
            _ => pixels,
        }
    }

    /// What the windows of some pixels see, a column for each.
    fn im2col(&self, cx: OpContext<'_>, clip: &Tensor, pixels: Range<usize>) -> Result<Tensor> {
        let mut columns = cx.workspace([self.taps(), pixels.len()], clip.dtype())?;
        cx.count("conv2d columns", 0, &[&columns, &columns]);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::im2col(backend, *self, clip, pixels.start, &mut columns),
            Backend::Cuda(backend) => {
                cuda::im2col(backend, *self, clip, pixels.start, &mut columns);
            }
            Backend::Gpu(backend) => {
                gpu::im2col(backend, *self, clip, pixels.start, &mut columns);
            }
        }
        Ok(columns)
    }
}

/// `count` in pieces of `most`.
fn strips(count: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(most).map(move |from| from..count.min(from + most))
}

/// A part of the result.
struct ConvStrip {
    sample: usize,
    channels: Range<usize>,
    pixels: Range<usize>,
}

impl ConvStrip {
    fn compute(
        &self,
        cx: OpContext<'_>,
        weight: &Tensor,
        columns: &Tensor,
        layer: Conv3d<'_>,
        y: &mut Tensor,
    ) -> Result<()> {
        let shape = [self.channels.len(), self.pixels.len()];
        let mut sums = cx.workspace(shape, Dtype::F32)?;
        let matmuls = [Matmul::new(weight, columns.into())];
        let allows_tf32 = layer.allows_tf32;
        FusedMatmul { allows_tf32, ..FusedMatmul::new(&matmuls, &mut sums) }.run(cx)?;
        let work = FLOPS * sums.shape().elements();
        cx.count("conv2d finish", work, &[&sums]);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                cpu::finish(backend, self, &sums, layer.bias, layer.activation, y);
            }
            Backend::Cuda(backend) => {
                cuda::finish(backend, self, &sums, layer.bias, layer.activation, y);
            }
            Backend::Gpu(backend) => {
                gpu::finish(backend, self, &sums, layer.bias, layer.activation, y);
            }
        }
        Ok(())
    }
}
