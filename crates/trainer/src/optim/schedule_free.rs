//! Schedule-free `AdamW` between steps. The parameters are y, where gradients are taken; the model is evaluated, saved as
//! an adapter and exported at x, which is computed from y and z when it is needed. y is kept meanwhile and not computed
//! back from x: that would not give the same bits.

use std::ops::Range;

use compute::ops::{AdamW, GradClip, ScheduleFreeState, ema, lerp, schedule_free};
use compute::{Dtype, Params, Result, Tag, Tape, Tensor};

use super::{named, of_each};
use crate::config::optimizer::OptimizerConfig;
use crate::model::host::to_vec;

/// How z is called in a state.
pub const STATE_Z: &str = "z";

/// The optimizer with its state.
pub struct ScheduleFreeAdamW {
    state: Vec<ScheduleFreeState>,
    /// Of all steps, as [`StepWeights::to_array`] has it; none without parameters.
    weights: Option<Tensor>,
    /// The same, unless somebody else may have written it.
    read: Option<StepWeights>,
    /// β₁
    beta: f64,
    /// y, while x is in its place.
    kept: Option<Vec<Tensor>>,
}

/// Weights of steps in the average: the square of the largest learning rate so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct WeightSum {
    sum: f32,
    largest_rate: f32,
}

/// The sums after a step and before it, since a step that is not applied comes again.
#[derive(Clone, Copy, Debug, Default)]
struct StepWeights {
    step: u64,
    before: WeightSum,
    after: WeightSum,
}

impl StepWeights {
    fn from_slice(values: &[f32]) -> Self {
        let [step, sum, largest_rate, next, next_rate] = *values else { return Self::default() };
        Self {
            step: step as u64,
            before: WeightSum { sum, largest_rate },
            after: WeightSum { sum: next, largest_rate: next_rate },
        }
    }

    fn to_array(self) -> [f32; 5] {
        let Self { step, before, after } = self;
        [step as f32, before.sum, before.largest_rate, after.sum, after.largest_rate]
    }

    /// With a step; and its share of all weights.
    fn with_step(self, step: u64, rate: f32) -> (Self, f32) {
        let before = if step == self.step { self.before } else { self.after };
        let largest_rate = before.largest_rate.max(rate);
        let weight = largest_rate * largest_rate;
        let sum = before.sum + weight;
        let after = WeightSum { sum, largest_rate };
        let share = if sum > 0.0 { weight / sum } else { 0.0 };
        (Self { step, before, after }, share)
    }
}

impl ScheduleFreeAdamW {
    /// Before the first step of parameters with these values.
    pub fn new(settings: &OptimizerConfig, values: &[Tensor]) -> Result<Self> {
        let n = StepWeights::default().to_array().len();
        let weights = values.first().map(|value| {
            value.device().with_tag(Tag::Optimizer, || value.device().zeros([n], Dtype::F32))
        });
        let state = of_each(values, ScheduleFreeState::new)?;
        let beta = settings.betas[0];
        Ok(Self { state, weights: weights.transpose()?, read: None, beta, kept: None })
    }

    /// Updates the parameters of a range. They may have a learning rate of their own beside the usual one, which alone
    /// decides what a step counts in the average.
    pub fn step(
        &mut self,
        range: Range<usize>,
        params: &mut [Tensor],
        gradients: &[Option<&Tensor>],
        [usual, how]: [AdamW; 2],
        clip: &GradClip,
    ) -> Result<()> {
        let share = self.share(usual)?;
        schedule_free(params, gradients, &mut self.state[range], how, share, Some(clip))
    }

    /// The weight of a step's z in the average. It is counted once, however many ranges the step has.
    fn share(&mut self, how: AdamW) -> Result<f32> {
        let Some(weights) = &mut self.weights else { return Ok(0.0) };
        let counted = match self.read {
            Some(counted) => counted,
            None => StepWeights::from_slice(&to_vec(weights)?),
        };
        let (next, share) = counted.with_step(how.step, how.learning_rate);
        if self.read.is_none_or(|read| read.to_array() != next.to_array()) {
            weights.write(&next.to_array());
        }
        self.read = Some(next);
        Ok(share)
    }

    /// Swaps y and x.
    pub fn swap(&mut self, params: &mut Params) -> Result<()> {
        let mut others = match self.kept.take() {
            Some(kept) => return self.put_back(params, kept),
            None => self.averaged(params)?,
        };
        params.values_mut()?.swap_with_slice(&mut others);
        self.kept = Some(others);
        Ok(())
    }

    fn put_back(&mut self, params: &mut Params, mut kept: Vec<Tensor>) -> Result<()> {
        match params.values_mut() {
            Ok(values) => values.swap_with_slice(&mut kept),
            Err(error) => {
                self.kept = Some(kept);
                return Err(error);
            }
        }
        Ok(())
    }

