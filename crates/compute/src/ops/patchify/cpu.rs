//! Images as tokens and back on the CPU.

use rayon::prelude::*;

use super::PatchLayout;
use crate::cpu::CpuBackend;
use crate::dtype::with_real;
use crate::{Element, Tensor};

/// Channels per task when images are put together: a cache line of f32.
const CHANNELS: usize = 16;

/// A piece of tokens is filled place by place within the token: what lies beside each other in the
/// image is then read in one go, and the piece, which is written to and fro, stays in the cache.
pub fn patchify(cpu: &CpuBackend, layout: PatchLayout, image: &Tensor, tokens: &mut Tensor) {
    let PatchLayout { channels, height, width, patch, strides: steps, .. } = layout;
    let wide = tokens.shape().width();
    with_real!(image.dtype(), T => {
        let image = image.data::<T>();
        cpu.par_rows(tokens.data_mut::<T>(), wide, |first, tokens| {
            let corners: Vec<usize> = (first..first + tokens.len() / wide)
                .map(|token| layout.corner(token))
                .collect();
            for channel in 0..channels {
                for (row, column) in (0..patch).flat_map(|i| (0..patch).map(move |j| (i, j))) {
                    let place = channel * steps[0] + row * steps[1] + column * steps[2];
                    let image = &image[(channel * height + row) * width + column..];
                    for (token, corner) in tokens.chunks_exact_mut(wide).zip(&corners) {
                        token[place] = image[*corner];
                    }
                }
            }
        });
    });
}

/// A task takes some channels of a sample: what it reads at a time lies beside each other, and so
/// does what it writes from one pixel to the next.
pub fn unpatchify(cpu: &CpuBackend, layout: PatchLayout, tokens: &Tensor, image: &mut Tensor) {
    let PatchLayout { channels, height, width, .. } = layout;
    // Nothing at all is no reason to cut it into pieces of no size.
    let (size, plane) = ((channels * height * width).max(1), (height * width).max(1));
    with_real!(image.dtype(), T => {
        let (image, tokens) = (image.data_mut::<T>(), tokens.data::<T>());
        let samples = image.par_chunks_mut(size).zip(tokens.par_chunks(size));
        cpu.install(|| samples.for_each(|(image, tokens)| {
            let parts = image.par_chunks_mut(CHANNELS * plane).enumerate();
            parts.for_each(|(part, planes)| layout.collect(tokens, part * CHANNELS, planes));
        }));
    });
}

impl PatchLayout {
    /// Where the first number of a token lies in the images.
    #[inline(always)]
    fn corner(&self, token: usize) -> usize {
        let (sample, token) =
            (token / (self.down * self.across), token % (self.down * self.across));
        let (row, column) = (token / self.across * self.patch, token % self.across * self.patch);
        (sample * self.channels * self.height + row) * self.width + column
    }

    /// Fills the planes of some channels of one sample.
    fn collect<T: Element>(&self, tokens: &[T], first_channel: usize, planes: &mut [T]) {
        let wide = self.channels * self.patch * self.patch;
        for row in 0..self.height {
            for column in 0..self.width {
                let token = row / self.patch * self.across + column / self.patch;
                let [of_channel, of_row, of_column] = self.strides;
                let place = first_channel * of_channel
                    + row % self.patch * of_row
                    + column % self.patch * of_column;
                let token = &tokens[token * wide..][place..];
                let pixel = row * self.width + column;
                let planes = planes.chunks_exact_mut(self.height * self.width);
                for (plane, number) in planes.zip(token.iter().step_by(of_channel)) {
                    plane[pixel] = *number;
                }
            }
        }
    }
}
