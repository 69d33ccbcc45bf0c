//! How long a run takes, as its plan says. Made by `plan/time.rs`.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How long a run takes, as planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimeEstimate {
    /// Images and captions that are not in the cache, before the first step.
    pub encode_secs: f64,
    /// Loading the model.
    pub load_secs: f64,
    /// Optimizer steps; 0 of them where nobody can say how many there will be.
    pub steps: RepeatedTime,
    /// Losses on what is held out.
    pub validation: RepeatedTime,
    /// Samples: all prompts each time.
    pub samples: RepeatedTime,
    /// Checkpoints.
    pub saving: RepeatedTime,
    /// How sure this is.
    pub basis: TimeBasis,
}

/// Something that comes again and again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RepeatedTime {
    /// Seconds each time.
    pub secs: f64,
    /// How often.
    pub times: u64,
}

impl RepeatedTime {
    /// Seconds in all.
    pub fn total_secs(self) -> f64 {
        self.secs * self.times as f64
    }
}

/// What estimated times rest on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeBasis {
    /// Kernels that `hearth bench calibrate` measured on this machine.
    Measured,
    /// Published figures of hardware of this class.
    #[default]
    Published,
}

/// Steps shorter than this are mostly not kernels. Chosen: a step has thousands of calls, whose bookkeeping takes
/// microseconds each.
const SHORT_STEP_SECS: f64 = 0.02;

impl TimeEstimate {
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

impl fmt::Display for TimeBasis {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_from_before_times_were_told_is_read() {
        assert_eq!(serde_json::from_str::<TimeEstimate>("{}").unwrap(), TimeEstimate::default());
        assert_eq!(TimeEstimate::default().total_secs(), None);
    }

    #[test]
    fn the_total_is_the_sum_of_its_parts() {
        let of = |secs, times| RepeatedTime { secs, times };
        let times = TimeEstimate {
            encode_secs: 1.0,
            load_secs: 2.0,
            steps: of(3.0, 10),
            validation: of(4.0, 2),
            samples: of(5.0, 3),
            saving: of(0.5, 4),
            basis: TimeBasis::Measured,
        };
        assert_eq!(times.total_secs(), Some(1.0 + 2.0 + 30.0 + 8.0 + 15.0 + 2.0));
        assert!(!times.certainty().contains("short"), "{}", times.certainty());
        let short = TimeEstimate { steps: of(1e-3, 10), ..times };
        assert!(short.certainty().contains("so short"), "{}", short.certainty());
    }
}
