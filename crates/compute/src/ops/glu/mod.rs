//! Gated linear units (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202), without the
//! linear layers around them: y = f(gate)·up. With silu for f it is `SwiGLU`, with gelu `GEGLU`.
//!
//! Kept for backward: gate, and up where the gradient of the gate is wanted.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use super::Activation;
use crate::backward::Backward;
use crate::device::Engine;
use crate::op::Place;
use crate::tape::Tape;
use crate::var::{Kept, Remake, Source, Var};
use crate::{Result, Tensor};

/// Operations per number, for the tally; an exponential counts as ten.
const FLOPS: usize = 21;

impl Tape<'_> {
    /// `activation` of every number of `gate`, times that of `up`.
    pub fn glu(&self, gate: &Var, up: &Var, activation: Activation) -> Result<Var> {
        let op = self.begin("glu");
        let dtype = op.expect_real("gate", gate.tensor())?;
        op.expect_dtype("up", up.tensor(), dtype)?;
        op.expect_shape("up", up.tensor(), gate.shape())?;
        let y = forward(op.place, gate.tensor(), up.tensor(), activation)?;
        let result = self.with_remake(op.result(y), || again(gate, up, activation));
        if !self.tracks(&[gate, up]) {
            return Ok(result);
        }
        let record = Record {
            gate: (self.keep(gate), up.source()),
            up: gate.source().map(|source| (self.keep(up), source)),
            activation,
        };
        Ok(self.record(result, move |back, gradient| record.backward(back, gradient)))
    }
}

fn again(gate: &Var, up: &Var, activation: Activation) -> Remake {
    let ((gate, mut needs), (up, more)) = (gate.held(), up.held());
    needs.extend(more);
    Remake::new(needs, move |place| forward(place, &gate.get(place)?, &up.get(place)?, activation))
}

fn forward(place: Place<'_>, gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let mut y = place.alloc(gate.shape(), gate.dtype())?;
    place.count("glu", FLOPS * gate.shape().elements(), &[gate, up, &y]);
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::forward(engine, activation, gate, up, &mut y),
        Engine::Cuda(engine) => cuda::forward(engine, activation, gate, up, &mut y),
        Engine::Gpu(engine) => gpu::forward(engine, activation, gate, up, &mut y),
    }
    Ok(y)
}

/// Each factor, with where the gradient of the other one goes.
struct Record {
    gate: (Kept, Option<Source>),
    up: Option<(Kept, Source)>,
    activation: Activation,
}

impl Record {
    fn backward(self, back: &mut Backward<'_>, gradient: Tensor) -> Result<()> {
        let (place, activation) = (back.place, self.activation);
        let gate = self.gate.0.get(place)?;
        let (up, source) = self.up.unzip();
        let up = up.map(|up| up.get(place)).transpose()?;
        let mut slot = back.slot_of(self.gate.1, gate.shape(), gate.dtype())?;
        // The gate's gradient takes the memory of the result's: a layer this wide is where the
        // most is held at once.
        let mut gradient = if up.is_some() { gradient.unshared()? } else { gradient };
        let mut tensors = vec![&gate, &gradient];
        tensors.extend(slot.as_ref().map(|slot| &slot.tensor));
        tensors.extend(up.iter().flat_map(|up| [up, &gradient]));
        let n_gradients = usize::from(up.is_some()) + usize::from(slot.is_some());
        place.count("glu backward", n_gradients * FLOPS * gate.shape().elements(), &tensors);
        let factors = (&gate, up.as_ref());
        match place.engine() {
            Engine::Meta => {}
            Engine::Cpu(engine) => {
                cpu::backward(engine, activation, factors, &mut gradient, slot.as_mut());
            }
            Engine::Cuda(engine) => {
                cuda::backward(engine, activation, factors, &mut gradient, slot.as_mut());
            }
            Engine::Gpu(engine) => {
                gpu::backward(engine, activation, factors, &mut gradient, slot.as_mut());
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
