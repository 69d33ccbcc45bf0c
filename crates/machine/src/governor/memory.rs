//! The rule for memory: at which memory level a run computes, and when it is paused. It goes to a level that takes
//! less while the run holds more than its share, as far as planned sizes say is needed and at once when the system
//! stalls; it goes back as far as there is provably memory. It never ends a run. What a level means (micro-batch
//! size, gradient checkpointing) it does not know.

use std::collections::VecDeque;

use super::GovernorLevel;
use super::backoff::Backoff;
use super::cause::{Cause, rounded};
use crate::memory::PressureLevel;
use crate::telemetry::{ProcessMemory, Telemetry};

/// Readings that are averaged.
const WINDOW: usize = 10;

/// Share of time stalled on memory that is not waited out. Chosen: below what makes a desktop stutter; the
/// trigger of the kernel that wakes the sampler stands at 0.15 of a second.
const STALL: f64 = 0.1;

/// The kernel's share of the last ten seconds fades slowly: for so many seconds after a change, a stall that
/// has fallen below this part of what it was is taken for the past.
const FADING_SECS: f64 = 20.0;
const FADING_PART: f64 = 0.75;

/// A run that holds this part of its share too much is not averaged. Chosen: noise of other programs is
/// smaller.
const URGENT_PART: f64 = 0.05;

/// A load below this is room for more. Taken: the rule of the plan, tighten by 0.8 above it, widen below.
const ROOMY_LOAD: f64 = 0.8;

/// Part of the share that stays free when the next larger level is taken for its size alone.
const MARGIN: f64 = 0.05;

/// Readings after a change that show its effect, counted from the first step that ended after it ...
const SEEN_READINGS: usize = 4;

/// ... or seconds, where steps are long.
const SEEN_SECS: f64 = 90.0;

/// Seconds without want before a larger level is taken. Chosen: all are regained within two minutes.
const CALM_SECS: f64 = 10.0;

/// Seconds without want after which a pause ends, whatever failed before. Chosen: to compute for a while and pause
/// again costs less than to stand still beside free memory.
const MAX_IDLE_SECS: f64 = 600.0;

/// How full memory is, and the level that follows from it.
#[derive(Clone, Debug)]
pub(super) struct MemoryControl {
    levels: Vec<GovernorLevel>,
    level: usize,
    is_paused: bool,
    shares: VecDeque<ProcessMemory>,
    last: MemoryChange,
    wanted_at: f64,
    /// Levels up to this one are barred until the backoff is over.
    barred: usize,
    backoff: Backoff,
}

/// The last change, and what was seen of its effect.
#[derive(Clone, Copy, Debug)]
struct MemoryChange {
    secs: f64,
    has_stepped: bool,
    n_readings: usize,
    /// What the kernel said at the time.
    stalled: f64,
}

impl MemoryControl {
    pub fn new(mut levels: Vec<GovernorLevel>) -> Self {
        if levels.is_empty() {
            levels.push(GovernorLevel { bytes: 0 });
        }
        Self {
            levels,
            level: 0,
            is_paused: false,
            shares: VecDeque::with_capacity(WINDOW),
            last: MemoryChange {
                secs: f64::NEG_INFINITY,
                has_stepped: true,
                n_readings: SEEN_READINGS,
                stalled: 0.0,
            },
            wanted_at: f64::NEG_INFINITY,
            barred: 0,
            // Chosen: three tries an hour at first, then fewer; what lasted twenty minutes was right.
            backoff: Backoff::new(600.0, 7200.0, 1200.0),
        }
    }

    pub fn level(&self) -> usize {
        self.level
    }

    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Averages begin again.
    pub fn reset(&mut self) {
        self.shares.clear();
    }

    /// A step ended.
    pub fn stepped(&mut self) {
        self.last.has_stepped = true;
    }

