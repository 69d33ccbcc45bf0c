//! Enlarging images by a whole factor, each pixel becoming a square of itself:
//!
//! y[c, i, j] = x[c, i / factor, j / factor]
//!
//! for x [samples, channels, height, width]. Of a clip [samples, channels, frames, height, width] each frame but the
//! first may become several:
//!
//! y[c, t, i, j] = x[c, ⌈t / frames⌉, i / factor, j / factor]
//!
//! Forward only, like all that images are encoded and decoded by.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::op::Op;
use crate::tape::Tape;
use crate::var::Var;
use crate::{Result, Tensor};

impl Tape<'_> {
    /// Images `factor` times as high and wide.
    pub fn upsample(&self, x: &Var, factor: usize) -> Result<Var> {
        let op = self.begin_op("upsample");
        op.expect_no_grad(x)?;
        let [samples, channels, height, width] = op.expect_rank("x", x.tensor())?;
        let clip = x.tensor().reshape([samples, channels, 1, height, width]);
        let large = enlarge(&op, &clip, UpsampleFactors { frames: 1, side: factor })?;
        let shape = [samples, channels, height * factor, width * factor];
        Ok(op.result(large.into_shape(shape.into())))
    }

    /// Clips `factor` times as high and wide, of which each frame but the first becomes `frames`.
    pub fn upsample_clip(&self, x: &Var, frames: usize, factor: usize) -> Result<Var> {
        let op = self.begin_op("upsample_clip");
        op.expect_no_grad(x)?;
        op.expect_rank::<5>("x", x.tensor())?;
        let large = enlarge(&op, x.tensor(), UpsampleFactors { frames, side: factor })?;
        Ok(op.result(large))
    }
}

/// What each frame but the first, and each pixel becomes.
#[derive(Clone, Copy)]
struct UpsampleFactors {
    frames: usize,
    side: usize,
}

fn enlarge(op: &Op<'_>, x: &Tensor, factors: UpsampleFactors) -> Result<Tensor> {
    let dtype = op.expect_real("x", x)?;
    let UpsampleFactors { frames: times, side } = factors;
    op.expect_range("frames", &times, times > 0, "1 or more")?;
    op.expect_range("factor", &side, side > 0, "1 or more")?;
    let [samples, channels, frames, height, width] = op.expect_rank("x", x)?;
    let frames = if frames == 0 { 0 } else { (frames - 1) * times + 1 };
    let mut y = op.alloc([samples, channels, frames, height * side, width * side], dtype)?;
    op.count(0, &[x, &y]);
    match op.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::forward(backend, x, factors, &mut y),
        Backend::Cuda(backend) => cuda::forward(backend, x, factors, &mut y),
        Backend::Gpu(backend) => gpu::forward(backend, x, factors, &mut y),
    }
    Ok(y)
}
