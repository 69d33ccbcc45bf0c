//! The few numbers that say how a run went, for the report's head and the model card.

use super::read::{History, Part};
use crate::train::event::{Step, Why};

/// Steps that the smoothed loss looks back on, as a share of the run and at most. Chosen: the loss
/// of a step jumps by as much as a whole run improves it; a twentieth is calm and still shows where
/// it bends.
const SMOOTHED_SHARE: usize = 20;
const SMOOTHED_STEPS: usize = 100;

/// How a run went.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// Steps taken.
    pub steps: u64,
    /// Steps that were to be taken.
    pub planned_steps: u64,
    /// Seconds of all parts of the run.
    pub secs: f64,
    /// Seconds of the middle one of all steps.
    pub secs_per_step: Option<f64>,
    /// The smoothed loss at the end.
    pub final_loss: Option<f64>,
    /// The lowest loss on held-out samples, and when.
    pub best_validation: Option<(u64, f64)>,
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
    /// How it ended; none if it was killed, or runs still.
    pub why: Option<Why>,
}

impl Figures {
    /// Of a run; none if it never began.
    pub fn of(history: &History) -> Option<Self> {
        let last = history.parts.last()?;
        let ends = history.parts.iter().filter_map(|part| Some(part.end.as_ref()?.peak_bytes));
        let peaks = history.steps.iter().map(|step| step.peak_bytes).chain(ends);
        let lower = |a: &&(u64, f64), b: &&(u64, f64)| a.1.total_cmp(&b.1);
        let phases = last.begin.phases.iter().map(|phase| phase.peak_bytes);
        Some(Self {
            steps: history.steps.last().map_or(last.begin.from_step, |step| step.step),
            planned_steps: last.begin.steps,
            secs: history.parts.iter().map(secs).sum(),
            secs_per_step: middle(history.steps.iter().map(|step| step.secs).collect()),
            final_loss: smoothed(&history.steps).last().map(|(_, loss)| *loss),
            best_validation: history.validations.iter().min_by(lower).copied(),
            unit: last.begin.unit.clone(),
            samples: last.begin.samples,
            held_out: last.begin.held_out,
            parameters: last.begin.parameters,
            peak_bytes: peaks.max(),
            planned_bytes: phases.max(),
            limit_bytes: last.begin.limit_bytes,
            why: last.end.as_ref().map(|end| end.why),
        })
    }
}

/// A part that was killed could not say how long it took; its steps did.
fn secs(part: &Part) -> f64 {
    part.end.as_ref().map_or(part.step_secs, |end| end.secs)
}

fn middle(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied()
}

/// The loss without its jumps: a mean that forgets, corrected for its short memory at the start.
/// Losses that are not finite have no part in it.
pub fn smoothed(steps: &[Step]) -> Vec<(f64, f64)> {
    let span = (steps.len() / SMOOTHED_SHARE).clamp(1, SMOOTHED_STEPS) as f64;
    let keep = 1.0 - 1.0 / span;
    let (mut sum, mut weight) = (0.0, 0.0);
    let finite = steps.iter().filter(|step| step.loss.is_finite());
    finite
        .map(|step| {
            sum = keep * sum + step.loss;
            weight = keep * weight + 1.0;
            (step.step as f64, sum / weight)
        })
        .collect()
}
