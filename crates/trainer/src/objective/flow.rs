//! Flow matching (Lipman et al., arXiv 2210.02747), as the reference scripts for SD3 and FLUX train
//! it: a latent x and noise ε are mixed, z = (1 - σ)·x + σ·ε, and the model is to find ε - x
//! (`compute::ops::add_noise`).
//!
//! loss = mean(w(σ)·(v - (ε - x))²)
//!
//! σ comes from a table of levels, the same that samples are drawn with; which level is drawn, and
//! what w is, is the scheme's business (Esser et al., arXiv 2403.03206, section 3.1).

/// How levels of noise are drawn, and what a sample at each counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightingScheme {
    /// All levels alike.
    Uniform,
    /// Levels in the middle more often: u = sigmoid of a normal number.
    LogitNormal {
        /// Of the normal number.
        mean: f64,
        /// The same.
        deviation: f64,
    },
    /// Levels in the middle more often, those at the ends never forgotten.
    Mode {
        /// How much more often.
        scale: f64,
    },
    /// All levels alike, those of little noise counting more: w = σ⁻², despite its name.
    SigmaSqrt,
    /// All levels alike, w = 2 / (π·(1 - 2σ + 2σ²)).
    Cosmap,
}

impl WeightingScheme {
    /// Where among the levels, 0 (most noise) to 1, from an even number in 0..1 and a normal one.
    pub fn sample_u(self, even: f64, normal: f64) -> f64 {
        match self {
            Self::LogitNormal { mean, deviation } => {
                1.0 / (1.0 + (-(mean + deviation * normal)).exp())
            }
            Self::Mode { scale } => {
                let cosine = (std::f64::consts::FRAC_PI_2 * even).cos();
                1.0 - even - scale * (cosine * cosine - 1.0 + even)
            }
            Self::Uniform | Self::SigmaSqrt | Self::Cosmap => even,
        }
    }

    /// What a sample counts.
    pub fn weight(self, sigma: f32) -> f32 {
        match self {
            Self::SigmaSqrt => sigma.powi(-2),
            Self::Cosmap => {
                2.0 / (std::f32::consts::PI * (1.0 - 2.0 * sigma + 2.0 * sigma * sigma))
            }
            Self::Uniform | Self::LogitNormal { .. } | Self::Mode { .. } => 1.0,
        }
    }
}

/// One level of noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timestep {
    /// The share of noise.
    pub sigma: f32,
    /// As models are told it.
    pub t: f32,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use weights::Catalog;
    use weights::load::load_f32;

    use super::*;
    use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing, TrainTimesteps};

    fn levels() -> TrainTimesteps {
        FlowMatchScheduler::fixed(3.0, SigmaSpacing::Trained).train_timesteps()
    }

    /// What diffusers computed.
    fn recorded(name: &str) -> Vec<f32> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden/sd3/models/flow_match/golden.safetensors");
        let catalog = Catalog::open(&path).unwrap();
        let tensor = catalog.find(name).unwrap();
        load_f32(&catalog, tensor, 0..tensor.numel()).unwrap()
    }

    fn check(name: &str, got: &[f32], tolerance: f32) {
        let expected = recorded(name);
        assert_eq!(expected.len(), got.len(), "{name}");
        for (expected, got) in expected.iter().zip(got) {
            let apart = (expected - got).abs() / expected.abs().max(1e-3);
            assert!(apart <= tolerance, "{name}: {expected} {got}");
        }
    }

    #[test]
    fn levels_are_those_of_the_reference() {
        let TrainTimesteps(levels) = levels();
        let of = |get: fn(&Timestep) -> f32| levels.iter().map(get).collect::<Vec<_>>();
        check("out.sd3_shift3.sigmas", &of(|level| level.sigma), 0.0);
        check("out.sd3_shift3.timesteps", &of(|level| level.t), 0.0);
    }

    #[test]
    fn places_are_those_of_the_reference() {
        let (even, normal) = (recorded("in.u"), recorded("in.normal"));
        let of = |scheme: WeightingScheme| -> Vec<f32> {
            let numbers = even.iter().zip(&normal);
            numbers.map(|(u, n)| scheme.sample_u(f64::from(*u), f64::from(*n)) as f32).collect()
        };
        check(
            "out.logit_normal_u",
            &of(WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 }),
            2e-6,
        );
        check("out.mode_u_1.29", &of(WeightingScheme::Mode { scale: 1.29 }), 2e-4);
        assert_eq!(of(WeightingScheme::Uniform), even);
    }

    #[test]
    fn samples_count_as_in_the_reference() {
        let levels = levels();
        let drawn: Vec<Timestep> =
            recorded("in.u").iter().map(|u| levels.at(f64::from(*u))).collect();
        let of = |get: &dyn Fn(&Timestep) -> f32| drawn.iter().map(get).collect::<Vec<_>>();
        check("out.sd3_shift3.t_of_u", &of(&|level| level.t), 0.0);
        check("out.sd3_shift3.sigma_of_u", &of(&|level| level.sigma), 0.0);
        for (name, scheme) in [
            ("out.sd3_shift3.weight_sigma_sqrt", WeightingScheme::SigmaSqrt),
            ("out.sd3_shift3.weight_cosmap", WeightingScheme::Cosmap),
            ("out.sd3_shift3.weight_none", WeightingScheme::Mode { scale: 1.29 }),
        ] {
            check(name, &of(&|level| scheme.weight(level.sigma)), 1e-6);
        }
    }

    #[test]
    fn a_place_at_the_end_has_a_level() {
        let levels = levels();
        assert_eq!(levels.at(1.0).t, levels.at(0.9999).t);
        assert_eq!(levels.at(0.0), Timestep { sigma: 1.0, t: 1000.0 });
    }
}
