//! Learning rate schedules.

use std::f64::consts::PI;

use crate::config::optimizer::{DecayCurve, LrSchedule, OptimizerConfig};

/// What the learning rate is multiplied by at a step, counted from 1, of `total`. `lowered` is how
/// often a plateau has lowered it.
///
/// Unlike the reference scripts, whose first warm-up step has a learning rate of 0, step n of n warm-up steps
/// has the full one.
pub fn lr_factor(settings: &OptimizerConfig, step: u64, total: u64, lowered: u32) -> f64 {
    let warmup = settings.warmup_steps;
    if step < warmup {
        return step as f64 / warmup as f64;
    }
    let first = warmup.max(1);
    let length = (total + 1).saturating_sub(first).max(1) as f64;
    let progress = (step - first) as f64 / length;
    match settings.lr_scheduler {
        LrSchedule::Constant => 1.0,
        LrSchedule::Linear => 1.0 - progress,
        LrSchedule::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        LrSchedule::CosineWithRestarts => {
            let of_cycle = (settings.cycles as f64 * progress).fract();
            0.5 * (1.0 + (PI * of_cycle).cos())
        }
        LrSchedule::Polynomial => {
            let least = settings.lr_end / settings.learning_rate;
            (1.0 - least) * (1.0 - progress).powf(settings.power) + least
        }
        LrSchedule::Plateau => PLATEAU_FACTOR.powi(lowered.try_into().unwrap_or(i32::MAX)),
        LrSchedule::Wsd => remaining(settings, step, total),
    }
}

/// The factor of the decay in the last share of the steps, after which it would be 0.
fn remaining(settings: &OptimizerConfig, step: u64, total: u64) -> f64 {
    let n_last = (settings.decay * total as f64).round();
    let past = step as f64 - (total as f64 - n_last);
    let progress = (past / (n_last + 1.0)).max(0.0);
    match settings.decay_curve {
        DecayCurve::Linear => 1.0 - progress,
        DecayCurve::Sqrt => 1.0 - progress.sqrt(),
    }
}

/// What a plateau multiplies the learning rate by. Chosen: PyTorch's tenth ends short trainings.
const PLATEAU_FACTOR: f64 = 0.5;

/// Measurements without progress that are a plateau. Chosen: two may be noise.
pub const PATIENCE: u64 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::optimizer::OptimizerKind;

    const SETTINGS: OptimizerConfig = OptimizerConfig {
        kind: OptimizerKind::AdamW,
        learning_rate: 1.0,
        betas: [0.9, 0.999],
        momentum: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.0,
        scale_parameter: false,
        d0: 1e-6,
        d_coef: 1.0,
        use_bias_correction: false,
        safeguard_warmup: false,
        lr_scheduler: LrSchedule::Constant,
        warmup_steps: 0,
        cycles: 1,
        power: 1.0,
        lr_end: 0.0,
        decay: 0.5,
        decay_curve: DecayCurve::Linear,
    };

    fn check(lr_scheduler: LrSchedule, warmup_steps: u64, expected: [f64; 6]) {
        check_all(&OptimizerConfig { lr_scheduler, warmup_steps, ..SETTINGS }, expected);
    }

    fn check_all(settings: &OptimizerConfig, expected: [f64; 6]) {
        for (step, expected) in (1..=6).zip(expected) {
            let got = lr_factor(settings, step, 6, 0);
            assert!((got - expected).abs() < 1e-3, "{settings:?} {step}: {got} {expected}");
        }
    }

    #[test]
    fn factors_rise_and_fall() {
        check(LrSchedule::Constant, 0, [1.0; 6]);
        check(LrSchedule::Constant, 4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        check(LrSchedule::Linear, 0, [1.0, 5.0 / 6.0, 4.0 / 6.0, 0.5, 2.0 / 6.0, 1.0 / 6.0]);
        check(LrSchedule::Linear, 3, [1.0 / 3.0, 2.0 / 3.0, 1.0, 0.75, 0.5, 0.25]);
        check(LrSchedule::Cosine, 0, [1.0, 0.933, 0.75, 0.5, 0.25, 0.067]);
        let plateau = OptimizerConfig { lr_scheduler: LrSchedule::Plateau, ..SETTINGS };
        assert_eq!(lr_factor(&plateau, 9, 10, 2), 0.25);
        // A warm-up as long as the run, or longer, is no division by zero.
        let linear = |warmup_steps| OptimizerConfig {
            lr_scheduler: LrSchedule::Linear,
            warmup_steps,
            ..SETTINGS
        };
        assert_eq!(lr_factor(&linear(6), 6, 6, 0), 1.0);
        assert_eq!(lr_factor(&linear(60), 6, 6, 0), 0.1);
    }

    #[test]
    fn the_last_steps_fall() {
        check(LrSchedule::Wsd, 0, [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]);
        check(LrSchedule::Wsd, 2, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]);
        // What warms up still does not fall yet.
        check(LrSchedule::Wsd, 5, [0.2, 0.4, 0.6, 0.8, 0.5, 0.25]);
        let wsd = OptimizerConfig { lr_scheduler: LrSchedule::Wsd, ..SETTINGS };
        let curved = OptimizerConfig { decay_curve: DecayCurve::Sqrt, ..wsd };
        check_all(&curved, [1.0, 1.0, 1.0, 0.5, 0.293, 0.134]);
        check_all(&OptimizerConfig { decay: 0.0, ..wsd }, [1.0; 6]);
        let all = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0].map(|left| left / 7.0);
        check_all(&OptimizerConfig { decay: 1.0, ..wsd }, all);
    }

    /// Every step of transformers' schedules (`tests/golden/optimizers/schedules.py`). With a warmup, step n here is step n
    /// there of a run that is longer by one, whose first step has a learning rate of 0.
    #[test]
    fn schedules_are_those_of_transformers() {
        let recorded = include_str!("../../../../tests/golden/optimizers/schedules.txt");
        for line in recorded.lines() {
            let mut words = line.split(' ');
            let name = words.next().unwrap();
            let mut number = || words.next().unwrap().parse::<f64>().unwrap();
            let (warmup, cycles, power, lr_end) = (number(), number(), number(), number());
            let lr_scheduler = match name {
                "linear" => LrSchedule::Linear,
                "cosine" => LrSchedule::Cosine,
                "cosine_with_restarts" => LrSchedule::CosineWithRestarts,
                _ => LrSchedule::Polynomial,
            };
            let settings = OptimizerConfig {
                lr_scheduler,
                learning_rate: 1e-3,
                warmup_steps: warmup as u64,
                cycles: cycles as u64,
                power,
                lr_end,
                ..SETTINGS
            };
            let factors: Vec<f64> = words.map(|word| word.parse().unwrap()).collect();
            for (step, expected) in (1..).zip(&factors) {
                let ours = lr_factor(&settings, step, factors.len() as u64, 0);
                assert!((ours - expected).abs() < 1e-9, "{line:.40} {step}: {ours} {expected}");
            }
        }
        assert_eq!(recorded.lines().count(), 11);
    }
}
