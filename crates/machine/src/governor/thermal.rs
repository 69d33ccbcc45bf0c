//! The rule for heat that can be seen: by a sensor's temperature, or by the hardware's throttle flags. It sets a
//! duty cycle: lower when the limit is about to be passed, higher when there is headroom, and a pause far above. Temperature above ambient grows about as power does, and power as duty does, so one
//! division says which duty to take; it is wrong by what the sensor is warmed by others, and corrected by the next.

use std::collections::VecDeque;

use super::MIN_DUTY;
use super::backoff::Backoff;
use super::cause::{Cause, rounded};
use super::mode::GovernorPolicy;
use super::thermometer::{TemperatureForecast, Thermometer};
use crate::telemetry::{Telemetry, ThrottleCause};

/// Degrees above the limit that stop a run at once. Chosen: pacing keeps within them unless something
/// happens that it cannot see coming, as a fan that stops.
pub const OVERSHOOT: f64 = 3.0;

/// Degrees below the limit at which it goes on.
const GO_ON_BELOW: f64 = 5.0;

/// Degrees below the limit that are good enough. Chosen: 1.5 of 60 above ambient are 2.5 % of speed.
const BAND: f64 = 1.5;

/// Degrees above the limit that it takes to lower the duty. Chosen: as much as peaks of honest sensors are off.
const HOT_ABOVE: f64 = 1.0;

/// Degrees below the limit that a higher duty aims at.
const AIM_BELOW: f64 = 0.5;

/// Ambient temperature, which nobody measures. Chosen: a warmer one makes corrections smaller, never
/// wrong in sign.
const AMBIENT_CELSIUS: f64 = 25.0;

/// Changes of duty smaller than this part are not worth one.
const SMALLEST_PART: f64 = 0.02;

/// The most that duty rises by at once, and after how many seconds. Chosen: from a third to all within two
/// minutes.
const RISE: f64 = 1.6;
const RISE_SECS: f64 = 25.0;

/// The same so many degrees below the limit or nearer, where a heat sink that still warms up matters.
const NEAR: f64 = 6.0;
const NEAR_RISE_SECS: f64 = 300.0;

/// A rise up to this is taken back whole if it does not last; of a larger one, the limit says how much.
const SMALL_RISE: f64 = 1.1;

/// Degrees cooler than when a duty was taken that did not last: it may be tried at once.
const COOLER: f64 = 3.0;

/// Readings in which the hardware says whether it slows itself down, and how many are believed.
const FLAGS: usize = 10;
const FLAGGED: usize = 5;

/// What duty loses while the hardware slows itself down, after how many seconds, and the least that is left:
/// the rest is the hardware's own work.
const FLAGGED_PART: f64 = 0.9;
const FLAGGED_SECS: f64 = 30.0;
const FLAGGED_LEAST: f64 = 0.3;

/// Seconds for which a sensor that falls silent is still believed.
const SILENT_SECS: f64 = 60.0;

/// The temperature, and the duty that follows from it.
#[derive(Clone, Debug)]
pub(super) struct ThermalControl {
    policy: GovernorPolicy,
    thermometer: Thermometer,
    duty: f64,
    is_paused: bool,
    changed_at: f64,
    read_at: Option<f64>,
    flags: VecDeque<bool>,
    flagged_at: f64,
    raised: Raise,
    /// How far from the limit it was state to be when a higher duty was taken that did not last.
    too_warm: f64,
    raise_backoff: Backoff,
    resume_backoff: Backoff,
}

/// A higher duty that was taken.
#[derive(Clone, Copy, Debug)]
struct Raise {
    from: f64,
    to: f64,
    /// How far from the limit it was state to be.
    ahead: f64,
}

/// The run's pace while a reading is taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct DutyState {
    /// Its duty.
    pub duty: f64,
    /// The highest that anything else allows.
    pub most_duty: f64,
    /// Whether it is paused for want of memory.
    pub is_paused_for_memory: bool,
    /// Seconds that a step takes with its rest.
    pub cycle_secs: f64,
}

impl ThermalControl {
    pub fn new(policy: GovernorPolicy) -> Self {
        Self {
            policy,
            thermometer: Thermometer::new(),
            duty: 1.0,
            is_paused: false,
            changed_at: f64::NEG_INFINITY,
            read_at: None,
            flags: VecDeque::with_capacity(FLAGS),
            flagged_at: f64::NEG_INFINITY,
            raised: Raise { from: 1.0, to: 1.0, ahead: 0.0 },
            too_warm: f64::INFINITY,
            // Chosen: three tries an hour at first, then fewer; what lasted an hour was right.
            raise_backoff: Backoff::new(900.0, 7200.0, 3600.0),
            resume_backoff: Backoff::new(30.0, 1800.0, 3600.0),
        }
    }

