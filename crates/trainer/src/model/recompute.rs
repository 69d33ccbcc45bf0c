//! Gradient checkpointing: what of a model is recomputed in backward to save memory.

use compute::BlockSwap;
use serde::{Deserialize, Serialize};

/// What is recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Nothing: the fastest, and the most memory.
    None,
    /// The queries of attention in every block, by one small layer from a norm's output that is
    /// recomputed anyway: about a tenth of a block's activations, for a fiftieth of the time.
    Queries,
    /// Every second block.
    Alternate,
    /// All blocks, but not their attention: what it gives is kept, a small part of a block's activations that takes
    /// long to compute where there are many tokens.
    #[serde(rename = "keep_attention")]
    KeepAttention,
    /// All blocks: the least memory.
    Block,
}

impl Recompute {
    /// From the most memory to the least.
    pub const ALL: [Self; 5] =
        [Self::None, Self::Queries, Self::Alternate, Self::KeepAttention, Self::Block];

    /// Whether recomputed blocks keep what attention gives.
    pub fn keeps_attention(self) -> bool {
        self == Self::KeepAttention
    }

    /// Whether any block is recomputed.
    pub fn recomputes_any(self) -> bool {
        matches!(self, Self::Alternate | Self::KeepAttention | Self::Block)
    }

    /// Whether the block of that index is recomputed.
    pub fn recomputes(self, index: usize) -> bool {
        match self {
            Self::None | Self::Queries => false,
            Self::Alternate => index.is_multiple_of(2),
            Self::KeepAttention | Self::Block => true,
        }
    }
}

/// How a block is run.
#[derive(Clone, Copy)]
pub struct BlockRun<'m> {
    /// The blocks that are offloaded.
    pub block_swap: Option<&'m BlockSwap>,
    /// The block's number among all blocks of the model.
    pub index: usize,
    /// Gradient checkpointing.
    pub recompute: Recompute,
}
