//! Gated linear units (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202), without the
//! linear layers around them: y = f(gate)·up. With silu for f it is `SwiGLU`, with gelu `GEGLU`.
//!
//! Saved for backward: gate, and up where the gradient of the gate is wanted.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use super::Activation;
use crate::backward::BackwardPass;
use crate::device::Backend;
use crate::op::OpContext;
use crate::tape::Tape;
use crate::var::{GradTarget, Remat, SavedTensor, Var};
use crate::{Result, Tensor};

/// FLOPs per element, for the work counter; an exponential counts as ten.
const FLOPS: usize = 21;

impl Tape<'_> {
    /// `activation` of every number of `gate`, times that of `up`.
    pub fn glu(&self, gate: &Var, up: &Var, activation: Activation) -> Result<Var> {
        let op = self.begin_op("glu");
        let dtype = op.expect_real("gate", gate.tensor())?;
        op.expect_dtype("up", up.tensor(), dtype)?;
        op.expect_shape("up", up.tensor(), gate.shape())?;
        let y = forward(op.cx, gate.tensor(), up.tensor(), activation)?;
        let result = self.with_remat(op.result(y), || remat(gate, up, activation));
        if !self.requires_grad(&[gate, up]) {
            return Ok(result);
        }
        let record = GluBackward {
            gate: (self.save_for_backward(gate), up.grad_target()),
            up: gate.grad_target().map(|source| (self.save_for_backward(up), source)),
            activation,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, gradient)))
    }
}

fn remat(gate: &Var, up: &Var, activation: Activation) -> Remat {
    let ((gate, mut needs), (up, more)) = (gate.to_saved(), up.to_saved());
    needs.extend(more);
    Remat::new(needs, move |cx| forward(cx, &gate.get(cx)?, &up.get(cx)?, activation))
}

fn forward(
    cx: OpContext<'_>,
    gate: &Tensor,
    up: &Tensor,
    activation: Activation,
) -> Result<Tensor> {
    let mut y = cx.alloc(gate.shape(), gate.dtype())?;
    cx.count("glu", FLOPS * gate.shape().elements(), &[gate, up, &y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::forward(backend, activation, gate, up, &mut y),
        Backend::Cuda(backend) => cuda::forward(backend, activation, gate, up, &mut y),
        Backend::Gpu(backend) => gpu::forward(backend, activation, gate, up, &mut y),
    }
    Ok(y)
}

/// Each factor, with where the gradient of the other one goes.
struct GluBackward {
    gate: (SavedTensor, Option<GradTarget>),
    up: Option<(SavedTensor, GradTarget)>,
    activation: Activation,
}

impl GluBackward {
    fn backward(self, back: &mut BackwardPass<'_>, gradient: Tensor) -> Result<()> {
        let (cx, activation) = (back.cx, self.activation);
        let gate = self.gate.0.get(cx)?;
        let (up, source) = self.up.unzip();
        let up = up.map(|up| up.get(cx)).transpose()?;
        let mut slot = back.slot_of(self.gate.1, gate.shape(), gate.dtype())?;
        // The gate's gradient takes the memory of the result's: a layer this wide is where the
        // most is held at once.
        let mut gradient = if up.is_some() { gradient.into_unique()? } else { gradient };
        let mut tensors = vec![&gate, &gradient];
        tensors.extend(slot.as_ref().map(|slot| &slot.tensor));
        tensors.extend(up.iter().flat_map(|up| [up, &gradient]));
        let n_gradients = usize::from(up.is_some()) + usize::from(slot.is_some());
        cx.count("glu backward", n_gradients * FLOPS * gate.shape().elements(), &tensors);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => {
                cpu::backward(
                    backend,
                    activation,
                    &gate,
                    up.as_ref(),
                    &mut gradient,
                    slot.as_mut(),
                );
            }
            Backend::Cuda(backend) => {
                cuda::backward(
                    backend,
                    activation,
                    &gate,
                    up.as_ref(),
                    &mut gradient,
                    slot.as_mut(),
                );
            }
            Backend::Gpu(backend) => {
                gpu::backward(
                    backend,
                    activation,
                    &gate,
                    up.as_ref(),
                    &mut gradient,
                    slot.as_mut(),
                );
            }
        }
        if let Some(slot) = slot {
            back.put(slot);
        }
        match source {
            Some(source) => back.pass(Some(source), gradient),
            None => Ok(()),
        }
    }
}
