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
use crate::backward::Backward;
use crate::cpu::sums::n_row_blocks;
use crate::cuda::columns::{shares_floats, statistics_floats};
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

impl Record {
    fn backward(self, back: &mut Backward<'_>, gradient: &Tensor) -> Result<()> {
        let (place, epsilon) = (back.place, self.epsilon);
        let x = self.x.0.get(place)?;
        let work = FLOPS * x.shape().elements();
        if let Some((_, Some(source))) = self.weight {
            let (rows, width) = (x.shape().rows(), x.shape().width());
            let mut slot = back.slot(source, [width].into(), Dtype::F32)?;
            let (floats, more) = match place.device.kind() {
                Kind::Cpu { .. } => (n_row_blocks(rows) * width, 0),
                Kind::Cuda { .. } => (statistics_floats(&x), shares_floats(&x)),
                Kind::Gpu { .. } => (statistics_floats(&x), 0),
            };
            let mut partial = place.workspace([floats], Dtype::F32)?;
            let mut shares = place.workspace([more], Dtype::F32)?;
            place.count("rms_norm weight backward", work, &[gradient, &x]);
            match place.engine() {
                Engine::Meta => {}
                Engine::Cpu(engine) => {
                    cpu::weight_gradient(engine, &x, gradient, epsilon, &mut partial, &mut slot);
                }
                Engine::Cuda(engine) => {
                    let room = [&mut partial, &mut shares];
                    cuda::weight_gradient(engine, &x, gradient, epsilon, room, &mut slot);
                }
                Engine::Gpu(engine) => {
                    gpu::weight_gradient(engine, &x, gradient, epsilon, &mut partial, &mut slot);
                }
            }
            back.put(slot);
        }
        if let Some(mut slot) = back.slot_of(self.x.1, x.shape(), x.dtype())? {
            let weight = self.weight.map(|(kept, _)| kept.get(place)).transpose()?;
            place.count("rms_norm backward", work, &[gradient, &x, &slot.tensor]);
            match place.engine() {
                Engine::Meta => {}
                Engine::Cpu(engine) => {
                    cpu::backward(engine, &x, weight.as_ref(), gradient, epsilon, &mut slot);
                }
                Engine::Cuda(engine) => {
                    cuda::backward(engine, &x, weight.as_ref(), gradient, epsilon, &mut slot);
                }
                Engine::Gpu(engine) => {
                    gpu::backward(engine, &x, weight.as_ref(), gradient, epsilon, &mut slot);
                }
            }
            back.put(slot);
        }
        Ok(())
    }
}
