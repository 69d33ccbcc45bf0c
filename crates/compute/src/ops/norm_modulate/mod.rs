//! Layer norm, and what is done to its result: with x̂ the row brought to mean 0 and variance 1,
//!
//! modulated: y = x̂·(1 + scale) + shift with vectors per sample, for x [samples, tokens, width];
//! affine:    y = x̂·weight + bias with the same vectors for every row.
//!
//! Kept for backward: x. Mean and variance are computed again, from a row that is at hand anyway.

mod cpu;
mod cuda;
pub(super) mod gpu;
#[cfg(test)]
pub(crate) mod tests;

use super::inputs;
use crate::backward::{Backward, Slot};
use crate::cuda::columns::statistics_floats;
use crate::device::{Engine, Kind};
use crate::op::{Op, Place};
use crate::tape::Tape;
use crate::var::{Chunk, Kept, Remake, Source, Var};
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
        let op = self.begin("norm_modulate");
        let dtype = op.expect_real("x", x.tensor())?;
        let [samples, tokens, width] = op.expect_rank("x", x.tensor())?;
        op.expect_chunk("scale", scale, (samples, width), dtype)?;
        op.expect_chunk("shift", shift, (samples, width), dtype)?;
        let form = Form {
            epsilon,
            rows_per_vector: tokens,
            plus_one: true,
            indices: (scale.index, shift.index),
        };
        self.norm(&op, x, (Some(scale.of), Some(shift.of)), form)
    }

    /// Layer norm with a weight and a bias of width `x`, f32, or without.
    pub fn layer_norm(
        &self,
        x: &Var,
        weight: Option<&Var>,
        bias: Option<&Var>,
        epsilon: f32,
    ) -> Result<Var> {
        let op = self.begin("layer_norm");
        op.expect_real("x", x.tensor())?;
        for (what, vector) in [("weight", weight), ("bias", bias)] {
            if let Some(vector) = vector {
                op.expect_vector(what, vector.tensor(), x.shape().width())?;
            }
        }
        let rows_per_vector = x.shape().rows().max(1);
        let form = Form { epsilon, rows_per_vector, plus_one: false, indices: (0, 0) };
        self.norm(&op, x, (weight, bias), form)
    }

    fn norm(
        &self,
        op: &Op<'_>,
        x: &Var,
        (scale, shift): (Option<&Var>, Option<&Var>),
        form: Form,
    ) -> Result<Var> {
        let y = forward(op.place, x.tensor(), [scale, shift].map(|v| v.map(Var::tensor)), form)?;
        let result = self.with_remake(op.result(y), || again(x, [scale, shift], form));
        if !self.tracks(&inputs([Some(x), scale, shift])) {
            return Ok(result);
        }
        let record = Record {
            x: (self.keep(x), x.source()),
            scale: scale.map(|scale| (self.keep(scale), scale.source())),
            shift: shift.and_then(|shift| Some((shift.source()?, shift.shape(), shift.dtype()))),
            form,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

/// What distinguishes the two uses.
#[derive(Clone, Copy)]
pub(super) struct Form {
    pub epsilon: f32,
    /// How many rows share a vector.
    pub rows_per_vector: usize,
    /// Whether the factor is 1 + scale.
    pub plus_one: bool,
    /// Which parts of the rows of scale and shift are meant.
    pub indices: (usize, usize),
}

/// Operations per number, for the tally.
const FLOPS: usize = 8;

fn again(x: &Var, vectors: [Option<&Var>; 2], form: Form) -> Remake {
    let (x, mut needs) = x.held();
    let vectors = vectors.map(|vector| {
        let (vector, more) = vector?.held();
        needs.extend(more);
        Some(vector)
    });
    Remake::new(needs, move |place| {
        let [scale, shift] =
            vectors.each_ref().map(|kept| kept.as_ref().map(|kept| kept.get(place)));
        let (scale, shift) = (scale.transpose()?, shift.transpose()?);
        forward(place, &x.get(place)?, [scale.as_ref(), shift.as_ref()], form)
    })
}

fn forward(
    place: Place<'_>,
    x: &Tensor,
    vectors: [Option<&Tensor>; 2],
    form: Form,
) -> Result<Tensor> {
    let mut y = place.alloc(x.shape(), x.dtype())?;
    place.count("norm_modulate", FLOPS * x.shape().elements(), &[x, &y]);
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::forward(engine, x, vectors, form, &mut y),
        Engine::Cuda(engine) => cuda::forward(engine, x, vectors, form, &mut y),
        Engine::Gpu(engine) => gpu::forward(engine, x, vectors, (form, true), &mut y),
    }
    Ok(y)
}

struct Record {
    x: (Kept, Option<Source>),
    scale: Option<(Kept, Option<Source>)>,
    shift: Option<(Source, Shape, Dtype)>,
    form: Form,
}

/// What gradients are found from.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub x: &'a Tensor,
    pub scale: Option<&'a Tensor>,
    /// That of the result.
    pub gradient: &'a Tensor,
    pub form: Form,
}

