//! Whether a run is learning: pure, from the figures of its steps. It remembers the last two hundred
//! losses and counts what was not finite; what it finds is said once.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Steps that are looked at together.
pub const WINDOW: usize = 100;

/// Steps in a row without a finite gradient that end a run. Chosen: f16's loss scale finds its place
/// in sixteen halvings.
const MOST_SKIPPED: u32 = 25;

/// A loss that is so many times that of the window before has come apart. Chosen: losses of single
/// pictures scatter by a third, their means over a hundred by a thirtieth.
const APART: f64 = 1.5;

/// What is remembered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// The last losses, at most two windows.
    losses: VecDeque<f64>,
    /// Steps whose gradient was not finite, in all ...
    n_skipped: u64,
    /// ... and at the end.
    n_skipped_now: u32,
    has_warned: bool,
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub enum Finding {
    /// The loss rises.
    Rising {
        /// Mean of the last window.
        now: f64,
        /// Mean of the one before.
        before: f64,
    },
    /// Nothing is finite any more: the run must end.
    NotFinite {
        /// Steps in a row.
        steps: u32,
    },
}

impl Health {
    /// Takes in a step.
    pub fn observe(&mut self, loss: f64, is_applied: bool) -> Option<Finding> {
        if !is_applied || !loss.is_finite() {
            self.n_skipped += 1;
            self.n_skipped_now += 1;
            let steps = self.n_skipped_now;
            return (steps >= MOST_SKIPPED).then_some(Finding::NotFinite { steps });
        }
        self.n_skipped_now = 0;
        self.losses.push_back(loss);
        if self.losses.len() > 2 * WINDOW {
            self.losses.pop_front();
        }
        let (before, now) = self.windows()?;
        let is_rising = now.mean > APART * before.mean;
        let is_news = is_rising && !self.has_warned;
        self.has_warned = is_rising;
        is_news.then_some(Finding::Rising { now: now.mean, before: before.mean })
    }

    /// Steps whose gradient was not finite.
    pub fn n_skipped(&self) -> u64 {
        self.n_skipped
    }

    /// The window before the last, and the last.
    pub fn windows(&self) -> Option<(Window, Window)> {
        (self.losses.len() == 2 * WINDOW).then(|| {
            let of = |from: usize| Window::of(self.losses.iter().skip(from).take(WINDOW));
            (of(0), of(WINDOW))
        })
    }
}

/// Losses of many steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation.
    pub spread: f64,
}

impl Window {
    fn of<'a>(losses: impl Iterator<Item = &'a f64> + Clone) -> Self {
        let mean = losses.clone().sum::<f64>() / WINDOW as f64;
        let squares: f64 = losses.map(|loss| (loss - mean).powi(2)).sum();
        Self { mean, spread: (squares / WINDOW as f64).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(losses: impl IntoIterator<Item = f64>) -> Vec<Finding> {
        let mut health = Health::default();
        losses.into_iter().filter_map(|loss| health.observe(loss, loss.is_finite())).collect()
    }

    #[test]
    fn a_run_that_learns_is_left_alone() {
        assert_eq!(found((0..1000).map(|step| 1.0 / f64::from(step + 1))), []);
        // Noise is no trend.
        assert_eq!(found((0..1000).map(|step| 1.0 + 0.8 * f64::from(step * 7 % 10 - 5) / 5.0)), []);
    }

    #[test]
    fn a_loss_that_rises_is_told_once() {
        let rising = (0..400).map(|step| if step < 150 { 1.0 } else { 9.0 });
        assert!(matches!(found(rising)[..], [Finding::Rising { .. }]));
    }

    #[test]
    fn a_run_of_nothing_finite_ends() {
        let losses = (0..10).map(|_| 1.0).chain(std::iter::repeat_n(f64::NAN, 25));
        assert_eq!(found(losses), [Finding::NotFinite { steps: 25 }]);
        // One good step in between, and it goes on.
        let losses = (0..60).map(|step| if step % 20 == 19 { 1.0 } else { f64::NAN });
        assert_eq!(found(losses), []);
    }
}
