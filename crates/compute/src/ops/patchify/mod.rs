//! Images as tokens and back: a token is a square of `patch` pixels a side, tokens run along rows.
//!
//! [samples, channels, height, width] ↔
//! [samples, (height / patch) · (width / patch), channels · patch · patch]
//!
//! Clips [samples, channels, frames, height, width] are cut up frame by frame. The frames of a channel lie one below the
//! other, so to the kernels a clip is a high image.
//!
//! With a patch of one pixel this turns an image into tokens for attention. Forward only: models
//! cut up latents, which nothing trained had a part in.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::op::Op;
use crate::tape::Tape;
use crate::var::Var;
use crate::{Result, Shape};

/// How the numbers of a token are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchOrder {
    /// (channel, row, column), as in SD3.
    ChannelsFirst,
    /// (row, column, channel).
    ChannelsLast,
}

/// What tokens are put together to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchedSize {
    /// Images of this height and width.
    Image([usize; 2]),
    /// Clips of this many frames, and of this height and width.
    Clip([usize; 3]),
}

impl From<[usize; 2]> for PatchedSize {
    fn from(size: [usize; 2]) -> Self {
        Self::Image(size)
    }
}

impl From<[usize; 3]> for PatchedSize {
    fn from(size: [usize; 3]) -> Self {
        Self::Clip(size)
    }
}

impl Tape<'_> {
    /// Images or clips as tokens.
    pub fn patchify(&self, x: &Var, patch: usize, order: PatchOrder) -> Result<Var> {
        let op = self.begin_op("patchify");
        op.expect_no_grad(x)?;
        let dtype = op.expect_real("x", x.tensor())?;
        let is_clip = x.shape().sizes().len() == 5;
        let [samples, channels, frames, height, width] = if is_clip {
            op.expect_rank("x", x.tensor())?
        } else {
            let [samples, channels, height, width] = op.expect_rank("x", x.tensor())?;
            [samples, channels, 1, height, width]
        };
        let layout = PatchLayout::new(&op, channels, [frames, height, width], patch, order)?;
        let mut tokens = op.alloc(layout.tokens(samples), dtype)?;
        op.count(0, &[x.tensor(), &tokens]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::patchify(backend, layout, x.tensor(), &mut tokens),
            Backend::Cuda(backend) => cuda::patchify(backend, layout, x.tensor(), &mut tokens),
            Backend::Gpu(backend) => gpu::patchify(backend, layout, x.tensor(), &mut tokens),
        }
        Ok(op.result(tokens))
    }

    /// Images or clips of this size from their tokens.
    pub fn unpatchify(
        &self,
        tokens: &Var,
        size: impl Into<PatchedSize>,
        patch: usize,
        order: PatchOrder,
    ) -> Result<Var> {
        let op = self.begin_op("unpatchify");
        op.expect_no_grad(tokens)?;
        let dtype = op.expect_real("tokens", tokens.tensor())?;
        let [samples, _, wide] = op.expect_rank("tokens", tokens.tensor())?;
        let channels =
            op.expect_multiple("the width of tokens", wide, patch.saturating_mul(patch))?;
        let (shape, size) = match size.into() {
            PatchedSize::Image([height, width]) => {
                ([samples, channels, height, width].into(), [1, height, width])
            }
            PatchedSize::Clip(size) => {
                (Shape::new(&[&[samples, channels][..], &size].concat()), size)
            }
        };
        let layout = PatchLayout::new(&op, channels, size, patch, order)?;
        op.expect_shape("tokens", tokens.tensor(), layout.tokens(samples))?;
        let mut image = op.alloc(shape, dtype)?;
        op.count(0, &[tokens.tensor(), &image]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::unpatchify(backend, layout, tokens.tensor(), &mut image),
            Backend::Cuda(backend) => {
                cuda::unpatchify(backend, layout, tokens.tensor(), &mut image);
            }
            Backend::Gpu(backend) => gpu::unpatchify(backend, layout, tokens.tensor(), &mut image),
        }
        Ok(op.result(image))
    }
}

/// Where the numbers of an image lie in tokens.
#[derive(Clone, Copy)]
struct PatchLayout {
    channels: usize,
    /// Of all frames together.
    height: usize,
    width: usize,
    patch: usize,
    /// Tokens in each direction.
    down: usize,
    across: usize,
    /// Steps within a token from a channel, a row, a column to the next.
    strides: [usize; 3],
}

impl PatchLayout {
    fn new(
        op: &Op<'_>,
        channels: usize,
        [frames, height, width]: [usize; 3],
        patch: usize,
        order: PatchOrder,
    ) -> Result<Self> {
        let down = frames * op.expect_multiple("height", height, patch)?;
        let height = frames * height;
        let across = op.expect_multiple("width", width, patch)?;
        let steps = match order {
            PatchOrder::ChannelsFirst => [patch * patch, patch, 1],
            PatchOrder::ChannelsLast => [1, patch * channels, channels],
        };
        Ok(Self { channels, height, width, patch, down, across, strides: steps })
    }

    fn tokens(&self, samples: usize) -> Shape {
        [samples, self.down * self.across, self.channels * self.patch * self.patch].into()
    }
}
