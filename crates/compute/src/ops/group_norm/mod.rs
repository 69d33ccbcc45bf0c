//! Group norm: with x̂ the channels of a group brought to mean 0 and variance 1 together,
//!
//! y = f(x̂ · weight + bias)
//!
//! for x [samples, channels, height, width], weight and bias `[channels]`. The activation is part of
//! the same pass, because in the networks that use this norm one nearly always follows. Forward
//! only, like all that images are encoded and decoded by.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use super::Activation;
use crate::device::{Backend, DeviceKind};
use crate::tape::Tape;
use crate::var::Var;
use crate::{Dtype, Result, Tensor};

/// FLOPs per element, for the work counter, of the norm alone and of an activation.
const FLOPS: usize = 8;
const ACTIVATION_FLOPS: usize = 20;

impl Tape<'_> {
    /// Group norm with a weight and a bias per channel, f32, and an activation.
    pub fn group_norm(
        &self,
        x: &Var,
        n_groups: usize,
        weight: &Tensor,
        bias: &Tensor,
        epsilon: f32,
        activation: Activation,
    ) -> Result<Var> {
        let op = self.begin_op("group_norm");
        op.expect_no_grad(x)?;
        let dtype = op.expect_real("x", x.tensor())?;
        let [_, channels, _, _] = op.expect_rank("x", x.tensor())?;
        op.expect_multiple("channels", channels, n_groups)?;
        op.expect_vector("weight", weight, channels)?;
        op.expect_vector("bias", bias, channels)?;
        let mut y = op.alloc(x.shape(), dtype)?;
        let flops = if activation == Activation::None { FLOPS } else { FLOPS + ACTIVATION_FLOPS };
        op.count(flops * x.shape().elements(), &[x.tensor(), &y]);
        let form = GroupNormConfig { n_groups, epsilon, activation };
        let floats = match op.device.kind() {
            DeviceKind::Cpu { .. } => 0,
            DeviceKind::Cuda { .. } => cuda::floats(x.tensor(), form),
            DeviceKind::Gpu { .. } => gpu::floats(x.tensor(), form),
        };
        let mut workspace = op.workspace([floats], Dtype::F32)?;
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                cpu::forward(backend, x.tensor(), weight, bias, form, &mut y);
            }
            Backend::Cuda(backend) => {
                cuda::forward(backend, x.tensor(), weight, bias, form, &mut workspace, &mut y);
            }
            Backend::Gpu(backend) => {
                gpu::forward(backend, x.tensor(), weight, bias, form, &mut workspace, &mut y);
            }
        }
        Ok(op.result(y))
    }
}

#[derive(Clone, Copy)]
struct GroupNormConfig {
    n_groups: usize,
    epsilon: f32,
    activation: Activation,
}