    /// Takes in a reading.
    pub fn observe(&mut self, now: f64, telemetry: &Telemetry) -> Option<Cause> {
        self.take_in(telemetry.memory);
        if let Some(want) = self.want(now, telemetry) {
            self.wanted_at = now;
            return self.is_effect_seen(now).then(|| self.tighten(now, want)).flatten();
        }
        if is_under_pressure(telemetry) {
            self.wanted_at = now;
        }
        let is_calm = now - self.wanted_at >= CALM_SECS && now - self.last.secs >= CALM_SECS;
        (is_calm && self.is_effect_seen(now)).then(|| self.widen(now)).flatten()
    }

    /// An allocation was refused: whatever the figures say, this level is too large.
    pub fn out_of_memory(&mut self, now: f64) -> Option<Cause> {
        let planned = self.levels[self.level].bytes;
        self.wanted_at = now;
        // A level that was refused is a mistake, no matter how long ago it was taken.
        self.backoff.start(now);
        self.step_down(now, self.level + 1).then_some(Cause::MemoryRefused { planned })
    }

    fn take_in(&mut self, share: Option<ProcessMemory>) {
        // While it is paused, nothing more will be seen.
        self.last.n_readings += usize::from(self.last.has_stepped || self.is_paused);
        let Some(share) = share else {
            // What is silent is forgotten: a last reading must not count for ever.
            self.shares.pop_front();
            return;
        };
        if self.shares.len() == WINDOW {
            self.shares.pop_front();
        }
        self.shares.push_back(share);
    }

    /// What memory is wanted for, if it is: what cannot wait first, then the average.
    fn want(&self, now: f64, telemetry: &Telemetry) -> Option<Cause> {
        let is_fading = |stalled: f64| {
            now - self.last.secs < FADING_SECS && stalled < FADING_PART * self.last.stalled
        };
        let is_stall = |stalled: &f64| (STALL..=1.0).contains(stalled) && !is_fading(*stalled);
        if let Some(stalled) = telemetry.memory_stall.filter(is_stall) {
            return Some(Cause::MemoryStalls { stalled: rounded(stalled), limit: STALL });
        }
        if telemetry.pressure_level == Some(PressureLevel::Critical) {
            return Some(Cause::MemoryCritical);
        }
        let share = telemetry.memory?;
        let is_urgent = -(share.left as f64) > URGENT_PART * share.held as f64;
        let is_over = self.shares.len() == WINDOW && self.load()? > 1.0;
        let short = Cause::MemoryShort { held: share.held, share: size(share) };
        (is_urgent || is_over).then_some(short)
    }

    /// Held of what may be held, averaged; over 1 is too much.
    fn load(&self) -> Option<f64> {
        let load = |share: &ProcessMemory| {
            // Nothing held is nothing to give back.
            if share.held == 0 { 0.0 } else { share.held as f64 / size(*share).max(1) as f64 }
        };
        let n = self.shares.len();
        (n > 0)
            .then(|| self.shares.iter().map(|share| load(share).min(2.0)).sum::<f64>() / n as f64)
    }

    /// Whether what was last decided shows in the readings.
    fn is_effect_seen(&self, now: f64) -> bool {
        self.last.n_readings >= SEEN_READINGS || now - self.last.secs >= SEEN_SECS
    }

    /// Goes down as many levels as the figures say, one at least.
    fn tighten(&mut self, now: f64, want: Cause) -> Option<Cause> {
        let saved =
            |level: &GovernorLevel| self.levels[self.level].bytes.saturating_sub(level.bytes);
        let lacking = match want {
            Cause::MemoryShort { held, share } => held.saturating_sub(share),
            _ => 0,
        };
        let enough = |level: &usize| saved(&self.levels[*level]) >= lacking;
        let last = self.levels.len() - 1;
        let to = (self.level + 1..=last).find(enough).unwrap_or(last.max(self.level + 1));
        let has_changed = self.step_down(now, to);
        if let Cause::MemoryStalls { stalled, .. } = want {
            self.last.stalled = stalled;
        }
        has_changed.then_some(want)
    }

