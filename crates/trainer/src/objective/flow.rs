//! Flow matching (Lipman et al., arXiv 2210.02747), as in the reference scripts for SD3 and FLUX: a latent
//! x and noise ε are mixed, z = (1 - σ)·x + σ·ε, and the model predicts ε - x
//! (`compute::ops::add_noise`).
//!
//! loss = mean(w(σ)·(v - (ε - x))²)
//!
//! σ comes from the scheduler's training timesteps; the weighting scheme decides which one is drawn, and w
//! (Esser et al., arXiv 2403.03206, section 3.1).

/// How timesteps are drawn, and the loss weight of each (diffusers: `weighting_scheme`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WeightingScheme {
    /// Uniform.
    Uniform,
    /// Logit-normal: u is the sigmoid of a normal draw, so that middle timesteps are more frequent.
    LogitNormal {
        /// Mean of the normal draw.
        mean: f64,
        /// Its standard deviation.
        deviation: f64,
    },
    /// Mode sampling with heavy tails: middle timesteps more often, both ends still drawn.
    Mode {
        /// The scale of the mode.
        scale: f64,
    },
    /// Uniform, with w = σ⁻², despite its name.
    SigmaSqrt,
    /// Uniform, with w = 2 / (π·(1 - 2σ + 2σ²)).
    Cosmap,
}

impl WeightingScheme {
    /// The fraction u among the timesteps, 0 (most noise) to 1, from a uniform and a normal draw.
    pub fn sample_u(self, uniform: f64, normal: f64) -> f64 {
        match self {
            Self::LogitNormal { mean, deviation } => {
                1.0 / (1.0 + (-(mean + deviation * normal)).exp())
            }
            Self::Mode { scale } => {
                let cosine = (std::f64::consts::FRAC_PI_2 * uniform).cos();
                1.0 - uniform - scale * (cosine * cosine - 1.0 + uniform)
            }
            Self::Uniform | Self::SigmaSqrt | Self::Cosmap => uniform,
        }
    }

    /// The loss weight.
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

/// How far the timesteps of training are shifted towards noise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum TimestepShift {
    /// As the scheduler of the model says; a shift that depends on the image's size is for sampling only.
    #[default]
    Scheduler,
    /// By the number of an image's tokens, as FLUX shifts sigmas in sampling.
    Resolution,
    /// By this factor.
    Fixed(f64),
}

/// Which timesteps are trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimestepRange {
    /// The least and the largest share of noise.
    pub sigmas: [f32; 2],
}

impl TimestepRange {
    /// All of them.
    pub const ALL: Self = Self { sigmas: [0.0, 1.0] };

    /// Whether it is trained.
    pub fn has(self, timestep: Timestep) -> bool {
        (self.sigmas[0]..=self.sigmas[1]).contains(&timestep.sigma)
    }
}

/// A timestep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timestep {
    /// The share of noise, σ.
    pub sigma: f32,
    /// The model's input.
    pub t: f32,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use weights::Catalog;
    use weights::load::load_f32;

    use super::*;
    use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing, TrainTimesteps};

    fn timesteps() -> TrainTimesteps {
        FlowMatchScheduler::fixed(3.0, SigmaSpacing::Trained)
            .train_timesteps(TimestepShift::Scheduler)
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
    fn timesteps_are_those_of_the_reference() {
        let timesteps = timesteps();
        let all: Vec<_> = (0..1000).map(|n| timesteps.at((f64::from(n) + 0.5) / 1e3, 0)).collect();
        let of = |get: fn(&Timestep) -> f32| all.iter().map(get).collect::<Vec<_>>();
        check("out.sd3_shift3.sigmas", &of(|timestep| timestep.sigma), 0.0);
        check("out.sd3_shift3.timesteps", &of(|timestep| timestep.t), 0.0);
    }

    #[test]
    fn draws_are_those_of_the_reference() {
        let (uniform, normal) = (recorded("in.u"), recorded("in.normal"));
        let of = |scheme: WeightingScheme| -> Vec<f32> {
            let draws = uniform.iter().zip(&normal);
            draws.map(|(u, n)| scheme.sample_u(f64::from(*u), f64::from(*n)) as f32).collect()
        };
        check(
            "out.logit_normal_u",
            &of(WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 }),
            2e-6,
        );
        check("out.mode_u_1.29", &of(WeightingScheme::Mode { scale: 1.29 }), 2e-4);
        assert_eq!(of(WeightingScheme::Uniform), uniform);
    }

    #[test]
    fn loss_weights_are_those_of_the_reference() {
        let timesteps = timesteps();
        let drawn: Vec<Timestep> =
            recorded("in.u").iter().map(|u| timesteps.at(f64::from(*u), 0)).collect();
        let of = |get: &dyn Fn(&Timestep) -> f32| drawn.iter().map(get).collect::<Vec<_>>();
        check("out.sd3_shift3.t_of_u", &of(&|timestep| timestep.t), 0.0);
        check("out.sd3_shift3.sigma_of_u", &of(&|timestep| timestep.sigma), 0.0);
        for (name, scheme) in [
            ("out.sd3_shift3.weight_sigma_sqrt", WeightingScheme::SigmaSqrt),
            ("out.sd3_shift3.weight_cosmap", WeightingScheme::Cosmap),
            ("out.sd3_shift3.weight_none", WeightingScheme::Mode { scale: 1.29 }),
        ] {
            check(name, &of(&|timestep| scheme.weight(timestep.sigma)), 1e-6);
        }
    }

    #[test]
    fn the_last_fraction_has_a_timestep() {
        let timesteps = timesteps();
        assert_eq!(timesteps.at(1.0, 0).t, timesteps.at(0.9999, 0).t);
        assert_eq!(timesteps.at(0.0, 0), Timestep { sigma: 1.0, t: 1000.0 });
    }
}
