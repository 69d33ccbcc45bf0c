//! `AdamW`: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101,
//! algorithm 2, with the learning rate also scaling the decay, as PyTorch has it:
//!
//! p ← p - rate·decay·p
//! m ← β₁·m + (1 - β₁)·g,  v ← β₂·v + (1 - β₂)·g²
//! p ← p - rate / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)

use super::gradients::check_clip;
use super::{GradClip, cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::Op;
use crate::{Dtype, Result, Tag, Tensor};

/// One step's settings.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate.
    pub learning_rate: f32,
    /// β₁ and β₂: decay of the two moments.
    pub betas: (f64, f64),
    /// Keeps the denominator away from 0.
    pub epsilon: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Which step this is, from 1.
    pub step: u64,
    /// Multiplies gradients before all else: one over the loss scale.
    pub scale: f32,
}

impl Default for AdamW {
    /// The first step, with PyTorch's values.
    fn default() -> Self {
        let (betas, epsilon) = ((0.9, 0.999), 1e-8);
        Self { learning_rate: 1e-3, betas, epsilon, weight_decay: 0.01, step: 1, scale: 1.0 }
    }
}

/// The state of `AdamW` for a parameter.
#[derive(Debug)]
pub struct Moments {
    /// The mean of gradients, in the shape of the parameter, f32.
    pub first: Tensor,
    /// The mean of their squares.
    pub second: Tensor,
}

impl Moments {
    /// Those before the first step.
    pub fn new(param: &Tensor) -> Result<Self> {
        let zeros = || param.device().zeros(param.shape(), Dtype::F32);
        param.device().with_tag(Tag::Optimizer, || Ok(Self { first: zeros()?, second: zeros()? }))
    }
}

/// FLOPs per element, for the work counter.
pub(super) const FLOPS: usize = 16;

/// Changes every parameter that has a gradient. With a `clip`, gradients are scaled down as it
/// says, and a step with a gradient that is not finite changes nothing.
pub fn adamw(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments],
    step: AdamW,
    clip: Option<&GradClip>,
) -> Result<()> {
    let Some(device) = params.first().map(|param| param.device().clone()) else { return Ok(()) };
    let op = Op::standalone("adamw", &device);
    check(&op, params, gradients, state.len(), step, clip)?;
    let (mut numbers, mut touched) = (0, Vec::new());
    for (index, (param, moments)) in params.iter().zip(&*state).enumerate() {
        for (what, moment) in [("first moment", &moments.first), ("second moment", &moments.second)]
        {
            op.expect(what, moment, Dtype::F32, param.shape())?;
            expect_unshared(index, moment)?;
        }
        if let Some(gradient) = gradients[index] {
            let (first, second) = (&moments.first, &moments.second);
            numbers += param.shape().elements();
            touched.extend([gradient, param, param, first, first, second, second]);
        }
    }
    op.count(FLOPS * numbers, &touched);
    match device.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::adamw(backend, params, gradients, state, step, clip),
        Backend::Cuda(backend) => cuda::adamw(backend, params, gradients, state, step, clip),
        Backend::Gpu(backend) => gpu::adamw(backend, params, gradients, state, step, clip),
    }
    Ok(())
}

/// Checks that are the same for both forms of the state.
pub(super) fn check(
    op: &Op<'_>,
    params: &[Tensor],
    gradients: &[Option<&Tensor>],
    n_states: usize,
    step: AdamW,
    clip: Option<&GradClip>,
) -> Result<()> {
    for (what, count) in [("count of gradients", gradients.len()), ("count of moments", n_states)] {
        let is_fit = count == params.len();
        op.expect_range(what, &count, is_fit, "one for each parameter")?;
    }
    check_settings(op, step)?;
    check_clip(op, clip)?;
    for (index, (param, gradient)) in params.iter().zip(gradients).enumerate() {
        op.expect("parameter", param, Dtype::F32, param.shape())?;
        expect_unshared(index, param)?;
        if let Some(gradient) = gradient {
            op.expect("gradient", gradient, Dtype::F32, param.shape())?;
        }
    }
    Ok(())
}

fn check_settings(op: &Op<'_>, step: AdamW) -> Result<()> {
    let AdamW { learning_rate, betas, epsilon, weight_decay, step, scale } = step;
    for (what, value) in [
        ("learning rate", learning_rate),
        ("epsilon", epsilon),
        ("weight decay", weight_decay),
        ("scale", scale),
    ] {
        let is_fit = value >= 0.0 && value.is_finite();
        op.expect_range(what, &value, is_fit, "0 or more, and finite")?;
    }
    for (what, beta) in [("first beta", betas.0), ("second beta", betas.1)] {
        let is_fit = (0.0..1.0).contains(&beta);
        op.expect_range(what, &beta, is_fit, "0 or more and below 1")?;
    }
    op.expect_range("step", &step, step > 0, "1 or more")
}

/// The arithmetic of a step, whatever its moments are stored in: what depends on no parameter is
/// worked out here once, in f64.
#[derive(Clone, Copy)]
pub(super) struct AdamWUpdate {
    /// What gradients are multiplied by.
    scale: f32,
    /// 1 - rate·decay
    remains: f32,
    /// 1 - β₁
    news: f32,
    /// β₂ and 1 - β₂
    squares: (f32, f32),
    /// 1 / √(1 - β₂ᵗ)
    correction: f32,
    epsilon: f32,
    /// rate / (1 - β₁ᵗ)
    rate: f32,
}

impl AdamWUpdate {
    /// For gradients to be multiplied by `scale`.
    pub fn new(step: AdamW, scale: f32) -> Self {
        let (rate, decay) = (f64::from(step.learning_rate), f64::from(step.weight_decay));
        // Rounded to f32, as they always were: a run that goes on takes the same steps.
        let (first, second) = (f64::from(step.betas.0 as f32), f64::from(step.betas.1 as f32));
        let steps = step.step as f64;
        Self {
            scale,
            remains: (1.0 - rate * decay) as f32,
            news: (1.0 - first) as f32,
            squares: (second as f32, (1.0 - second) as f32),
            correction: (1.0 / (1.0 - second.powf(steps)).sqrt()) as f32,
            epsilon: step.epsilon,
            rate: (rate / (1.0 - first.powf(steps))) as f32,
        }
    }

    /// All of it, in the order in which a GPU's kernels are told.
    pub fn kernel_args(&self) -> [f32; 8] {
        let Self { scale, remains, news, squares, correction, epsilon, rate } = *self;
        [scale, remains, news, squares.0, squares.1, correction, epsilon, rate]
    }

    /// Updates some parameters and their moments.
    #[inline(always)]
    pub fn apply(
        &self,
        params: &mut [f32],
        gradients: &[f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        let moments = first.iter_mut().zip(second);
        for ((param, gradient), (first, second)) in params.iter_mut().zip(gradients).zip(moments) {
            let gradient = gradient * self.scale;
            *first += (gradient - *first) * self.news;
            *second = *second * self.squares.0 + gradient * gradient * self.squares.1;
            let denominator = second.sqrt() * self.correction + self.epsilon;
            *param = *param * self.remains - self.rate * (*first / denominator);
        }
    }
}
