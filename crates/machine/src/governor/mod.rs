//! The governor: how fast a run goes and how much memory it takes, so that neither heat nor other
//! programs end it. Pure: it is told the time, what the machine feels like and what steps took; it reads
//! nothing, sleeps never and has no thread. Whoever computes keeps to its pace.

use serde::{Deserialize, Serialize};

/// How a run may treat the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Hardly to be noticed.
    Quiet,
    /// Fast, and never hot for long.
    Balanced,
    /// As fast as the hardware goes.
    Full,
    /// Nobody sits there: fast, with cool fans.
    Overnight,
}

/// What it goes by.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// In general.
    pub mode: Mode,
    /// The highest temperature, where the user gave one.
    pub max_celsius: Option<f64>,
}

/// One way to compute, as far as the governor knows it. Ways stand in an order: the first is the plan's,
/// fastest and largest; each that follows takes less memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rung {
    /// Bytes that the process holds at its peak this way.
    pub bytes: u64,
}

/// How a run goes now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Which way it computes.
    pub rung: usize,
    /// Share of time in which it computes; it rests in the rest.
    pub duty: f64,
    /// Whether it stands still until told otherwise.
    pub is_paused: bool,
}

/// A step that was taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Took {
    /// Seconds it computed.
    pub secs: f64,
    /// Seconds that were expected of it, by rates measured on this machine or by published ones.
    pub expected_secs: f64,
}
