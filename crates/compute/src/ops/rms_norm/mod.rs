//! Root-mean-square norm (Zhang and Sennrich, "Root Mean Square Layer Normalization",
//! arXiv 1910.07467) over the rows of x [.., width], with a weight `[width]` or without:
//!
//! y = x̂·weight with x̂ = x / √(mean(x²) + ε)
//!
//! Saved for backward: x. The mean is computed again, from a row that is at hand anyway.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use cpu::{backward_row, normalise};

use super::inputs;
use crate::backward::{BackwardPass, GradientSlot};
use crate::cpu::sums::n_row_blocks;
use crate::device::{Backend, DeviceKind};
use crate::op::OpContext;
use crate::tape::Tape;
use crate::var::{GradTarget, Remat, SavedTensor, Var};
use crate::{Dtype, Result, Tensor};

/// FLOPs per element, for the work counter.
const FLOPS: usize = 6;

impl Tape<'_> {
    /// Root-mean-square norm with a weight of width `x`, f32, or without.
    pub fn rms_norm(&self, x: &Var, weight: Option<&Var>, epsilon: f32) -> Result<Var> {
        let op = self.begin_op("rms_norm");
        op.expect_real("x", x.tensor())?;
        if let Some(weight) = weight {
            op.expect_vector("weight", weight.tensor(), x.shape().width())?;
        }
        let y = forward(op.cx, x.tensor(), weight.map(Var::tensor), epsilon)?;
        let result = self.with_remat(op.result(y), || remat(x, weight, epsilon));
        if !self.requires_grad(&inputs([Some(x), weight])) {
            return Ok(result);
        }
        let record = RmsNormBackward {
            x: (self.save_for_backward(x), x.grad_target()),
            weight: weight.map(|weight| (self.save_for_backward(weight), weight.grad_target())),
            epsilon,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

fn remat(x: &Var, weight: Option<&Var>, epsilon: f32) -> Remat {
    let (x, mut needs) = x.to_saved();
    let weight = weight.map(|weight| {
        let (weight, more) = weight.to_saved();
        needs.extend(more);
        weight
    });
    Remat::new(needs, move |cx| {
        let weight = weight.as_ref().map(|weight| weight.get(cx)).transpose()?;
        forward(cx, &x.get(cx)?, weight.as_ref(), epsilon)
    })
}

fn forward(cx: OpContext<'_>, x: &Tensor, weight: Option<&Tensor>, epsilon: f32) -> Result<Tensor> {
    let mut y = cx.alloc(x.shape(), x.dtype())?;
    cx.count("rms_norm", FLOPS * x.shape().elements(), &[x, &y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::forward(backend, x, weight, epsilon, &mut y),
        Backend::Cuda(backend) => cuda::forward(backend, x, weight, epsilon, &mut y),
        Backend::Gpu(backend) => gpu::forward(backend, x, weight, epsilon, &mut y),
    }
    Ok(y)
}

struct RmsNormBackward {
    x: (SavedTensor, Option<GradTarget>),
    weight: Option<(SavedTensor, Option<GradTarget>)>,
    epsilon: f32,
}

/// What a gradient is found from.
#[derive(Clone, Copy)]
struct RmsNormInputs<'a> {
    x: &'a Tensor,
    weight: Option<&'a Tensor>,
    /// That of the result.
    gradient: &'a Tensor,
    epsilon: f32,
}

/// The gradients that somebody asks for.
struct RmsNormSlots<'a> {
    x: Option<&'a mut GradientSlot>,
    weight: Option<&'a mut GradientSlot>,
}

impl RmsNormBackward {
    fn backward(self, back: &mut BackwardPass<'_>, gradient: &Tensor) -> Result<()> {
        let (cx, epsilon) = (back.cx, self.epsilon);
        let x = self.x.0.get(cx)?;
        let (weight, source) = self.weight.unzip();
        let weight = weight.map(|kept| kept.get(cx)).transpose()?;
        let width = [x.shape().width()].into();
        let mut of_weight = back.slot_of(source.flatten(), width, Dtype::F32)?;
        let mut of_x = back.slot_of(self.x.1, x.shape(), x.dtype())?;
        let floats = of_weight.as_ref().map_or(0, |_| workspace_floats(cx, &x));
        let mut workspace = cx.workspace([floats], Dtype::F32)?;
        let mut tensors = vec![gradient, &x];
        tensors.extend(of_x.iter().map(|slot| &slot.tensor));
        let n_gradients = usize::from(of_x.is_some()) + usize::from(of_weight.is_some());
        if n_gradients == 2 && matches!(cx.device.kind(), DeviceKind::Cpu { .. }) {
            // A pass for each.
            tensors.extend([gradient, &x]);
        }
        cx.count("rms_norm backward", n_gradients * FLOPS * x.shape().elements(), &tensors);
        let rows = RmsNormInputs { x: &x, weight: weight.as_ref(), gradient, epsilon };
        let wanted = RmsNormSlots { x: of_x.as_mut(), weight: of_weight.as_mut() };
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::backward(backend, rows, wanted, &mut workspace),
            Backend::Cuda(backend) => cuda::backward(backend, rows, wanted, &mut workspace),
            Backend::Gpu(backend) => gpu::backward(backend, rows, wanted, &mut workspace),
        }
        of_weight.into_iter().chain(of_x).for_each(|slot| back.put(slot));
        Ok(())
    }
}

/// Floats of scratch memory that the weight's gradient takes.
fn workspace_floats(cx: OpContext<'_>, x: &Tensor) -> usize {
    match cx.device.kind() {
        DeviceKind::Cpu { .. } => n_row_blocks(x.shape().rows()) * x.shape().width(),
        DeviceKind::Cuda { .. } => cuda::shares_floats(x),
        DeviceKind::Gpu { .. } => gpu::sums_floats(x),
    }
}
