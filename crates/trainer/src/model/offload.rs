//! Where the frozen blocks of a model are while it trains.

use serde::{Deserialize, Serialize};

/// Every family has blocks, and so this choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// On the device.
    None,
    /// Every second one on the host: nearly half as little of the device's memory, and twice the time for a
    /// block to come.
    Alternate,
    /// All of them on the host, from where each comes to the device for as long as it is needed.
    Blocks,
}

impl Offload {
    /// Whether the block of that index does.
    pub fn offloads(self, index: usize) -> bool {
        match self {
            Self::None => false,
            Self::Alternate => !index.is_multiple_of(2),
            Self::Blocks => true,
        }
    }
}
