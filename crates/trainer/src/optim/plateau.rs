//! Whether a loss still falls.

use serde::{Deserialize, Serialize};

/// The best loss so far, and the number of evaluations since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plateau {
    best: Option<f64>,
    #[serde(alias = "n_without")]
    n_bad: u64,
}

/// A loss must be lower by this share to count as progress. Taken: `threshold` of PyTorch's
/// `ReduceLROnPlateau`.
const PROGRESS: f64 = 1e-4;

impl Plateau {
    /// Takes an evaluation; returns how many there have been without progress.
    pub fn observe(&mut self, loss: f64) -> u64 {
        // NaN is no progress.
        if self.best.is_none_or(|best| loss < best * (1.0 - PROGRESS)) && loss.is_finite() {
            *self = Self { best: Some(loss), n_bad: 0 };
        } else {
            self.n_bad += 1;
        }
        self.n_bad
    }

    /// Measurements without progress.
    pub fn n_without(&self) -> u64 {
        self.n_bad
    }

    /// Counts anew from the best so far.
    pub fn restart(&mut self) {
        self.n_bad = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_what_is_no_progress() {
        let mut plateau = Plateau::default();
        let losses = [1.0, 0.5, 0.5, 0.49999, f64::NAN, 0.4, 0.7];
        let counts: Vec<u64> = losses.iter().map(|loss| plateau.observe(*loss)).collect();
        assert_eq!(counts, [0, 0, 1, 2, 3, 0, 1]);
        plateau.restart();
        assert_eq!(plateau.observe(0.4), 1);
    }
}
