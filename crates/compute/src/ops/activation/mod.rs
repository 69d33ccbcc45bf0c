//! Functions applied to every element: y = f(x). Also used inside [`linear`](super::linear) and
//! [`glu`](crate::Tape::glu).

mod cpu;
pub(super) mod cuda;
pub(super) mod gpu;
#[cfg(test)]
pub(crate) mod tests;

use crate::backward::BackwardPass;
use crate::device::Backend;
use crate::op::OpContext;
use crate::tape::Tape;
use crate::var::{Activated, Remat, Var};
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
    /// tanh(x)
    Tanh,
}

/// FLOPs per element, for the work counter; an exponential counts as ten.
pub(crate) const FLOPS: usize = 20;

impl Tape<'_> {
    /// `activation` of every element of `x`.
    pub fn activate(&self, x: &Var, activation: Activation) -> Result<Var> {
        let op = self.begin_op("activate");
        let dtype = op.expect_real("x", x.tensor())?;
        let mut y = op.alloc(x.shape(), dtype)?;
        op.count(FLOPS * x.shape().elements(), &[x.tensor(), &y]);
        forward(op.backend(), x.tensor(), activation, &mut y);
        let result = self.with_remat(op.result(y), || {
            let (held, needs) = x.to_saved();
            Remat::new(needs, move |cx| remat(cx, &held.get(cx)?, activation))
        });
        if !self.requires_grad(&[x]) {
            return Ok(result);
        }
        let (kept, source) = (self.save_for_backward(x), x.grad_target());
        Ok(self.record(result, move |back, mut gradient| {
            let x = kept.get(back.cx)?;
            gradient = gradient.into_unique()?;
            backward(back.cx, activation, &x, &mut gradient);
            back.pass(source, gradient)
        }))
    }
}

/// Recomputes the result, for readers that saved the input instead.
pub(crate) fn remat(cx: OpContext<'_>, x: &Tensor, activation: Activation) -> Result<Tensor> {
    let mut y = cx.alloc(x.shape(), x.dtype())?;
    cx.count("activate", FLOPS * x.shape().elements(), &[x, &y]);
    forward(cx.backend(), x, activation, &mut y);
    Ok(y)
}

fn forward(backend: &Backend, x: &Tensor, activation: Activation, y: &mut Tensor) {
    match backend {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::forward(backend, activation, x, y),
        Backend::Cuda(backend) => cuda::forward(backend, activation, x, y),
        Backend::Gpu(backend) => gpu::forward(backend, activation, x, y),
    }
}

impl Activated {
    /// The gradient of what the activation was applied to, from that of its result, if there is one, and
    /// what readers of the result took through it themselves.
    pub(crate) fn gradient(
        &self,
        back: &mut BackwardPass<'_>,
        node: usize,
        of_result: Option<Tensor>,
    ) -> Result<Option<Tensor>> {
        let through = back.through_activation.remove(&node);
        let Some(gradient) = of_result else { return Ok(through) };
        let mut gradient = gradient.into_unique()?;
        backward(back.cx, self.activation, &self.input, &mut gradient);
        match through {
            Some(through) => back.sum(gradient, &through).map(Some),
            None => Ok(Some(gradient)),
        }
    }
}

/// Turns the gradient of f(x) into that of x, in place.
pub(crate) fn backward(
    cx: OpContext<'_>,
    activation: Activation,
    x: &Tensor,
    gradient: &mut Tensor,
) {
    let work = FLOPS * x.shape().elements();
    cx.count("activate backward", work, &[x, gradient, gradient]);
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::backward(backend, activation, x, gradient),
        Backend::Cuda(backend) => cuda::backward(backend, activation, x, gradient),
        Backend::Gpu(backend) => gpu::backward(backend, activation, x, gradient),
    }
}
