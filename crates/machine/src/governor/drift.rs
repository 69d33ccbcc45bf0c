//! The rule for heat that cannot be seen: steps that take longer than they did at their best, while every
//! sensor is content. Whether that is heat is found by trying: with less duty the machine cools, and if more gets
//! done in all, it was. If not, it was something else (a power cap, another program), and the run goes on at its
//! full duty. Expected times may be wrong by any factor, so drift is relative to the best of this run.

use std::collections::VecDeque;

use super::backoff::Backoff;
use super::cause::{Cause, rounded};
use super::{GovernorPolicy, MIN_DUTY, StepTime};

/// Samples that are averaged, without the fastest and the slowest.
const WINDOW: usize = 10;

/// The least that a sample covers, and one step at least. Chosen: a window is then two minutes or more, longer
/// than hardware takes to slow down, cool and speed up again.
const SAMPLE_SECS: f64 = 12.0;

/// Steps so many times slower are taken for heat until shown otherwise. Taken: laptops that slow down without
/// telling lose 15 % and more.
const DRIFT: f64 = 1.15;

/// Where less duty has helped, steps so many times slower are reason enough for still less.
const STILL: f64 = 1.05;

/// What calibrated rates may be wrong by, if they are this machine's own.
const CALIBRATION: f64 = 1.15;

/// More must get done by this part, or another duty was in vain.
const GAIN: f64 = 1.025;

/// Seconds that the machine is given to cool or to warm up before its steps count for a trial.
const SETTLING_SECS: f64 = 120.0;

/// Seconds of fast steps before more duty is tried, and how much more.
const CALM_SECS: f64 = 600.0;
const RISE: f64 = 1.05;

/// How long steps take, and the share of duty that follows.
#[derive(Clone, Debug)]
pub(super) struct Drift {
    is_paced: bool,
    start: Option<f64>,
    /// The best average of every level: expected times of different levels may be wrong by different factors.
    best: Vec<Option<f64>>,
    level: usize,
    open: StepTime,
    samples: VecDeque<f64>,
    now: f64,
    /// Samples in a row since when it has been slow.
    n_slow: usize,
    /// A drift that is known not to be heat.
    accepted: f64,
    share: f64,
    trial: Option<Trial>,
    changed_at: f64,
    raise_backoff: Backoff,
    lower_backoff: Backoff,
}

/// Another duty, to see whether more gets done.
#[derive(Clone, Copy, Debug)]
struct Trial {
    kind: TrialKind,
    /// The drift and the share before.
    drift: f64,
    share: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrialKind {
    /// Halfway to the duty at which steps at their best would do as much as slow ones do now.
    Less,
    /// Nearly all the way. If that is in vain too, it is something else than heat.
    Least,
    /// A little more.
    More,
}

impl Drift {
    pub fn new(policy: GovernorPolicy) -> Self {
        Self {
            is_paced: policy.avoids_throttling(),
            start: policy.is_calibrated.then_some(CALIBRATION),
            best: Vec::new(),
            level: 0,
            open: StepTime { secs: 0.0, expected_secs: 0.0 },
            samples: VecDeque::with_capacity(WINDOW),
            now: 1.0,
            n_slow: 0,
            accepted: 1.0,
            share: 1.0,
            trial: None,
            changed_at: f64::NEG_INFINITY,
            // Chosen: two tries an hour at first, then fewer. A try is judged, so none is by mistake.
            raise_backoff: Backoff::new(1800.0, 4.0 * 3600.0, f64::INFINITY),
            lower_backoff: Backoff::new(1800.0, 4.0 * 3600.0, f64::INFINITY),
        }
    }

    pub fn share(&self) -> f64 {
        self.share
    }

    /// Averages begin again.
    pub fn reset(&mut self) {
        self.open = StepTime { secs: 0.0, expected_secs: 0.0 };
        self.samples.clear();
        self.n_slow = 0;
    }

    /// Takes in a step on that level; `is_explained` is whether anything that can be seen makes it slow.
    pub fn record_step(
        &mut self,
        now: f64,
        took: StepTime,
        level: usize,
        is_explained: bool,
    ) -> Option<Cause> {
        let is_settling = self.trial.is_some() && now - self.changed_at < SETTLING_SECS;
        if !is_time(took.secs) || !is_time(took.expected_secs) || is_settling {
            return None;
        }
        if level != std::mem::replace(&mut self.level, level) {
            self.reset();
        }
        if !self.take_in(took) {
            return None;
        }
        self.now = self.measure()?;
        if !self.is_paced || is_explained {
            self.n_slow = 0;
            return None;
        }
        if let Some(trial) = self.trial {
            return self.judge(now, trial);
        }
        // What was accepted and went away is news when it comes again.
        self.accepted = self.accepted.min(self.now).max(1.0);
        if self.now < self.limit() {
            self.n_slow = 0;
            return self.fast(now);
        }
        self.n_slow += 1;
        // At first only the end of the window is slow.
        let is_due = self.n_slow >= WINDOW && self.lower_backoff.is_ready(now);
        is_due.then(|| self.try_less(now, self.limit()))
    }

