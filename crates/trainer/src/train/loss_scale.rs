//! Loss scaling in f16, so that small gradients do not underflow
//! (Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2).

use serde::{Deserialize, Serialize};

/// A dynamic loss scale: grows while gradients are finite, and shrinks when one overflows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    factor: f64,
    good_steps: u32,
}

/// Taken: the defaults of PyTorch's `GradScaler`.
const INITIAL_SCALE: f64 = 65536.0;

/// Steps after which it grows. Taken: the same.
pub(super) const GROWTH_INTERVAL: u32 = 2000;

impl LossScale {
    /// Before the first step.
    pub fn new() -> Self {
        Self { factor: INITIAL_SCALE, good_steps: 0 }
    }

    /// The factor on the loss.
    pub fn factor(self) -> f64 {
        self.factor
    }

    /// After a step with finite gradients, or not.
    pub fn update(&mut self, is_finite: bool) {
        *self = match (is_finite, self.good_steps + 1) {
            (false, _) => Self { factor: self.factor / 2.0, good_steps: 0 },
            (true, GROWTH_INTERVAL) => Self { factor: self.factor * 2.0, good_steps: 0 },
            (true, good_steps) => Self { good_steps, ..*self },
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_halves_on_overflow_and_doubles_after_the_growth_interval() {
        let mut scale = LossScale::new();
        scale.update(false);
        assert_eq!(scale.factor(), 32768.0);
        (0..GROWTH_INTERVAL - 1).for_each(|_| scale.update(true));
        assert_eq!(scale.factor(), 32768.0);
        scale.update(true);
        assert_eq!(scale.factor(), 65536.0);
    }
}
