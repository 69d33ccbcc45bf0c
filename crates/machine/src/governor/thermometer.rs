//! What sensors say, made fit to be judged: single spikes are dropped, a sensor that says the same at work
//! and at rest is not believed, and what is coming is told from where the last readings lead. Sensors are compared by
//! their distance to their limits, since which of them is the hottest may change from reading to reading.

use std::collections::VecDeque;
use std::ops::Range;

use crate::reading::Celsius;
use crate::telemetry::Temperature;

/// Seconds of readings that are judged together, unless a step and its rest take longer.
const WINDOW_SECS: f64 = 24.0;
const LONGEST_WINDOW_SECS: f64 = 1200.0;

/// Slots that a window is kept in, so that long windows and hasty samplers take no more memory.
const SLOTS: f64 = 48.0;

/// Seconds that are looked ahead. Chosen: two changes of pace are judged in that time.
const AHEAD_SECS: f64 = 30.0;

/// Degrees of a rise, from one half of the window to the other, that are noise; and the most that is expected
/// on top of what is.
const NOISE: f64 = 0.7;
const MOST_RISE: f64 = 4.0;

/// Degrees from one reading to the next that no silicon does, and how often it must say so to be believed.
const JUMP: f64 = 15.0;
const BELIEVED: usize = 4;

/// Readings before the first counts: a sensor that is stuck shows by not noticing that work ends.
const FEWEST: usize = 7;

/// Seconds at rest after which a sensor that has not moved is not believed, doubled whenever that
/// turns out wrong.
const STUCK_SECS: f64 = 180.0;

/// Seconds at work that it must have said the same before.
const WORKED_SECS: f64 = 5.0;

/// A duty below this part of the one before counts as rest: any real sensor would notice.
const REST_PART: f64 = 0.7;

/// The readings.
#[derive(Clone, Debug)]
pub(super) struct Thermometer {
    /// The last that was believed, and how many since were not.
    last: Option<f64>,
    n_jumps: usize,
    n_read: usize,
    slots: VecDeque<ThermometerSlot>,
    unmoved: StuckSensor,
    stuck_secs: f64,
    is_stuck: bool,
}

/// How hot it is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TemperatureForecast {
    /// The sensor.
    pub sensor: String,
    /// What it says.
    pub celsius: f64,
    /// What it shall stay under.
    pub limit: f64,
    /// Degrees above that.
    pub over: f64,
    /// Degrees above that it is going to be; not known right after a change of pace.
    pub ahead: Option<f64>,
}

/// Readings of a part of the window, in degrees above the limit.
#[derive(Clone, Copy, Debug)]
struct ThermometerSlot {
    at: f64,
    /// The two highest.
    top: [f64; 2],
    sum: f64,
    n: f64,
}

/// A sensor that has not moved by a degree.
#[derive(Clone, Copy, Debug, Default)]
struct StuckSensor {
    celsius: f64,
    last: f64,
    top_duty: f64,
    worked_secs: f64,
    rested_secs: f64,
}

impl Thermometer {
    pub fn new() -> Self {
        Self {
            last: None,
            n_jumps: 0,
            n_read: 0,
            slots: VecDeque::new(),
            unmoved: StuckSensor::default(),
            stuck_secs: STUCK_SECS,
            is_stuck: false,
        }
    }

    /// The pace changed, or time jumped: what is coming must be seen anew.
    pub fn reset(&mut self) {
        self.slots.clear();
    }

    /// Takes in what a sensor says while the run goes with that duty, each step and its rest taking
    /// `cycle_secs`. Nothing, if that is no temperature or the sensor is not believed.
    pub fn read(
        &mut self,
        now: f64,
        heat: &Temperature,
        limit: f64,
        duty: f64,
        cycle_secs: f64,
    ) -> Option<TemperatureForecast> {
        let celsius = Celsius::from_sensor(heat.celsius).ok()?.0;
        if self.is_spike(celsius) {
            return None;
        }
        self.n_read += 1;
        self.watch(now, celsius, duty);
        if self.is_stuck || self.n_read < FEWEST {
            return None;
        }
        let over = celsius - limit;
        let window = window(cycle_secs);
        self.keep(now, over, window);
        let ahead = self.ahead(now, window);
        Some(TemperatureForecast { sensor: heat.sensor.clone(), celsius, limit, over, ahead })
    }

    /// Whether the sensor is not believed, and for how long it has said the same.
    pub fn stuck_secs(&self) -> Option<f64> {
        self.is_stuck.then_some(self.unmoved.worked_secs + self.unmoved.rested_secs)
    }

    /// Whether it is a temperature that can follow the last one, or insists to be.
    fn is_spike(&mut self, celsius: f64) -> bool {
        let is_jump = self.last.is_some_and(|last| (celsius - last).abs() > JUMP);
        self.n_jumps = if is_jump { self.n_jumps + 1 } else { 0 };
        let is_spike = (1..BELIEVED).contains(&self.n_jumps);
        if !is_spike {
            self.last = Some(celsius);
        }
        is_spike
    }

