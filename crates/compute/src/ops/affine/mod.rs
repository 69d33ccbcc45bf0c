//! Every channel scaled and shifted, with all that usually follows:
//!
//! y = f(x·scale + bias)
//!
//! for x [.., width] and vectors `[width]`, elementwise.
//!
//! Saved for backward: scale and bias, and x where scale is trained or there is an activation. The input of
//! f is recomputed from them.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use super::linear::column_sums;
use super::{Activation, activation, inputs};
use crate::backward::BackwardPass;
use crate::cpu::sums::n_row_blocks;
use crate::device::{Backend, DeviceKind};
use crate::op::OpContext;
use crate::tape::Tape;
use crate::var::{GradTarget, Remat, SavedTensor, Var};
use crate::{Dtype, Result, Tensor};

/// FLOPs per element, for the work counter, besides the activation's.
const FLOPS: usize = 2;

impl Tape<'_> {
    /// `activation` of x·scale + bias, with vectors of width `x`, f32.
    pub fn affine(
        &self,
        x: &Var,
        scale: &Var,
        bias: Option<&Var>,
        activation: Activation,
    ) -> Result<Var> {
        let op = self.begin_op("affine");
        op.expect_real("x", x.tensor())?;
        op.expect_vector("scale", scale.tensor(), x.shape().width())?;
        if let Some(bias) = bias {
            op.expect_vector("bias", bias.tensor(), x.shape().width())?;
        }
        let bias_tensor = bias.map(Var::tensor);
        let result =
            op.result(forward(op.cx, x.tensor(), scale.tensor(), bias_tensor, activation)?);
        if !self.requires_grad(&inputs([Some(x), Some(scale), bias])) {
            return Ok(result);
        }
        let keeps_x = scale.grad_target().is_some() || activation != Activation::None;
        let record = AffineBackward {
            saved_x: keeps_x.then(|| self.save_for_backward(x)),
            x: x.grad_target(),
            scale: (self.save_for_backward(scale), scale.grad_target()),
            bias: bias.map(|bias| (self.save_for_backward(bias), bias.grad_target())),
            activation,
        };
        // Where x is not saved anyway, saving it instead of the result would gain nothing.
        let result = if keeps_x {
            self.with_remat(result, || remat(x, scale, bias, activation))
        } else {
            result
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, gradient)))
    }
}

fn remat(x: &Var, scale: &Var, bias: Option<&Var>, activation: Activation) -> Remat {
    let ((x, mut needs), (scale, more)) = (x.to_saved(), scale.to_saved());
    needs.extend(more);
    let bias = bias.map(|bias| {
        let (bias, more) = bias.to_saved();
        needs.extend(more);
        bias
    });
    Remat::new(needs, move |cx| {
        let bias = bias.as_ref().map(|bias| bias.get(cx)).transpose()?;
        forward(cx, &x.get(cx)?, &scale.get(cx)?, bias.as_ref(), activation)
    })
}

fn forward(
    cx: OpContext<'_>,
    x: &Tensor,
    scale: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
) -> Result<Tensor> {
    let mut y = cx.alloc(x.shape(), x.dtype())?;
    let of_activation = if activation == Activation::None { 0 } else { activation::FLOPS };
    let work = (FLOPS + of_activation) * x.shape().elements();
    cx.count("affine", work, &[x, &y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::forward(backend, x, scale, bias, activation, &mut y),
        Backend::Cuda(backend) => cuda::forward(backend, x, scale, bias, activation, &mut y),
        Backend::Gpu(backend) => gpu::forward(backend, x, scale, bias, activation, &mut y),
    }
    Ok(y)
}

struct AffineBackward {
    saved_x: Option<SavedTensor>,
    x: Option<GradTarget>,
    scale: (SavedTensor, Option<GradTarget>),
    bias: Option<(SavedTensor, Option<GradTarget>)>,
    activation: Activation,
}

impl AffineBackward {
    fn backward(self, back: &mut BackwardPass<'_>, mut gradient: Tensor) -> Result<()> {
        let cx = back.cx;
        let x = self.saved_x.map(|kept| kept.get(cx)).transpose()?;
        let scale = self.scale.0.get(cx)?;
        let (bias, bias_source) = self.bias.unzip();
        if self.activation != Activation::None {
            let x = x.as_ref().expect("saved because of the activation");
            let bias = bias.map(|bias| bias.get(cx)).transpose()?;
            let before = forward(cx, x, &scale, bias.as_ref(), Activation::None)?;
            gradient = gradient.into_unique()?;
            activation::backward(cx, self.activation, &before, &mut gradient);
        }
        if let Some(slot) = back.slot_of(bias_source.flatten(), scale.shape(), Dtype::F32)? {
            column_sums(back, &gradient, slot);
        }
        if let Some(source) = self.scale.1 {
            let x = x.expect("saved because the scale is trained");
            scale_gradient(back, source, &x, &gradient)?;
        }
        let Some(source) = self.x else { return Ok(()) };
        // The gradient of x takes the memory of the result's.
        let mut gradient = gradient.into_unique()?;
        let work = gradient.shape().elements();
        cx.count("affine backward", work, &[&gradient, &gradient]);
        match cx.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => cpu::multiply(backend, &mut gradient, &scale),
            Backend::Cuda(backend) => cuda::multiply(backend, &mut gradient, &scale),
            Backend::Gpu(backend) => gpu::multiply(backend, &mut gradient, &scale),
        }
        back.pass(Some(source), gradient)
    }
}

/// Σ gradient·x over all rows.
fn scale_gradient(
    back: &mut BackwardPass<'_>,
    source: GradTarget,
    x: &Tensor,
    gradient: &Tensor,
) -> Result<()> {
    let cx = back.cx;
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let mut slot = back.slot(source, [width].into(), Dtype::F32)?;
    let n_partial = match cx.device.kind() {
        DeviceKind::Cpu { .. } => n_row_blocks(rows),
        DeviceKind::Cuda { .. } | DeviceKind::Gpu { .. } => 0,
    };
    let mut partial = cx.workspace([n_partial, width], Dtype::F32)?;
    let work = FLOPS * x.shape().elements();
    cx.count("affine scale backward", work, &[x, gradient]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::scale_gradient(backend, x, gradient, &mut partial, &mut slot),
        Backend::Cuda(backend) => cuda::scale_gradient(backend, x, gradient, &mut slot),
        Backend::Gpu(backend) => gpu::scale_gradient(backend, x, gradient, &mut slot),
    }
    back.put(slot);
    Ok(())
}
