//! Timesteps that are drawn more often than their distribution has it: for content or style, or within a range.

use super::flow::{Timestep, WeightingScheme};

/// Which timesteps are drawn more often.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum TimestepBias {
    /// None.
    #[default]
    None,
    /// Those with much noise, where composition is decided: the cube of a uniform number is the share of draws with more
    /// noise. ai-toolkit's `content_or_style = "content"`, after arXiv 2302.08453, section 3.4.
    Content,
    /// Those with little noise, where details are decided: one minus that cube.
    Style,
    /// Those of a range, `multiplier` times as often as without a bias: `timestep_bias_strategy` of diffusers' scripts
    /// for SDXL and of SimpleTuner.
    Range {
        /// Timesteps from the first, of 1000, to below the second.
        timesteps: [f64; 2],
        /// Above 0; below 1 they are drawn less often.
        multiplier: f64,
    },
}

impl TimestepBias {
    /// The fraction u among the timesteps, 0 (most noise) to 1, from a uniform and a normal draw.
    pub fn sample_u(self, scheme: WeightingScheme, uniform: f64, normal: f64) -> f64 {
        match self {
            Self::Content => scheme.quantile(uniform.powi(3)),
            Self::Style => scheme.quantile(1.0 - uniform.powi(3)),
            Self::None | Self::Range { .. } => scheme.sample_u(uniform, normal),
        }
    }

    /// Whether a timestep that was drawn is kept, by another uniform draw; else it is drawn again.
    pub fn keeps(self, timestep: Timestep, uniform: f64) -> bool {
        let Self::Range { timesteps: [first, end], multiplier } = self else { return true };
        let t = f64::from(timestep.sigma) * 1000.0;
        // The last timestep belongs to a range that ends there.
        let is_inside = first <= t && (t < end || end >= 1000.0);
        let most = multiplier.max(1.0);
        uniform * most < if is_inside { multiplier } else { 1.0 }
    }
}

impl WeightingScheme {
    /// The fraction below which a share of draws are, 0 to 1.
    pub(crate) fn quantile(self, share: f64) -> f64 {
        match self {
            // Falls with the uniform number.
            Self::Mode { .. } => self.sample_u(1.0 - share, 0.0),
            Self::LogitNormal { .. } => self.sample_u(share, normal_quantile(share)),
            Self::Uniform | Self::SigmaSqrt | Self::Cosmap => self.sample_u(share, 0.0),
        }
    }
}

/// The normal number below which a share of normal draws are.
/// Taken: Wichura, Algorithm AS 241 (1988), PPND7, exact to seven digits.
fn normal_quantile(share: f64) -> f64 {
    let polynomial = |coefficients: [f64; 4], x: f64| {
        coefficients.iter().rev().fold(0.0, |sum, coefficient| sum * x + coefficient)
    };
    let centred = share - 0.5;
    if centred.abs() <= 0.425 {
        let r = 0.180_625 - centred * centred;
        let above = polynomial([3.387_132_717_9, 50.434_271_938, 159.291_132_02, 59.109_374_72], r);
        let below = polynomial([1.0, 17.895_169_469, 78.757_757_664, 67.187_563_6], r);
        return centred * above / below;
    }
    let tail = share.min(1.0 - share);
    if tail <= 0.0 {
        return f64::INFINITY.copysign(centred);
    }
    let r = (-tail.ln()).sqrt();
    let size = if r <= 5.0 {
        let above = [1.423_437_277_7, 2.756_815_39, 1.306_728_481_6, 0.170_238_211_03];
        let below = [1.0, 0.737_001_642_5, 0.120_211_329_75, 0.0];
        polynomial(above, r - 1.6) / polynomial(below, r - 1.6)
    } else {
        let above = [6.657_905_115, 3.081_226_386, 0.428_682_943_37, 0.017_337_203_997];
        let below = [1.0, 0.241_978_942_25, 0.012_258_202_635, 0.0];
        polynomial(above, r - 5.0) / polynomial(below, r - 5.0)
    };
    size.copysign(centred)
}

#[cfg(test)]
mod tests {
    use super::super::weighting::tests::recorded;
    use super::*;

    /// Draws on a fine grid.
    const DRAWS: usize = 100_000;

    fn uniform(index: usize) -> f64 {
        (index as f64 + 0.5) / DRAWS as f64
    }

    /// Sums by tenths of the share of noise, from least to most, scaled to 1.
    fn shares(draws: impl Iterator<Item = (f64, f64)>) -> [f64; 10] {
        let mut tenths = [0.0; 10];
        draws.for_each(|(sigma, share)| tenths[((sigma * 10.0) as usize).min(9)] += share);
        let all: f64 = tenths.iter().sum();
        tenths.map(|tenth| tenth / all)
    }

    fn check(name: &str, found: [f64; 10]) {
        let expected = recorded(name);
        assert_eq!(expected.len(), 10, "{name}");
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - f64::from(expected)).abs() < 1e-4, "{name}: {found} {expected}");
        }
    }

    #[test]
    fn content_and_style_are_those_of_ai_toolkit() {
        for (scheme, name) in [
            (WeightingScheme::Uniform, "uniform"),
            (WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 }, "logit_normal"),
        ] {
            for (bias, word) in [(TimestepBias::Content, "content"), (TimestepBias::Style, "style")]
            {
                let sigma = |index| 1.0 - bias.sample_u(scheme, uniform(index), f64::NAN);
                let found = shares((0..DRAWS).map(|index| (sigma(index), 1.0)));
                check(&format!("out.{word}.{name}"), found);
            }
        }
        // The quantile of a half is the median of draws.
        let mode = WeightingScheme::Mode { scale: 1.29 };
        assert!((mode.quantile(0.5) - 0.5).abs() < 1e-12);
        assert!(mode.quantile(0.1) < 0.2 && mode.quantile(0.9) > 0.8);
    }

    /// The share of timesteps that are kept, in each tenth of those that were drawn.
    #[test]
    fn ranges_are_those_of_diffusers_and_simpletuner() {
        for (name, timesteps, multiplier) in [
            ("out.earlier", [0.0, 300.0], 3.0),
            ("out.later", [700.0, 1000.0], 3.0),
            ("out.range", [200.0, 500.0], 0.25),
        ] {
            let bias = TimestepBias::Range { timesteps, multiplier };
            let kept = |index: usize| {
                let sigma = (index as f32 + 0.5) / 100.0;
                let timestep = Timestep { sigma, t: sigma * 1000.0 };
                let kept = (0..1000).filter(|at| bias.keeps(timestep, f64::from(*at) / 1000.0));
                (f64::from(sigma), kept.count() as f64)
            };
            let found = shares((0..100).map(kept));
            let expected = recorded(name);
            for (found, expected) in found.iter().zip(expected) {
                // Kept draws are counted in thousandths.
                assert!((found - f64::from(expected)).abs() < 1e-3, "{name}: {found} {expected}");
            }
        }
    }

    /// `statistics.NormalDist().inv_cdf` of Python.
    #[test]
    fn quantiles_are_those_of_python() {
        for (share, expected) in [
            (0.5, 0.0),
            (0.025, -1.959_963_984_540_05),
            (0.975, 1.959_963_984_540_05),
            (0.7, 0.524_400_512_708_04),
            (1e-6, -4.753_424_308_822_90),
            (1e-20, -9.262_340_089_798_41),
        ] {
            let found = normal_quantile(share);
            assert!((found - expected).abs() < 1e-6, "{share}: {found} {expected}");
        }
        assert_eq!([0.0, 1.0].map(normal_quantile), [f64::NEG_INFINITY, f64::INFINITY]);
    }
}
