//! What a convolution needs on the CPU besides matmuls.

pub mod winograd;

use super::{ConvStrip, ConvWindow};
use crate::cpu::CpuBackend;
use crate::cpu::rows::store;
use crate::dtype::with_real;
use crate::ops::Activation;
use crate::{Element, Tensor};

/// Numbers that are biased, activated and rounded in turn, without leaving the nearest cache.
const SCRATCH: usize = 512;

/// Copies what windows see (im2col): a row for each number of the kernel, a column for each pixel.
pub fn im2col(
    cpu: &CpuBackend,
    window: ConvWindow,
    image: &Tensor,
    first_pixel: usize,
    columns: &mut Tensor,
) {
    let n_pixels = columns.shape().width();
    with_real!(image.dtype(), T => {
        let image = image.data::<T>();
        cpu.par_rows(columns.data_mut::<T>(), n_pixels, |first, rows| {
            for (tap, row) in (first..).zip(rows.chunks_exact_mut(n_pixels)) {
                window.see(image, tap, first_pixel, row);
            }
        });
    });
}

impl ConvWindow {
    /// What the `tap`-th number of the kernel meets at each pixel.
    fn see<T: Element>(&self, image: &[T], tap: usize, first_pixel: usize, mut pixels: &mut [T]) {
        let ([_, height, width], [kernel_height, kernel_width]) = (self.image, self.kernel);
        let (channel, tap) =
            (tap / (kernel_height * kernel_width), tap % (kernel_height * kernel_width));
        let (tap_row, tap_column) = (tap / kernel_width, tap % kernel_width);
        let channel = &image[channel * height * width..][..height * width];
        let mut pixel = first_pixel;
        while !pixels.is_empty() {
            let (row, column) = (pixel / self.result[1], pixel % self.result[1]);
            let length = pixels.len().min(self.result[1] - column);
            let (now, later) = pixels.split_at_mut(length);
            let at = (row * self.stride + tap_row).checked_sub(self.corner[0]);
            match at.filter(|at| *at < height) {
                None => now.fill(T::default()),
                Some(at) => self.see_row(&channel[at * width..][..width], tap_column, column, now),
            }
            pixel += length;
            pixels = later;
        }
    }

    /// The same within one row of the image, from the result's column `first` on.
    fn see_row<T: Element>(&self, row: &[T], tap: usize, first: usize, pixels: &mut [T]) {
        // Columns of the result whose window's number at `tap` is inside the image.
        let left = self.corner[1];
        let from = left.saturating_sub(tap).div_ceil(self.stride);
        let to = (row.len() + left).saturating_sub(tap).div_ceil(self.stride);
        let from = from.clamp(first, first + pixels.len());
        let to = to.clamp(from, first + pixels.len());
        pixels[..from - first].fill(T::default());
        pixels[to - first..].fill(T::default());
        if from == to {
            return;
        }
        let inside = &mut pixels[from - first..to - first];
        let seen = &row[from * self.stride + tap - left..];
        if self.stride == 1 {
            inside.copy_from_slice(&seen[..inside.len()]);
        } else {
            for (pixel, seen) in inside.iter_mut().zip(seen.iter().step_by(self.stride)) {
                *pixel = *seen;
            }
        }
    }
}

/// Puts a strip into its place, with bias and activation.
pub fn finish(
    cpu: &CpuBackend,
    strip: &ConvStrip,
    sums: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    y: &mut Tensor,
) {
    let &[_, outputs, height, width] = y.shape().sizes() else { unreachable!("made by the op") };
    let n_pixels = height * width;
    let (sums, bias) = (sums.data::<f32>(), bias.map(Tensor::data::<f32>));
    with_real!(y.dtype(), T => {
        let start = (strip.sample * outputs + strip.channels.start) * n_pixels;
        let planes = &mut y.data_mut::<T>()[start..][..strip.channels.len() * n_pixels];
        cpu.par_chunks(planes, n_pixels, |index, plane| {
            let bias = bias.map_or(0.0, |bias| bias[strip.channels.start + index]);
            let sums = &sums[index * strip.pixels.len()..][..strip.pixels.len()];
            let mut scratch = [0.0; SCRATCH];
            let pieces = plane[strip.pixels.clone()].chunks_mut(SCRATCH).zip(sums.chunks(SCRATCH));
            for (y, sums) in pieces {
                let values = &mut scratch[..sums.len()];
                for (value, sum) in values.iter_mut().zip(sums) {
                    *value = sum + bias;
                }
                activation.apply(values);
                store(values, y, false);
            }
        });
    });
}
