//! Main memory: how much there is, how much could be had right now, and what others have said
//! about it (containers, pressure, swap).

use serde::{Deserialize, Serialize};

use crate::pressure::StallPressure;
use crate::reading::{Bytes, Quantity, Reading};

/// The machine's main memory. On unified machines the GPU lives in it too.
#[derive(Clone, Debug, Serialize)]
pub struct SystemMemory {
    /// All of it, as the kernel manages it.
    pub total: Reading<Bytes>,
    /// What a new program could take without making the system swap.
    pub available: Reading<Bytes>,
    /// What this process holds of it.
    pub held: Reading<Bytes>,
    /// The tightest limit of the containers around this process, if any of them has one.
    pub container: Reading<Option<ContainerLimit>>,
    /// Swap space in all.
    pub swap_total: Reading<Bytes>,
    /// Swap space not in use.
    pub swap_free: Reading<Bytes>,
    /// Current memory pressure.
    pub pressure: Reading<MemoryPressure>,
    /// Whether the system will wake us when pressure rises.
    pub pressure_wakeup: Reading<bool>,
}

/// A limit set by a control group (container, service, batch system).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ContainerLimit {
    /// The limit itself.
    pub limit: Bytes,
    /// What is left below it, caches that the kernel would give up counted as free.
    pub left: Bytes,
}

impl Quantity for ContainerLimit {
    const UNIT: &'static str = "bytes";
}

/// Memory pressure in the words of the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryPressure {
    /// Linux: shares of time spent waiting for memory.
    Stalls(StallPressure),
    /// macOS: a level.
    Level(PressureLevel),
}

impl Quantity for MemoryPressure {
    const UNIT: &'static str = "percent or level";
}

/// Memory pressure level of macOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PressureLevel {
    /// Enough memory for everyone.
    Normal,
    /// Programs are asked to give memory back.
    Warning,
    /// Programs are about to be killed.
    Critical,
}
