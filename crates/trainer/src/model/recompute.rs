//! Which blocks of a model are computed twice to save memory.

use serde::{Deserialize, Serialize};

/// Every family has blocks, and so this choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// None: the fastest, and the most memory.
    None,
    /// Every second one.
    Alternate,
    /// All: the least memory.
    Block,
}

impl Recompute {
    /// Whether the block of that index is.
    pub fn does(self, index: usize) -> bool {
        match self {
            Self::None => false,
            Self::Alternate => index.is_multiple_of(2),
            Self::Block => true,
        }
    }
}
