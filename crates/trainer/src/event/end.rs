//! How a run ended: as it should, as it was asked to, or with an error.

use std::error::Error;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::TrainerError;

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunEnd {
    /// Steps taken.
    pub step: u64,
    /// Why.
    #[serde(alias = "why")]
    pub reason: EndReason,
    /// Seconds of this part of the run.
    pub secs: f64,
    /// Bytes taken at the worst moment.
    pub peak_bytes: usize,
    /// Energy of this part of the run, where power can be read.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub energy: Option<EnergyUsed>,
    /// The mean of the last losses of the whole run; none where none of them is finite.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss: Option<f64>,
    /// The checkpoint with the lowest held-out loss, if it is kept.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub best: Option<BestCheckpoint>,
}

/// An error that ended a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunFailure {
    /// Steps taken.
    pub step: u64,
    /// What failed, with its causes.
    pub text: String,
    /// What can be done about it.
    pub hint: String,
}

impl RunFailure {
    /// Of an error after so many steps.
    pub(super) fn of(error: &TrainerError, step: u64) -> Self {
        let (mut text, mut cause) = (error.to_string(), error.source());
        while let Some(error) = cause {
            text = format!("{text}: {}", error.to_string().trim_end());
            cause = error.source();
        }
        Self { step, text, hint: error.hint().into_owned() }
    }
}

/// A checkpoint with the lowest held-out loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestCheckpoint {
    /// Steps taken.
    pub step: u64,
    /// The loss then.
    pub loss: f64,
    /// Relative to the run's folder.
    pub path: PathBuf,
}

/// Energy that a run took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnergyUsed {
    /// In the time that is known of.
    pub joules: f64,
    /// The share of the time that is known of.
    pub covered: f64,
}

impl EndReason {
    /// Whether there is a result: an interrupted run goes on, and of one that is unhealthy or diverged
    /// nothing is worth to be used.
    pub fn is_done(self) -> bool {
        matches!(self, Self::Finished | Self::Plateau)
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// All steps were taken.
    Finished,
    /// The loss on held-out samples stopped falling.
    Plateau,
    /// The user asked for it; it can go on.
    Interrupted,
    /// The user asked for another value of a key; the same program goes on with it.
    Changed,
    /// It was not learning.
    Unhealthy,
    /// All steps were taken, and what came of them is of no use.
    Diverged,
}
