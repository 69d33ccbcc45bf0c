//! Block offloading (block swap): where the frozen blocks of a model are while it trains.

use serde::{Deserialize, Serialize};

/// Which blocks are offloaded to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// None: all on the device.
    None,
    /// Every second block: nearly half of the device's memory, and twice the time to copy a block.
    Alternate,
    /// All blocks; each is copied to the device for as long as it is needed.
    Blocks,
}

impl Offload {
    /// Whether the block of that index is offloaded.
    pub fn offloads(self, index: usize) -> bool {
        match self {
            Self::None => false,
            Self::Alternate => !index.is_multiple_of(2),
            Self::Blocks => true,
        }
    }
}
