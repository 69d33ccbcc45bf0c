//! The rule for heat that cannot be seen: steps that take longer than they did at their best, while every
//! sensor is content. Whether that is heat is found by trying: with less duty the machine cools, and if more gets
//! done in all, it was. If not, it was something else (a power cap, another program), and the run goes on at its
//! full duty. Expected times may be wrong by any factor, so drift is relative to the best of this run.

use std::collections::VecDeque;

use super::cause::{Cause, rounded};
use super::patience::Patience;
use super::{MIN_DUTY, Policy, Took};

/// Samples that are averaged, without the fastest and the slowest.
const WINDOW: usize = 10;

/// The least that a sample covers, and one step at least. Chosen: short steps are all noise.
const SAMPLE_SECS: f64 = 3.0;

/// Steps so many times slower are taken for heat until shown otherwise. Taken: laptops that slow down without
/// telling lose 15 % and more.
const DRIFT: f64 = 1.15;

/// What calibrated rates may be wrong by, if they are this machine's own.
const CALIBRATION: f64 = 1.15;

/// More must get done by this part, or less duty was in vain.
const GAIN: f64 = 1.03;

/// Seconds that the machine is given to cool before a trial is judged.
const COOLING_SECS: f64 = 120.0;

/// Trials before it is taken for something else than heat: halfway to the pace that steps went at,
/// and nearly all the way.
const TRIALS: u32 = 2;

/// Seconds of fast steps before more duty is tried, and how much more.
const CALM_SECS: f64 = 600.0;
const RISE: f64 = 1.05;

/// How long steps take, and the share of duty that follows.
#[derive(Clone, Debug)]
pub(super) struct Drift {
    is_paced: bool,
    start: Option<f64>,
    /// The best average of every rung: expected times of different rungs may be wrong by different factors.
    best: Vec<Option<f64>>,
    rung: usize,
    open: Took,
    samples: VecDeque<f64>,
    now: f64,
    /// A drift that is known not to be heat.
    accepted: f64,
    share: f64,
    /// The share before the last rise.
    lower_share: f64,
    trial: Option<Trial>,
    changed_at: f64,
    higher: Patience,
    trials: Patience,
}

/// Less duty, to see whether more gets done.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// The drift and the share before.
    drift: f64,
    share: f64,
    n: u32,
}

impl Drift {
    pub fn new(policy: Policy) -> Self {
        Self {
            is_paced: policy.spares_the_hardware(),
            start: policy.is_calibrated.then_some(CALIBRATION),
            best: Vec::new(),
            rung: 0,
            open: Took { secs: 0.0, expected_secs: 0.0 },
            samples: VecDeque::with_capacity(WINDOW),
            now: 1.0,
            accepted: 1.0,
            share: 1.0,
            lower_share: 1.0,
            trial: None,
            changed_at: f64::NEG_INFINITY,
            // Chosen: two tries an hour at first, then fewer; what lasted a quarter of an hour was right.
            higher: Patience::new(1800.0, 4.0 * 3600.0, 900.0),
            trials: Patience::new(1800.0, 4.0 * 3600.0, f64::INFINITY),
        }
    }

    pub fn share(&self) -> f64 {
        self.share
    }

    /// How many times as long steps take as at their best.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Averages begin again.
    pub fn start_afresh(&mut self) {
        self.open = Took { secs: 0.0, expected_secs: 0.0 };
        self.samples.clear();
    }

    /// Takes in a step on that rung; `is_explained` is whether anything that can be seen makes it slow.
    pub fn took(&mut self, now: f64, took: Took, rung: usize, is_explained: bool) -> Option<Cause> {
        if !is_time(took.secs) || !is_time(took.expected_secs) {
            return None;
        }
        if rung != std::mem::replace(&mut self.rung, rung) {
            self.start_afresh();
        }
        self.take_in(took);
        self.now = self.measure()?;
        if !self.is_paced {
            return None;
        }
        if self.trial.is_some() {
            let is_fair = now - self.changed_at >= COOLING_SECS && !is_explained;
            return is_fair.then(|| self.judge(now)).flatten();
        }
        // What was accepted and went away is news when it comes again.
        self.accepted = self.accepted.min(self.now.max(1.0) * DRIFT.sqrt()).max(1.0);
        let is_slow = self.now >= self.accepted * DRIFT;
        match (is_slow, is_explained) {
            (true, false) => self.slow(now),
            (false, false) => self.fast(now),
            (_, true) => None,
        }
    }

