//! Functions applied to every number: y = f(x). Also used inside [`linear`](super::linear) and
//! [`glu`](crate::Tape::glu).

mod cpu;
pub(super) mod cuda;
pub(super) mod gpu;
#[cfg(test)]
pub(crate) mod tests;

use crate::backward::Backward;
use crate::device::Engine;
use crate::op::Place;
use crate::tape::Tape;
use crate::var::{Activated, Remake, Var};
use crate::{Result, Tensor};

/// Which function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// x
    #[default]
    None,
    /// x · Φ(x) with the usual approximation by tanh.
    GeluTanh,
    /// x · Φ(x), by the error function.
    GeluErf,
    /// x · sigmoid(1.702 x)
    QuickGelu,
    /// x · sigmoid(x)
    Silu,
}

/// Operations per number, for the tally; an exponential counts as ten.
pub(crate) const FLOPS: usize = 20;

impl Tape<'_> {
    /// `activation` of every number of `x`.
    pub fn activate(&self, x: &Var, activation: Activation) -> Result<Var> {
        let op = self.begin("activate");
        let dtype = op.expect_real("x", x.tensor())?;
        let mut y = op.alloc(x.shape(), dtype)?;
        op.count(FLOPS * x.shape().elements(), &[x.tensor(), &y]);
        forward(op.engine(), x.tensor(), activation, &mut y);
        let result = self.with_remake(op.result(y), || {
            let (held, needs) = x.held();
            Remake::new(needs, move |place| again(place, &held.get(place)?, activation))
        });
        if !self.tracks(&[x]) {
            return Ok(result);
        }
        let (kept, source) = (self.keep(x), x.source());
        Ok(self.record(result, move |back, mut gradient| {
            let x = kept.get(back.place)?;
            gradient = gradient.unshared()?;
            backward(back.place, activation, &x, &mut gradient);
            back.pass(source, gradient)
        }))
    }
}

/// The result once more, for whoever kept the way instead.
pub(crate) fn again(place: Place<'_>, x: &Tensor, activation: Activation) -> Result<Tensor> {
    let mut y = place.alloc(x.shape(), x.dtype())?;
    place.count("activate", FLOPS * x.shape().elements(), &[x, &y]);
    forward(place.engine(), x, activation, &mut y);
    Ok(y)
}

fn forward(engine: &Engine, x: &Tensor, activation: Activation, y: &mut Tensor) {
    match engine {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::forward(engine, activation, x, y),
        Engine::Cuda(engine) => cuda::forward(engine, activation, x, y),
        Engine::Gpu(engine) => gpu::forward(engine, activation, x, y),
    }
}

impl Activated {
    /// The gradient of what the activation was applied to, from that of its result, if there is one, and
    /// what readers of the result took through it themselves.
    pub(crate) fn gradient(
        &self,
        back: &mut Backward<'_>,
        node: usize,
        of_result: Option<Tensor>,
    ) -> Result<Option<Tensor>> {
        let through = back.through.remove(&node);
        let Some(gradient) = of_result else { return Ok(through) };
        let mut gradient = gradient.unshared()?;
        backward(back.place, self.activation, &self.before, &mut gradient);
        match through {
            Some(through) => back.sum(gradient, &through).map(Some),
            None => Ok(Some(gradient)),
        }
    }
}

/// Turns the gradient of f(x) into that of x, in place.
pub(crate) fn backward(
    place: Place<'_>,
    activation: Activation,
    x: &Tensor,
    gradient: &mut Tensor,
) {
    let work = FLOPS * x.shape().elements();
    place.count("activate backward", work, &[x, gradient, gradient]);
    match place.engine() {
        Engine::Meta => {}
        Engine::Cpu(engine) => cpu::backward(engine, activation, x, gradient),
        Engine::Cuda(engine) => cuda::backward(engine, activation, x, gradient),
        Engine::Gpu(engine) => gpu::backward(engine, activation, x, gradient),
    }
}
