//! What an error d of the predicted velocity costs. Beside d² there are losses that grow only linearly with large
//! errors, so that a few bad images or captions pull less: PyTorch's, which are a parabola between two lines, and
//! pseudo-Huber, which bends smoothly (arXiv 2403.16728; `conditional_loss` of kohya's sd-scripts and SimpleTuner).
//!
//! Beyond a threshold c they are linear. It may depend on the timestep.

/// A loss with its threshold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VelocityLoss {
    /// The function.
    pub kind: LossKind,
    /// Where it becomes linear, if it does.
    pub threshold: HuberThreshold,
}

/// A function of an error d and a threshold c.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LossKind {
    /// d²
    #[default]
    Mse,
    /// |d|
    L1,
    /// d²/2 up to c, then c·(|d| - c/2): PyTorch's `huber_loss`.
    Huber,
    /// The same over c: PyTorch's `smooth_l1_loss`.
    SmoothL1,
    /// 2c·(√(d² + c²) - c): kohya's `huber`.
    PseudoHuber,
    /// The same over c: kohya's `smooth_l1`.
    PseudoSmoothL1,
}

impl LossKind {
    /// Whether it has a threshold.
    pub fn has_threshold(self) -> bool {
        !matches!(self, Self::Mse | Self::L1)
    }

    /// Whether it is divided by its threshold.
    pub fn is_divided(self) -> bool {
        matches!(self, Self::SmoothL1 | Self::PseudoSmoothL1)
    }
}

/// Where a loss becomes linear.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HuberThreshold {
    /// Its value, or its least one.
    pub c: f64,
    /// How it depends on the timestep.
    pub schedule: HuberSchedule,
}

impl Default for HuberThreshold {
    /// Taken: kohya's default of `huber_c`.
    fn default() -> Self {
        Self { c: 0.1, schedule: HuberSchedule::Constant }
    }
}

/// How a threshold depends on the timestep: kohya's `huber_schedule`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HuberSchedule {
    /// Not at all.
    #[default]
    Constant,
    /// c to the power of σ: from 1 without noise to c at full noise.
    Exponential,
    /// (1 - c) / (1 + r)² + c, with the ratio r of noise to signal. kohya asks the scheduler for r, and flow matching
    /// has none there; it is σ / (1 - σ). SimpleTuner takes the root of its inverse, which turns the schedule around.
    Snr,
}

impl HuberThreshold {
    /// At a share of noise.
    pub fn at(self, sigma: f32) -> f32 {
        let (c, sigma) = (self.c, f64::from(sigma));
        let threshold = match self.schedule {
            HuberSchedule::Constant => c,
            HuberSchedule::Exponential => c.powf(sigma),
            HuberSchedule::Snr => (1.0 - c) * (1.0 - sigma).powi(2) + c,
        };
        threshold as f32
    }
}

#[cfg(test)]
mod tests {
    use super::super::weighting::tests::recorded;
    use super::*;

    #[test]
    fn thresholds_are_those_of_kohya() {
        for (name, schedule) in [
            ("constant", HuberSchedule::Constant),
            ("exponential", HuberSchedule::Exponential),
            ("snr", HuberSchedule::Snr),
        ] {
            let threshold = HuberThreshold { c: 0.3, schedule };
            let expected = recorded(&format!("out.threshold.{name}"));
            for (sigma, expected) in recorded("in.sigmas").iter().zip(expected) {
                let found = threshold.at(*sigma);
                assert!((found - expected).abs() < 1e-6, "{name} {sigma}: {found} {expected}");
            }
        }
    }
}
