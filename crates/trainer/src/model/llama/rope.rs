//! How positions turn queries and keys: the angle per token of every pair of a head, stretched for
//! models that were taught longer texts later.

use std::f64::consts::TAU;

use compute::ops::RopeAxis;

use crate::model::config::Unsupported;

/// The rotation of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// The slowest pair turns about this many times slower than the fastest.
    pub theta: f64,
    /// How angles are stretched.
    pub scaling: RopeScaling,
}

/// How angles are stretched to texts longer than a model began with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All alike.
    Linear {
        /// Times longer.
        factor: f64,
    },
    /// As Llama 3.1 does it: the slow ones are, the fast ones are not, and those between in part.
    Llama3 {
        /// Times longer.
        factor: f64,
        /// Pairs that turn less often than this over the first length are stretched whole.
        low_freq_factor: f64,
        /// Pairs that turn more often than this are not stretched.
        high_freq_factor: f64,
        /// The length that the model began with.
        original_max_position_embeddings: usize,
    },
}

impl RopeConfig {
    /// The angle per token of each pair of a head of width `d`.
    pub fn axis(&self, d: usize) -> RopeAxis {
        let mut axis = RopeAxis::new(d, self.theta);
        for frequency in &mut axis.frequencies {
            *frequency /= self.scaling.divisor(*frequency);
        }
        axis
    }

    /// That all of it can be computed.
    pub fn check(&self) -> Result<(), Unsupported> {
        let is_fine = |number: f64| number.is_finite() && number > 0.0;
        Unsupported::unless(is_fine(self.theta), format!("rope_theta is {}", self.theta))?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => {
                Unsupported::unless(is_fine(factor), format!("factor of rope_scaling is {factor}"))
            }
            RopeScaling::Llama3 {
                factor, low_freq_factor: low, high_freq_factor: high, ..
            } => {
                Unsupported::unless(
                    is_fine(factor),
                    format!("factor of rope_scaling is {factor}"),
                )?;
                Unsupported::unless(
                    is_fine(low) && low < high,
                    format!("low_freq_factor {low} is not below high_freq_factor {high}"),
                )
            }
        }
    }
}

impl RopeScaling {
    /// What a pair's angle is divided by.
    pub fn divisor(&self, frequency: f64) -> f64 {
        match *self {
            Self::None => 1.0,
            Self::Linear { factor } => factor,
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let turns = original_max_position_embeddings as f64 * frequency / TAU;
                let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let share = share.clamp(0.0, 1.0);
                1.0 / ((1.0 - share) / factor + share)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by transformers 5.22.2's `ROPE_INIT_FUNCTIONS["llama3"]` for the settings of Llama 3.1.
    #[test]
    fn angles_of_llama_3_are_those_of_transformers() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let axis = RopeConfig { theta: 500_000.0, scaling }.axis(128);
        for (pair, expected) in LLAMA_3 {
            let got = axis.frequencies[pair];
            assert!((got / expected - 1.0).abs() < 1e-6, "{pair}: {expected} {got}");
        }
    }

    const LLAMA_3: [(usize, f64); 8] = [
        (0, 1.0),
        (1, 0.814_617_216_587_066_7),
        (20, 0.016_560_440_883_040_428),
        (30, 0.001_371_893_682_517_111_3),
        (32, 0.000_524_846_022_017_300_1),
        (34, 0.000_178_507_791_133_597_5),
        (36, 7.784_655_463_183_299e-5),
        (63, 3.068_925_877_869_333e-7),
    ];

    #[test]
    fn angles_that_make_no_sense_are_refused() {
        let refused = |theta, scaling| RopeConfig { theta, scaling }.check().unwrap_err().0;
        assert_eq!(refused(0.0, RopeScaling::None), "rope_theta is 0");
        let linear = RopeScaling::Linear { factor: -2.0 };
        assert_eq!(refused(1e4, linear), "factor of rope_scaling is -2");
        let llama = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 4.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        assert_eq!(refused(1e4, llama), "low_freq_factor 4 is not below high_freq_factor 4");
    }
}
