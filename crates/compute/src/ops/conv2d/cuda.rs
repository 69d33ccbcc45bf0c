//! What a convolution needs on a GPU besides matmuls.

use super::{ConvStrip, ConvWindow};
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};
use crate::ops::Activation;

const KERNELS: CudaSource = CudaSource { name: "conv2d", text: include_str!("kernel.cu") };

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
    image: &Tensor,
    first_pixel: usize,
    columns: &mut Tensor,
) {
    let ([channels, height, width], [kernel_height, kernel_width]) = (window.image, window.kernel);
    let ([top, left], [_, across]) = (window.corner, window.result);
    let pixels = columns.shape().width();
    let arguments = arguments![
        image,
        columns,
        channels,
        pixels,
        first_pixel,
        height,
        width,
        kernel_height,
        kernel_width,
        window.stride,
        top,
        left,
        across,
    ];
    let variant = CudaVariant::of(&[image.dtype()]);
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
    let &[_, _, height, width] = y.shape().sizes() else { unreachable!("made by the op") };
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
            height * width,
            activation.code(),
        ];
        cuda.launch(&KERNELS, "finish", variant, grid(channels, pixels), &arguments);
    });
}
