//! Sums of gradients that do not depend on their order, so that any number of ranks gives the same bits. The gradient of
//! every micro-batch is rounded to a multiple of a fixed power of two and added in f64, which is then exact: integers with
//! a common exponent. The exponent is fixed, since the largest gradient is known only after all were added. Sums beyond
//! `EXACT_BITS` are rounded as others are; what is not finite stays so.

use compute::{Dtype, Gradients, ParamKey, Result};

/// Bits behind the point. Chosen: half of the last is 5e-13, far below the epsilon of `AdamW`, 1e-8; sums up to 2^13 are
/// exact.
const BITS: i32 = 40;

/// The same with the loss scale of f16, which begins with 2^16.
const SCALED_BITS: i32 = 24;

/// Bits of an f64's integers.
#[cfg(test)]
const EXACT_BITS: i32 = 53;

/// One sum per parameter that any gradient arrived for.
pub struct ExactSums {
    sums: Vec<Option<Vec<f64>>>,
    /// What a multiple of the smallest step is multiplied by to be an integer.
    scale: f64,
}

impl ExactSums {
    /// Of a model that computes in `dtype`.
    pub fn new(dtype: Dtype, n_params: usize) -> Self {
        let bits = if dtype == Dtype::F16 { SCALED_BITS } else { BITS };
        Self { sums: vec![None; n_params], scale: 2f64.powi(bits) }
    }

    /// Forgets what was added, and keeps the memory.
    pub fn reset(&mut self) {
        self.sums.iter_mut().flatten().for_each(Vec::clear);
    }

    /// Adds a gradient of a micro-batch, which is then zero.
    pub fn add(&mut self, key: ParamKey, gradients: &mut Gradients) -> Result<()> {
        if let Some(values) = gradients.read(key)? {
            self.add_to(key.index(), &values);
            gradients.reset_one(key);
        }
        Ok(())
    }

    fn add_to(&mut self, index: usize, values: &[f32]) {
        let scale = self.scale;
        let sums = self.sums[index].get_or_insert_default();
        sums.resize(values.len(), 0.0);
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum += round_to(f64::from(*value), scale);
        }
    }

    /// The sums of a parameter, if any gradient arrived.
    pub fn get(&self, key: ParamKey) -> Option<&[f64]> {
        self.sums[key.index()].as_deref().filter(|sums| !sums.is_empty())
    }

    /// A number that is added up beside the gradients, such as a loss.
    pub fn round(&self, value: f64) -> f64 {
        round_to(value, self.scale)
    }
}

fn round_to(value: f64, scale: f64) -> f64 {
    (value * scale).round_ties_even() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_the_same_in_any_order() {
        let values: Vec<f32> = (0..4096)
            .map(|at: i32| ((at * 7919 % 4001) as f32 - 2000.0) * 1.37e-2f32.powi(1 + at % 4))
            .collect();
        let sum = |order: &mut dyn Iterator<Item = &f32>| {
            let mut sums = ExactSums::new(Dtype::F32, 1);
            order.for_each(|value| sums.add_to(0, &[*value]));
            sums.sums[0].as_ref().unwrap()[0]
        };
        let forward = sum(&mut values.iter());
        assert_eq!(forward.to_bits(), sum(&mut values.iter().rev()).to_bits());
        let (odd, even): (Vec<f32>, Vec<f32>) = values.iter().partition(|value| **value > 1.0);
        assert_eq!(forward, sum(&mut odd.iter()) + sum(&mut even.iter()));
        let plain = |order: &mut dyn Iterator<Item = &f32>| order.sum::<f32>();
        assert_ne!(plain(&mut values.iter()), plain(&mut values.iter().rev()));
        assert!((forward - values.iter().map(|value| f64::from(*value)).sum::<f64>()).abs() < 1e-8);
    }

    #[test]
    fn what_cannot_be_exact_is_close_and_not_finite_stays_so() {
        let most = 2f32.powi(EXACT_BITS - BITS + 8) * 1.234_567;
        assert_eq!(round_to(most.into(), 2f64.powi(BITS)), f64::from(most));
        assert!(round_to(f64::INFINITY, 2f64.powi(BITS)).is_infinite());
        assert!(round_to(f64::NAN, 2f64.powi(BITS)).is_nan());
    }
}
