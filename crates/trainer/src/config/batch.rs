//! In what micro-batches a batch goes through the model, and what is recomputed: the same result in
//! less memory and more time. What a step sees, and with which random numbers, does not depend on it;
//! only the order in which gradients are summed does.

use std::fmt;

use compute::Quantisation;
use serde::{Deserialize, Serialize};

use super::RunConfig;
use super::optimizer::OptimizerKind;
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;

/// How a batch is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BatchSettings {
    /// Samples of a micro-batch, at most.
    #[serde(alias = "micro")]
    pub micro_batch: usize,
    /// What is recomputed.
    pub recompute: Recompute,
}

impl BatchSettings {
    /// As the job says.
    pub fn from_config(config: &RunConfig) -> Self {
        Self {
            micro_batch: config.train.micro_batch.unwrap_or(config.train.batch_size),
            recompute: config.train.recompute,
        }
    }

    /// The next way that takes less memory and leaves the batch in one micro-batch, if there is one.
    pub fn with_more_recompute(self) -> Option<Self> {
        let recompute = match self.recompute {
            Recompute::None => Recompute::Queries,
            Recompute::Queries => Recompute::Alternate,
            Recompute::Alternate => Recompute::KeepAttention,
            Recompute::KeepAttention => Recompute::Block,
            Recompute::Block => return None,
        };
        Some(Self { recompute, ..self })
    }

    /// The next way that takes less memory, if there is one. Smaller micro-batches come first, four of
    /// five: they are as many in all, while computing twice is another forward.
    pub fn with_less_memory(self) -> Option<Self> {
        if self.micro_batch > 1 {
            return Some(Self { micro_batch: self.micro_batch * 4 / 5, ..self });
        }
        self.with_more_recompute()
    }
}

impl fmt::Display for BatchSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recomputed = match self.recompute {
            Recompute::None => "",
            Recompute::Queries => ", queries recomputed",
            Recompute::Alternate => ", every second block recomputed",
            Recompute::KeepAttention => ", every block recomputed but for attention",
            Recompute::Block => ", every block recomputed",
        };
        write!(f, "micro-batch {}{recomputed}", self.micro_batch)
    }
}

/// One value for each thing that a plan decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanChoice {
    /// `train.micro_batch`
    pub micro_batch: usize,
    /// `train.recompute`
    pub recompute: Recompute,
    /// `train.fused_backward_pass`
    pub fused_backward_pass: bool,
    /// `machine.offload`
    pub offload: Offload,
    /// `base.quantise`
    pub quantise: Option<Quantisation>,
    /// `base.quantise_encoders`
    pub quantise_encoders: Option<Quantisation>,
    /// `optimizer.kind`
    pub optimizer: OptimizerKind,
}

impl PlanChoice {
    /// As a job says it, typed or by default.
    pub fn from_config(config: &RunConfig) -> Self {
        let BatchSettings { micro_batch: micro, recompute } = BatchSettings::from_config(config);
        Self {
            micro_batch: micro,
            recompute,
            fused_backward_pass: config.train.fused_backward_pass,
            offload: config.machine.offload,
            quantise: config.base.quantise,
            quantise_encoders: config.base.quantise_encoders,
            optimizer: config.optimizer.kind,
        }
    }
}

impl fmt::Display for PlanChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { micro_batch: micro, recompute, offload: stream, quantise, optimizer, .. } =
            *self;
        write!(f, "{}", BatchSettings { micro_batch: micro, recompute })?;
        f.write_str(match stream {
            Offload::None => "",
            Offload::Alternate => ", every second block from main memory",
            Offload::Blocks => ", blocks from main memory",
        })?;
        if let Some(format) = quantise {
            write!(f, ", base in {format}")?;
        }
        if optimizer == OptimizerKind::AdamW8bit {
            f.write_str(", optimizer in 8 bits")?;
        }
        if self.fused_backward_pass {
            f.write_str(", fused backward pass")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_leads_to_the_tightest_and_ends_there() {
        let first = BatchSettings { micro_batch: 5, recompute: Recompute::None };
        let ways: Vec<_> = std::iter::successors(Some(first), |how| how.with_less_memory())
            .map(|how| (how.micro_batch, how.recompute))
            .collect();
        let expected = [
            (5, Recompute::None),
            (4, Recompute::None),
            (3, Recompute::None),
            (2, Recompute::None),
            (1, Recompute::None),
            (1, Recompute::Queries),
            (1, Recompute::Alternate),
            (1, Recompute::KeepAttention),
            (1, Recompute::Block),
        ];
        assert_eq!(ways, expected);
    }
}
