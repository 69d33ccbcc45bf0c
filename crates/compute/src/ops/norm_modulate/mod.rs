//! Layer norm, and what is done to its result: with x̂ the row brought to mean 0 and variance 1,
//!
//! modulated: y = x̂·(1 + scale) + shift with vectors per sample, for x [samples, tokens, width];
//! affine:    y = x̂·weight + bias with the same vectors for every row.
//!
//! Saved for backward: x. Mean and variance are computed again, from a row that is at hand anyway.

mod cpu;
mod cuda;
pub(super) mod gpu;
#[cfg(test)]
pub(crate) mod tests;

use super::inputs;
use crate::backward::{BackwardPass, GradientSlot};
use crate::cuda::columns::statistics_floats;
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::tape::Tape;
use crate::var::{Chunk, GradTarget, Remat, SavedTensor, Var};
use crate::{Dtype, Result, Shape, Tensor};

impl Tape<'_> {
    /// Layer norm, scaled and shifted by vectors per sample.
    pub fn norm_modulate(
        &self,
        x: &Var,
        scale: Chunk<'_>,
        shift: Chunk<'_>,
        epsilon: f32,
    ) -> Result<Var> {
        let op = self.begin_op("norm_modulate");
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, tokens, width] = op.expect_rank("x", x.tensor())?;
        op.expect_chunk("scale", scale, samples, width, dtype)?;
        op.expect_chunk("shift", shift, samples, width, dtype)?;
        let form = NormConfig {
            epsilon,
            rows_per_vector: tokens,
            plus_one: true,
            indices: (scale.index, shift.index),
        };
        self.norm(&op, x, Some(scale.of), Some(shift.of), form)
    }

    /// Layer norm with a weight and a bias of width `x`, f32, or without.
    pub fn layer_norm(
        &self,
        x: &Var,
        weight: Option<&Var>,
        bias: Option<&Var>,
        epsilon: f32,
    ) -> Result<Var> {
        let op = self.begin_op("layer_norm");
        op.expect_real("x", x.tensor())?;
        for (what, vector) in [("weight", weight), ("bias", bias)] {
            if let Some(vector) = vector {
                op.expect_vector(what, vector.tensor(), x.shape().width())?;
            }
        }
        let rows_per_vector = x.shape().rows().max(1);
        let form = NormConfig { epsilon, rows_per_vector, plus_one: false, indices: (0, 0) };
        self.norm(&op, x, weight, bias, form)
    }

    fn norm(
        &self,
        op: &Op<'_>,
        x: &Var,
        scale: Option<&Var>,
        shift: Option<&Var>,
        form: NormConfig,
    ) -> Result<Var> {
        let y = forward(op.cx, x.tensor(), [scale, shift].map(|v| v.map(Var::tensor)), form)?;
        let result = self.with_remat(op.result(y), || remat(x, [scale, shift], form));
        if !self.requires_grad(&inputs([Some(x), scale, shift])) {
            return Ok(result);
        }
        let record = NormBackward {
            x: (self.save_for_backward(x), x.grad_target()),
            scale: scale.map(|scale| (self.save_for_backward(scale), scale.grad_target())),
            shift: shift
                .and_then(|shift| Some((shift.grad_target()?, shift.shape(), shift.dtype()))),
            form,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

/// What distinguishes the two uses.
#[derive(Clone, Copy)]
pub(super) struct NormConfig {
    pub epsilon: f32,
    /// How many rows share a vector.
    pub rows_per_vector: usize,
    /// Whether the factor is 1 + scale.
    pub plus_one: bool,
    /// Which parts of the rows of scale and shift are meant.
    pub indices: (usize, usize),
}

/// FLOPs per element, for the work counter.
const FLOPS: usize = 8;

fn remat(x: &Var, vectors: [Option<&Var>; 2], form: NormConfig) -> Remat {
    let (x, mut needs) = x.to_saved();
    let vectors = vectors.map(|vector| {
        let (vector, more) = vector?.to_saved();
        needs.extend(more);
        Some(vector)
    });
    Remat::new(needs, move |cx| {
        let [scale, shift] = vectors.each_ref().map(|kept| kept.as_ref().map(|kept| kept.get(cx)));
        let (scale, shift) = (scale.transpose()?, shift.transpose()?);
        forward(cx, &x.get(cx)?, [scale.as_ref(), shift.as_ref()], form)
    })
}

fn forward(
    cx: OpContext<'_>,
    x: &Tensor,
    vectors: [Option<&Tensor>; 2],
    form: NormConfig,
) -> Result<Tensor> {
    let mut y = cx.alloc(x.shape(), x.dtype())?;
    cx.count("norm_modulate", FLOPS * x.shape().elements(), &[x, &y]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::forward(backend, x, vectors, form, &mut y),
        Backend::Cuda(backend) => cuda::forward(backend, x, vectors, form, &mut y),
        Backend::Gpu(backend) => gpu::forward(backend, x, vectors, form, true, &mut y),
    }
    Ok(y)
}

struct NormBackward {
    x: (SavedTensor, Option<GradTarget>),
    scale: Option<(SavedTensor, Option<GradTarget>)>,
    shift: Option<(GradTarget, Shape, Dtype)>,
    form: NormConfig,
}

/// What gradients are found from.
#[derive(Clone, Copy)]
pub(super) struct NormBackwardInputs<'a> {
    pub x: &'a Tensor,
    pub scale: Option<&'a Tensor>,
    /// That of the result.
    pub gradient: &'a Tensor,
    pub form: NormConfig,
}

impl NormBackward {
    fn backward(self, back: &mut BackwardPass<'_>, gradient: &Tensor) -> Result<()> {
        let cx = back.cx;
        let x = self.x.0.get(cx)?;
        let (scale, scale_source) = self.scale.unzip();
        let (scale, scale_source) =
            (scale.map(|kept| kept.get(cx)).transpose()?, scale_source.flatten());
        let rows = NormBackwardInputs { x: &x, scale: scale.as_ref(), gradient, form: self.form };
        let wanted = [scale_source.is_some(), self.shift.is_some()];
        let [of_scale, of_shift] = workspace_floats(cx, rows, wanted);
        let mut of_scale = cx.workspace([of_scale], Dtype::F32)?;
        let mut of_shift = cx.workspace([of_shift], Dtype::F32)?;
        let mut slot = back.slot_of(self.x.1, x.shape(), x.dtype())?;
        rows_gradient(cx, rows, slot.as_mut(), [&mut of_scale, &mut of_shift]);
        if let Some(slot) = slot {
            back.put(slot);
        }
        if let Some((source, shape, dtype)) = self.shift {
            let mut slot = back.slot(source, shape, dtype)?;
            slot.clear_unless_adding();
            shift_gradient(cx, rows, &of_shift, &mut slot.tensor);
            back.put(slot);
        }
        if let (Some(source), Some(scale)) = (scale_source, &scale) {
            let mut slot = back.slot(source, scale.shape(), scale.dtype())?;
            slot.clear_unless_adding();
            scale_gradient(cx, rows, &mut of_scale, &mut slot.tensor);
            back.put(slot);
        }
        Ok(())
    }
}

/// Whether one pass over the rows finds the gradient of x and sums of which the vectors' are made; elsewhere each
/// has a pass of its own.
fn is_one_pass(cx: OpContext<'_>) -> bool {
    matches!(cx.device.kind(), DeviceKind::Gpu { .. })
}

/// Floats of scratch memory for the gradients of scale and shift: sums, or what is known of rows.
fn workspace_floats(
    cx: OpContext<'_>,
    rows: NormBackwardInputs<'_>,
    wanted: [bool; 2],
) -> [usize; 2] {
    let floats = match cx.device.kind() {
        DeviceKind::Cpu { .. } => [0, 0],
        DeviceKind::Cuda { .. } => [statistics_floats(rows.x), 0],
        DeviceKind::Gpu { .. } => [gpu::sums_floats(rows.x, rows.form.rows_per_vector); 2],
    };
    [0, 1].map(|vector| if wanted[vector] { floats[vector] } else { 0 })
}

/// The gradient of x, if it is wanted; in one pass also the sums that there is room for.
fn rows_gradient(
    cx: OpContext<'_>,
    rows: NormBackwardInputs<'_>,
    slot: Option<&mut GradientSlot>,
    sums: [&mut Tensor; 2],
) {
    let NormBackwardInputs { x, scale, gradient, form } = rows;
    if slot.is_none() && !is_one_pass(cx) {
        return;
    }
    let mut tensors = vec![gradient, x];
    tensors.extend(slot.iter().map(|slot| &slot.tensor));
    cx.count("norm_modulate backward", FLOPS * x.shape().elements(), &tensors);
    match (cx.backend(), slot) {
        (Backend::Cpu(backend), Some(slot)) => {
            cpu::backward(backend, x, scale, gradient, form, slot);
        }
        (Backend::Cuda(backend), Some(slot)) => {
            cuda::backward(backend, x, scale, gradient, form, slot);
        }
        (Backend::Gpu(backend), slot) => gpu::backward(backend, rows, true, slot, sums.map(Some)),
        (Backend::Meta | Backend::Cpu(_) | Backend::Cuda(_), _) => {}
    }
}

/// Adds Σ gradient over the rows of a vector.
fn shift_gradient(
    cx: OpContext<'_>,
    rows: NormBackwardInputs<'_>,
    sums: &Tensor,
    out: &mut Tensor,
) {
    let NormBackwardInputs { x, gradient, form, .. } = rows;
    if !is_one_pass(cx) {
        let work = FLOPS * x.shape().elements();
        cx.count("norm_modulate shift backward", work, &[gradient]);
    }
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::shift_gradient(backend, gradient, form, out),
        Backend::Cuda(backend) => cuda::shift_gradient(backend, gradient, form, out),
        Backend::Gpu(backend) => gpu::add_up(backend, sums, rows, form.indices.1, true, out),
    }
}

/// Adds Σ gradient · x̂ over the rows of a vector.
fn scale_gradient(
    cx: OpContext<'_>,
    rows: NormBackwardInputs<'_>,
    workspace: &mut Tensor,
    out: &mut Tensor,
) {
    let NormBackwardInputs { x, gradient, form, .. } = rows;
    if !is_one_pass(cx) {
        let work = FLOPS * x.shape().elements();
        cx.count("norm_modulate scale backward", work, &[gradient, x]);
    }
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::scale_gradient(backend, x, gradient, form, out),
        Backend::Cuda(backend) => cuda::scale_gradient(backend, x, gradient, form, workspace, out),
        Backend::Gpu(backend) => gpu::add_up(backend, workspace, rows, form.indices.0, true, out),
    }
}
