//! Why the pace is as it is: one variant per cause, with the figures it was decided on. A cause is a line
//! in `events.jsonl` and, as text, a line for people; its remedy stands apart.

use serde::{Deserialize, Serialize};

use super::Pace;
use crate::reading::Bytes;

/// Something that was decided or noticed, with its cause.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PaceDecision {
    /// The pace before.
    pub from: Pace,
    /// The pace from now on; the same if something was only noticed.
    pub to: Pace,
    /// Why.
    pub cause: Cause,
}

/// Why something was decided. Figures are rounded to what people read, which also makes them come back
/// from JSON as they went. No cause is an error; the derive is what sets each text beside its variant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Cause {
    /// The run holds more memory than its share.
    #[error("memory is short: the run holds {} of {}", Bytes(*held), Bytes(*share))]
    MemoryShort {
        /// Bytes it holds.
        held: u64,
        /// Bytes it may hold.
        share: u64,
    },
    /// Programs stall on memory.
    #[error("memory is short: programs stalled on it for {:.0} % of 10 s, more than {:.0} %", 100.0 * stalled, 100.0 * limit)]
    MemoryStalls {
        /// Share of the last ten seconds.
        stalled: f64,
        /// The share that is let pass.
        limit: f64,
    },
    /// macOS is about to end programs.
    #[error("memory is short: macOS reports critical pressure and will end programs")]
    MemoryCritical,
    /// An allocation was refused.
    #[error("out of memory at a memory level that takes {}", Bytes(*planned))]
    MemoryRefused {
        /// Bytes that this memory level takes as planned.
        planned: u64,
    },
    /// There is memory again.
    #[error("there is memory again: {} needed, {} available", Bytes(*planned), known(*share))]
    MemoryBack {
        /// Bytes that the next memory level takes.
        planned: u64,
        /// Bytes the run may hold, where that is known.
        share: Option<u64>,
    },
    /// A sensor is, or will soon be, above its limit.
    #[error("hot: {sensor} at {celsius:.0} °C, limit {limit:.0} °C")]
    Hot {
        /// Its name.
        sensor: String,
        /// What it says.
        celsius: f64,
        /// What it shall stay under.
        limit: f64,
    },
    /// A sensor is so far above its limit that nothing but rest helps.
    #[error("too hot to go on: {sensor} at {celsius:.0} °C, limit {limit:.0} °C")]
    TooHot {
        /// Its name.
        sensor: String,
        /// What it says.
        celsius: f64,
        /// What it shall stay under.
        limit: f64,
    },
    /// A sensor leaves room below its limit.
    #[error("cooler: {sensor} at {celsius:.0} °C, limit {limit:.0} °C")]
    Cool {
        /// Its name.
        sensor: String,
        /// What it says.
        celsius: f64,
        /// What it shall stay under.
        limit: f64,
    },
    /// A sensor reads the same whether the machine is busy or idle.
    #[error("{sensor} is ignored: {celsius:.0} °C for {secs:.0} s, busy and idle")]
    SensorStuck {
        /// Its name.
        sensor: String,
        /// What it says.
        celsius: f64,
        /// For how long.
        secs: f64,
    },
    /// The sensor that the run was paced by gives no reading any more.
    #[error("no temperature reading for {secs:.0} s")]
    SensorLost {
        /// For how long.
        secs: f64,
    },
    /// The hardware throttles because of heat.
    #[error("the hardware throttles because of heat, in {readings} of {of} readings")]
    ThrottledByHeat {
        /// Readings that said so ...
        readings: usize,
        /// ... of so many.
        of: usize,
    },
    /// The hardware no longer does.
    #[error("the hardware has not throttled for {secs:.0} s")]
    ThrottleOver {
        /// For how long.
        secs: f64,
    },
    /// Steps take longer, and no sensor says why: less duty is tried.
    #[error(
        "steps take {drift:.2} times as long as the fastest, more than {limit:.2}, and no sensor says why"
    )]
    Slow {
        /// How many times as long as at their best.
        drift: f64,
        /// What is let pass.
        limit: f64,
    },
    /// Less duty did not make steps faster: it is not heat.
    #[error(
        "steps take {before:.2} times as long as the fastest, {after:.2} at a lower pace: it is not heat"
    )]
    NotHeat {
        /// How many times as long as at their best steps took before.
        before: f64,
        /// And with less duty.
        after: f64,
    },
    /// Steps have long been fast: more duty is tried.
    #[error("steps take {drift:.2} times as long as the fastest, less than {limit:.2}")]
    #[serde(alias = "slow_no_more")]
    SpeedRecovered {
        /// How many times as long as at their best.
        drift: f64,
        /// What is let pass.
        limit: f64,
    },
    /// It runs on its battery.
    #[error("running on battery, not on mains")]
    OnBattery,
    /// It has mains again.
    #[error("running on mains again")]
    OnMains,
    /// The power supply asked for less.
    #[error("the power supply limits the clock: it gives less than the GPU asks for")]
    PowerBrake,
    /// Busy at a low clock for no reported reason.
    #[error(
        "busy at a low clock for no reported reason: power is stuck, and a lower pace does not help"
    )]
    StuckPower,
    /// The user, or the system, chose to save power.
    #[error("a power saving mode limits the clock")]
    LowPower,
}

impl Cause {
    /// Whether it is reported though it changes nothing.
    pub(super) fn is_notice(&self) -> bool {
        matches!(
            self,
            Self::NotHeat { .. }
                | Self::SensorStuck { .. }
                | Self::ThrottledByHeat { .. }
                | Self::OnBattery
                | Self::PowerBrake
                | Self::StuckPower
                | Self::LowPower
        )
    }

    /// What a person can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::MemoryShort { .. } | Self::MemoryStalls { .. } | Self::MemoryCritical => {
                "close other programs, or give the run less from the start with --max-memory"
            }
            Self::MemoryRefused { .. } => "give the run less from the start with --max-memory",
            Self::Hot { .. } | Self::TooHot { .. } => {
                "improve the airflow, or allow more with --max-temp"
            }
            Self::ThrottledByHeat { .. } => {
                "improve the airflow and clean the fans; --mode quiet keeps it cooler"
            }
            Self::SensorStuck { .. } => {
                "nothing is lost: the run is paced by step time and the hardware protects itself"
            }
            Self::NotHeat { .. } => {
                "look for another busy program or a power saving mode; macOS: System Settings, \
                 Battery, Energy Mode"
            }
            Self::OnBattery => "plug it in, or train at full speed with --mode full",
            Self::PowerBrake => "check the power supply and its cables",
            Self::StuckPower => {
                "shut down, unplug the power supply for a minute, and use the one that came with the machine"
            }
            Self::LowPower => "switch the power saving mode off; macOS: System Settings, Battery",
            _ => return None,
        })
    }
}

fn known(share: Option<u64>) -> String {
    share.map_or_else(|| "an unknown amount".into(), |share| Bytes(share).to_string())
}

/// A figure as people read it.
pub(super) fn rounded(figure: f64) -> f64 {
    (100.0 * figure).round() / 100.0
}