    /// Returns whether there is a new sample.
    fn take_in(&mut self, took: StepTime) -> bool {
        self.open.secs += took.secs;
        self.open.expected_secs += took.expected_secs;
        if self.open.secs < SAMPLE_SECS {
            return false;
        }
        if self.samples.len() == WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back(self.open.secs / self.open.expected_secs);
        self.open = StepTime { secs: 0.0, expected_secs: 0.0 };
        true
    }

    /// The average beside the best one.
    fn measure(&mut self) -> Option<f64> {
        if self.samples.len() < WINDOW {
            return None;
        }
        let mut sorted: Vec<f64> = self.samples.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let average = sorted[1..WINDOW - 1].iter().sum::<f64>() / (WINDOW - 2) as f64;
        if self.best.len() <= self.level {
            self.best.resize(self.level + 1, self.start);
        }
        let best = self.best[self.level].get_or_insert(average);
        *best = best.min(average);
        Some(average / *best)
    }

    fn try_less(&mut self, now: f64, limit: f64) -> Cause {
        let cause = self.cause(limit);
        self.begin(now, Trial { kind: TrialKind::Less, drift: self.now, share: self.share });
        cause
    }

    fn begin(&mut self, now: f64, trial: Trial) {
        let break_even = self.accepted / trial.drift;
        let part = match trial.kind {
            TrialKind::Less => f64::midpoint(1.0, break_even),
            TrialKind::Least => (1.1 * break_even).min(1.0),
            TrialKind::More => RISE,
        };
        self.trial = Some(trial);
        self.set(now, (trial.share * part).clamp(MIN_DUTY, 1.0));
    }

    /// Keeps to the other duty if more gets done, goes back if not.
    fn judge(&mut self, now: f64, trial: Trial) -> Option<Cause> {
        self.trial = None;
        let (before, after) = (trial.share / trial.drift, self.share / self.now);
        if after > GAIN * before {
            self.changed_at = now;
            let is_still_slow = trial.kind != TrialKind::More && self.now >= self.accepted * STILL;
            return is_still_slow.then(|| self.try_less(now, self.accepted * STILL));
        }
        match trial.kind {
            TrialKind::Less if self.now >= self.limit() => {
                let cause = self.cause(self.limit());
                self.begin(now, Trial { kind: TrialKind::Least, ..trial });
                Some(cause)
            }
            TrialKind::Less | TrialKind::Least if trial.share < 1.0 => {
                wait(&mut self.lower_backoff, now);
                let (drift, limit) = (rounded(self.now), rounded(self.limit()));
                self.set(now, trial.share);
                Some(Cause::SpeedRecovered { drift, limit })
            }
            TrialKind::Less | TrialKind::Least => {
                self.accepted = trial.drift;
                wait(&mut self.lower_backoff, now);
                let (before, after) = (rounded(trial.drift), rounded(self.now));
                self.set(now, trial.share);
                Some(Cause::NotHeat { before, after })
            }
            TrialKind::More => {
                wait(&mut self.raise_backoff, now);
                let cause = self.cause(trial.drift * self.share / trial.share / GAIN);
                self.set(now, trial.share);
                Some(cause)
            }
        }
    }

    /// Fast, or nearly, for long: perhaps there is a better duty.
    fn fast(&mut self, now: f64) -> Option<Cause> {
        if self.share >= 1.0 || now - self.changed_at < CALM_SECS {
            return None;
        }
        let still = self.accepted * STILL;
        if self.now >= still && self.lower_backoff.is_ready(now) {
            return Some(self.try_less(now, still));
        }
        if !self.raise_backoff.is_ready(now) {
            return None;
        }
        let (drift, limit) = (rounded(self.now), rounded(self.limit()));
        self.begin(now, Trial { kind: TrialKind::More, drift: self.now, share: self.share });
        Some(Cause::SpeedRecovered { drift, limit })
    }

    fn set(&mut self, now: f64, share: f64) {
        self.share = (100.0 * share).round() / 100.0;
        self.changed_at = now;
        self.reset();
    }

    fn cause(&self, limit: f64) -> Cause {
        Cause::Slow { drift: rounded(self.now), limit: rounded(limit) }
    }

    /// The drift that is not let pass.
    fn limit(&self) -> f64 {
        self.accepted * DRIFT
    }
}

/// Something was in vain.
fn wait(patience: &mut Backoff, now: f64) {
    patience.start(now);
    patience.fail(now);
}

/// A time that a step can take; a day is none.
fn is_time(secs: f64) -> bool {
    secs > 0.0 && secs < 86_400.0
}
