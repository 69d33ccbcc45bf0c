//! Gumbel-softmax: for logits over the last dimension,
//!
//! soft = softmax((logits + g) / τ) with g = -ln(-ln u), u uniform over (0, 1)
//!
//! Its largest entry falls on each place with the probability softmax(logits) gives it. A hard
//! choice is one there and zero elsewhere, with the gradient of the soft one (Jang, Gu and Poole,
//! "Categorical Reparameterization with Gumbel-Softmax", arXiv 1611.01144, section 2).
//!
//! In place: the logits are taken by value, and if neither the caller nor a record holds their
//! memory as well, the result is written over them. Else they stay as they were.
//!
//! Saved for backward: the soft values, which are the result or, of a hard choice, lie where the
//! logits were.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::random::RandomSequence;
use crate::tape::Tape;
use crate::var::{SavedTensor, Var};
use crate::{Result, Tensor};

/// FLOPs per element, for the work counter; a logarithm or an exponential counts as ten, a random
/// number as forty.
const FLOPS: usize = 75;
const BACKWARD_FLOPS: usize = 5;

impl Tape<'_> {
    /// A random choice by `logits` over the last dimension, in their memory if nobody else holds
    /// it: soft, the sharper the lower the temperature, or hard with the gradient of the soft one.
    pub fn gumbel_softmax(&self, logits: Var, temperature: f32, hard: bool) -> Result<Var> {
        let op = self.begin_op("gumbel_softmax");
        let dtype = op.expect_real("logits", logits.tensor())?;
        let is_fit = temperature > 0.0 && temperature.is_finite();
        op.expect_range("temperature", &temperature, is_fit, "above 0 and finite")?;
        let sequence = self.random_sequence(logits.shape());
        let draw = GumbelDraw { temperature, sequence, is_mirrored: false };
        let (source, shape) = (logits.grad_target(), logits.shape());
        let is_tracked = self.requires_grad(&[&logits]);
        let logits = logits.into_tensor();
        let (shared, mut values) = if logits.ref_count() == 1 {
            (None, logits)
        } else {
            (Some(logits), op.alloc(shape, dtype)?)
        };
        // Without a record nobody asks for the soft values of a hard choice.
        let has_both = hard && is_tracked;
        let mut choice = has_both.then(|| op.alloc(shape, dtype)).transpose()?;
        op.count(FLOPS * shape.elements(), &[&values, &values]);
        match op.backend() {
            Backend::Meta => {}
            Backend::Cpu(backend) => match &mut choice {
                Some(choice) => cpu::both(backend, draw, shared.as_ref(), &mut values, choice),
                None => cpu::one(backend, draw, shared.as_ref(), &mut values, hard),
            },
            Backend::Cuda(backend) => match &mut choice {
                Some(choice) => cuda::both(backend, draw, shared.as_ref(), &mut values, choice),
                None => cuda::one(backend, draw, shared.as_ref(), &mut values, hard),
            },
            Backend::Gpu(backend) => match &mut choice {
                Some(choice) => gpu::both(backend, draw, shared.as_ref(), &mut values, choice),
                None => gpu::one(backend, draw, shared.as_ref(), &mut values, hard),
            },
        }
        drop(shared);
        let (kept, result) = match choice {
            Some(choice) => {
                self.save_extra(&op);
                (SavedTensor::Tensor(values), op.result(choice))
            }
            None if is_tracked => {
                let result = op.result(values);
                (self.save_for_backward(&result), result)
            }
            None => return Ok(op.result(values)),
        };
        Ok(self.record(result, move |back, gradient| {
            let soft = kept.get(back.cx)?;
            let mut gradient = gradient.into_unique()?;
            let work = BACKWARD_FLOPS * soft.shape().elements();
            back.cx.count("gumbel backward", work, &[&soft, &gradient, &gradient]);
            match back.cx.backend() {
                Backend::Meta => {}
                Backend::Cpu(backend) => cpu::backward(backend, &soft, temperature, &mut gradient),
                Backend::Cuda(backend) => {
                    cuda::backward(backend, &soft, temperature, &mut gradient);
                }
                Backend::Gpu(backend) => gpu::backward(backend, &soft, temperature, &mut gradient),
            }
            back.pass(source, gradient)
        }))
    }

    /// Two soft choices with opposite noise (antithetic variates): where one has u, the other has 1 - u. No gradient
    /// leads through them.
    pub fn gumbel_softmax_pair(&self, logits: &Tensor, temperature: f32) -> Result<[Tensor; 2]> {
        let op = self.begin_op("gumbel_softmax_pair");
        let dtype = op.expect_real("logits", logits)?;
        let is_fit = temperature > 0.0 && temperature.is_finite();
        op.expect_range("temperature", &temperature, is_fit, "above 0 and finite")?;
        let (shape, sequence) = (logits.shape(), self.random_sequence(logits.shape()));
        let mut pair = [op.alloc(shape, dtype)?, op.alloc(shape, dtype)?];
        op.count(2 * FLOPS * shape.elements(), &[logits, &pair[0], &pair[1]]);
        for (values, is_mirrored) in pair.iter_mut().zip([false, true]) {
            let draw = GumbelDraw { temperature, sequence, is_mirrored };
            match op.backend() {
                Backend::Meta => {}
                Backend::Cpu(backend) => cpu::one(backend, draw, Some(logits), values, false),
                Backend::Cuda(backend) => cuda::one(backend, draw, Some(logits), values, false),
                Backend::Gpu(backend) => gpu::one(backend, draw, Some(logits), values, false),
            }
        }
        Ok(pair)
    }
}

/// What makes a choice.
#[derive(Clone, Copy)]
struct GumbelDraw {
    temperature: f32,
    sequence: RandomSequence,
    /// Whether 1 - u takes the place of u.
    is_mirrored: bool,
}
