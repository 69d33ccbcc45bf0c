//! What of a model is recomputed to save memory.

use serde::{Deserialize, Serialize};

/// Every family has blocks, and so this choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing: the fastest, and the most memory.
    None,
    /// In every block the queries of attention, by one of its smallest layers from a norm's result that
    /// is made again anyway: about a tenth of what a block keeps, for a fiftieth of the time.
    Queries,
    /// Every second block.
    Alternate,
    /// All blocks: the least memory.
    Block,
}

impl Recompute {
    /// Whether any block is.
    pub fn recomputes_any(self) -> bool {
        matches!(self, Self::Alternate | Self::Block)
    }

    /// Whether the block of that index is.
    pub fn recomputes(self, index: usize) -> bool {
        match self {
            Self::None | Self::Queries => false,
            Self::Alternate => index.is_multiple_of(2),
            Self::Block => true,
        }
    }
}