    /// x of every parameter, in its dtype.
    fn averaged(&self, params: &Params) -> Result<Vec<Tensor>> {
        let values = params.values();
        let of = |(y, ScheduleFreeState { z, .. }): (&Tensor, &ScheduleFreeState)| {
            let device = y.device();
            device.with_tag(Tag::Optimizer, || {
                let mut x = device.zeros(y.shape(), Dtype::F32)?;
                ema(&mut x, y, 0.0)?;
                lerp(&mut x, z, weight_of_z(self.beta))?;
                let nothing = Params::default();
                let tape = Tape::inference(device, &nothing, 0);
                Ok(tape.convert(&x.into(), y.dtype())?.into_tensor())
            })
        };
        values.iter().zip(&self.state).map(of).collect()
    }

    /// The state, by parameter and in a stable order.
    pub fn tensors(&mut self) -> Vec<(String, &mut Tensor)> {
        // Who asks for it may write it.
        self.read = None;
        let mut all = named(&mut self.state, |ScheduleFreeState { z, second }| {
            vec![(STATE_Z, z), ("second", second)]
        });
        all.extend(self.weights.as_mut().map(|weights| ("weights".to_owned(), weights)));
        all
    }
}

/// What x has of z, beside y.
fn weight_of_z(beta: f64) -> f32 {
    (1.0 - 1.0 / beta) as f32
}

/// x of some values of a checkpoint.
pub fn averaged_on_host(settings: &OptimizerConfig, y: &mut [f32], z: &[f32]) {
    let share = 1.0 - weight_of_z(settings.betas[0]);
    for (y, z) in y.iter_mut().zip(z) {
        *y = share * *y + (1.0 - share) * z;
    }
}

#[cfg(test)]
mod tests {
    use compute::Device;
    use compute::ops::global_norm;

    use super::*;
    use crate::config::RawConfig;

    fn shares(steps: &[(u64, f32)]) -> Vec<f32> {
        let mut counted = StepWeights::default();
        let one = |(step, rate): &(u64, f32)| {
            // As a run that resumes reads it.
            let (next, share) =
                StepWeights::from_slice(&counted.to_array()).with_step(*step, *rate);
            counted = next;
            share
        };
        steps.iter().map(one).collect()
    }

    #[test]
    fn steps_weigh_as_much_as_the_largest_rate_and_count_once() {
        assert_eq!(shares(&[(1, 1.0), (2, 1.0), (3, 1.0)]), [1.0, 0.5, 1.0 / 3.0]);
        // A rate that falls weighs as the largest before; one of 0 nothing.
        assert_eq!(shares(&[(1, 1.0), (2, 2.0), (3, 1.0)]), [1.0, 0.8, 4.0 / 9.0]);
        assert_eq!(shares(&[(1, 0.0), (2, 1.0)]), [0.0, 1.0]);
        // A step in many ranges, and one that was skipped and comes again with another rate.
        assert_eq!(shares(&[(1, 1.0), (1, 1.0), (2, 1.0), (2, 2.0)]), [1.0, 1.0, 0.5, 0.8]);
    }

    fn settings() -> OptimizerConfig {
        let mut raw = RawConfig::default();
        for argument in ["base.path=x", "data.images=y", "optimizer.betas=[0.8, 0.99]"] {
            raw.set(argument).unwrap();
        }
        raw.resolve().unwrap().optimizer
    }

    /// A parameter after three steps.
    fn trained(device: &Device) -> (Params, ScheduleFreeAdamW) {
        let values: Vec<f32> = (0..9).map(|i| (i as f32).cos()).collect();
        let gradient = device.upload([9], &values).unwrap();
        let mut params = Params::default();
        params.add(device.upload([9], &values).unwrap());
        let mut optimizer = ScheduleFreeAdamW::new(&settings(), &params.values()).unwrap();
        let norm = global_norm(&[Some(&gradient)], device).unwrap();
        let clip = GradClip { norm, max_norm: f32::INFINITY };
        for step in 1..=3 {
            let how = AdamW { step, betas: (0.8, 0.99), ..AdamW::default() };
            let all = params.values_mut().unwrap();
            optimizer.step(0..1, all, &[Some(&gradient)], [how; 2], &clip).unwrap();
        }
        (params, optimizer)
    }

    #[test]
    fn the_average_takes_the_place_of_parameters_and_leaves_no_trace() {
        let device = Device::cpu(1, 1 << 16).unwrap();
        let (mut params, mut optimizer) = trained(&device);
        let values = |params: &Params| params.values()[0].to_f32_vec();
        let (y, z) = (values(&params), optimizer.state[0].z.to_f32_vec());
        let in_use = device.usage().in_use;
        optimizer.swap(&mut params).unwrap();
        let x = values(&params);
        assert!(device.usage().in_use > in_use && x != y);
        let mut on_host = y.clone();
        averaged_on_host(&settings(), &mut on_host, &z);
        for (index, x) in x.iter().enumerate() {
            let exact = 1.25 * y[index] - 0.25 * z[index];
            assert!((x - exact).abs() < 1e-6 && (on_host[index] - exact).abs() < 1e-6);
        }
        optimizer.swap(&mut params).unwrap();
        assert_eq!(values(&params), y);
        assert_eq!(device.usage().in_use, in_use);
    }
}