    pub fn duty(&self) -> f64 {
        self.duty
    }

    pub fn is_paused(&self) -> bool {
        self.is_paused
    }

    /// Whether heat explains slow steps at this moment, where all else allows that duty.
    pub fn is_limiting(&self, now: f64, most_duty: f64) -> bool {
        self.duty < most_duty || self.is_paused || now - self.flagged_at < FLAGGED_SECS
    }

    /// Averages begin again.
    pub fn reset(&mut self) {
        self.thermometer.reset();
        self.flags.clear();
    }

    /// Takes in a reading.
    pub fn observe(&mut self, now: f64, telemetry: &Telemetry, state: DutyState) -> Option<Cause> {
        self.take_in_flag(now, telemetry.throttled);
        let was_stuck = self.thermometer.stuck_secs().is_some();
        let forecast = telemetry.temperature.as_ref().and_then(|heat| {
            let duty = if self.is_paused || state.is_paused_for_memory { 0.0 } else { state.duty };
            let limit = self.policy.limit(heat);
            self.thermometer.read(now, heat, limit, duty, state.cycle_secs)
        });
        if let (Some(secs), Some(heat), false) =
            (self.thermometer.stuck_secs(), &telemetry.temperature, was_stuck)
        {
            let (sensor, celsius) = (heat.sensor.clone(), rounded(heat.celsius));
            self.resume(now);
            return Some(Cause::SensorStuck { sensor, celsius, secs: secs.round() });
        }
        match forecast {
            Some(forecast) => {
                self.read_at = Some(now);
                self.judge(now, &forecast, state)
            }
            None => self.judge_blind(now, state),
        }
    }

    fn take_in_flag(&mut self, now: f64, throttled: Option<ThrottleCause>) {
        let is_flagged = throttled == Some(ThrottleCause::Heat);
        if self.flags.len() == FLAGS {
            self.flags.pop_front();
        }
        self.flags.push_back(is_flagged);
        if is_flagged {
            self.flagged_at = now;
        }
    }

    fn judge(
        &mut self,
        now: f64,
        forecast: &TemperatureForecast,
        state: DutyState,
    ) -> Option<Cause> {
        if self.is_paused {
            let is_cool = forecast.over <= -GO_ON_BELOW && self.resume_backoff.is_ready(now);
            return is_cool.then(|| {
                self.resume_backoff.start(now);
                self.resume(now);
                forecast.cool()
            });
        }
        if forecast.over > OVERSHOOT {
            self.resume_backoff.fail(now);
            self.is_paused = true;
            self.changed(now);
            return Some(forecast.too_hot());
        }
        if let Some(cause) = self.flagged(now, state) {
            return Some(cause);
        }
        let ahead = forecast.ahead.filter(|_| !state.is_paused_for_memory)?;
        if ahead > HOT_ABOVE {
            return self.lower(now, ahead, forecast, state);
        }
        self.raise(now, ahead, forecast, state)
    }

    /// Fewer degrees need fewer watts.
    fn lower(
        &mut self,
        now: f64,
        ahead: f64,
        forecast: &TemperatureForecast,
        state: DutyState,
    ) -> Option<Cause> {
        let headroom = forecast.headroom();
        let wanted = state.duty * (headroom / (headroom + ahead)).min(1.0 - SMALLEST_PART);
        self.set_lower(now, wanted, state).then(|| forecast.hot())
    }

    fn raise(
        &mut self,
        now: f64,
        ahead: f64,
        forecast: &TemperatureForecast,
        state: DutyState,
    ) -> Option<Cause> {
        let headroom = forecast.headroom();
        let rise = (headroom - AIM_BELOW) / (headroom + ahead).max(1.0);
        let is_due = ahead < -NEAR || now - self.changed_at >= NEAR_RISE_SECS;
        let has_room = ahead < -BAND && is_due && self.is_long_unflagged(now);
        let to = self.higher_duty(now, rise.clamp(1.0, RISE), state).filter(|_| has_room)?;
        if !self.raise_backoff.is_ready(now) && ahead >= self.too_warm - COOLER {
            return None;
        }
        self.set_higher(now, Raise { from: state.duty, to, ahead });
        Some(forecast.cool())
    }

