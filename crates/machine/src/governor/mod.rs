//! The governor: how fast a run goes and how much memory it takes, so that neither heat nor other
//! programs end it. Pure: it is given the time, telemetry and step times; it reads nothing, never sleeps and
//! has no thread. The training loop keeps to its pace.
//!
//! Four rules, each a small state machine that knows nothing of the others: `memory` sets the memory level,
//! `thermal`, `drift` and `power` each a bound on the duty cycle, of which the lowest counts. The rules in plain
//! words are in `docs/thermal.md`; `simulated` is the machine that they are proven on.

mod backoff;
mod cause;
mod clock;
mod drift;
mod memory;
mod mode;
mod power;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
mod thermal;
mod thermometer;

use std::mem::Discriminant;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::cause::{Cause, PaceDecision};
pub use self::mode::{GovernorMode, GovernorPolicy};
pub use self::thermal::OVERSHOOT;

use self::clock::GovernorClock;
use self::drift::Drift;
use self::memory::MemoryControl;
use self::power::PowerControl;
use self::thermal::{DutyState, ThermalControl};
use crate::memory::PressureLevel;
use crate::telemetry::Telemetry;

/// The lowest duty. Chosen: a run that rests nine seconds of ten still ends; what needs more rest is paused.
pub const MIN_DUTY: f64 = 0.1;

/// Seconds for which a reading explains slow steps.
const EXPLAINS_SECS: f64 = 30.0;

/// Share of time stalled on memory that explains slow steps, though it is too little to give memory back.
const EXPLAINING_STALL: f64 = 0.02;

/// A memory level, as far as the governor knows it. Levels are in order: the first is the plan's, fastest
/// and largest; each that follows takes less memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GovernorLevel {
    /// Bytes that the process holds at its peak at this level.
    pub bytes: u64,
}

/// The pace of a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Which memory level it computes at; 0 is the plan's.
    #[serde(alias = "rung")]
    pub level: usize,
    /// Share of time in which it computes; it idles in the rest. Short rests in short turns heat less
    /// than long ones in long.
    pub duty: f64,
    /// Whether it is paused.
    pub is_paused: bool,
}

/// A step that was taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Seconds it computed.
    pub secs: f64,
    /// Seconds that were expected of it, by rates measured on this machine or by published ones.
    pub expected_secs: f64,
}

/// Decides the pace of a run.
#[derive(Clone, Debug)]
pub struct Governor {
    policy: GovernorPolicy,
    clock: GovernorClock,
    memory: MemoryControl,
    thermal: ThermalControl,
    drift: Drift,
    power: PowerControl,
    pace: Pace,
    step_secs: f64,
    explained_at: f64,
    reported: Vec<Discriminant<Cause>>,
}

impl Governor {
    /// A governor at the start of a run: on the first level, as fast as the mode allows.
    pub fn new(policy: GovernorPolicy, levels: Vec<GovernorLevel>) -> Self {
        Self {
            policy,
            clock: GovernorClock::default(),
            memory: MemoryControl::new(levels),
            thermal: ThermalControl::new(policy),
            drift: Drift::new(policy),
            power: PowerControl::new(),
            pace: Pace { level: 0, duty: policy.duty(false), is_paused: false },
            step_secs: 0.0,
            explained_at: f64::NEG_INFINITY,
            reported: Vec::new(),
        }
    }

    /// Takes in a reading; one a second is usual, more under pressure.
    pub fn observe(&mut self, now: Duration, telemetry: &Telemetry) -> Vec<PaceDecision> {
        let now = self.at(now);
        if explains_slow_steps(telemetry) {
            self.explained_at = now;
        }
        let mut decisions = Vec::new();
        let cause = self.power.observe(now, telemetry);
        self.decide(cause, &mut decisions);
        let cause = self.memory.observe(now, telemetry);
        self.decide(cause, &mut decisions);
        let cause = self.thermal.observe(now, telemetry, self.duty_state());
        self.decide(cause, &mut decisions);
        decisions
    }

    /// Takes in a step that ended.
    pub fn record_step(&mut self, now: Duration, took: StepTime) -> Vec<PaceDecision> {
        let now = self.at(now);
        if took.secs.is_finite() {
            self.step_secs = took.secs.clamp(0.0, 3600.0);
        }
        self.memory.stepped();
        let is_explained = now - self.explained_at < EXPLAINS_SECS
            || self.power.is_on_battery()
            || self.thermal.is_limiting(now, self.most_duty());
        let cause = self.drift.record_step(now, took, self.pace.level, is_explained);
        let mut decisions = Vec::new();
        self.decide(cause, &mut decisions);
        decisions
    }

    /// An allocation was refused on the current level: the next one is taken at once.
    pub fn out_of_memory(&mut self, now: Duration) -> Vec<PaceDecision> {
        let now = self.at(now);
        let cause = self.memory.out_of_memory(now);
        let mut decisions = Vec::new();
        self.decide(cause, &mut decisions);
        decisions
    }

    /// The current pace.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// The moment in our own seconds; after a gap, what was averaged before is forgotten.
    fn at(&mut self, now: Duration) -> f64 {
        let moment = self.clock.tick(now, 3.0 * self.cycle_secs());
        if moment.is_after_gap {
            self.memory.reset();
            self.thermal.reset();
            self.drift.reset();
        }
        moment.secs
    }

    /// Combines the rules, and returns what changed or is worth a notice; each kind of notice only once.
    fn decide(&mut self, cause: Option<Cause>, decisions: &mut Vec<PaceDecision>) {
        let Some(cause) = cause else { return };
        let from = self.pace;
        self.pace = Pace {
            level: self.memory.level(),
            duty: self.thermal.duty().min(self.most_duty()).clamp(MIN_DUTY, 1.0),
            is_paused: self.memory.is_paused() || self.thermal.is_paused(),
        };
        let kind = std::mem::discriminant(&cause);
        let is_reported = self.reported.contains(&kind);
        if from != self.pace || (cause.is_notice() && !is_reported) {
            decisions.push(PaceDecision { from, to: self.pace, cause });
        }
        if !is_reported {
            self.reported.push(kind);
        }
    }

    fn duty_state(&self) -> DutyState {
        DutyState {
            duty: self.pace.duty,
            most_duty: self.most_duty(),
            is_paused_for_memory: self.memory.is_paused(),
            cycle_secs: self.cycle_secs(),
        }
    }

    /// The highest duty that everything but visible heat allows.
    fn most_duty(&self) -> f64 {
        (self.policy.duty(self.power.is_on_battery()) * self.drift.share()).max(MIN_DUTY)
    }

    /// Seconds that a step takes with its rest.
    fn cycle_secs(&self) -> f64 {
        self.step_secs / self.pace.duty
    }
}

/// Whether something other than hidden heat makes steps slow.
fn explains_slow_steps(telemetry: &Telemetry) -> bool {
    telemetry.throttled.is_some()
        || telemetry.memory_stall.is_some_and(|stalled| stalled >= EXPLAINING_STALL)
        || telemetry.pressure_level.is_some_and(|level| level > PressureLevel::Normal)
}