    /// To a level that takes less, or to a pause below the last. Returns whether anything changed.
    fn step_down(&mut self, now: f64, to: usize) -> bool {
        if self.is_paused {
            return false;
        }
        self.barred = self.level;
        self.backoff.fail(now);
        if to < self.levels.len() {
            self.level = to;
        } else {
            self.is_paused = true;
        }
        self.changed(now);
        true
    }

    /// Goes on, or up as many levels as there is provably room for.
    fn widen(&mut self, now: f64) -> Option<Cause> {
        let is_idle_long = self.is_paused && now - self.wanted_at >= MAX_IDLE_SECS;
        let is_barred =
            |to: usize| to <= self.barred && !self.backoff.is_ready(now) && !is_idle_long;
        let is_open = |to: &usize| !is_barred(*to) && self.has_room_for(*to);
        let first = if self.is_paused { self.level } else { 0 };
        let last = if self.is_paused { self.level } else { self.level.checked_sub(1)? };
        let to = (first..=last).find(is_open)?;
        let share = self.shares.back().map(|share| size(*share));
        self.is_paused = false;
        self.level = to;
        self.backoff.start(now);
        self.changed(now);
        Some(Cause::MemoryBack { planned: self.levels[to].bytes, share })
    }

    /// Whether a level fits by what was planned and by what is really held. Where nothing is known of
    /// memory, nothing speaks against the next one.
    fn has_room_for(&self, to: usize) -> bool {
        let is_next = to + 1 >= self.level;
        let Some((now, load)) = self.shares.back().zip(self.load()) else { return is_next };
        let planned = self.levels[self.level].bytes;
        let more = self.levels[to].bytes.saturating_sub(planned);
        let held = self.shares.iter().map(|share| share.held).max().unwrap_or(0).max(planned);
        let needed = held.saturating_add(more) as f64;
        let share = size(*now) as f64;
        // It was planned to fit. A load says little of a pause: where weights are most of what a run holds, it
        // never gets low.
        if self.is_paused {
            return needed <= share;
        }
        // A load says something of the next level, not of those beyond.
        needed <= (1.0 - MARGIN) * share || (is_next && load < ROOMY_LOAD && needed <= share)
    }

    fn changed(&mut self, now: f64) {
        self.last = MemoryChange { secs: now, has_stepped: false, n_readings: 0, stalled: 0.0 };
        // What was held before says nothing about the new level.
        self.shares.clear();
    }
}

/// Whether memory is too contended to take more, though nothing need be given back.
fn is_under_pressure(telemetry: &Telemetry) -> bool {
    telemetry.memory_stall.is_some_and(|stalled| stalled >= STALL / 2.0)
        || telemetry.pressure_level.is_some_and(|level| level > PressureLevel::Normal)
}

