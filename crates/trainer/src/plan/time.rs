//! How long a job takes: what each of its parts takes, how often that comes, and how sure it is.
//!
//! Left out on purpose: what the host does beside the kernels (decoding images, making tokens of texts, the loop
//! itself), which counts only where kernels take no time; and rest, which the governor decides.

use std::fmt;

use compute::Work;
use serde::{Deserialize, Serialize};

use super::Outlook;
use super::rates::Rates;
use crate::config::train::Length;
use crate::config::{RunConfig, Switch};

/// What takes time: work, each with how often it is done, and reading weights.
#[derive(Clone, Debug, Default)]
pub struct Cost {
    /// Work of kernels.
    pub works: Vec<(f64, Work)>,
    /// Bytes that are read from files of weights.
    pub read_bytes: u64,
}

impl Cost {
    /// Seconds at these rates.
    pub fn secs(&self, rates: &Rates) -> f64 {
        let work = self.works.iter().map(|(times, work)| times * rates.seconds(work));
        work.sum::<f64>() + reading(rates, self.read_bytes)
    }
}

/// Seconds to read so many bytes of a model's files.
pub(super) fn reading(rates: &Rates, bytes: u64) -> f64 {
    if bytes == 0 { 0.0 } else { rates.loading(bytes).unwrap_or(0.0) }
}

/// Seconds to save a checkpoint whose tensors have so many bytes. Chosen: two files and two folders that are
/// flushed, and an ordinary solid-state disk with the checksum on the way.
pub(super) fn saving(bytes: usize) -> f64 {
    const FLUSHING_SECS: f64 = 0.02;
    const BYTES_PER_SECOND: f64 = 500e6;
    FLUSHING_SECS + bytes as f64 / BYTES_PER_SECOND
}

/// How long a run takes, as planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    /// Images and captions that are not in the cache, before the first step.
    pub encode_secs: f64,
    /// Loading the model.
    pub load_secs: f64,
    /// Optimizer steps; 0 of them where nobody can say how many there will be.
    pub steps: Repeated,
    /// Losses on what is held out.
    pub validation: Repeated,
    /// Samples: all prompts each time.
    pub samples: Repeated,
    /// Checkpoints.
    pub saving: Repeated,
    /// How sure this is.
    pub basis: Basis,
}

/// Something that comes again and again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Repeated {
    /// Seconds each time.
    pub secs: f64,
    /// How often.
    pub times: u64,
}

impl Repeated {
    /// Seconds in all.
    pub fn total_secs(self) -> f64 {
        self.secs * self.times as f64
    }
}

/// What estimated times rest on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Kernels that `hearth bench calibrate` measured on this machine.
    Measured,
    /// Published figures of hardware of this class.
    #[default]
    Published,
}

/// Steps shorter than this are mostly not kernels. Chosen: a step has thousands of calls, whose bookkeeping takes
/// microseconds each.
const SHORT_STEP_SECS: f64 = 0.02;

impl Times {
    /// Seconds of the whole job; nothing where the number of steps is not known.
    pub fn total_secs(&self) -> Option<f64> {
        let Self { encode_secs, load_secs, steps, validation, samples, saving, basis: _ } = self;
        let repeated = [steps, validation, samples, saving].map(|of| of.total_secs());
        (steps.times > 0).then(|| encode_secs + load_secs + repeated.iter().sum::<f64>())
    }

    /// How far the estimate can be trusted, in words.
    pub fn certainty(&self) -> String {
        let short = if self.steps.secs < SHORT_STEP_SECS {
            "; steps are so short that work outside the kernels, which is not counted, can take longer than they do"
        } else {
            ""
        };
        format!("{}{short}", self.basis)
    }
}

impl Basis {
    /// Of these rates.
    pub fn of(rates: &Rates) -> Self {
        if rates.is_measured { Self::Measured } else { Self::Published }
    }
}

impl fmt::Display for Basis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Measured => "kernels measured on this machine by `hearth bench calibrate`",
            Self::Published => {
                "published figures of this class of hardware, may be off by a factor of two: `hearth bench \
                 calibrate` measures this machine"
            }
        })
    }
}

/// Optimizer steps of a job; nothing where epochs are asked for and nobody counted the samples.
pub(super) fn n_steps<S>(config: &RunConfig, outlook: &Outlook<S>) -> Option<u64> {
    let accumulation = config.train.accumulation as u64;
    match config.train.length {
        Length::Steps(steps) => Some(steps),
        Length::Epochs(_) if outlook.is_nominal => None,
        Length::Epochs(epochs) => {
            let batches: usize =
                outlook.train.values().map(|shown| shown.div_ceil(config.train.batch)).sum();
            Some((epochs * batches as u64).div_ceil(accumulation).max(1))
        }
    }
}

/// How often something is done in so many steps: every so many, in the end, and before the first step.
pub(super) fn n_looks(every: Switch<u64>, steps: u64) -> u64 {
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
            let looks = (0..=steps).filter(is_due).count() as u64;
            assert_eq!(n_looks(Switch::On(every), steps), looks, "{every} {steps}");
            assert_eq!(n_saves(Switch::On(every), steps), looks - 1, "{every} {steps}");
        }
        assert_eq!((n_looks(Switch::Off, 9), n_saves(Switch::Off, 9)), (2, 1));
    }

    #[test]
    fn a_run_from_before_times_were_told_is_read() {
        assert_eq!(serde_json::from_str::<Times>("{}").unwrap(), Times::default());
        assert_eq!(Times::default().total_secs(), None);
    }

    #[test]
    fn the_total_is_the_sum_of_its_parts() {
        let of = |secs, times| Repeated { secs, times };
        let times = Times {
            encode_secs: 1.0,
            load_secs: 2.0,
            steps: of(3.0, 10),
            validation: of(4.0, 2),
            samples: of(5.0, 3),
            saving: of(0.5, 4),
            basis: Basis::Measured,
        };
        assert_eq!(times.total_secs(), Some(1.0 + 2.0 + 30.0 + 8.0 + 15.0 + 2.0));
        assert!(!times.certainty().contains("short"), "{}", times.certainty());
        let short = Times { steps: of(1e-3, 10), ..times };
        assert!(short.certainty().contains("so short"), "{}", short.certainty());
    }
}
