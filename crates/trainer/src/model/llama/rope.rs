//! Rotary position embeddings: the frequency of every pair of a head, scaled for models that were trained
//! on longer texts later.

use std::f64::consts::TAU;
use std::sync::Arc;

use compute::ops::RopeAxis;

use crate::model::config::Unsupported;

/// The rotary settings of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies: the lowest is about this many times lower than the highest.
    pub theta: f64,
    /// How frequencies are scaled.
    pub scaling: RopeScaling,
}

/// How frequencies are scaled to a longer context.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not scaled.
    None,
    /// All by the same factor.
    Linear {
        /// Scaling factor.
        factor: f64,
    },
    /// Llama 3.1's: low frequencies are scaled, high ones are not, those between in part.
    Llama3 {
        /// Scaling factor.
        factor: f64,
        /// Pairs with fewer turns than this over the original context are scaled in full.
        low_freq_factor: f64,
        /// Pairs with more turns than this are not scaled.
        high_freq_factor: f64,
        /// The original context length.
        original_max_position_embeddings: usize,
    },
    /// Each frequency by a factor of its own, others for long texts than for short ones.
    LongRope(Arc<LongRope>),
}

/// Factors that were searched for (Ding et al., "`LongRoPE`", arXiv 2402.13753).
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// The divisor of each frequency in texts up to the original context length.
    pub short_factor: Vec<f64>,
    /// The same in longer texts.
    pub long_factor: Vec<f64>,
    /// The original context length.
    pub original_max_position_embeddings: usize,
    /// What the turned part of queries and keys is multiplied by, in texts of any length.
    pub attention_factor: f64,
}

impl LongRope {
    /// The attention factor of a model that was made for `original` tokens and now is for `context`, unless its files say
    /// otherwise. Taken: transformers' `_compute_longrope_parameters`.
    pub fn usual_attention_factor(context: usize, original: usize) -> f64 {
        let stretch = context as f64 / original as f64;
        if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / (original as f64).ln()).sqrt() }
    }
}

impl RopeConfig {
    /// The frequency of each pair of the `d` numbers of a head that are turned, for texts of up to `length` tokens. As
    /// transformers does where it reads a text as a whole, and llama.cpp by the size of its KV cache.
    pub fn axis(&self, d: usize, length: usize) -> RopeAxis {
        let mut axis = RopeAxis::new(d, self.theta);
        for (pair, frequency) in axis.frequencies.iter_mut().enumerate() {
            *frequency /= self.scaling.divisor(pair, *frequency, length);
        }
        axis
    }

    /// Checks that the settings are valid for heads of which `d` numbers are turned.
    pub fn check(&self, d: usize) -> Result<(), Unsupported> {
        let is_fine = |number: f64| number.is_finite() && number > 0.0;
        Unsupported::unless(is_fine(self.theta), format!("rope_theta is {}", self.theta))?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::LongRope(ref long) => {
                for (name, factors) in
                    [("short_factor", &long.short_factor), ("long_factor", &long.long_factor)]
                {
                    let (n, pairs) = (factors.len(), d / 2);
                    let problem =
                        format!("{name} has {n} values, {pairs} pairs of a head are turned");
                    Unsupported::unless(n == pairs, problem)?;
                    let strange = factors.iter().find(|factor| !is_fine(**factor));
                    let said = format!("{name} has {}", strange.unwrap_or(&0.0));
                    Unsupported::unless(strange.is_none(), said)?;
                }
                let factor = long.attention_factor;
                Unsupported::unless(is_fine(factor), format!("attention_factor is {factor}"))
            }
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
    /// What cos and sin are multiplied by.
    pub fn amplitude(&self) -> f32 {
        match self {
            Self::LongRope(long) => long.attention_factor as f32,
            Self::None | Self::Linear { .. } | Self::Llama3 { .. } => 1.0,
        }
    }

    /// The divisor of a pair's frequency in texts of up to `length` tokens.
    pub fn divisor(&self, pair: usize, frequency: f64, length: usize) -> f64 {
        match *self {
            Self::None => 1.0,
            Self::LongRope(ref long) => {
                let is_long = length > long.original_max_position_embeddings;
                if is_long { long.long_factor[pair] } else { long.short_factor[pair] }
            }
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
    fn frequencies_of_llama_3_are_those_of_transformers() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let axis = RopeConfig { theta: 500_000.0, scaling }.axis(128, 131_072);
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
    fn invalid_settings_are_refused() {
        let refused = |theta, scaling| RopeConfig { theta, scaling }.check(4).unwrap_err().0;
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
        let long = |short_factor: &[f64], attention_factor| {
            RopeScaling::LongRope(Arc::new(LongRope {
                short_factor: short_factor.into(),
                long_factor: vec![1.0; 2],
                original_max_position_embeddings: 64,
                attention_factor,
            }))
        };
        let said = "short_factor has 1 values, 2 pairs of a head are turned";
        assert_eq!(refused(1e4, long(&[1.0], 1.0)), said);
        assert_eq!(refused(1e4, long(&[1.0, -1.0], 1.0)), "short_factor has -1");
        assert_eq!(refused(1e4, long(&[1.0, 1.0], 0.0)), "attention_factor is 0");
    }
}
