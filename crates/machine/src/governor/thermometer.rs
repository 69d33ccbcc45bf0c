//! What sensors say, made fit to be judged: single spikes are dropped, a sensor that says the same at work
//! and at rest is not believed, and what is coming is told from where the last readings lead. Sensors are compared by
//! their distance to their limits, since which of them is the hottest may change from reading to reading.

use std::collections::VecDeque;

use crate::feel::Heat;
use crate::reading::Celsius;

/// Seconds of readings that are judged together, unless a step and its rest take longer.
const WINDOW_SECS: f64 = 16.0;
const LONGEST_WINDOW_SECS: f64 = 300.0;

/// Readings that are kept at most; the sampler may be in a hurry.
const MOST_READINGS: usize = 512;

/// Seconds that are looked ahead. Chosen: as long as a change of pace takes to be judged.
const AHEAD_SECS: f64 = 20.0;

/// A trend smaller than this, over half a window, is noise of sensors that count whole degrees.
const NOISE: f64 = 1.0;

/// Seconds at rest after which a sensor that has not moved is not believed, doubled whenever that
/// turns out wrong.
const STUCK_SECS: f64 = 180.0;

/// Seconds at work that it must have said the same before.
const WORKED_SECS: f64 = 10.0;

/// A duty below this part of the one before counts as rest: any real sensor would notice.
const REST_PART: f64 = 0.7;

/// The readings.
#[derive(Clone, Debug)]
pub(super) struct Thermometer {
    last: VecDeque<f64>,
    /// When, and how many degrees above the limit.
    over: VecDeque<(f64, f64)>,
    unmoved: Unmoved,
    stuck_secs: f64,
    is_stuck: bool,
}

/// How hot it is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outlook {
    /// The sensor.
    pub sensor: String,
    /// What it says.
    pub celsius: f64,
    /// What it shall stay under.
    pub limit: f64,
    /// Degrees above that, without spikes.
    pub over: f64,
    /// Degrees above that it is going to be; not known right after a change of pace.
    pub ahead: Option<f64>,
}

/// A sensor that has not moved by a degree.
#[derive(Clone, Copy, Debug, Default)]
struct Unmoved {
    celsius: f64,
    last: f64,
    top_duty: f64,
    worked_secs: f64,
    rested_secs: f64,
}

impl Thermometer {
    pub fn new() -> Self {
        Self {
            last: VecDeque::with_capacity(3),
            over: VecDeque::new(),
            unmoved: Unmoved::default(),
            stuck_secs: STUCK_SECS,
            is_stuck: false,
        }
    }

    /// The pace changed, or time jumped: what is coming must be seen anew.
    pub fn start_afresh(&mut self) {
        self.over.clear();
    }

    /// Takes in what a sensor says while the run goes with that duty, each step and its rest taking
    /// `cycle_secs`. Nothing, if that is no temperature or the sensor is not believed.
    pub fn read(
        &mut self,
        now: f64,
        heat: &Heat,
        limit: f64,
        duty: f64,
        cycle_secs: f64,
    ) -> Option<Outlook> {
        let celsius = Celsius::from_sensor(heat.celsius).ok()?.0;
        self.watch(now, celsius, duty);
        if self.is_stuck {
            return None;
        }
        let over = self.without_spikes(celsius - limit);
        let window = (2.0 * cycle_secs).clamp(WINDOW_SECS, LONGEST_WINDOW_SECS);
        self.over.push_back((now, over));
        while self.over.len() > MOST_READINGS
            || self.over.front().is_some_and(|first| now - first.0 > window)
        {
            self.over.pop_front();
        }
        let ahead = self.ahead(now, window);
        Some(Outlook { sensor: heat.sensor.clone(), celsius, limit, over, ahead })
    }

    /// Whether the sensor is not believed, and for how long it has said the same.
    pub fn stuck_secs(&self) -> Option<f64> {
        self.is_stuck.then_some(self.unmoved.worked_secs + self.unmoved.rested_secs)
    }

