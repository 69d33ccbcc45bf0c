//! The few numbers that say how a run went, for the report's head and the model card.

use std::path::PathBuf;

use super::history::{History, RunPart};
use super::{BestCheckpoint, StepMetrics};

/// Steps that a loss is the mean of: a quarter of a short run and at most 20; of a long one a twentieth, at
/// most 100. Chosen: the loss of a step jumps by as much as a whole run improves it; so much is calm and
/// still shows where it bends.
pub fn loss_window(planned_steps: u64) -> usize {
    let n = planned_steps as usize;
    (n / 4).clamp(1, 20).max((n / 20).min(100))
}

/// The loss of a run after these steps: the mean of the last `window`, without what is not finite. The live
/// line, the last lines of a run, its report, its model card and its events all show this number.
pub fn mean_loss(steps: &[StepMetrics], window: usize) -> Option<f64> {
    mean(&steps[steps.len().saturating_sub(window)..])
}

fn mean(steps: &[StepMetrics]) -> Option<f64> {
    let losses = || steps.iter().map(|step| step.loss).filter(|loss| loss.is_finite());
    let n = losses().count();
    (n > 0).then(|| losses().sum::<f64>() / n as f64)
}

/// How a run went.
#[derive(Clone, Debug, PartialEq)]
pub struct RunFigures {
    /// Steps taken.
    pub steps: u64,
    /// Steps that were to be taken.
    pub planned_steps: u64,
    /// Seconds of all parts of the run.
    pub secs: f64,
    /// Seconds in which steps waited for data.
    pub wait_secs: f64,
    /// Seconds of rest, to keep to the pace.
    pub rest_secs: f64,
    /// Seconds of the middle one of all steps.
    pub secs_per_step: Option<f64>,
    /// Steps whose loss or gradient was NaN or infinite; they changed nothing.
    pub not_finite_steps: usize,
    /// Steps that losses are means of.
    pub loss_window: usize,
    /// The mean of the first losses; none where they are the last ones too.
    pub first_loss: Option<f64>,
    /// The mean of the last losses; none where none of them is finite.
    pub final_loss: Option<f64>,
    /// The lowest loss on held-out samples, and when.
    pub best_validation: Option<(u64, f64)>,
    /// The checkpoint of then, if it is not the last and was kept; relative to the run's folder.
    pub best_checkpoint: Option<PathBuf>,
    /// What samples are called.
    pub unit: String,
    /// Samples that were trained on.
    pub samples: usize,
    /// Samples that were held out.
    pub held_out: usize,
    /// Numbers that were trained.
    pub parameters: usize,
    /// Bytes taken at the worst moment; none if it never came to a step.
    pub peak_bytes: Option<usize>,
    /// Bytes of the largest phase, as planned.
    pub planned_bytes: Option<usize>,
    /// The most that could be taken.
    pub limit_bytes: usize,
}

impl RunFigures {
    /// Of a run; none if it never began.
    pub fn of(history: &History) -> Option<Self> {
        let last = history.parts.last()?;
        let ends = history.parts.iter().filter_map(|part| Some(part.end()?.peak_bytes));
        let peaks = history.steps.iter().map(|step| step.peak_bytes).chain(ends);
        let lower = |a: &&(u64, f64), b: &&(u64, f64)| a.1.total_cmp(&b.1);
        let best_validation = history.validations.iter().min_by(lower).copied();
        let is_best =
            |best: &&BestCheckpoint| best_validation.is_some_and(|(step, _)| step == best.step);
        let end = last.end();
        let best = end.and_then(|end| end.best.as_ref().filter(|best| best.step < end.step));
        let phases = last.begin.phases.iter().map(|phase| phase.peak_bytes);
        let (steps, loss_window) = (&history.steps, loss_window(last.begin.steps));
        Some(Self {
            steps: history.steps.last().map_or(last.begin.from_step, |step| step.step),
            planned_steps: last.begin.steps,
            secs: history.parts.iter().map(secs).sum(),
            wait_secs: steps.iter().map(|step| step.wait_secs).sum(),
            rest_secs: steps.iter().map(|step| step.rest_secs).sum(),
            secs_per_step: median(history.steps.iter().map(|step| step.secs).collect()),
            not_finite_steps: steps.iter().filter(|step| is_not_finite(step)).count(),
            loss_window,
            first_loss: steps
                .get(..loss_window)
                .filter(|_| steps.len() > loss_window)
                .and_then(mean),
            final_loss: mean_loss(steps, loss_window),
            best_validation,
            best_checkpoint: best.filter(is_best).map(|best| best.path.clone()),
            unit: last.begin.unit.clone(),
            samples: last.begin.samples,
            held_out: last.begin.held_out,
            parameters: last.begin.parameters,
            peak_bytes: peaks.max(),
            planned_bytes: phases.max(),
            limit_bytes: last.begin.limit_bytes,
        })
    }
}

impl RunFigures {
    /// `mean of the last 20 steps`: what the loss at the end is.
    pub fn loss_label(&self) -> String {
        match self.loss_window.min(self.steps as usize) {
            0 | 1 => "of the last step".into(),
            n => format!("mean of the last {n} steps"),
        }
    }
}

fn is_not_finite(step: &StepMetrics) -> bool {
    step.is_skipped || !step.loss.is_finite()
}

/// A part that was killed could not say how long it took; its steps did.
fn secs(part: &RunPart) -> f64 {
    part.end().map_or(part.step_secs, |end| end.secs)
}

fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

/// The loss without its jumps: after each step with a finite one, the mean of the last.
pub fn smoothed(steps: &[StepMetrics], window: usize) -> Vec<(f64, f64)> {
    let after = |n: usize| {
        let step = steps[..n].last().filter(|step| step.loss.is_finite())?;
        Some((step.step as f64, mean_loss(&steps[..n], window)?))
    };
    (1..=steps.len()).filter_map(after).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(losses: &[f64]) -> Vec<StepMetrics> {
        let step = |(n, loss): (usize, &f64)| StepMetrics {
            step: n as u64 + 1,
            loss: *loss,
            grad_norm: None,
            learning_rate: 1.0,
            loss_scale: None,
            is_skipped: false,
            secs: 1.0,
            rest_secs: 0.0,
            wait_secs: 0.0,
            peak_bytes: 1,
            launches: None,
            copy_wait_secs: None,
        };
        losses.iter().enumerate().map(step).collect()
    }

    #[test]
    fn a_loss_is_the_mean_of_the_last_finite_ones() {
        let nan = f64::NAN;
        let cases: [(&[f64], usize, Option<f64>); 6] = [
            (&[], 4, None),
            (&[3.0], 4, Some(3.0)),
            (&[9.0, 1.0, 3.0], 2, Some(2.0)),
            (&[9.0, nan, 3.0], 2, Some(3.0)),
            // Of a run that diverged, what was before is not what it came to.
            (&[9.0, nan, nan], 2, None),
            (&[9.0, f64::INFINITY], 1, None),
        ];
        for (losses, window, expected) in cases {
            let steps = steps(losses);
            assert_eq!(mean_loss(&steps, window), expected, "{losses:?}");
            let last = smoothed(&steps, window).last().map(|(_, loss)| *loss);
            assert!(expected.is_none() || last == expected, "the curve ends there: {losses:?}");
        }
    }

    #[test]
    fn losses_of_short_runs_are_means_of_few_steps() {
        let windows = [1, 4, 40, 80, 400, 1000, 2000, 100_000].map(loss_window);
        assert_eq!(windows, [1, 1, 10, 20, 20, 50, 100, 100]);
    }
}
