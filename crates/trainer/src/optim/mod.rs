//! Optimizers with their state, learning rate schedules, and the EMA of the trained parameters. The kernels
//! are `compute`'s; here is the state between steps.

mod ema;
mod muon;
mod outer;
mod plateau;
mod prodigy;
pub mod schedule;
mod schedule_free;
mod shard;

use std::ops::Range;
use std::slice;

use compute::ops::{
    Adafactor, AdamW, FactoredMoments, GradClip, Moments, Moments8bit, adafactor, adamw,
    adamw_8bit, lion, momentum, stochastic_round,
};
use compute::{Dtype, Gradients, Params, RandomSequence, Result, Tape, Tensor};

pub use ema::Ema;
pub use outer::OuterOptimizer;
pub use plateau::Plateau;
pub use schedule_free::{STATE_Z, averaged_on_host};
pub use shard::OptimizerShard;

use crate::config::optimizer::{OptimizerConfig, OptimizerKind};
use crate::model::adapter::Adapters;
use muon::MuonAdamW;
use prodigy::ProdigyOptimizer;
use schedule_free::ScheduleFreeAdamW;

/// One step's settings.
#[derive(Clone, Copy, Debug)]
pub struct OptimizerStep {
    /// Those of the optimizer.
    pub adamw: AdamW,
    /// Seed of the stochastic rounding of parameters in bf16, another one in each step.
    pub rounding_seed: u64,
}

impl OptimizerStep {
    /// With another learning rate.
    fn with_rate(self, factor: f32) -> Self {
        let learning_rate = factor * self.adamw.learning_rate;
        Self { adamw: AdamW { learning_rate, ..self.adamw }, ..self }
    }
}

/// In what parameters differ in a step.
#[derive(Clone, Copy)]
pub struct ParamGroups<'a> {
    /// What the learning rate of each is multiplied by; of those beyond the last, by one.
    pub rate_factors: &'a [f32],
    /// Which of them this rank updates, where it does not update all.
    pub shard: Option<&'a OptimizerShard>,
}

impl ParamGroups<'_> {
    fn rate_factor(&self, index: usize) -> f32 {
        self.rate_factors.get(index).copied().unwrap_or(1.0)
    }

    /// Every factor once.
    fn distinct(&self, n_params: usize) -> Vec<f32> {
        let mut all = Vec::new();
        for factor in (0..n_params).map(|index| self.rate_factor(index)) {
            if !all.contains(&factor) {
                all.push(factor);
            }
        }
        all
    }
}

/// An optimizer with its state.
pub enum Optimizer {
    /// `AdamW`.
    AdamW(Vec<Moments>),
    /// `AdamW` with moments in 8 bits.
    AdamW8bit(Vec<Moments8bit>),
    /// `AdamW` without a schedule.
    ScheduleFree(ScheduleFreeAdamW),
    /// Adafactor.
    Adafactor(AdafactorOptimizer),
    /// Lion, with the mean of gradients.
    Lion(Vec<Tensor>),
    /// `Muon` for matrices within blocks, `AdamW` for the rest.
    Muon(MuonAdamW),
    /// Prodigy.
    Prodigy(ProdigyOptimizer),
}

