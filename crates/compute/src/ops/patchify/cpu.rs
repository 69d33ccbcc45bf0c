//! Images as tokens and back on the processor.

use super::Layout;
use crate::Tensor;
use crate::cpu::Cpu;
use crate::dtype::with_real;

/// A piece of tokens is filled place by place within the token: what lies beside each other in the
/// image is then read in one go, and the piece, which is written to and fro, stays in the cache.
pub fn patchify(cpu: &Cpu, layout: Layout, image: &Tensor, tokens: &mut Tensor) {
    let Layout { channels, height, width, patch, steps, .. } = layout;
    let wide = tokens.shape().width();
    with_real!(image.dtype(), T => {
        let image = image.data::<T>();
        cpu.rows(tokens.data_mut::<T>(), wide, |first, tokens| {
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

pub fn unpatchify(cpu: &Cpu, layout: Layout, tokens: &Tensor, image: &mut Tensor) {
    let Layout { channels, height, width, patch, down, across, steps } = layout;
    let wide = tokens.shape().width();
    with_real!(image.dtype(), T => {
        let tokens = tokens.data::<T>();
        cpu.rows(image.data_mut::<T>(), width, |first, rows| {
            for (index, pixels) in (first..).zip(rows.chunks_exact_mut(width)) {
                let (plane, row) = (index / height, index % height);
                let (sample, channel) = (plane / channels, plane % channels);
                let token = (sample * down + row / patch) * across;
                let tokens = &tokens[token * wide..][..across * wide];
                let place = channel * steps[0] + row % patch * steps[1];
                for (token, pixels) in tokens.chunks_exact(wide).zip(pixels.chunks_exact_mut(patch)) {
                    for (column, pixel) in pixels.iter_mut().enumerate() {
                        *pixel = token[place + column * steps[2]];
                    }
                }
            }
        });
    });
}

impl Layout {
    /// Where the first number of a token lies in the images.
    #[inline(always)]
    fn corner(&self, token: usize) -> usize {
        let (sample, token) =
            (token / (self.down * self.across), token % (self.down * self.across));
        let (row, column) = (token / self.across * self.patch, token % self.across * self.patch);
        (sample * self.channels * self.height + row) * self.width + column
    }
}
