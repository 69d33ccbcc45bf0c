//! What a convolution needs on a GPU besides matmuls.

use super::{ConvStrip, ConvWindow};
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs, singles};
use crate::ops::Activation;

const KERNELS: WgslSource = WgslSource { name: "conv", text: include_str!("kernel.wgsl") };

/// Copies what windows see (im2col): a row for each number of the kernel, a column for each pixel.
pub fn im2col(
    gpu: &GpuBackend,
    window: ConvWindow,
    clip: &Tensor,
    first_pixel: usize,
    columns: &mut Tensor,
) {
    let ([frames, height, width], [kernel_frames, kernel_height, kernel_width]) =
        (window.clip, window.kernel);
    let ([front, top, left], [_, down, across]) = (window.corner, window.result);
    let [stride_frames, stride_rows, stride_columns] = window.stride;
    let (n, pixels) = (columns.shape().elements(), columns.shape().width());
    let arguments = arguments![
        clip,
        columns,
        n,
        pixels,
        first_pixel,
        frames,
        height,
        width,
        kernel_frames,
        kernel_height,
        kernel_width,
        stride_frames,
        stride_rows,
        stride_columns,
        front,
        top,
        left,
        down,
        across,
        window.replicates,
    ];
    gpu.launch(&KERNELS, "im2col", &GpuVariant::of(&[clip.dtype()]), pairs(n), &arguments);
}

/// Puts a strip's sums into their place.
pub fn finish(
    gpu: &GpuBackend,
    strip: &ConvStrip,
    sums: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    y: &mut Tensor,
) {
    let &[_, _, frames, height, width] = y.shape().sizes() else { unreachable!("made by the op") };
    let (n, pixels) = (sums.shape().elements(), sums.shape().width());
    let (first_pixel, first_channel) = (strip.pixels.start, strip.channels.start);
    let variant = GpuVariant::of(&[y.dtype()]);
    y.with_range_mut(strip.sample..strip.sample + 1, |y| {
        let arguments = arguments![
            sums,
            bias,
            y,
            n,
            pixels,
            first_pixel,
            first_channel,
            frames * height * width,
            activation.code(),
        ];
        gpu.launch(&KERNELS, "finish", &variant, singles(n), &arguments);
    });
}
