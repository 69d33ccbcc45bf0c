//! Layer norm, and what is done to its result: with x̂ the row brought to mean 0 and variance 1,
//!
//! modulated: y = x̂·(1 + scale) + shift with vectors per sample, for x [samples, tokens, width];
//! affine:    y = x̂·weight + bias with the same vectors for every row.
//!
//! Kept for backward: x. Mean and variance are computed again, from a row that is at hand anyway.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
pub(crate) mod tests;

use super::inputs;
use crate::backward::Backward;
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
struct Form {
    epsilon: f32,
    /// How many rows share a vector.
    rows_per_vector: usize,
    /// Whether the factor is 1 + scale.
    plus_one: bool,
    /// Which parts of the rows of scale and shift are meant.
    indices: (usize, usize),
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
        Engine::Gpu(engine) => gpu::forward(engine, x, vectors, form, &mut y),
    }
    Ok(y)
}

struct Record {
    x: (Kept, Option<Source>),
    scale: Option<(Kept, Option<Source>)>,
    shift: Option<(Source, Shape, Dtype)>,
    form: Form,
}

impl Record {
    fn backward(self, back: &mut Backward<'_>, gradient: &Tensor) -> Result<()> {
        let (place, form) = (back.place, self.form);
        let x = self.x.0.get(place)?;
        let work = FLOPS * x.shape().elements();
        if let Some((source, shape, dtype)) = self.shift {
            let mut slot = back.slot(source, shape, dtype)?;
            slot.clear_unless_adding();
            place.count("norm_modulate shift backward", work, &[gradient]);
            match place.engine() {
                Engine::Meta => {}
                Engine::Cpu(engine) => {
                    cpu::shift_gradient(engine, gradient, form, &mut slot.tensor);
                }
                Engine::Cuda(engine) => {
                    cuda::shift_gradient(engine, gradient, form, &mut slot.tensor);
                }
                Engine::Gpu(engine) => {
                    gpu::shift_gradient(engine, gradient, form, &mut slot.tensor);
                }
            }
            back.put(slot);
        }
        let scale = match &self.scale {
            Some((kept, _)) => Some(kept.get(place)?),
            None => None,
        };
        if let (Some((_, Some(source))), Some(scale)) = (&self.scale, &scale) {
            let mut slot = back.slot(*source, scale.shape(), scale.dtype())?;
            slot.clear_unless_adding();
            place.count("norm_modulate scale backward", work, &[gradient, &x]);
            let floats = match place.device.kind() {
                Kind::Cpu { .. } => 0,
                Kind::Cuda { .. } | Kind::Gpu { .. } => statistics_floats(&x),
            };
            let mut room = place.workspace([floats], Dtype::F32)?;
            match place.engine() {
                Engine::Meta => {}
                Engine::Cpu(engine) => {
                    cpu::scale_gradient(engine, &x, gradient, form, &mut slot.tensor);
                }
                Engine::Cuda(engine) => {
                    let out = &mut slot.tensor;
                    cuda::scale_gradient(engine, &x, gradient, form, &mut room, out);
                }
                Engine::Gpu(engine) => {
                    let out = &mut slot.tensor;
                    gpu::scale_gradient(engine, &x, gradient, form, &mut room, out);
                }
            }
            back.put(slot);
        }
        if let Some(mut slot) = back.slot_of(self.x.1, x.shape(), x.dtype())? {
            place.count("norm_modulate backward", work, &[gradient, &x, &slot.tensor]);
            match place.engine() {
                Engine::Meta => {}
                Engine::Cpu(engine) => {
                    cpu::backward(engine, &x, scale.as_ref(), gradient, form, &mut slot);
                }
                Engine::Cuda(engine) => {
                    cuda::backward(engine, &x, scale.as_ref(), gradient, form, &mut slot);
                }
                Engine::Gpu(engine) => {
                    gpu::backward(engine, &x, scale.as_ref(), gradient, form, &mut slot);
                }
            }
            back.put(slot);
        }
        Ok(())
    }
}
