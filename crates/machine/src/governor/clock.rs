//! Time as the governor counts it: seconds that never run backwards, whatever the caller's clock does.
//! A machine that slept, or a clock that was set, shows as a gap; what was averaged before it says
//! nothing about now.

use std::time::Duration;

/// Chosen: readings come every second; a minute without one is not a late one.
const GAP_SECS: f64 = 60.0;

/// The clock.
#[derive(Clone, Debug, Default)]
pub(super) struct GovernorClock {
    last: Option<Duration>,
    secs: f64,
}

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ClockTick {
    /// Seconds since the first.
    pub secs: f64,
    /// Whether the time before it is not to be trusted.
    pub is_after_gap: bool,
}

impl GovernorClock {
    /// Now; `busy_secs` is how long nothing could be told for a good reason.
    pub fn tick(&mut self, now: Duration, busy_secs: f64) -> ClockTick {
        let last = self.last.replace(now).unwrap_or(now);
        let ran_backwards = now < last;
        let passed = now.saturating_sub(last).as_secs_f64();
        self.secs += passed;
        ClockTick { secs: self.secs, is_after_gap: ran_backwards || passed > GAP_SECS + busy_secs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_never_runs_backwards_and_gaps_are_told() {
        let mut clock = GovernorClock::default();
        let mut at = |secs: u64| {
            let moment = clock.tick(Duration::from_secs(secs), 0.0);
            (moment.secs, moment.is_after_gap)
        };
        assert_eq!(at(1000), (0.0, false));
        assert_eq!(at(1001), (1.0, false));
        assert_eq!(at(400), (1.0, true));
        assert_eq!(at(402), (3.0, false));
        assert_eq!(at(4002), (3603.0, true));
        assert!(at(u64::MAX).0.is_finite());
    }

    #[test]
    fn a_long_step_is_no_gap() {
        let mut clock = GovernorClock::default();
        clock.tick(Duration::ZERO, 0.0);
        assert!(!clock.tick(Duration::from_secs(300), 300.0).is_after_gap);
        assert!(clock.tick(Duration::from_secs(900), 300.0).is_after_gap);
    }
}
