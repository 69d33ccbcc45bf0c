//! Images as tokens and back: a token is a square of `patch` pixels a side, tokens run along rows.
//!
//! [samples, channels, height, width] ↔
//! [samples, (height / patch) · (width / patch), channels · patch · patch]
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

impl Tape<'_> {
    /// Images as tokens.
    pub fn patchify(&self, x: &Var, patch: usize, order: PatchOrder) -> Result<Var> {
        let op = self.begin_op("patchify");
        op.expect_no_grad(x)?;
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, channels, height, width] = op.expect_rank("x", x.tensor())?;
        let layout = PatchLayout::new(&op, [channels, height, width], patch, order)?;
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

    /// Images of this height and width from their tokens.
    pub fn unpatchify(
        &self,
        tokens: &Var,
        [height, width]: [usize; 2],
        patch: usize,
        order: PatchOrder,
    ) -> Result<Var> {
        let op = self.begin_op("unpatchify");
        op.expect_no_grad(tokens)?;
        let dtype = op.expect_real("tokens", tokens.tensor())?;
        let [samples, _, wide] = op.expect_rank("tokens", tokens.tensor())?;
        let channels =
            op.expect_multiple("the width of tokens", wide, patch.saturating_mul(patch))?;
        let layout = PatchLayout::new(&op, [channels, height, width], patch, order)?;
        op.expect_shape("tokens", tokens.tensor(), layout.tokens(samples))?;
        let mut image = op.alloc([samples, channels, height, width], dtype)?;
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
        [channels, height, width]: [usize; 3],
        patch: usize,
        order: PatchOrder,
    ) -> Result<Self> {
        let down = op.expect_multiple("height", height, patch)?;
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
