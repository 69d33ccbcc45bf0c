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
    clip: &Tensor,
    first_pixel: usize,
    columns: &mut Tensor,
) {
    let n_pixels = columns.shape().width();
    with_real!(clip.dtype(), T => {
        let clip = clip.data::<T>();
        cpu.par_rows(columns.data_mut::<T>(), n_pixels, |first, rows| {
            for (tap, row) in (first..).zip(rows.chunks_exact_mut(n_pixels)) {
                window.see(clip, tap, first_pixel, row);
            }
        });
    });
}

impl ConvWindow {
    /// Where a place of the padded clip lies in it, along an axis; `None` where there are zeros.
    pub(super) fn source(&self, axis: usize, at: usize) -> Option<usize> {
        let (before, size) = (self.corner[axis], self.clip[axis]);
        if self.replicates {
            return Some(at.saturating_sub(before).min(size - 1));
        }
        at.checked_sub(before).filter(|at| *at < size)
    }

    /// What the `tap`-th number of the kernel meets at each pixel.
    fn see<T: Element>(&self, clip: &[T], tap: usize, first_pixel: usize, mut pixels: &mut [T]) {
        let [_, down, across] = self.result;
        let [_, height, width] = self.clip;
        let (tap, tap_column) = (tap / self.kernel[2], tap % self.kernel[2]);
        let (tap, tap_row) = (tap / self.kernel[1], tap % self.kernel[1]);
        let (channel, tap_frame) = (tap / self.kernel[0], tap % self.kernel[0]);
        let mut pixel = first_pixel;
        while !pixels.is_empty() {
            let (row, column) = (pixel / across, pixel % across);
            let (frame, row) = (row / down, row % down);
            let length = pixels.len().min(across - column);
            let (now, later) = pixels.split_at_mut(length);
            let frame = self.source(0, frame * self.stride[0] + tap_frame);
            let row = self.source(1, row * self.stride[1] + tap_row);
            match frame.zip(row) {
                None => now.fill(T::default()),
                Some((frame, row)) => {
                    let line = (channel * self.clip[0] + frame) * height + row;
                    self.see_row(&clip[line * width..][..width], tap_column, column, now);
                }
            }
            pixel += length;
            pixels = later;
        }
    }

    /// The same within one row of the clip, from the result's column `first` on.
    fn see_row<T: Element>(&self, row: &[T], tap: usize, first: usize, pixels: &mut [T]) {
        // Columns of the result whose window's number at `tap` is inside the clip.
        let (left, stride) = (self.corner[2], self.stride[2]);
        let from = left.saturating_sub(tap).div_ceil(stride);
        let to = (row.len() + left).saturating_sub(tap).div_ceil(stride);
        let from = from.clamp(first, first + pixels.len());
        let to = to.clamp(from, first + pixels.len());
        let edge = |at: Option<&T>| at.copied().filter(|_| self.replicates).unwrap_or_default();
        pixels[..from - first].fill(edge(row.first()));
        pixels[to - first..].fill(edge(row.last()));
        if from == to {
            return;
        }
        let inside = &mut pixels[from - first..to - first];
        let seen = &row[from * stride + tap - left..];
        if stride == 1 {
            inside.copy_from_slice(&seen[..inside.len()]);
        } else {
            for (pixel, seen) in inside.iter_mut().zip(seen.iter().step_by(stride)) {
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
    let &[_, outputs, frames, height, width] = y.shape().sizes() else {
        unreachable!("made by the op")
    };
    let n_pixels = frames * height * width;
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