    /// No temperature is known: the throttle flags alone count, and what was decided by a sensor is
    /// taken back after a while.
    fn judge_blind(&mut self, now: f64, state: DutyState) -> Option<Cause> {
        let silent_secs = self.read_at.map(|at| now - at).filter(|secs| *secs >= SILENT_SECS);
        if self.is_paused {
            return silent_secs.map(|secs| {
                self.resume(now);
                Cause::SensorLost { secs: secs.round() }
            });
        }
        if let Some(cause) = self.flagged(now, state) {
            return Some(cause);
        }
        if (self.read_at.is_some() && silent_secs.is_none()) || !self.is_long_unflagged(now) {
            return None;
        }
        let to = self.higher_duty(now, RISE, state).filter(|_| self.raise_backoff.is_ready(now))?;
        self.set_higher(now, Raise { from: state.duty, to, ahead: 0.0 });
        Some(match silent_secs {
            Some(secs) => Cause::SensorLost { secs: secs.round() },
            None => Cause::ThrottleOver { secs: (now - self.flagged_at).round().min(1e6) },
        })
    }

    /// The hardware throttles: a little less duty, then see.
    fn flagged(&mut self, now: f64, state: DutyState) -> Option<Cause> {
        let readings = self.flags.iter().filter(|is_flagged| **is_flagged).count();
        if readings < FLAGGED {
            return None;
        }
        let cause = Cause::ThrottledByHeat { readings, of: self.flags.len() };
        if !self.policy.avoids_throttling() {
            return Some(cause);
        }
        let is_due = now - self.changed_at >= FLAGGED_SECS && state.duty > FLAGGED_LEAST;
        let wanted = (FLAGGED_PART * state.duty).max(FLAGGED_LEAST);
        (is_due && self.set_lower(now, wanted, state)).then_some(cause)
    }

    fn is_long_unflagged(&self, now: f64) -> bool {
        now - self.flagged_at >= RISE_SECS
    }

    /// Lower; where a small rise did not last, back to what it was before at least. Returns whether it changed.
    fn set_lower(&mut self, now: f64, wanted: f64, state: DutyState) -> bool {
        let is_mistake = self.raise_backoff.is_recent(now) && state.duty <= self.raised.to;
        let is_small = self.raised.to <= SMALL_RISE * self.raised.from;
        let wanted = if is_mistake && is_small { wanted.min(self.raised.from) } else { wanted };
        let duty = whole_percent(wanted).max(MIN_DUTY);
        if duty >= state.duty {
            return false;
        }
        if is_mistake {
            self.too_warm = self.too_warm.min(self.raised.ahead);
        }
        self.raise_backoff.fail(now);
        self.duty = duty;
        self.changed(now);
        true
    }

    /// The duty to rise to, if it is time and worth it.
    fn higher_duty(&self, now: f64, rise: f64, state: DutyState) -> Option<f64> {
        let is_due = now - self.changed_at >= RISE_SECS && !state.is_paused_for_memory;
        let wanted = state.duty * rise;
        let to = if wanted >= 1.0 - SMALLEST_PART { 1.0 } else { whole_percent(wanted + 0.005) };
        let is_worth_it = to >= (1.0 + SMALLEST_PART) * self.duty || (to == 1.0 && self.duty < 1.0);
        (is_due && is_worth_it && state.duty < state.most_duty).then_some(to)
    }

    fn set_higher(&mut self, now: f64, raise: Raise) {
        if self.raise_backoff.is_ready(now) {
            self.too_warm = f64::INFINITY;
        }
        self.duty = raise.to;
        self.raised = raise;
        self.raise_backoff.start(now);
        self.changed(now);
    }

    /// After a pause, with less duty than before.
    fn resume(&mut self, now: f64) {
        if std::mem::take(&mut self.is_paused) {
            self.duty = whole_percent(0.8 * self.duty).max(MIN_DUTY);
        }
        self.changed(now);
    }

    fn changed(&mut self, now: f64) {
        self.changed_at = now;
        self.thermometer.reset();
    }
}

impl TemperatureForecast {
    /// Degrees between ambient temperature and the limit.
    fn headroom(&self) -> f64 {
        (self.limit - AMBIENT_CELSIUS).max(15.0)
    }

    fn hot(&self) -> Cause {
        let (sensor, celsius, limit) = self.figures();
        Cause::Hot { sensor, celsius, limit }
    }

    fn too_hot(&self) -> Cause {
        let (sensor, celsius, limit) = self.figures();
        Cause::TooHot { sensor, celsius, limit }
    }

    fn cool(&self) -> Cause {
        let (sensor, celsius, limit) = self.figures();
        Cause::Cool { sensor, celsius, limit }
    }

    fn figures(&self) -> (String, f64, f64) {
        (self.sensor.clone(), rounded(self.celsius), rounded(self.limit))
    }
}

/// Duties are whole percents: people read them.
fn whole_percent(duty: f64) -> f64 {
    (100.0 * duty + 1e-9).floor() / 100.0
}
