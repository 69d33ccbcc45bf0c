//! Where the computer's power comes from, and what counts it.

use serde::Serialize;

use crate::reading::{Percent, Reading, Watts};

/// The computer's power.
#[derive(Clone, Debug, Serialize)]
pub struct PowerInfo {
    /// Whether it runs on its battery.
    pub on_battery: Reading<bool>,
    /// How full the battery is; none if it has none.
    pub charge: Reading<Option<Percent>>,
    /// What it draws from its battery, while it does.
    pub drain: Reading<Watts>,
    /// Counters of the energy that the CPU took.
    pub counters: Reading<Vec<EnergyCounter>>,
}

/// A counter of one CPU package.
#[derive(Clone, Debug, Serialize)]
pub struct EnergyCounter {
    /// The kernel's name for it, e.g. `package-0`.
    pub name: String,
    /// Microjoules so far; it starts again after `range`.
    pub microjoules: Reading<u64>,
    /// The highest it counts to.
    pub range: u64,
}
