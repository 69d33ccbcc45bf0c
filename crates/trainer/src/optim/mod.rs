//! Optimizers with their state, learning rate schedules, and the EMA of the trained parameters. The kernels
//! are `compute`'s; here is the state between steps.

mod ema;
mod muon;
mod outer;
mod plateau;
pub mod schedule;
mod shard;

use std::ops::Range;
use std::slice;

use compute::ops::{
    AdamW, BlockCodes, GradClip, Moments, Moments8bit, adamw, adamw_8bit, stochastic_round,
};
use compute::{Dtype, Gradients, Params, RandomSequence, Result, Tape, Tensor};

pub use ema::Ema;
pub use outer::OuterOptimizer;
pub use plateau::Plateau;
pub use shard::OptimizerShard;

use crate::config::optimizer::{self, OptimizerKind};
use crate::model::adapter::Adapters;
use muon::MuonAdamW;

/// One step's settings.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerStep {
    /// Those of the optimizer.
    pub adamw: AdamW,
    /// Seed of the stochastic rounding of parameters in bf16, another one in each step.
    pub rounding_seed: u64,
}

/// An optimizer with its state.
pub enum Optimizer {
    /// `AdamW`.
    AdamW(Vec<Moments>),
    /// `AdamW` with moments in 8 bits.
    AdamW8bit(Vec<Moments8bit>),
    /// `Muon` for matrices within blocks, `AdamW` for the rest.
    Muon(MuonAdamW),
}

impl Optimizer {
    /// Before the first step of a model that computes in `dtype`.
    pub fn new(
        settings: &optimizer::OptimizerConfig,
        adapters: &Adapters,
        dtype: Dtype,
        shard: Option<&OptimizerShard>,
    ) -> Result<Self> {
        let values = adapters.params.values();
        let values =
            values.iter().enumerate().map(|(index, value)| Self::held(shard, index, value));
        let values = values.collect::<Result<Vec<_>>>()?;
        let values = values.iter();
        Ok(match settings.kind {
            OptimizerKind::AdamW => Self::AdamW(values.map(Moments::new).collect::<Result<_>>()?),
            OptimizerKind::AdamW8bit => {
                Self::AdamW8bit(values.map(Moments8bit::new).collect::<Result<_>>()?)
            }
            OptimizerKind::Muon => {
                let momentum = settings.momentum as f32;
                Self::Muon(MuonAdamW::new(adapters, momentum, dtype)?)
            }
        })
    }

    /// What the state of a parameter is made for: itself, or next to nothing where another rank holds it.
    fn held(shard: Option<&OptimizerShard>, index: usize, value: &Tensor) -> Result<Tensor> {
        if shard.is_none_or(|shard| shard.is_own(index)) {
            return Ok(value.clone());
        }
        value.device().zeros([1], Dtype::F32)
    }

    /// Makes room on another device for the state of a parameter that another rank holds.
    pub fn make_room(&mut self, index: usize, param: &Tensor) -> Result<()> {
        match self {
            Self::AdamW(state) => state[index] = Moments::new(param)?,
            Self::AdamW8bit(state) => state[index] = Moments8bit::new(param)?,
            Self::Muon(_) => {}
        }
        Ok(())
    }

    /// The state of one parameter, in a stable order.
    pub fn tensors_of(&mut self, index: usize) -> Vec<&mut Tensor> {
        match self {
            Self::AdamW(state) => {
                let Moments { first, second } = &mut state[index];
                vec![first, second]
            }
            Self::AdamW8bit(state) => {
                let Moments8bit { first, second } = &mut state[index];
                vec![&mut first.codes, &mut first.scales, &mut second.codes, &mut second.scales]
            }
            Self::Muon(_) => Vec::new(),
        }
    }

    /// Changes the parameters, of a shard its own; nothing at all if the norm in `clip` is not finite. All memory is asked
    /// for before anything is changed.
    pub fn step(
        &mut self,
        params: &mut Params,
        gradients: &Gradients,
        how: OptimizerStep,
        clip: &GradClip,
        shard: Option<&OptimizerShard>,
    ) -> Result<()> {
        let gradients = gradients.all(params.values().len());
        let params = params.values_mut()?;
        if shard.is_none() && params.iter().all(|param| param.dtype() == Dtype::F32) {
            return self.step_range(0..params.len(), params, &gradients, how.adamw, clip);
        }
        for param in params.iter().filter(|param| param.dtype() != Dtype::F32) {
            param.device().alloc(param.shape(), Dtype::F32)?;
        }
        for (index, (param, gradient)) in params.iter_mut().zip(gradients).enumerate() {
            let gradient = gradient.filter(|_| shard.is_none_or(|shard| shard.is_own(index)));
            if let Some(gradient) = gradient {
                self.step_one(index, param, gradient, how, clip)?;
            }
        }
        Ok(())
    }

