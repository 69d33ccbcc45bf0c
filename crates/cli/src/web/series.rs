//! Curves of a run, small enough to be sent and drawn: of a long run every bucket of steps shows its lowest and its
//! highest value, so that no spike is lost.

use serde::Serialize;
use trainer::event::StepMetrics;

/// Points of a curve. Chosen: as many as a wide screen has columns; 100,000 steps become 60 kB.
pub const MOST_POINTS: usize = 2000;

/// Points in order; a value that is not finite is null in JSON.
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct CurvePoints {
    pub steps: Vec<u64>,
    /// Of training, by then.
    pub minutes: Vec<f64>,
    pub values: Vec<f64>,
}

/// A point of a curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    pub step: u64,
    pub minutes: f64,
    pub value: f64,
}

impl CurvePoints {
    /// At most [`MOST_POINTS`] of these.
    pub fn of(points: &[CurvePoint]) -> Self {
        let mut kept = Self::default();
        if points.len() <= MOST_POINTS {
            for point in points {
                kept.push(point);
            }
            return kept;
        }
        let n_buckets = MOST_POINTS / 2;
        for bucket in 0..n_buckets {
            let [from, to] = [bucket, bucket + 1].map(|at| at * points.len() / n_buckets);
            kept.push_extremes(&points[from..to]);
        }
        kept
    }

    /// The lowest and the highest, in their order. What is not finite counts as highest: it must be seen.
    fn push_extremes(&mut self, bucket: &[CurvePoint]) {
        let key = |at: &usize| {
            if bucket[*at].value.is_finite() { bucket[*at].value } else { f64::INFINITY }
        };
        let by_value = |a: &usize, b: &usize| key(a).total_cmp(&key(b));
        let (low, high) = ((0..bucket.len()).min_by(by_value), (0..bucket.len()).max_by(by_value));
        let (Some(low), Some(high)) = (low, high) else { return };
        self.push(&bucket[low.min(high)]);
        if low != high {
            self.push(&bucket[low.max(high)]);
        }
    }

    fn push(&mut self, point: &CurvePoint) {
        self.steps.push(point.step);
        self.minutes.push(short(point.minutes));
        self.values.push(short(point.value));
    }
}

/// To six digits: more than a screen shows, in a third of the text.
fn short(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let power = 10_f64.powi((value.abs().log10().floor() as i32 - 5).abs());
    if value.abs() < 1e5 {
        (value * power).round() / power
    } else {
        (value / power).round() * power
    }
}

/// Minutes of training after each step, rest included.
pub fn minutes(steps: &[StepMetrics]) -> Vec<f64> {
    let mut secs = 0.0;
    let after = |step: &StepMetrics| {
        secs += step.secs + step.rest_secs;
        secs / 60.0
    };
    steps.iter().map(after).collect()
}

/// The mean of the last `window` losses after each step, without those that are not finite: as
/// `trainer::event::figures::smoothed`, in one pass.
pub fn smoothed(steps: &[StepMetrics], window: usize) -> Vec<f64> {
    let (mut sum, mut n) = (0.0, 0_u32);
    let mut after = |at: usize| {
        let mut add = |loss: f64, by: f64| {
            if loss.is_finite() {
                sum += by * loss;
                n = if by > 0.0 { n + 1 } else { n - 1 };
            }
        };
        add(steps[at].loss, 1.0);
        if at >= window {
            add(steps[at - window].loss, -1.0);
        }
        if n == 0 { f64::NAN } else { sum / f64::from(n) }
    };
    (0..steps.len()).map(&mut after).collect()
}

#[cfg(test)]
mod tests {
    use trainer::event::figures;

    use super::*;

    fn steps(losses: &[f64]) -> Vec<StepMetrics> {
        let step = |(at, loss): (usize, &f64)| StepMetrics {
            step: at as u64 + 1,
            loss: *loss,
            grad_norm: None,
            learning_rate: 1.0,
            loss_scale: None,
            is_skipped: false,
            secs: 30.0,
            rest_secs: 30.0,
            wait_secs: 0.0,
            peak_bytes: 1,
            launches: None,
            copy_wait_secs: None,
        };
        losses.iter().enumerate().map(step).collect()
    }

    #[test]
    fn a_long_curve_keeps_every_spike() {
        let mut points: Vec<CurvePoint> =
            (0..100_000).map(|at| CurvePoint { step: at, minutes: 0.0, value: 1.0 }).collect();
        (points[777].value, points[50_001].value, points[99_999].value) = (9.0, f64::NAN, 0.5);
        let kept = CurvePoints::of(&points);
        assert!(kept.values.len() <= MOST_POINTS && kept.steps.is_sorted());
        let value = |step: u64| kept.values[kept.steps.iter().position(|it| *it == step).unwrap()];
        assert_eq!([value(777), value(99_999)], [9.0, 0.5]);
        assert!(value(50_001).is_nan());
        assert!(serde_json::to_string(&kept).unwrap().contains("null"));
        assert_eq!(CurvePoints::of(&points[..2000]).values.len(), 2000);
        for (value, expected) in
            [(1.0 / 3.0, "0.333333"), (7_912_345_678.0, "7912350000.0"), (1.5e-9, "1.5e-9")]
        {
            assert_eq!(serde_json::to_string(&short(value)).unwrap(), expected);
        }
    }

    #[test]
    fn a_smooth_loss_is_that_of_the_report() {
        let losses: Vec<f64> = (0..50).map(|at| f64::from(at * at % 17) / 3.0).collect();
        let steps = steps(&[&losses[..20], &[f64::NAN, f64::INFINITY], &losses[20..]].concat());
        for window in [1, 4, 20] {
            let ours = smoothed(&steps, window);
            for (step, theirs) in figures::smoothed(&steps, window) {
                let ours = ours[step as usize - 1];
                assert!((ours - theirs).abs() < 1e-12, "{step}: {ours} {theirs}");
            }
        }
        assert_eq!(minutes(&steps[..3]), [1.0, 2.0, 3.0]);
    }
}