impl Optimizer {
    /// Before the first step of a model that computes in `dtype`.
    pub fn new(
        settings: &OptimizerConfig,
        adapters: &Adapters,
        dtype: Dtype,
        shard: Option<&OptimizerShard>,
    ) -> Result<Self> {
        let values = adapters.params.values();
        let held = values.iter().enumerate().map(|(index, value)| Self::held(shard, index, value));
        let held = held.collect::<Result<Vec<_>>>()?;
        Ok(match settings.kind {
            OptimizerKind::AdamW => Self::AdamW(of_each(&held, Moments::new)?),
            OptimizerKind::AdamW8bit => Self::AdamW8bit(of_each(&held, Moments8bit::new)?),
            OptimizerKind::AdamWScheduleFree => {
                Self::ScheduleFree(ScheduleFreeAdamW::new(settings, &held)?)
            }
            OptimizerKind::Adafactor => Self::Adafactor(AdafactorOptimizer {
                state: of_each(&held, FactoredMoments::new)?,
                scale_parameter: settings.scale_parameter,
            }),
            OptimizerKind::Lion => Self::Lion(of_each(&held, momentum)?),
            OptimizerKind::Muon => {
                Self::Muon(MuonAdamW::new(adapters, settings.momentum as f32, dtype)?)
            }
            OptimizerKind::Prodigy => Self::Prodigy(ProdigyOptimizer::new(settings, &held)?),
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
            Self::Adafactor(all) => all.state[index] = FactoredMoments::new(param)?,
            Self::Lion(means) => means[index] = momentum(param)?,
            // Never sharded.
            Self::ScheduleFree(_) | Self::Muon(_) | Self::Prodigy(_) => {}
        }
        Ok(())
    }

    /// The state of one parameter, in a stable order.
    pub fn tensors_of(&mut self, index: usize) -> Vec<&mut Tensor> {
        let prefix = format!("{index}.");
        let all = self.tensors().into_iter();
        all.filter(|(name, _)| name.starts_with(&prefix)).map(|(_, tensor)| tensor).collect()
    }

    /// Changes the parameters, of a shard its own; nothing at all if the norm in `clip` is not finite. All memory is asked
    /// for before anything is changed.
    pub fn step(
        &mut self,
        params: &mut Params,
        gradients: &Gradients,
        how: OptimizerStep,
        clip: &GradClip,
        groups: ParamGroups<'_>,
    ) -> Result<()> {
        let gradients = gradients.all(params.values().len());
        let params = params.values_mut()?;
        let shard = groups.shard;
        if shard.is_none() && params.iter().all(|param| param.dtype() == Dtype::F32) {
            // A parameter without a gradient does not change, so that every group passes over those of the others.
            return groups.distinct(params.len()).into_iter().try_for_each(|factor| {
                let is_in = |index: &usize| groups.rate_factor(*index) == factor;
                let own =
                    |(index, gradient): (usize, &Option<_>)| gradient.filter(|_| is_in(&index));
                let own: Vec<_> = gradients.iter().enumerate().map(own).collect();
                self.step_range(0..params.len(), params, &own, how.adamw, factor, clip)
            });
        }
        for param in params.iter().filter(|param| param.dtype() != Dtype::F32) {
            param.device().alloc(param.shape(), Dtype::F32)?;
        }
        for (index, (param, gradient)) in params.iter_mut().zip(gradients).enumerate() {
            let gradient = gradient.filter(|_| shard.is_none_or(|shard| shard.is_own(index)));
            if let Some(gradient) = gradient {
                let how = how.with_rate(groups.rate_factor(index));
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
            return self.step_range(range, slice::from_mut(param), &gradient, adamw, 1.0, clip);
        }
        let nothing = Params::default();
        let tape = Tape::inference(param.device(), &nothing, 0);
        let mut exact = tape.convert(&param.clone().into(), Dtype::F32)?.into_tensor();
        self.step_range(range, slice::from_mut(&mut exact), &gradient, adamw, 1.0, clip)?;
        stochastic_round(&exact, param, RandomSequence::new(rounding_seed, index as u64))
    }

    /// Changes the parameters of a range, with a factor of their own on the learning rate.
    fn step_range(
        &mut self,
        range: Range<usize>,
        params: &mut [Tensor],
        gradients: &[Option<&Tensor>],
        usual: AdamW,
        rate_factor: f32,
        clip: &GradClip,
    ) -> Result<()> {
        let how = AdamW { learning_rate: rate_factor * usual.learning_rate, ..usual };
        match self {
            Self::AdamW(state) => adamw(params, gradients, &mut state[range], how, Some(clip)),
            Self::AdamW8bit(state) => {
                adamw_8bit(params, gradients, &mut state[range], how, Some(clip))
            }
            Self::ScheduleFree(state) => state.step(range, params, gradients, [usual, how], clip),
            Self::Adafactor(AdafactorOptimizer { state, scale_parameter }) => {
                let how = Adafactor { adamw: how, scale_parameter: *scale_parameter };
                adafactor(params, gradients, &mut state[range], how, Some(clip))
            }
            Self::Lion(means) => lion(params, gradients, &mut means[range], how, Some(clip)),
            Self::Muon(state) => state.step(range, params, gradients, how, clip),
            Self::Prodigy(state) => state.step(params, gradients, how, clip),
        }
    }

    /// Swaps the parameters and those that the optimizer evaluates the model at, where these are others; a second call
    /// swaps them again.
    pub fn swap_averaged(&mut self, params: &mut Params) -> Result<()> {
        match self {
            Self::ScheduleFree(state) => state.swap(params),
            _ => Ok(()),
        }
    }

    /// What the optimizer multiplies the learning rate by. Waits for the GPU if that is there.
    pub fn rate_factor(&self) -> Result<f64> {
        match self {
            Self::Prodigy(state) => state.distance(),
            _ => Ok(1.0),
        }
    }

    /// Its state, by parameter and in a stable order.
    pub fn tensors(&mut self) -> Vec<(String, &mut Tensor)> {
        match self {
            Self::AdamW(state) => {
                named(state, |Moments { first, second }| vec![("first", first), ("second", second)])
            }
            Self::AdamW8bit(state) => named(state, |Moments8bit { first, second }| {
                vec![
                    ("first.codes", &mut first.codes),
                    ("first.scales", &mut first.scales),
                    ("second.codes", &mut second.codes),
                    ("second.scales", &mut second.scales),
                ]
            }),
            Self::ScheduleFree(state) => state.tensors(),
            Self::Adafactor(all) => {
                named(&mut all.state, |FactoredMoments { rows, columns, .. }| {
                    let columns = columns.as_mut().map(|columns| ("columns", columns));
                    [("rows", rows)].into_iter().chain(columns).collect()
                })
            }
            Self::Lion(means) => named(means, |mean| vec![("mean", mean)]),
            Self::Muon(state) => state.tensors(),
            Self::Prodigy(state) => state.tensors(),
        }
    }
}

/// Adafactor's state and its one setting.
pub struct AdafactorOptimizer {
    state: Vec<FactoredMoments>,
    scale_parameter: bool,
}

/// The state of each parameter.
fn of_each<S>(values: &[Tensor], new: fn(&Tensor) -> Result<S>) -> Result<Vec<S>> {
    values.iter().map(new).collect()
}

/// The tensors of each parameter's state, by its index.
fn named<'a, S>(
    state: &'a mut [S],
    tensors: impl Fn(&'a mut S) -> Vec<(&'static str, &'a mut Tensor)>,
) -> Vec<(String, &'a mut Tensor)> {
    let of = |(index, state)| {
        let tensors = tensors(state).into_iter();
        tensors.map(move |(name, tensor)| (format!("{index}.{name}"), tensor))
    };
    state.iter_mut().enumerate().flat_map(of).collect()
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
