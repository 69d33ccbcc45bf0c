//! Power: the battery, which lowers the duty, and whatever holds the clock down without heat, against which
//! no pace helps. The governor reports each only once.

use super::backoff::Backoff;
use super::cause::Cause;
use crate::telemetry::{Telemetry, ThrottleCause};

/// Readings in a row that are believed. Chosen: drivers report a brake for a moment when load begins.
const BELIEVED: usize = 5;

/// Seconds on mains before the pace rises again.
const MAINS_SECS: f64 = 45.0;

/// What is known about power.
#[derive(Clone, Debug)]
pub(super) struct PowerControl {
    is_on_battery: bool,
    /// When it was last seen on battery, and in how many readings up to now.
    battery_at: f64,
    n_battery: usize,
    /// What held the clock down at last, and in how many readings up to now.
    throttled: Option<ThrottleCause>,
    n_throttled: usize,
    backoff: Backoff,
}

impl PowerControl {
    pub fn new() -> Self {
        Self {
            is_on_battery: false,
            battery_at: f64::NEG_INFINITY,
            n_battery: 0,
            throttled: None,
            n_throttled: 0,
            // Chosen: a plug with a loose contact is believed three times an hour.
            backoff: Backoff::new(600.0, 3600.0, 1200.0),
        }
    }

    pub fn is_on_battery(&self) -> bool {
        self.is_on_battery
    }

    /// Takes in a reading.
    pub fn observe(&mut self, now: f64, telemetry: &Telemetry) -> Option<Cause> {
        let clock = self.clock(telemetry.throttled);
        self.battery(now, telemetry.on_battery).or(clock)
    }

    fn battery(&mut self, now: f64, on_battery: Option<bool>) -> Option<Cause> {
        if on_battery? {
            self.battery_at = now;
            self.n_battery += 1;
        } else {
            self.n_battery = 0;
        }
        if !self.is_on_battery && self.n_battery >= BELIEVED {
            self.is_on_battery = true;
            self.backoff.fail(now);
            return Some(Cause::OnBattery);
        }
        let is_steady = now - self.battery_at >= MAINS_SECS && self.backoff.is_ready(now);
        if self.is_on_battery && is_steady {
            self.is_on_battery = false;
            self.backoff.start(now);
            return Some(Cause::OnMains);
        }
        None
    }

    fn clock(&mut self, throttled: Option<ThrottleCause>) -> Option<Cause> {
        self.n_throttled = if throttled == self.throttled { self.n_throttled + 1 } else { 1 };
        self.throttled = throttled;
        let cause = match throttled? {
            ThrottleCause::Heat => return None,
            ThrottleCause::PowerBrake => Cause::PowerBrake,
            ThrottleCause::StuckPower => Cause::StuckPower,
            ThrottleCause::LowPower => Cause::LowPower,
        };
        (self.n_throttled >= BELIEVED).then_some(cause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loose_plug_is_believed_less_and_less() {
        let mut power = PowerControl::new();
        let mut n_changes = [0; 6];
        for secs in 0..6 * 3600_u32 {
            let on_battery = Some(secs / 60 % 2 == 1);
            let telemetry = Telemetry { on_battery, ..Telemetry::default() };
            n_changes[secs as usize / 3600] +=
                usize::from(power.observe(f64::from(secs), &telemetry).is_some());
        }
        assert!(n_changes.iter().all(|n| (1..=8).contains(n)), "{n_changes:?}");
        assert!(n_changes[5] <= 2, "{n_changes:?}");
    }

    #[test]
    fn a_moment_is_not_believed() {
        let mut power = PowerControl::new();
        let mut said = |throttled: Option<ThrottleCause>, n: usize| {
            let telemetry = Telemetry { throttled, ..Telemetry::default() };
            (0..n).filter_map(|_| power.observe(0.0, &telemetry)).last()
        };
        assert_eq!(said(Some(ThrottleCause::PowerBrake), 4), None);
        assert_eq!(said(None, 1), None);
        assert_eq!(said(Some(ThrottleCause::PowerBrake), 4), None);
        assert_eq!(said(Some(ThrottleCause::StuckPower), 5), Some(Cause::StuckPower));
        assert_eq!(said(Some(ThrottleCause::Heat), 50), None);
    }
}
