//! Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2. Only the sign of
//! a mean of gradients counts, so that every parameter moves by the learning rate, and one mean is all that is stored:
//!
//! p ← p - rate·decay·p - rate·sign(β₁·m + (1 - β₁)·g)
//! m ← β₂·m + (1 - β₂)·g

use super::adamw::{AdamW, check};
use super::{GradClip, cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::Op;
use crate::{Dtype, Result, Tensor};

/// FLOPs per element, for the work counter.
const FLOPS: usize = 10;

/// Changes every parameter that has a gradient, with means as [`momentum`](super::momentum) makes them. Of the settings
/// epsilon and the number of the step have no effect. A `clip` is as in [`adamw`](super::adamw()).
pub fn lion(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    means: &mut [Tensor],
    step: AdamW,
    clip: Option<&GradClip>,
) -> Result<()> {
    let Some(device) = params.first().map(|param| param.device().clone()) else { return Ok(()) };
    let op = Op::standalone("lion", &device);
    check(&op, params, gradients, means.len(), step, clip)?;
    let (mut numbers, mut touched) = (0, Vec::new());
    for (index, (param, mean)) in params.iter().zip(&*means).enumerate() {
        op.expect("mean", mean, Dtype::F32, param.shape())?;
        expect_unshared(index, mean)?;
        if let Some(gradient) = gradients[index] {
            numbers += param.shape().elements();
            touched.extend([gradient, param, param, mean, mean]);
        }
    }
    op.count(FLOPS * numbers, &touched);
    match device.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::lion(backend, params, gradients, means, step, clip),
        Backend::Cuda(backend) => cuda::lion(backend, params, gradients, means, step, clip),
        Backend::Gpu(backend) => gpu::lion(backend, params, gradients, means, step, clip),
    }
    Ok(())
}

/// The arithmetic of a step; what depends on no parameter is worked out once, in f64.
#[derive(Clone, Copy)]
pub(super) struct LionUpdate {
    /// What gradients are multiplied by.
    scale: f32,
    /// rate·decay
    shrinks: f32,
    /// β₁ and 1 - β₁
    direction: [f32; 2],
    /// β₂ and 1 - β₂
    mean: [f32; 2],
    rate: f32,
}

impl LionUpdate {
    /// For gradients to be multiplied by `scale`.
    pub fn new(step: AdamW, scale: f32) -> Self {
        let both = |beta: f64| [beta as f32, (1.0 - beta) as f32];
        let (rate, decay) = (f64::from(step.learning_rate), f64::from(step.weight_decay));
        Self {
            scale,
            shrinks: (rate * decay) as f32,
            direction: both(step.betas.0),
            mean: both(step.betas.1),
            rate: step.learning_rate,
        }
    }

    /// All of it, in the order in which a GPU's kernels are told.
    pub fn kernel_args(&self) -> [f32; 7] {
        let Self { scale, shrinks, direction, mean, rate } = *self;
        [scale, shrinks, direction[0], direction[1], mean[0], mean[1], rate]
    }

    /// Updates some parameters and their means.
    #[inline(always)]
    pub fn apply(&self, params: &mut [f32], gradients: &[f32], means: &mut [f32]) {
        for ((param, gradient), mean) in params.iter_mut().zip(gradients).zip(means) {
            let gradient = gradient * self.scale;
            let along = *mean * self.direction[0] + gradient * self.direction[1];
            // Not `signum`, which has no 0.
            let sign = f32::from(along > 0.0) - f32::from(along < 0.0);
            // What is not finite stays visible.
            let sign = if along.is_finite() { sign } else { along };
            *param -= *param * self.shrinks + self.rate * sign;
            *mean = *mean * self.mean[0] + gradient * self.mean[1];
        }
    }
}
