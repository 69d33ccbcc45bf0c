//! How far each step goes.

use std::f64::consts::PI;

use crate::config::optimizer::Schedule;

/// What the learning rate is multiplied by at a step, counted from 1, of `total`. `lowered` is how
/// often a plateau has lowered it.
///
/// Unlike the reference scripts, whose first step goes nowhere in a warm-up, step n of n goes all
/// the way.
pub fn factor(schedule: Schedule, warmup: u64, step: u64, total: u64, lowered: u32) -> f64 {
    if step < warmup {
        return step as f64 / warmup as f64;
    }
    let first = warmup.max(1);
    let length = (total + 1).saturating_sub(first).max(1) as f64;
    let progress = (step - first) as f64 / length;
    match schedule {
        Schedule::Constant => 1.0,
        Schedule::Linear => 1.0 - progress,
        Schedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        Schedule::Plateau => LOWER.powi(lowered.try_into().unwrap_or(i32::MAX)),
    }
}

/// What a plateau multiplies the learning rate by. Chosen: PyTorch's tenth ends short trainings.
const LOWER: f64 = 0.5;

/// Measurements without progress that are a plateau. Chosen: two may be noise.
pub const PATIENCE: u64 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: Schedule, warmup: u64, expected: [f64; 6]) {
        for (step, expected) in (1..=6).zip(expected) {
            let got = factor(schedule, warmup, step, 6, 0);
            assert!((got - expected).abs() < 1e-3, "{schedule:?} {step}: {got} {expected}");
        }
    }

    #[test]
    fn factors_rise_and_fall() {
        check(Schedule::Constant, 0, [1.0; 6]);
        check(Schedule::Constant, 4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        check(Schedule::Linear, 0, [1.0, 5.0 / 6.0, 4.0 / 6.0, 0.5, 2.0 / 6.0, 1.0 / 6.0]);
        check(Schedule::Linear, 3, [1.0 / 3.0, 2.0 / 3.0, 1.0, 0.75, 0.5, 0.25]);
        check(Schedule::Cosine, 0, [1.0, 0.933, 0.75, 0.5, 0.25, 0.067]);
        assert_eq!(factor(Schedule::Plateau, 0, 9, 10, 2), 0.25);
        // A warm-up as long as the run, or longer, is no division by zero.
        assert_eq!(factor(Schedule::Linear, 6, 6, 6, 0), 1.0);
        assert_eq!(factor(Schedule::Linear, 60, 6, 6, 0), 0.1);
    }
}
