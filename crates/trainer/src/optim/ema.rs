//! An EMA of the trained parameters (Polyak and Juditsky, 1992), which is often better than the last step
//! alone.

use compute::ops::ema;
use compute::{Dtype, Params, Result, Tag, Tensor};

/// The EMA of every parameter.
pub struct Ema {
    decay: f64,
    shadow: Vec<Tensor>,
}

impl Ema {
    /// Before the first step.
    pub fn new(decay: f64, params: &Params) -> Result<Self> {
        let mean = |value: &Tensor| {
            let device = value.device();
            device.with_tag(Tag::Optimizer, || device.zeros(value.shape(), Dtype::F32))
        };
        Ok(Self { decay, shadow: params.values().iter().map(mean).collect::<Result<_>>()? })
    }

    /// Updates it after a step, counted from 1.
    pub fn update(&mut self, params: &Params, step: u64) -> Result<()> {
        let decay = self.decay_at(step);
        let values = params.values();
        let mut pairs = self.shadow.iter_mut().zip(&*values);
        pairs.try_for_each(|(mean, value)| ema(mean, value, decay as f32))
    }

    /// The decay warms up, so that the EMA forgets the initial values: 0 at the first step, which copies
    /// the parameters. Taken: (1 + n) / (10 + n) for n steps before, as in diffusers' `EMAModel`.
    fn decay_at(&self, step: u64) -> f64 {
        match step.saturating_sub(1) as f64 {
            0.0 => 0.0,
            before => self.decay.min((1.0 + before) / (10.0 + before)),
        }
    }

    /// Swaps the EMA and the parameters; a second call swaps them again.
    pub fn swap(&mut self, params: &mut Params) -> Result<()> {
        params.values_mut()?.swap_with_slice(&mut self.shadow);
        Ok(())
    }

    /// By parameter, in order.
    pub fn tensors(&mut self) -> impl Iterator<Item = &mut Tensor> {
        self.shadow.iter_mut()
    }
}

#[cfg(test)]
mod tests {
    use compute::Device;

    use super::*;

    #[test]
    fn it_is_the_ema_of_the_reference() {
        let device = Device::cpu(1, 1 << 16).unwrap();
        let mut params = Params::default();
        let key = params.add(device.upload([1], &[0.0f32]).unwrap());
        let mut average = Ema::new(0.9, &params).unwrap();
        let mut expected = 0.0f32;
        for step in 1..=200u64 {
            let value = step as f32;
            params.values_mut().unwrap()[0] = device.upload([1], &[value]).unwrap();
            average.update(&params, step).unwrap();
            let before = (step - 1) as f32;
            let decay = if step == 1 { 0.0 } else { ((1.0 + before) / (10.0 + before)).min(0.9) };
            expected = decay * expected + (1.0 - decay) * value;
        }
        average.swap(&mut params).unwrap();
        let mean = params.get(key).to_vec::<f32>()[0];
        assert!((mean - expected).abs() < 1e-3, "{mean} {expected}");
        average.swap(&mut params).unwrap();
        assert_eq!(params.get(key).to_vec::<f32>(), [200.0]);
    }
}