/// Bytes that the run may hold in all.
fn size(share: ProcessMemory) -> u64 {
    u64::try_from(i128::from(share.held) + i128::from(share.left)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const NONE: [usize; 0] = [];

    fn levels() -> Vec<GovernorLevel> {
        [10, 8, 6, 5].map(|gib| GovernorLevel { bytes: gib * GIB }).to_vec()
    }

    /// A machine that lets the run hold so many GiB; steps end every second, unless it is paused.
    struct ContendedMachine {
        memory: MemoryControl,
        now: f64,
    }

    impl ContendedMachine {
        fn new() -> Self {
            Self { memory: MemoryControl::new(levels()), now: 0.0 }
        }

        /// Levels taken in so many seconds; a pause is the number of levels.
        fn wait(&mut self, secs: usize, allowed: f64, stalled: f64) -> Vec<usize> {
            let mut seen = Vec::new();
            for _ in 0..secs {
                self.now += 1.0;
                if !self.memory.is_paused() {
                    self.memory.stepped();
                }
                let held = levels()[self.memory.level()].bytes;
                let left = (allowed * GIB as f64) as i64 - held.cast_signed();
                let memory = Some(ProcessMemory { held, left });
                let telemetry =
                    Telemetry { memory, memory_stall: Some(stalled), ..Telemetry::default() };
                if self.memory.observe(self.now, &telemetry).is_some() {
                    seen.push(if self.memory.is_paused() { 4 } else { self.memory.level() });
                }
            }
            seen
        }
    }

    #[test]
    fn as_many_levels_as_the_figures_say() {
        let mut machine = ContendedMachine::new();
        assert_eq!(machine.wait(60, 10.5, 0.0), NONE);
        assert_eq!(machine.wait(1, 5.9, 0.0), [3], "urgent: no averaging");
        assert_eq!(machine.wait(60, 5.9, 0.0), NONE, "the next would take 6");
        assert_eq!(machine.wait(100, 8.5, 0.0), [1], "and so up: 10 do not fit");
        assert_eq!(machine.wait(100, 12.0, 0.0), [0]);
    }

    #[test]
    fn a_little_too_much_is_averaged() {
        let mut machine = ContendedMachine::new();
        assert_eq!(machine.wait(9, 9.8, 0.0), NONE);
        assert_eq!(machine.wait(1, 9.8, 0.0), [1]);
    }

    #[test]
    fn stalls_go_down_a_level_at_a_time_and_pause_at_last() {
        let mut machine = ContendedMachine::new();
        assert_eq!(machine.wait(1, 20.0, 0.5), [1], "at once");
        assert_eq!(machine.wait(30, 20.0, 0.5), [2, 3, 4]);
        assert_eq!(machine.wait(600, 20.0, 0.5), NONE, "still paused, never more");
        assert_eq!(machine.wait(60, 20.0, 0.0), [3, 0]);
    }

    #[test]
    fn a_stall_that_fades_is_the_past() {
        let mut machine = ContendedMachine::new();
        assert_eq!(machine.wait(1, 20.0, 0.4), [1]);
        for secs in 1..20 {
            let stalled = 0.4 * f64::exp(-f64::from(secs) / 10.0);
            assert_eq!(machine.wait(1, 20.0, stalled), NONE, "after {secs} s");
        }
    }

    #[test]
    fn a_level_that_did_not_last_is_not_tried_for_longer_each_time() {
        let mut machine = ContendedMachine::new();
        let mut n_changes = Vec::new();
        for _ in 0..6 {
            // A hog that comes and goes every two minutes, for an hour.
            let hour = (0..15)
                .map(|_| machine.wait(120, 9.0, 0.0).len() + machine.wait(120, 12.0, 0.0).len());
            n_changes.push(hour.sum::<usize>());
        }
        assert!(n_changes[0] <= 8 && n_changes[1..].iter().all(|n| *n <= 4), "{n_changes:?}");
        assert!(n_changes.iter().sum::<usize>() > 6, "it is tried again: {n_changes:?}");
    }

    #[test]
    fn a_refusal_counts_whatever_the_figures_say() {
        let mut memory = MemoryControl::new(levels());
        for level in [1, 2, 3, 3] {
            assert!(memory.out_of_memory(0.0).is_some());
            assert_eq!(memory.level(), level);
        }
        assert!(memory.is_paused());
        assert!(memory.out_of_memory(0.0).is_none(), "it is paused already");
    }

    #[test]
    fn a_change_is_judged_by_steps_taken_after_it() {
        let mut memory = MemoryControl::new(levels());
        let telemetry = Telemetry { memory_stall: Some(0.5), ..Telemetry::default() };
        assert!(memory.observe(0.0, &telemetry).is_some());
        // A long step still runs at the old level: its readings say nothing.
        assert!((1..60).all(|secs| memory.observe(f64::from(secs), &telemetry).is_none()));
        memory.stepped();
        assert!((60..63).all(|secs| memory.observe(f64::from(secs), &telemetry).is_none()));
        assert!(memory.observe(64.0, &telemetry).is_some());
    }
}
