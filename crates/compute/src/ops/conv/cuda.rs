//! What a convolution needs on a GPU besides matmuls.

use super::{ConvStrip, ConvWindow};
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};
use crate::ops::Activation;

const KERNELS: CudaSource = CudaSource { name: "conv", text: include_str!("kernel.cu") };

/// Rows of blocks that a GPU can have.
const MAX_BLOCK_ROWS: usize = 65535;

/// A thread for each pixel, in every row or, of very many rows, in turn.
fn grid(rows: usize, pixels: usize) -> LaunchConfig {
    let across = LaunchConfig::per_element(pixels);
    LaunchConfig { blocks: [across.blocks[0], rows.min(MAX_BLOCK_ROWS) as u32, 1], ..across }
}

/// Copies what windows see (im2col): a row for each number of the kernel, a column for each pixel.
pub fn im2col(
    cuda: &CudaBackend,
    window: ConvWindow,
    clip: &Tensor,
    first_pixel: usize,
    columns: &mut Tensor,
) {
    let ([frames, height, width], [kernel_frames, kernel_height, kernel_width]) =
        (window.clip, window.kernel);
    let ([front, top, left], [_, down, across]) = (window.corner, window.result);
    let [stride_frames, stride_rows, stride_columns] = window.stride;
    let (channels, pixels) = (window.inputs, columns.shape().width());
    let arguments = arguments![
        clip,
        columns,
        channels,
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
    let variant = CudaVariant::of(&[clip.dtype()]);
    cuda.launch(&KERNELS, "im2col", variant, grid(channels, pixels), &arguments);
}

/// Puts a strip's sums into their place.
pub fn finish(
    cuda: &CudaBackend,
    strip: &ConvStrip,
    sums: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    y: &mut Tensor,
) {
    let &[_, _, frames, height, width] = y.shape().sizes() else { unreachable!("made by the op") };
    let (channels, pixels) = (sums.shape().rows(), sums.shape().width());
    let (first_pixel, first_channel) = (strip.pixels.start, strip.channels.start);
    let variant = CudaVariant::of(&[y.dtype()]);
    y.with_range_mut(strip.sample..strip.sample + 1, |y| {
        let arguments = arguments![
            sums,
            bias,
            y,
            channels,
            pixels,
            first_pixel,
            first_channel,
            frames * height * width,
            activation.code(),
        ];
        cuda.launch(&KERNELS, "finish", variant, grid(channels, pixels), &arguments);
    });
}
