//! Losses by timestep: ten equal parts of the share of noise, so that it shows where a model learns. Without the weights of
//! timesteps, which would hide that.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::null_is_nan;

/// How many parts the share of noise is cut into.
pub const TENTHS: usize = 10;

/// Losses of a step's samples, or of those of a validation, by their timesteps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimestepLosses {
    /// Steps taken so far.
    pub step: u64,
    /// Whether they are those of a validation.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub is_held_out: bool,
    /// Parts that had a sample, from little noise to much.
    pub tenths: Vec<TenthLoss>,
}

/// A part of the timesteps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenthLoss {
    /// Which: 0 has timesteps from 0 to 100 of 1000.
    pub tenth: usize,
    /// Samples that had such a timestep.
    pub n: u64,
    /// Their mean loss, without weights of samples and timesteps.
    #[serde(deserialize_with = "null_is_nan")]
    pub loss: f64,
}

/// Means of samples, one by one or part by part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimestepSums(BTreeMap<usize, (u64, f64)>);

impl TimestepSums {
    /// Adds a sample with this share of noise.
    pub fn add(&mut self, sigma: f32, loss: f64) {
        let tenth = ((sigma * TENTHS as f32) as usize).min(TENTHS - 1);
        self.add_part(TenthLoss { tenth, n: 1, loss });
    }

    /// Adds all samples of a part. A loss that is not finite would hide all others.
    pub fn add_part(&mut self, TenthLoss { tenth, n, loss }: TenthLoss) {
        if tenth >= TENTHS || !loss.is_finite() {
            return;
        }
        let (all, sum) = self.0.entry(tenth).or_default();
        *all += n;
        *sum += n as f64 * loss;
    }

    /// The means.
    pub fn means(&self) -> Vec<TenthLoss> {
        let mean = |(tenth, (n, sum)): (&usize, &(u64, f64))| TenthLoss {
            tenth: *tenth,
            n: *n,
            loss: sum / *n as f64,
        };
        self.0.iter().filter(|(_, (n, _))| *n > 0).map(mean).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_of_parts_are_those_of_their_samples() {
        let mut samples = TimestepSums::default();
        for (sigma, loss) in [(0.0, 1.0), (0.05, 2.0), (0.099, 6.0), (0.1, 4.0), (1.0, 0.5)] {
            samples.add(sigma, loss);
        }
        samples.add(0.5, f64::NAN);
        let of = |tenth, n, loss| TenthLoss { tenth, n, loss };
        let expected = [of(0, 3, 3.0), of(1, 1, 4.0), of(9, 1, 0.5)];
        assert_eq!(samples.means(), expected);
        let mut parts = TimestepSums::default();
        for part in expected {
            parts.add_part(part);
        }
        parts.add_part(of(0, 1, 7.0));
        assert_eq!(parts.means()[0], of(0, 4, 4.0));
    }
}
