//! Where the frozen blocks of a model are while it trains.

use serde::{Deserialize, Serialize};

/// Every family has blocks, and so this choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// On the device.
    None,
    /// On the host, from where each comes to the device for as long as it is needed.
    Blocks,
}
