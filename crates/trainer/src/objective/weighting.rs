//! Loss weights by timestep, beside those of a [`WeightingScheme`](super::flow::WeightingScheme).

/// The weight of a sample's loss at its share of noise σ.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LossWeighting {
    /// 1
    #[default]
    None,
    /// σ: `loss_weight_fn = SIGMA` of OneTrainer.
    Sigma,
    /// σ², the loss of x instead of the velocity: an error of the velocity is σ times as large in x = z - σ·v. kohya
    /// trains SD3 so.
    SigmaSquared,
    /// σ²·min(SNR, γ), where SNR = ((1 - σ) / σ)². Min-SNR (Hang et al., arXiv 2303.09556, section 3.4) weights the loss
    /// of x by min(SNR, γ); its weights for noise and v are the same loss in other terms, and so is this one for the
    /// velocity. kohya's trainers and SimpleTuner leave `min_snr_gamma` and `snr_gamma` without effect on flow models,
    /// and OneTrainer refuses it.
    MinSnr {
        /// The largest weight of x.
        gamma: f64,
    },
    /// A bell over the timesteps with mean 1, which is 0 at full noise: `linear_timesteps` of ai-toolkit.
    Bell,
    /// The same, as high for all timesteps with less noise than the middle: its `linear_timesteps2`.
    HalfBell,
}

impl LossWeighting {
    /// The weight.
    pub fn weight(self, sigma: f32) -> f32 {
        let sigma = f64::from(sigma);
        let weight = match self {
            Self::None => 1.0,
            Self::Sigma => sigma,
            Self::SigmaSquared => sigma * sigma,
            Self::MinSnr { gamma } => (1.0 - sigma).powi(2).min(gamma * sigma * sigma),
            Self::Bell => bell(sigma),
            Self::HalfBell => bell(sigma.max(0.5)),
        };
        weight as f32
    }
}

/// Mean of a bell over 1000 timesteps, above its least value.
/// Taken: the sum that ai-toolkit's `CustomFlowMatchEulerDiscreteScheduler` divides by, over 1000.
const BELL_MEAN: f64 = 0.249_093_530_002_602;

/// e^(-2·(σ - ½)²), moved to 0 at its ends and scaled to mean 1.
fn bell(sigma: f64) -> f64 {
    let height = |distance: f64| (-2.0 * distance * distance).exp();
    (height(sigma - 0.5) - height(0.5)) / BELL_MEAN
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use weights::Catalog;
    use weights::load::load_f32;

    use super::*;

    /// What the trainers' own code computed (`tests/golden/losses/generate.py`).
    pub fn recorded(name: &str) -> Vec<f32> {
        let path = "../../tests/golden/losses/golden.safetensors";
        let catalog = Catalog::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
        let tensor = catalog.find(name).unwrap();
        load_f32(&catalog, tensor, 0..tensor.numel()).unwrap()
    }

    /// Their lists go from timestep 1000 down to 1.
    #[test]
    fn bells_are_those_of_ai_toolkit() {
        for (name, weighting) in
            [("out.bell", LossWeighting::Bell), ("out.half_bell", LossWeighting::HalfBell)]
        {
            let list = recorded(name);
            assert_eq!(list.len(), 1000);
            for (index, expected) in list.iter().enumerate() {
                let found = weighting.weight((1000 - index) as f32 / 1000.0);
                assert!((found - expected).abs() < 2e-6, "{name} {index}: {found} {expected}");
            }
        }
    }
}
