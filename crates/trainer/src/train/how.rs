//! In what portions a batch goes through the model, and what is computed twice: the same result in
//! less memory and more time. What a step sees, and with which random numbers, does not depend on it.

use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::model::recompute::Recompute;

/// How a batch is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct How {
    /// The most pictures that go through the model at once.
    pub micro: usize,
    /// Which blocks are computed twice.
    pub recompute: Recompute,
}

impl How {
    /// As the job says.
    pub fn of(config: &RunConfig) -> Self {
        Self {
            micro: config.train.micro_batch.unwrap_or(config.train.batch),
            recompute: config.train.recompute,
        }
    }
}
