//! `DoRA`: adapters that train a weight's direction and magnitude separately (Liu et al., "`DoRA`", arXiv
//! 2402.09353): a linear layer with a low-rank term, each row of whose sum has a trained length,
//!
//! y = f(g·(x·Wᵀ + scale·(x·Aᵀ)·Bᵀ) + bias) with g = magnitude / ‖W + scale·B·A‖
//!
//! and norms of rows. Here is g, `[out]`, f32. The sum is a [`linear`](crate::Tape::linear) layer
//! without bias, in which only the low-rank term sees dropout, and [`affine`](crate::Tape::affine)
//! does the rest.
//!
//! The norm counts as a constant in backward (section 4.3 there): A and B get no gradient through
//! it, the magnitude gets that of g divided by it. W + scale·B·A never exists, and W may be
//! quantised: for each row w of W and b of B
//!
//! ‖w + scale·b·A‖² = ‖w‖² + scale·b·(2·w·Aᵀ + scale·b·(A·Aᵀ))
//!
//! Saved for backward: the norms. A recomputed block computes g twice, at the cost of another rank-wide
//! matmul with W, which is little beside its matmuls with tokens.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use super::linear::{Lora, Weight};
use super::matmul::{FusedMatmul, Matmul, Operand};
use crate::device::{Backend, Device, DeviceKind};
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::Var;
use crate::{Dtype, Result, Tensor};

/// The norm of each row of a weight, f32 `[out]`: what a magnitude starts as, and what
/// [`Tape::dora_scale`] needs of the weight besides.
pub fn row_norms(weight: Weight<'_>) -> Result<Tensor> {
    let device = device_of(weight);
    let op = Op::standalone("row_norms", device);
    let outputs = weight.check(&op, weight.shape().width())?;
    let mut norms = op.alloc([outputs], Dtype::F32)?;
    op.count(2 * weight.shape().elements(), &[&norms]);
    let numbers = match device.kind() {
        DeviceKind::Cpu { .. } => 0,
        DeviceKind::Cuda { .. } => cuda::workspace_floats(weight),
        DeviceKind::Gpu { .. } => gpu::workspace_floats(weight),
    };
    let mut workspace = op.workspace([numbers], Dtype::F32)?;
    match op.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::row_norms(backend, weight, &mut norms),
        Backend::Cuda(backend) => cuda::row_norms(backend, weight, &mut workspace, &mut norms),
        Backend::Gpu(backend) => gpu::row_norms(backend, weight, &mut workspace, &mut norms),
    }
    Ok(norms)
}

fn device_of(weight: Weight<'_>) -> &Device {
    match weight {
        Weight::Dense(var) => var.tensor().device(),
        Weight::Quantised(quantised) => quantised.codes().device(),
    }
}

impl Tape<'_> {
    /// magnitude / ‖W + scale·B·A‖ by row, for a frozen weight with its [`row_norms`] and a
    /// magnitude `[out]`, f32; see the module's comment.
    pub fn dora_scale(
        &self,
        weight: Weight<'_>,
        norms: &Tensor,
        lora: Lora<'_>,
        magnitude: &Var,
    ) -> Result<Var> {
        let op = self.begin_op("dora_scale");
        let inputs = weight.shape().width();
        let outputs = weight.check(&op, inputs)?;
        lora.check(&op, [outputs, inputs])?;
        op.expect_vector("norms", norms, outputs)?;
        op.expect_vector("magnitude", magnitude.tensor(), outputs)?;
        let mut scales = op.alloc([outputs], Dtype::F32)?;
        let norms = adapted_norms(op.cx, weight, norms, lora)?;
        divide(op.cx, magnitude.tensor(), &norms, &mut scales, false);
        let result = op.result(scales);
        let Some(source) = magnitude.grad_target().filter(|_| self.requires_grad(&[magnitude]))
        else {
            return Ok(result);
        };
        self.save_extra(&op);
        Ok(self.record(result, move |back, gradient| {
            let mut slot = back.slot(source, norms.shape(), Dtype::F32)?;
            divide(back.cx, &gradient, &norms, &mut slot.tensor, slot.add);
            back.put(slot);
            Ok(())
        }))
    }
}

/// ‖W + scale·B·A‖ by row.
fn adapted_norms(
    cx: OpContext<'_>,
    weight: Weight<'_>,
    norms: &Tensor,
    Lora { down, up, scale, .. }: Lora<'_>,
) -> Result<Tensor> {
    let (rank, outputs) = (down.shape().rows(), norms.shape().width());
    let (down, up) = (Operand::from(down.tensor()), up.tensor());
    let mut adapted = cx.alloc([outputs], Dtype::F32)?;
    let mut square = cx.workspace([rank, rank], Dtype::F32)?;
    FusedMatmul::new(&[Matmul::new(down, down.t())], &mut square).run(cx)?;
    let mut cross = cx.workspace([outputs, rank], Dtype::F32)?;
    let matmuls = [
        Matmul { scale: 2.0, ..Matmul::new(weight.matrix(Dtype::F32), down.t()) },
        Matmul { scale, ..Matmul::new(up, (&square).into()) },
    ];
    FusedMatmul::new(&matmuls, &mut cross).run(cx)?;
    let work = 2 * up.shape().elements();
    cx.count("dora norms", work, &[up, &cross, norms, &adapted]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => {
            cpu::adapted_norms(backend, norms, up, &cross, scale, &mut adapted);
        }
        Backend::Cuda(backend) => {
            cuda::adapted_norms(backend, norms, up, &cross, scale, &mut adapted);
        }
        Backend::Gpu(backend) => {
            gpu::adapted_norms(backend, norms, up, &cross, scale, &mut adapted);
        }
    }
    Ok(adapted)
}

fn divide(cx: OpContext<'_>, x: &Tensor, by: &Tensor, out: &mut Tensor, add: bool) {
    cx.count("dora divide", x.shape().elements(), &[x, by, out]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::divide(backend, x, by, out, add),
        Backend::Cuda(backend) => cuda::divide(backend, x, by, out, add),
        Backend::Gpu(backend) => gpu::divide(backend, x, by, out, add),
    }
}