    /// The middle one of the last three.
    fn without_spikes(&mut self, over: f64) -> f64 {
        if self.last.len() == 3 {
            self.last.pop_front();
        }
        self.last.push_back(over);
        let mut sorted: Vec<f64> = self.last.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    /// The peak of the newer half of the window, and as much more as it rose over that of the older.
    /// Peaks, since a limit is one, and since within a long step temperature goes up and down anyway.
    fn ahead(&self, now: f64, window: f64) -> Option<f64> {
        let middle = now - window / 2.0;
        let peak = |is_new: bool| {
            let half = self.over.iter().filter(|(at, _)| (*at > middle) == is_new);
            half.map(|(_, over)| *over).reduce(f64::max)
        };
        let first = self.over.front()?.0;
        let is_full = now - first >= 0.9 * window || self.over.len() == MOST_READINGS;
        let (old, new) = peak(false).zip(peak(true)).filter(|_| is_full)?;
        let rise = if new - old > NOISE { new - old } else { 0.0 };
        Some(new + rise * AHEAD_SECS / (window / 2.0))
    }

    fn watch(&mut self, now: f64, celsius: f64, duty: f64) {
        if (celsius - self.unmoved.celsius).abs() >= 1.0 {
            if std::mem::take(&mut self.is_stuck) {
                self.stuck_secs *= 2.0;
            }
            self.unmoved = Unmoved { celsius, last: now, top_duty: duty, ..Unmoved::default() };
            return;
        }
        let unmoved = &mut self.unmoved;
        let passed = now - std::mem::replace(&mut unmoved.last, now);
        if duty >= unmoved.top_duty {
            unmoved.top_duty = duty;
            unmoved.worked_secs += passed;
        } else if duty <= REST_PART * unmoved.top_duty {
            unmoved.rested_secs += passed;
        }
        self.is_stuck |=
            unmoved.worked_secs >= WORKED_SECS && unmoved.rested_secs >= self.stuck_secs;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(thermometer: &mut Thermometer, now: u32, celsius: f64, duty: f64) -> Option<Outlook> {
        let heat = Heat { sensor: "gpu".into(), celsius, limit: None };
        thermometer.read(f64::from(now), &heat, 80.0, duty, 1.0)
    }

    #[test]
    fn a_spike_is_dropped_and_nonsense_is_nothing() {
        let mut thermometer = Thermometer::new();
        read(&mut thermometer, 0, 60.0, 1.0);
        read(&mut thermometer, 1, 60.0, 1.0);
        assert_eq!(read(&mut thermometer, 2, 120.0, 1.0).unwrap().over, -20.0);
        for celsius in [0.0, f64::NAN, 1e9, -1.0] {
            assert_eq!(read(&mut thermometer, 3, celsius, 1.0), None);
        }
    }

    #[test]
    fn what_is_coming_is_told_from_the_rise() {
        let mut thermometer = Thermometer::new();
        let ramp = |secs| 60.0 + 0.25 * f64::from(secs);
        let seen: Vec<_> =
            (0..30).map(|secs| read(&mut thermometer, secs, ramp(secs), 1.0)).collect();
        assert_eq!(seen[10].as_ref().unwrap().ahead, None, "too early to tell");
        let last = seen[29].as_ref().unwrap();
        // 67 degrees at the end without the last reading, and five more in twenty seconds.
        assert!((last.ahead.unwrap() + 8.0).abs() < 1.0, "{last:?}");
    }

    #[test]
    fn a_sensor_that_does_not_notice_rest_is_not_believed() {
        let mut thermometer = Thermometer::new();
        assert!((0..100).all(|secs| read(&mut thermometer, secs, 90.0, 1.0).is_some()));
        assert!((100..270).all(|secs| read(&mut thermometer, secs, 90.0, 0.0).is_some()));
        assert!((270..300).any(|secs| read(&mut thermometer, secs, 90.0, 0.0).is_none()));
        assert!(thermometer.stuck_secs().is_some());
        assert!(read(&mut thermometer, 300, 85.0, 1.0).is_some(), "it moves: believed again");
        // At rest from the start: nothing to notice.
        let mut idle = Thermometer::new();
        assert!((0..999).all(|secs| read(&mut idle, secs, 40.0, 0.0).is_some()));
    }
}