    /// Changes the parameter at `index` alone. One in bf16 is updated in f32 and rounded at random.
    pub fn step_one(
        &mut self,
        index: usize,
        param: &mut Tensor,
        gradient: &Tensor,
        OptimizerStep { adamw, rounding_seed }: OptimizerStep,
        clip: &GradClip,
    ) -> Result<()> {
        let (range, gradient) = (index..index + 1, [Some(gradient)]);
        if param.dtype() == Dtype::F32 {
            return self.step_range(range, slice::from_mut(param), &gradient, adamw, clip);
        }
        let nothing = Params::default();
        let tape = Tape::inference(param.device(), &nothing, 0);
        let mut exact = tape.convert(&param.clone().into(), Dtype::F32)?.into_tensor();
        self.step_range(range, slice::from_mut(&mut exact), &gradient, adamw, clip)?;
        stochastic_round(&exact, param, RandomSequence::new(rounding_seed, index as u64))
    }

    /// Changes the parameters of a range.
    fn step_range(
        &mut self,
        range: Range<usize>,
        params: &mut [Tensor],
        gradients: &[Option<&Tensor>],
        how: AdamW,
        clip: &GradClip,
    ) -> Result<()> {
        match self {
            Self::AdamW(state) => adamw(params, gradients, &mut state[range], how, Some(clip)),
            Self::AdamW8bit(state) => {
                adamw_8bit(params, gradients, &mut state[range], how, Some(clip))
            }
            Self::Muon(state) => state.step(range, params, gradients, how, clip),
        }
    }

    /// Its state, by parameter and in a stable order.
    pub fn tensors(&mut self) -> Vec<(String, &mut Tensor)> {
        let mut all = Vec::new();
        match self {
            Self::AdamW(state) => {
                for (index, Moments { first, second }) in state.iter_mut().enumerate() {
                    all.push((format!("{index}.first"), first));
                    all.push((format!("{index}.second"), second));
                }
            }
            Self::AdamW8bit(state) => {
                for (index, Moments8bit { first, second }) in state.iter_mut().enumerate() {
                    for (name, BlockCodes { codes, scales }) in
                        [("first", first), ("second", second)]
                    {
                        all.push((format!("{index}.{name}.codes"), codes));
                        all.push((format!("{index}.{name}.scales"), scales));
                    }
                }
            }
            Self::Muon(state) => all = state.tensors(),
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use compute::Device;
    use compute::ops::global_norm;

    use super::*;

    /// The mean of many weights after steps along the same gradient.
    fn trained(dtype: Dtype, is_nearest: bool) -> f64 {
        const N: usize = 1 << 12;
        let device = Device::cpu(1, 1 << 24).unwrap();
        let nothing = Params::default();
        let convert = |tensor: &Tensor, dtype| {
            let tape = Tape::inference(&device, &nothing, 0);
            tape.convert(&tensor.clone().into(), dtype).unwrap().into_tensor()
        };
        let mut param = convert(&device.upload([N], &vec![1.0f32; N]).unwrap(), dtype);
        let gradient = device.upload([N], &vec![1.0f32; N]).unwrap();
        let mut optimizer = Optimizer::AdamW(vec![Moments::new(&param).unwrap()]);
        for step in 1..=100 {
            let adamw = AdamW { learning_rate: 1e-4, weight_decay: 0.0, step, ..AdamW::default() };
            let how = OptimizerStep { adamw, rounding_seed: step };
            let norm = global_norm(&[Some(&gradient)], &device).unwrap();
            let clip = GradClip { norm, max_norm: f32::INFINITY };
            if is_nearest {
                let mut exact = convert(&param, Dtype::F32);
                optimizer.step_one(0, &mut exact, &gradient, how, &clip).unwrap();
                param = convert(&exact, dtype);
            } else {
                optimizer.step_one(0, &mut param, &gradient, how, &clip).unwrap();
            }
        }
        assert_eq!(param.dtype(), dtype);
        param.to_f32_vec().iter().map(|value| f64::from(*value)).sum::<f64>() / N as f64
    }

    /// A step of 1e-4 is far below half of a step of bf16, 1/512 just below 1.
    #[test]
    fn stochastic_rounding_keeps_steps_that_rounding_to_the_nearest_loses() {
        let (exact, random) = (trained(Dtype::F32, false), trained(Dtype::Bf16, false));
        assert!((exact - 0.99).abs() < 1e-5, "{exact}");
        assert!((random - exact).abs() < 3e-4, "{random} {exact}");
        assert_eq!(trained(Dtype::Bf16, true), 1.0);
    }
}
