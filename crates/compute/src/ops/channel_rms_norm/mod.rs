//! Root-mean-square norm over channels: every pixel of x [samples, channels, height, width] is a row of its own,
//!
//! y = f(x / max(‖x‖, ε) · √channels · weight)
//!
//! with ‖x‖ the Euclidean norm over channels, ε = 1e-12 as in PyTorch's `F.normalize`, and weight `[channels]`. The
//! activation is part of the same pass, as in `group_norm`. Forward only, like all that images are encoded and
//! decoded by.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use super::Activation;
use crate::device::Backend;
use crate::tape::Tape;
use crate::var::Var;
use crate::{Dtype, Result, Tensor};

/// FLOPs per element, for the work counter, of the norm alone and of an activation.
const FLOPS: usize = 5;
const ACTIVATION_FLOPS: usize = 20;

/// Taken: the default of `torch.nn.functional.normalize`.
const EPSILON: f32 = 1e-12;

impl Tape<'_> {
    /// Root-mean-square norm over channels with a weight for each, f32, and an activation.
    pub fn channel_rms_norm(
        &self,
        x: &Var,
        weight: &Tensor,
        activation: Activation,
    ) -> Result<Var> {
        let op = self.begin_op("channel_rms_norm");
        op.expect_no_grad(x)?;
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, channels, height, width] = op.expect_rank("x", x.tensor())?;
        op.expect_vector("weight", weight, channels)?;
        let mut y = op.alloc(x.shape(), dtype)?;
        let flops = if activation == Activation::None { FLOPS } else { FLOPS + ACTIVATION_FLOPS };
        op.count(flops * x.shape().elements(), &[x.tensor(), &y]);
        // What each pixel is multiplied by.
        let mut factors = op.workspace([samples, height * width], Dtype::F32)?;
        let x = x.tensor();
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(cpu) => cpu::forward(cpu, x, weight, activation, &mut factors, &mut y),
            Backend::Cuda(cuda) => cuda::forward(cuda, x, weight, activation, &mut factors, &mut y),
            Backend::Gpu(gpu) => gpu::forward(gpu, x, weight, activation, &mut factors, &mut y),
        }
        Ok(op.result(y))
    }
}
