//! Root-mean-square norm (Zhang and Sennrich, "Root Mean Square Layer Normalization",
//! arXiv 1910.07467) over the rows of x [.., width], with a weight `[width]` or without:
//!
//! y = x̂·weight with x̂ = x / √(mean(x²) + ε)
//!
//! Kept for backward: x. The mean is computed again, from a row that is at hand anyway.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use cpu::{back_through, normalise};

use super::inputs;
use crate::backward::{Backward, Slot};
use crate::cpu::sums::n_row_blocks;
use crate::device::{Engine, Kind};
use crate::op::Place;
use crate::tape::Tape;
use crate::var::{Kept, Remake, Source, Var};
use crate::{Dtype, Result, Tensor};

/// Operations per number, for the tally.
const FLOPS: usize = 6;

impl Tape<'_> {
    /// Root-mean-square norm with a weight of width `x`, f32, or without.
    pub fn rms_norm(&self, x: &Var, weight: Option<&Var>, epsilon: f32) -> Result<Var> {
        let op = self.begin("rms_norm");
        op.expect_real("x", x.tensor())?;
        if let Some(weight) = weight {
            op.expect_vector("weight", weight.tensor(), x.shape().width())?;
        }
        let y = forward(op.place, x.tensor(), weight.map(Var::tensor), epsilon)?;
        let result = self.with_remake(op.result(y), || again(x, weight, epsilon));
        if !self.tracks(&inputs([Some(x), weight])) {
            return Ok(result);
        }
        let record = Record {
            x: (self.keep(x), x.source()),
            weight: weight.map(|weight| (self.keep(weight), weight.source())),
            epsilon,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, &gradient)))
    }
}

fn again(x: &Var, weight: Option<&Var>, epsilon: f32) -> Remake {
    let (x, mut needs) = x.held();
    let weight = weight.map(|weight| {
        let (weight, more) = weight.held();
        needs.extend(more);
        weight
    });
    Remake::new(needs, move |place| {
        let weight = weight.as_ref().map(|weight| weight.get(place)).transpose()?;
        forward(place, &x.get(place)?, weight.as_ref(), epsilon)
    })
}

fn forward(place: Place<'_>, x: &Tensor, weight: Option<&Tensor>, epsilon: f32) -> Result<Tensor> {
    let mut y = place.alloc(x.shape(), x.dtype())?;
    place.count("rms_norm", FLOPS * x.shape().elements(), &[x, &y]);
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::forward(engine, x, weight, epsilon, &mut y),
        Engine::Cuda(engine) => cuda::forward(engine, x, weight, epsilon, &mut y),
        Engine::Gpu(engine) => gpu::forward(engine, x, weight, epsilon, &mut y),
    }
    Ok(y)
}

struct Record {
    x: (Kept, Option<Source>),
    weight: Option<(Kept, Option<Source>)>,
    epsilon: f32,
}

/// What a gradient is found from.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: &'a Tensor,
    weight: Option<&'a Tensor>,
    /// That of the result.
    gradient: &'a Tensor,
    epsilon: f32,
}

/// The gradients that somebody asks for.
struct Wanted<'a> {
    x: Option<&'a mut Slot>,
    weight: Option<&'a mut Slot>,
}

impl Record {
    fn backward(self, back: &mut Backward<'_>, gradient: &Tensor) -> Result<()> {
        let (place, epsilon) = (back.place, self.epsilon);
        let x = self.x.0.get(place)?;
        let (weight, source) = self.weight.unzip();
        let weight = weight.map(|kept| kept.get(place)).transpose()?;
        let width = [x.shape().width()].into();
        let mut of_weight = back.slot_of(source.flatten(), width, Dtype::F32)?;
        let mut of_x = back.slot_of(self.x.1, x.shape(), x.dtype())?;
        let floats = of_weight.as_ref().map_or(0, |_| room_floats(place, &x));
        let mut room = place.workspace([floats], Dtype::F32)?;
        let mut tensors = vec![gradient, &x];
        tensors.extend(of_x.iter().map(|slot| &slot.tensor));
        let n_gradients = usize::from(of_x.is_some()) + usize::from(of_weight.is_some());
        if n_gradients == 2 && matches!(place.device.kind(), Kind::Cpu { .. }) {
            // A pass for each.
            tensors.extend([gradient, &x]);
        }
        place.count("rms_norm backward", n_gradients * FLOPS * x.shape().elements(), &tensors);
        let rows = Rows { x: &x, weight: weight.as_ref(), gradient, epsilon };
        let wanted = Wanted { x: of_x.as_mut(), weight: of_weight.as_mut() };
        match place.engine() {
            Engine::Meta => {}
            Engine::Cpu(engine) => cpu::backward(engine, rows, wanted, &mut room),
            Engine::Cuda(engine) => cuda::backward(engine, rows, wanted, &mut room),
            Engine::Gpu(engine) => gpu::backward(engine, rows, wanted, &mut room),
        }
        of_weight.into_iter().chain(of_x).for_each(|slot| back.put(slot));
        Ok(())
    }
}

/// Floats of room that the weight's gradient takes.
fn room_floats(place: Place<'_>, x: &Tensor) -> usize {
    match place.device.kind() {
        Kind::Cpu { .. } => n_row_blocks(x.shape().rows()) * x.shape().width(),
        Kind::Cuda { .. } => cuda::shares_floats(x),
        Kind::Gpu { .. } => gpu::sums_floats(x),
    }
}
