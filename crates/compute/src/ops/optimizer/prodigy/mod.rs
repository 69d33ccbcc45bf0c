//! Prodigy: Mishchenko and Defazio, arXiv 2306.06101, algorithm 4, in the form of its authors' code. It is Adam with a
//! learning rate of d, an estimate of the distance from the first parameters p₀ to the solution, which only grows. With
//! r = rate·correction:
//!
//! m ← β₁·m + (1 - β₁)·d·g,  v ← β₂·v + (1 - β₂)·(d·g)²
//! s ← √β₂·s + d/d₀·d·r·g,  n ← √β₂·n + d/d₀·d·r·⟨g, p₀ - p⟩
//! d' = max(d, coefficient·n / ‖s‖₁)
//! p ← p - d·r·decay·p - d·r·m / (√v + d'·ε)
//!
//! The two sums are over all parameters, so that no parameter can be updated before all gradients are known. d stays on
//! the device.

mod cpu;
mod cuda;
mod gpu;

use super::adamw::{AdamW, check};
use super::{GradClip, expect_unshared};
use crate::device::{Backend, DeviceKind};
use crate::op::{Op, OpContext};
use crate::{Device, Dtype, Result, Tag, Tensor};

/// One step's settings.
#[derive(Clone, Copy, Debug)]
pub struct Prodigy {
    /// Those that it shares with `AdamW`. The learning rate multiplies d and is usually 1.
    pub adamw: AdamW,
    /// The first d.
    pub d0: f32,
    /// Multiplies every estimate of d.
    pub d_coef: f32,
    /// Adam's bias correction.
    pub use_bias_correction: bool,
    /// Leaves the learning rate out of s, so that a warmup does not make d grow too far.
    pub safeguard_warmup: bool,
}

/// The state of a parameter: four times its size.
#[derive(Debug)]
pub struct ProdigyState {
    /// The mean of gradients times d, in the shape of the parameter, f32.
    pub first: Tensor,
    /// The mean of their squares.
    pub second: Tensor,
    /// p₀, the parameter before the first step.
    pub start: Tensor,
    /// s, the weighted sum of gradients.
    pub sum: Tensor,
}

impl ProdigyState {
    /// That before the first step.
    pub fn new(param: &Tensor) -> Result<Self> {
        let zeros = || param.device().zeros(param.shape(), Dtype::F32);
        let mut state = param.device().with_tag(Tag::Optimizer, || -> Result<Self> {
            Ok(Self { first: zeros()?, second: zeros()?, start: zeros()?, sum: zeros()? })
        })?;
        super::ema(&mut state.start, param, 0.0)?;
        Ok(state)
    }
}

/// What is known of d, in this order: d, n, ‖s‖₁, and d before the last step.
const ESTIMATES: usize = 4;

/// d before the first step, on a device.
pub fn prodigy_distance(device: &Device, d0: f32) -> Result<Tensor> {
    device.with_tag(Tag::Optimizer, || device.upload([ESTIMATES], &[d0, 0.0, 0.0, d0]))
}

/// FLOPs per element, for the work counter.
const FLOPS: usize = 30;

/// Changes every parameter that has a gradient, and the estimate of d. A `clip` is as in [`adamw`](super::adamw()). All
/// memory is asked for before anything is changed.
pub fn prodigy(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ProdigyState],
    distance: &mut Tensor,
    step: Prodigy,
    clip: Option<&GradClip>,
) -> Result<()> {
    let Some(device) = params.first().map(|param| param.device().clone()) else { return Ok(()) };
    let op = Op::standalone("prodigy", &device);
    check(&op, params, gradients, state.len(), step.adamw, clip)?;
    op.expect("distance", distance, Dtype::F32, [ESTIMATES].into())?;
    expect_unshared(0, distance)?;
    for (what, value) in [("d0", step.d0), ("d_coef", step.d_coef)] {
        op.expect_range(what, &value, value > 0.0 && value.is_finite(), "above 0, and finite")?;
    }
    let (mut numbers, mut touched) = (0, Vec::new());
    for (index, (param, of)) in params.iter().zip(&*state).enumerate() {
        let ProdigyState { first, second, start, sum } = of;
        let all = [("first moment", first), ("second moment", second), ("start", start)];
        for (what, tensor) in all.into_iter().chain([("sum", sum)]) {
            op.expect(what, tensor, Dtype::F32, param.shape())?;
            expect_unshared(index, tensor)?;
        }
        if let Some(gradient) = gradients[index] {
            numbers += param.shape().elements();
            touched.extend([gradient, param, first, first, second, second, start, sum, sum]);
            touched.extend([param, param, first, second]);
        }
    }
    op.count(FLOPS * numbers, &touched);
    run(op.cx, params, gradients, state, distance, ProdigyUpdate::new(step), clip)
}

fn run(
    cx: OpContext<'_>,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ProdigyState],
    distance: &mut Tensor,
    update: ProdigyUpdate,
    clip: Option<&GradClip>,
) -> Result<()> {
    let sizes = params.iter().zip(gradients).filter(|(_, gradient)| gradient.is_some());
    let sizes = sizes.map(|(param, _)| param.shape().elements());
    let floats = match cx.device.kind() {
        DeviceKind::Cpu { .. } => 0,
        DeviceKind::Cuda { .. } => cuda::floats(sizes),
        DeviceKind::Gpu { .. } => gpu::floats(sizes),
    };
    let sums = &mut cx.workspace([floats], Dtype::F32)?;
    match cx.backend() {
        Backend::Meta => {}
        Backend::Cpu(cpu) => cpu::prodigy(cpu, params, gradients, state, distance, update, clip),
        Backend::Cuda(cuda) => {
            let tensors = cuda::tensors(params, gradients, state);
            cuda::prodigy(cuda, &tensors, distance, sums, update, clip);
        }
        Backend::Gpu(gpu) => {
            gpu::prodigy(gpu, params, gradients, state, gpu::Sums { distance, sums }, update, clip);
        }
    }
    Ok(())
}

/// The arithmetic of a step; what depends on neither a parameter nor d is worked out once, in f64.
#[derive(Clone, Copy, Debug)]
struct ProdigyUpdate {
    /// What gradients are multiplied by.
    scale: f32,
    /// β₁ and 1 - β₁
    means: [f32; 2],
    /// β₂ and 1 - β₂
    squares: [f32; 2],
    /// √β₂
    keeps: f32,
    /// rate·correction
    rate: f32,
    /// What d²/d₀ is multiplied by in s.
    sum_rate: f32,
    decay: f32,
    epsilon: f32,
    d0: f32,
    d_coef: f32,
}

impl ProdigyUpdate {
    fn new(step: Prodigy) -> Self {
        let Prodigy { adamw, d0, d_coef, use_bias_correction, safeguard_warmup } = step;
        let (first, second) = adamw.betas;
        let n = adamw.step as f64;
        let corrected = (1.0 - second.powf(n)).sqrt() / (1.0 - first.powf(n));
        let correction = if use_bias_correction { corrected } else { 1.0 };
        let rate = (f64::from(adamw.learning_rate) * correction) as f32;
        Self {
            scale: adamw.scale,
            means: [first as f32, (1.0 - first) as f32],
            squares: [second as f32, (1.0 - second) as f32],
            keeps: second.sqrt() as f32,
            rate,
            sum_rate: if safeguard_warmup { 1.0 } else { rate },
            decay: adamw.weight_decay,
            epsilon: adamw.epsilon,
            d0,
            d_coef,
        }
    }
}