impl Record {
    fn backward(self, back: &mut Backward<'_>, gradient: &Tensor) -> Result<()> {
        let place = back.place;
        let x = self.x.0.get(place)?;
        let (scale, scale_source) = self.scale.unzip();
        let (scale, scale_source) =
            (scale.map(|kept| kept.get(place)).transpose()?, scale_source.flatten());
        let rows = Rows { x: &x, scale: scale.as_ref(), gradient, form: self.form };
        let wanted = [scale_source.is_some(), self.shift.is_some()];
        let [of_scale, of_shift] = room_floats(place, rows, wanted);
        let mut of_scale = place.workspace([of_scale], Dtype::F32)?;
        let mut of_shift = place.workspace([of_shift], Dtype::F32)?;
        let mut slot = back.slot_of(self.x.1, x.shape(), x.dtype())?;
        rows_gradient(place, rows, slot.as_mut(), [&mut of_scale, &mut of_shift]);
        if let Some(slot) = slot {
            back.put(slot);
        }
        if let Some((source, shape, dtype)) = self.shift {
            let mut slot = back.slot(source, shape, dtype)?;
            slot.clear_unless_adding();
            shift_gradient(place, rows, &of_shift, &mut slot.tensor);
            back.put(slot);
        }
        if let (Some(source), Some(scale)) = (scale_source, &scale) {
            let mut slot = back.slot(source, scale.shape(), scale.dtype())?;
            slot.clear_unless_adding();
            scale_gradient(place, rows, &mut of_scale, &mut slot.tensor);
            back.put(slot);
        }
        Ok(())
    }
}

/// Whether one pass over the rows finds the gradient of x and sums of which the vectors' are made; elsewhere each
/// has a pass of its own.
fn is_one_pass(place: Place<'_>) -> bool {
    matches!(place.device.kind(), Kind::Gpu { .. })
}

/// Floats of room for the gradients of scale and shift: sums, or what is known of rows.
fn room_floats(place: Place<'_>, rows: Rows<'_>, wanted: [bool; 2]) -> [usize; 2] {
    let floats = match place.device.kind() {
        Kind::Cpu { .. } => [0, 0],
        Kind::Cuda { .. } => [statistics_floats(rows.x), 0],
        Kind::Gpu { .. } => [gpu::sums_floats(rows.x, rows.form.rows_per_vector); 2],
    };
    [0, 1].map(|vector| if wanted[vector] { floats[vector] } else { 0 })
}

/// The gradient of x, if it is wanted; in one pass also the sums that there is room for.
fn rows_gradient(
    place: Place<'_>,
    rows: Rows<'_>,
    slot: Option<&mut Slot>,
    sums: [&mut Tensor; 2],
) {
    let Rows { x, scale, gradient, form } = rows;
    if slot.is_none() && !is_one_pass(place) {
        return;
    }
    let mut tensors = vec![gradient, x];
    tensors.extend(slot.iter().map(|slot| &slot.tensor));
    place.count("norm_modulate backward", FLOPS * x.shape().elements(), &tensors);
    match (place.engine(), slot) {
        (Engine::Cpu(engine), Some(slot)) => cpu::backward(engine, x, scale, gradient, form, slot),
        (Engine::Cuda(engine), Some(slot)) => {
            cuda::backward(engine, x, scale, gradient, form, slot);
        }
        (Engine::Gpu(engine), slot) => gpu::backward(engine, rows, true, slot, sums.map(Some)),
        (Engine::Meta | Engine::Cpu(_) | Engine::Cuda(_), _) => {}
    }
}

/// Adds Σ gradient over the rows of a vector.
fn shift_gradient(place: Place<'_>, rows: Rows<'_>, sums: &Tensor, out: &mut Tensor) {
    let Rows { x, gradient, form, .. } = rows;
    if !is_one_pass(place) {
        let work = FLOPS * x.shape().elements();
        place.count("norm_modulate shift backward", work, &[gradient]);
    }
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::shift_gradient(engine, gradient, form, out),
        Engine::Cuda(engine) => cuda::shift_gradient(engine, gradient, form, out),
        Engine::Gpu(engine) => gpu::add_up(engine, sums, rows, (form.indices.1, true), out),
    }
}

/// Adds Σ gradient · x̂ over the rows of a vector.
fn scale_gradient(place: Place<'_>, rows: Rows<'_>, room: &mut Tensor, out: &mut Tensor) {
    let Rows { x, gradient, form, .. } = rows;
    if !is_one_pass(place) {
        let work = FLOPS * x.shape().elements();
        place.count("norm_modulate scale backward", work, &[gradient, x]);
    }
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::scale_gradient(engine, x, gradient, form, out),
        Engine::Cuda(engine) => cuda::scale_gradient(engine, x, gradient, form, room, out),
        Engine::Gpu(engine) => gpu::add_up(engine, room, rows, (form.indices.0, true), out),
    }
}
