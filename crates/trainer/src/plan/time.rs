//! How long a job takes: the time of each part, how often it comes, and how sure that is.
//!
//! Left out on purpose: host work beside the kernels (decoding images, tokenising texts, the loop itself), which
//! is small; and rest, which the governor decides.

use super::DatasetSummary;
use super::rates::Rates;
use crate::config::train::TrainLength;
use crate::config::{RunConfig, Switch};
use crate::cost::Cost;
use crate::event::TimeBasis;

impl Cost {
    /// Seconds at these rates.
    pub fn secs(&self, rates: &Rates) -> f64 {
        let work = self.works.iter().map(|(times, work)| times * rates.seconds(work));
        work.sum::<f64>() + read_secs(rates, self.read_bytes)
    }
}

/// Seconds to read so many bytes of a model's files.
pub(super) fn read_secs(rates: &Rates, bytes: u64) -> f64 {
    if bytes == 0 { 0.0 } else { rates.loading(bytes).unwrap_or(0.0) }
}

/// Seconds to save a checkpoint whose tensors have so many bytes. Chosen: two files and two folders that are
/// flushed, and an ordinary solid-state disk with the checksum on the way.
pub(super) fn save_secs(bytes: usize) -> f64 {
    const FLUSHING_SECS: f64 = 0.02;
    const BYTES_PER_SECOND: f64 = 500e6;
    FLUSHING_SECS + bytes as f64 / BYTES_PER_SECOND
}

/// What times at these rates are based on.
pub(super) fn basis(rates: &Rates) -> TimeBasis {
    if rates.is_measured { TimeBasis::Measured } else { TimeBasis::Published }
}

/// Optimizer steps of a job; none where epochs are set and the samples are not counted.
pub(super) fn n_steps<S>(config: &RunConfig, dataset: &DatasetSummary<S>) -> Option<u64> {
    let is_known = !dataset.is_nominal || matches!(config.train.length, TrainLength::Steps(_));
    let batches = dataset.train.values().map(|shown| shown.div_ceil(config.train.batch_size));
    is_known.then(|| config.train.n_steps(batches.sum::<usize>() as u64))
}

/// How often something is done in so many steps: every so many, in the end, and before the first step.
pub(super) fn n_evaluations(every: Switch<u64>, steps: u64) -> u64 {
    1 + n_saves(every, steps)
}

/// The same without the one before the first step.
pub(super) fn n_saves(every: Switch<u64>, steps: u64) -> u64 {
    match every {
        Switch::On(every) => steps.div_ceil(every),
        Switch::Off => u64::from(steps > 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the loop does it: at every multiple, and in the end.
    #[test]
    fn what_comes_every_so_many_steps_is_counted_as_the_loop_does() {
        for (every, steps) in (1..7).flat_map(|every| (1..20).map(move |steps| (every, steps))) {
            let is_due = |step: &u64| step.is_multiple_of(every) || *step == steps;
            let n_due = (0..=steps).filter(is_due).count() as u64;
            assert_eq!(n_evaluations(Switch::On(every), steps), n_due, "{every} {steps}");
            assert_eq!(n_saves(Switch::On(every), steps), n_due - 1, "{every} {steps}");
        }
        assert_eq!((n_evaluations(Switch::Off, 9), n_saves(Switch::Off, 9)), (2, 1));
    }
}