    fn keep(&mut self, now: f64, over: f64, window: f64) {
        while self.slots.front().is_some_and(|first| now - first.at > window) {
            self.slots.pop_front();
        }
        match self.slots.back_mut().filter(|last| now - last.at < window / SLOTS) {
            Some(last) => {
                last.top = higher(last.top, over);
                last.sum += over;
                last.n += 1.0;
            }
            None => self.slots.push_back(ThermometerSlot {
                at: now,
                top: higher(NOTHING, over),
                sum: over,
                n: 1.0,
            }),
        }
    }

    /// The peak of the newer half of the window, and as much more as the mean will rise if it goes on as from the
    /// older half to the newer. Peaks, since a limit is one; the second highest, since the highest is noise.
    fn ahead(&self, now: f64, window: f64) -> Option<f64> {
        if now - self.slots.front()?.at < 0.9 * window {
            return None;
        }
        let middle = self.slots.partition_point(|slot| slot.at <= now - window / 2.0);
        let mean = |slots: Range<usize>| {
            let slots = self.slots.range(slots);
            let (sum, n) = slots.fold((0.0, 0.0), |(sum, n), slot| (sum + slot.sum, n + slot.n));
            (n > 0.0).then(|| sum / n)
        };
        let (old, new) = mean(0..middle).zip(mean(middle..self.slots.len()))?;
        let rise = (new - old - NOISE) * AHEAD_SECS / (window / 2.0);
        let tops = self.slots.range(middle..).flat_map(|slot| slot.top);
        let [highest, second] = tops.fold(NOTHING, higher);
        let peak = if second.is_finite() { second } else { highest };
        Some(peak + rise.clamp(0.0, MOST_RISE))
    }

    fn watch(&mut self, now: f64, celsius: f64, duty: f64) {
        if (celsius - self.unmoved.celsius).abs() >= 1.0 {
            if std::mem::take(&mut self.is_stuck) {
                self.stuck_secs *= 2.0;
            }
            self.unmoved =
                StuckSensor { celsius, last: now, top_duty: duty, ..StuckSensor::default() };
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

const NOTHING: [f64; 2] = [f64::NEG_INFINITY; 2];

/// The two highest of three.
fn higher([first, second]: [f64; 2], other: f64) -> [f64; 2] {
    [first.max(other), second.max(first.min(other))]
}

/// Two halves of whole cycles: within a step and its rest, temperature goes up and down anyway.
fn window(cycle_secs: f64) -> f64 {
    let cycle_secs = cycle_secs.clamp(0.1, LONGEST_WINDOW_SECS / 2.0);
    2.0 * cycle_secs * (WINDOW_SECS / 2.0 / cycle_secs).ceil()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(
        thermometer: &mut Thermometer,
        now: u32,
        celsius: f64,
        duty: f64,
    ) -> Option<TemperatureForecast> {
        let heat = Temperature { sensor: "gpu".into(), celsius, limit: None };
        thermometer.read(f64::from(now), &heat, 80.0, duty, 1.0)
    }

    #[test]
    fn a_spike_is_dropped_and_nonsense_is_nothing() {
        let mut thermometer = Thermometer::new();
        assert!((0..6).all(|secs| read(&mut thermometer, secs, 60.0, 1.0).is_none()), "too few");
        assert_eq!(read(&mut thermometer, 6, 60.0, 1.0).unwrap().over, -20.0);
        assert!((7..10).all(|secs| read(&mut thermometer, secs, 120.0, 1.0).is_none()));
        assert_eq!(read(&mut thermometer, 10, 120.0, 1.0).unwrap().over, 40.0, "it insists");
        for celsius in [0.0, f64::NAN, 1e9, -1.0] {
            assert_eq!(read(&mut thermometer, 11, celsius, 1.0), None);
        }
    }

    #[test]
    fn what_is_coming_is_told_from_the_rise() {
        let mut thermometer = Thermometer::new();
        let ramp = |secs| 60.0 + 0.25 * f64::from(secs);
        let seen: Vec<_> =
            (0..50).map(|secs| read(&mut thermometer, secs, ramp(secs), 1.0)).collect();
        assert_eq!(seen[10].as_ref().unwrap().ahead, None, "too early to tell");
        let last = seen[49].as_ref().unwrap();
        // 72 degrees, and as many more as are foreseen at most.
        assert!((last.ahead.unwrap() + 4.0).abs() < 1.0, "{last:?}");
    }

    #[test]
    fn a_sensor_that_does_not_notice_rest_is_not_believed() {
        let mut thermometer = Thermometer::new();
        assert!((0..6).all(|secs| read(&mut thermometer, secs, 90.0, 1.0).is_none()));
        assert!((6..100).all(|secs| read(&mut thermometer, secs, 90.0, 1.0).is_some()));
        assert!((100..270).all(|secs| read(&mut thermometer, secs, 90.0, 0.0).is_some()));
        assert!((270..300).any(|secs| read(&mut thermometer, secs, 90.0, 0.0).is_none()));
        assert!(thermometer.stuck_secs().is_some());
        assert!(read(&mut thermometer, 300, 85.0, 1.0).is_some(), "it moves: believed again");
        // At rest from the start: nothing to notice.
        let mut idle = Thermometer::new();
        assert!((0..999).filter_map(|secs| read(&mut idle, secs, 40.0, 0.0)).count() > 990);
    }
}
