//! Telemetry: the few readings that a run is paced by, small enough to be taken every second. What could not be read is not there; nothing is invented.

use serde::{Deserialize, Serialize};

use crate::memory::PressureLevel;

/// Readings of one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Telemetry {
    /// What this process holds of memory, and what is left.
    pub memory: Option<ProcessMemory>,
    /// Share of the last ten seconds in which programs stalled on memory, 0 to 1 (Linux).
    #[serde(alias = "stalled")]
    pub memory_stall: Option<f64>,
    /// What macOS says of memory.
    #[serde(alias = "level")]
    pub pressure_level: Option<PressureLevel>,
    /// The sensor that is nearest to its limit.
    #[serde(alias = "heat")]
    pub temperature: Option<Temperature>,
    /// What throttles the clock, if something does that should not.
    pub throttled: Option<ThrottleCause>,
    /// Power drawn now.
    pub watts: Option<f64>,
    /// Whether it runs on its battery.
    pub on_battery: Option<bool>,
    /// Share of the last moment in which the GPU computed, 0 to 1 (NVIDIA).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_utilisation: Option<f64>,
    /// Share of the last moment in which the GPU's memory was read or written, 0 to 1 (NVIDIA).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_utilisation: Option<f64>,
}

/// This process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Bytes it holds.
    pub held: u64,
    /// Bytes it may take on top before others suffer; below zero if it holds too many.
    pub left: i64,
}

/// A temperature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Temperature {
    /// The sensor's name.
    pub sensor: String,
    /// Its reading.
    pub celsius: f64,
    /// Where the hardware begins to protect itself, if it is known.
    pub limit: Option<f64>,
}

/// What throttles the clock. A power cap alone is normal under load, and is not here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ThrottleCause {
    /// Heat, as the driver or the system says.
    Heat,
    /// The power supply asked for less.
    PowerBrake,
    /// Busy at a low clock for no reported reason: a power supply that is stuck (DGX Spark).
    StuckPower,
    /// The user, or the system, chose to save power.
    LowPower,
}