    fn take_in(&mut self, took: Took) {
        self.open.secs += took.secs;
        self.open.expected_secs += took.expected_secs;
        if self.open.secs < SAMPLE_SECS {
            return;
        }
        if self.samples.len() == WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back(self.open.secs / self.open.expected_secs);
        self.open = Took { secs: 0.0, expected_secs: 0.0 };
    }

    /// The average beside the best one.
    fn measure(&mut self) -> Option<f64> {
        if self.samples.len() < WINDOW {
            return None;
        }
        let mut sorted: Vec<f64> = self.samples.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let average = sorted[1..WINDOW - 1].iter().sum::<f64>() / (WINDOW - 2) as f64;
        if self.best.len() <= self.rung {
            self.best.resize(self.rung + 1, self.start);
        }
        let best = self.best[self.rung].get_or_insert(average);
        *best = best.min(average);
        Some(average / *best)
    }

    /// Slow for no reason that can be seen.
    fn slow(&mut self, now: f64) -> Option<Cause> {
        let cause = self.cause();
        if self.share < 1.0 && self.higher.is_fresh(now) {
            self.higher.lost(now);
            self.set(now, self.lower_share);
            return Some(cause);
        }
        if !self.trials.allows(now) {
            return None;
        }
        self.begin(now, Trial { drift: self.now, share: self.share, n: 0 });
        Some(cause)
    }

    fn begin(&mut self, now: f64, trial: Trial) {
        // At this part of the duty, steps at their best would do as much as now.
        let break_even = self.accepted / trial.drift;
        let part = if trial.n == 0 { f64::midpoint(1.0, break_even) } else { 1.1 * break_even };
        self.trial = Some(trial);
        self.set(now, (trial.share * part).clamp(MIN_DUTY, trial.share));
    }

    fn judge(&mut self, now: f64) -> Option<Cause> {
        let trial = self.trial?;
        let done = |share: f64, drift: f64| share / drift;
        if done(self.share, self.now) > GAIN * done(trial.share, trial.drift) {
            self.trial = None;
            self.changed_at = now;
            return None;
        }
        if trial.n + 1 < TRIALS && self.now >= self.accepted * DRIFT {
            self.begin(now, Trial { n: trial.n + 1, ..trial });
            return Some(self.cause());
        }
        self.trial = None;
        self.accepted = trial.drift;
        self.trials.took(now);
        self.trials.lost(now);
        let after = self.now;
        self.set(now, trial.share);
        Some(Cause::NotHeat { before: rounded(trial.drift), after: rounded(after) })
    }

    /// Fast for long: perhaps more is possible.
    fn fast(&mut self, now: f64) -> Option<Cause> {
        let is_due = now - self.changed_at >= CALM_SECS && self.higher.allows(now);
        if self.share >= 1.0 || !is_due {
            return None;
        }
        let cause = Cause::SlowNoMore { drift: rounded(self.now), limit: rounded(self.limit()) };
        self.lower_share = self.share;
        self.higher.took(now);
        self.set(now, (RISE * self.share).min(1.0));
        Some(cause)
    }

    fn set(&mut self, now: f64, share: f64) {
        self.share = (100.0 * share).round() / 100.0;
        self.changed_at = now;
        self.start_afresh();
    }

    fn cause(&self) -> Cause {
        Cause::Slow { drift: rounded(self.now), limit: rounded(self.limit()) }
    }

    fn limit(&self) -> f64 {
        self.accepted * DRIFT
    }
}

/// A time that a step can take; a day is none.
fn is_time(secs: f64) -> bool {
    secs > 0.0 && secs < 86_400.0
}
