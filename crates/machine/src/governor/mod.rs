//! The governor: how fast a run goes and how much memory it takes, so that neither heat nor other
//! programs end it. Pure: it is told the time, what the machine feels like and what steps took; it reads
//! nothing, sleeps never and has no thread. Whoever computes keeps to its pace.
//!
//! Four rules, each a small state machine that knows nothing of the others: `memory` sets the rung, `heat`,
//! `drift` and `power` each a bound on the duty, of which the lowest counts. The rules in plain
//! words are in `docs/thermal.md`; `simulated` is the machine that they are proven on.

mod cause;
mod clock;
mod drift;
mod heat;
mod memory;
mod mode;
mod patience;
mod power;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;
mod thermometer;

use std::mem::Discriminant;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::cause::{Cause, Decision};
pub use self::heat::OVERSHOOT;
pub use self::mode::{Mode, Policy};

use self::clock::Clock;
use self::drift::Drift;
use self::heat::{Going, Warmth};
use self::memory::Memory;
use self::power::Power;
use crate::feel::Feel;
use crate::memory::PressureLevel;

/// The lowest duty. Chosen: a run that rests nine seconds of ten still ends; what needs more rest is a
/// standstill.
pub const MIN_DUTY: f64 = 0.1;

/// Seconds for which a reading explains slow steps.
const EXPLAINS_SECS: f64 = 30.0;

/// Share of time at a standstill that explains slow steps, though it is too little to give memory back.
const EXPLAINING_STALL: f64 = 0.02;

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
    /// Share of time in which it computes; it rests in the rest. Short rests in short turns heat less
    /// than long ones in long.
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

/// Decides how a run goes.
#[derive(Clone, Debug)]
pub struct Governor {
    policy: Policy,
    clock: Clock,
    memory: Memory,
    warmth: Warmth,
    drift: Drift,
    power: Power,
    pace: Pace,
    step_secs: f64,
    explained_at: f64,
    said: Vec<Discriminant<Cause>>,
}

impl Governor {
    /// A governor at the start of a run: on the first rung, as fast as the mode allows.
    pub fn new(policy: Policy, rungs: Vec<Rung>) -> Self {
        Self {
            policy,
            clock: Clock::default(),
            memory: Memory::new(rungs),
            warmth: Warmth::new(policy),
            drift: Drift::new(policy),
            power: Power::new(),
            pace: Pace { rung: 0, duty: policy.duty(false), is_paused: false },
            step_secs: 0.0,
            explained_at: f64::NEG_INFINITY,
            said: Vec::new(),
        }
    }

    /// Takes in a reading; one a second is usual, more under pressure.
    pub fn feel(&mut self, now: Duration, feel: &Feel) -> Vec<Decision> {
        let now = self.at(now);
        if explains_slow_steps(feel) {
            self.explained_at = now;
        }
        let mut decisions = Vec::new();
        let cause = self.power.feel(now, feel);
        self.decide(cause, &mut decisions);
        let cause = self.memory.feel(now, feel);
        self.decide(cause, &mut decisions);
        let cause = self.warmth.feel(now, feel, self.going());
        self.decide(cause, &mut decisions);
        decisions
    }

    /// Takes in a step that ended.
    pub fn took(&mut self, now: Duration, took: Took) -> Vec<Decision> {
        let now = self.at(now);
        if took.secs.is_finite() {
            self.step_secs = took.secs.clamp(0.0, 3600.0);
        }
        self.memory.stepped();
        let is_explained = now - self.explained_at < EXPLAINS_SECS
            || self.power.is_on_battery()
            || self.warmth.is_felt(now, self.most_duty());
        let cause = self.drift.took(now, took, self.pace.rung, is_explained);
        let mut decisions = Vec::new();
        self.decide(cause, &mut decisions);
        decisions
    }

    /// An allocation was refused on the current rung: the next one is taken at once.
    pub fn refused(&mut self, now: Duration) -> Vec<Decision> {
        let now = self.at(now);
        let cause = self.memory.refused(now);
        let mut decisions = Vec::new();
        self.decide(cause, &mut decisions);
        decisions
    }

    /// How the run goes now.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// The moment in our own seconds; after a gap, what was averaged before is forgotten.
    fn at(&mut self, now: Duration) -> f64 {
        let moment = self.clock.at(now, 3.0 * self.cycle_secs());
        if moment.is_after_gap {
            self.memory.start_afresh();
            self.warmth.start_afresh();
            self.drift.start_afresh();
        }
        moment.secs
    }

    /// Puts the rules together, and tells what changed or is worth a word; the same word only once.
    fn decide(&mut self, cause: Option<Cause>, decisions: &mut Vec<Decision>) {
        let Some(cause) = cause else { return };
        let from = self.pace;
        self.pace = Pace {
            rung: self.memory.rung(),
            duty: self.warmth.duty().min(self.most_duty()).clamp(MIN_DUTY, 1.0),
            is_paused: self.memory.is_paused() || self.warmth.is_paused(),
        };
        let kind = std::mem::discriminant(&cause);
        let is_said = self.said.contains(&kind);
        if from != self.pace || (cause.is_notice() && !is_said) {
            decisions.push(Decision { from, to: self.pace, cause });
        }
        if !is_said {
            self.said.push(kind);
        }
    }

    fn going(&self) -> Going {
        Going {
            duty: self.pace.duty,
            most_duty: self.most_duty(),
            is_held_up: self.memory.is_paused(),
            cycle_secs: self.cycle_secs(),
        }
    }

    /// The highest duty that is allowed by all but heat that can be seen.
    fn most_duty(&self) -> f64 {
        (self.policy.duty(self.power.is_on_battery()) * self.drift.share()).max(MIN_DUTY)
    }

    /// Seconds that a step takes with its rest.
    fn cycle_secs(&self) -> f64 {
        self.step_secs / self.pace.duty
    }
}

/// Whether something other than hidden heat makes steps slow.
fn explains_slow_steps(feel: &Feel) -> bool {
    feel.throttled.is_some()
        || feel.stalled.is_some_and(|stalled| stalled >= EXPLAINING_STALL)
        || feel.level.is_some_and(|level| level > PressureLevel::Normal)
}
