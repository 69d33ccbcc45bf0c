//! Schedule-free `AdamW`: Defazio et al., "The Road Less Scheduled", arXiv 2405.15682, algorithm 1, in the form of its
//! authors' code. Three sequences: z takes the steps, x is the average of z that is used in the end, and y between the
//! two is where gradients are taken. The parameters are y; of x nothing is stored:
//!
//! v ← β₂·v + (1 - β₂)·g²,  u = g / (√(v / (1 - β₂ᵗ)) + ε) + decay·y
//! y ← y + c·(z - y) - rate·(1 - β₁·(1 - c))·u
//! z ← z - rate·u
//! x = y + (1 - 1 / β₁)·(z - y)
//!
//! c is the weight of this step's z in the average.

use super::adamw::{AdamW, check};
use super::{GradClip, cpu, cuda, expect_unshared, gpu};
use crate::device::Backend;
use crate::op::Op;
use crate::{Dtype, Result, Tag, Tensor};

/// The state of a parameter.
#[derive(Debug)]
pub struct ScheduleFreeState {
    /// z, in the shape of the parameter, f32.
    pub z: Tensor,
    /// The mean of squares of gradients.
    pub second: Tensor,
}

impl ScheduleFreeState {
    /// That before the first step: all three sequences begin at the parameter.
    pub fn new(param: &Tensor) -> Result<Self> {
        let zeros = || param.device().zeros(param.shape(), Dtype::F32);
        let (mut z, second) =
            param.device().with_tag(Tag::Optimizer, || Ok((zeros()?, zeros()?)))?;
        super::ema(&mut z, param, 0.0)?;
        Ok(Self { z, second })
    }
}

/// FLOPs per element, for the work counter.
const FLOPS: usize = 18;

/// Changes every parameter that has a gradient; `weight` is c. A `clip` is as in [`adamw`](super::adamw()).
pub fn schedule_free(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ScheduleFreeState],
    step: AdamW,
    weight: f32,
    clip: Option<&GradClip>,
) -> Result<()> {
    let Some(device) = params.first().map(|param| param.device().clone()) else { return Ok(()) };
    let op = Op::standalone("schedule_free", &device);
    check(&op, params, gradients, state.len(), step, clip)?;
    op.expect_range("weight", &weight, (0.0..=1.0).contains(&weight), "0 to 1")?;
    let (mut numbers, mut touched) = (0, Vec::new());
    for (index, (param, ScheduleFreeState { z, second })) in params.iter().zip(&*state).enumerate()
    {
        for (what, tensor) in [("z", z), ("second moment", second)] {
            op.expect(what, tensor, Dtype::F32, param.shape())?;
            expect_unshared(index, tensor)?;
        }
        if let Some(gradient) = gradients[index] {
            numbers += param.shape().elements();
            touched.extend([gradient, param, param, z, z, second, second]);
        }
    }
    op.count(FLOPS * numbers, &touched);
    let how = ScheduleFreeStep { step, weight };
    match device.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => cpu::schedule_free(backend, params, gradients, state, how, clip),
        Backend::Cuda(backend) => cuda::schedule_free(backend, params, gradients, state, how, clip),
        Backend::Gpu(backend) => gpu::schedule_free(backend, params, gradients, state, how, clip),
    }
    Ok(())
}

/// A step's settings with the weight of its z.
#[derive(Clone, Copy)]
pub(super) struct ScheduleFreeStep {
    pub step: AdamW,
    pub weight: f32,
}

/// The arithmetic of a step; what depends on no parameter is worked out once, in f64.
#[derive(Clone, Copy)]
pub(super) struct ScheduleFreeUpdate {
    /// What gradients are multiplied by.
    scale: f32,
    /// β₂ and 1 - β₂
    squares: [f32; 2],
    /// 1 / √(1 - β₂ᵗ)
    correction: f32,
    epsilon: f32,
    decay: f32,
    /// c
    weight: f32,
    /// rate·(1 - β₁·(1 - c))
    y_rate: f32,
    /// Of z.
    rate: f32,
}

impl ScheduleFreeUpdate {
    /// For gradients to be multiplied by `scale`.
    pub fn new(ScheduleFreeStep { step, weight }: ScheduleFreeStep, scale: f32) -> Self {
        let (rate, c) = (f64::from(step.learning_rate), f64::from(weight));
        let (first, second) = step.betas;
        Self {
            scale,
            squares: [second as f32, (1.0 - second) as f32],
            correction: (1.0 / (1.0 - second.powf(step.step as f64)).sqrt()) as f32,
            epsilon: step.epsilon,
            decay: step.weight_decay,
            weight,
            y_rate: (rate * (1.0 - first * (1.0 - c))) as f32,
            rate: step.learning_rate,
        }
    }

    /// All of it, in the order in which a GPU's kernels are told.
    pub fn kernel_args(&self) -> [f32; 9] {
        let Self { scale, squares, correction, epsilon, decay, weight, y_rate, rate } = *self;
        [scale, squares[0], squares[1], correction, epsilon, decay, weight, y_rate, rate]
    }

    /// Updates some parameters and their state.
    #[inline(always)]
    pub fn apply(&self, y: &mut [f32], gradients: &[f32], z: &mut [f32], second: &mut [f32]) {
        let state = z.iter_mut().zip(second);
        for ((y, gradient), (z, second)) in y.iter_mut().zip(gradients).zip(state) {
            let gradient = gradient * self.scale;
            *second = *second * self.squares[0] + gradient * gradient * self.squares[1];
            let denominator = second.sqrt() * self.correction + self.epsilon;
            let along = gradient / denominator + self.decay * *y;
            *y = *y + (*z - *y) * self.weight - self.y_rate * along;
            *z -= self.rate * along;
        }
    }
}
