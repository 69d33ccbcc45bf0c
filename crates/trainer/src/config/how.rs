//! In what portions a batch goes through the model, and what is computed twice: the same result in
//! less memory and more time. What a step sees, and with which random numbers, does not depend on it;
//! only the order in which gradients are summed does.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::RunConfig;
use crate::model::recompute::Recompute;

/// How a batch is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct How {
    /// The most samples that go through the model at once.
    pub micro: usize,
    /// What is computed twice.
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

    /// The next way that takes less memory, if there is one. Fewer samples at once come first, four of
    /// five: they are as many in all, while computing twice is another forward.
    pub fn tighter(self) -> Option<Self> {
        if self.micro > 1 {
            return Some(Self { micro: self.micro * 4 / 5, ..self });
        }
        let recompute = match self.recompute {
            Recompute::None => Recompute::Queries,
            Recompute::Queries => Recompute::Alternate,
            Recompute::Alternate => Recompute::Block,
            Recompute::Block => return None,
        };
        Some(Self { recompute, ..self })
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let twice = match self.recompute {
            Recompute::None => "",
            Recompute::Queries => " with queries computed twice",
            Recompute::Alternate => " with every second block computed twice",
            Recompute::Block => " with every block computed twice",
        };
        write!(f, "{} at once{twice}", self.micro)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_leads_to_the_tightest_and_ends_there() {
        let first = How { micro: 5, recompute: Recompute::None };
        let ways: Vec<_> = std::iter::successors(Some(first), |how| how.tighter())
            .map(|how| (how.micro, how.recompute))
            .collect();
        let expected = [
            (5, Recompute::None),
            (4, Recompute::None),
            (3, Recompute::None),
            (2, Recompute::None),
            (1, Recompute::None),
            (1, Recompute::Queries),
            (1, Recompute::Alternate),
            (1, Recompute::Block),
        ];
        assert_eq!(ways, expected);
    }
}
