//! A machine that exists in numbers: it warms up, has a fan, slows itself down with or without saying so, shares
//! its memory with others and has sensors of every kind of honesty. Hours pass in milliseconds. It computes steps at
//! the pace of a governor, or at a constant one to compare with, and keeps what happened each second.

use std::fmt;
use std::time::Duration;

use super::{Governor, Pace, PaceDecision, StepTime};
use crate::telemetry::{ProcessMemory, Telemetry, Temperature, ThrottleCause};

/// Seconds of simulated time at once.
const TICK: f64 = 0.25;

/// Steps shorter than this are computed and rested in the same tick.
const LONG_STEP: f64 = 1.0;

/// The hardware, and what goes on around it.
#[derive(Clone, Debug)]
pub(super) struct SimulatedMachine {
    /// The air around.
    pub ambient: f64,
    /// Degrees above that at full work in the long run.
    pub rise: f64,
    /// The part of them that comes within seconds; the rest comes with the heat sink.
    pub die_part: f64,
    pub die_secs: f64,
    pub sink_secs: f64,
    pub fan: Option<SimulatedFan>,
    pub throttle: Option<SimulatedThrottle>,
    pub sensor: SimulatedSensor,
    /// The sensor's own limit, if it tells one.
    pub limit: Option<f64>,
    /// What holds the clock down without heat, and to which part; whether it is told.
    pub cap: Option<(Option<ThrottleCause>, f64)>,
    pub on_battery: Option<bool>,
    /// Bytes that the run may hold; others have the rest.
    pub allowed_bytes: Option<u64>,
    /// Bytes that it holds on each level.
    pub level_bytes: Vec<u64>,
    /// Seconds of a step at full speed, and how many times as many are expected.
    pub step_secs: f64,
    pub bias: f64,
    pub state: SimulatedState,
}

/// A fan with one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedFan {
    pub on: f64,
    pub off: f64,
    /// The part of heat that stays while it is on.
    pub part: f64,
}

/// Hardware that protects itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedThrottle {
    pub on: f64,
    pub off: f64,
    /// The part of speed, and of power, that is left.
    pub speed: f64,
    pub is_told: bool,
}

/// How honest the sensor is.
#[derive(Clone, Copy, Debug)]
pub(super) enum SimulatedSensor {
    /// Whole degrees, with a degree of noise.
    Honest,
    Missing,
    /// The same for ever.
    Stuck(f64),
    /// Silent half of the time, and now and then far off.
    Flapping,
}

#[derive(Clone, Debug)]
pub(super) struct SimulatedState {
    secs: f64,
    die: f64,
    sink: f64,
    is_fan_on: bool,
    is_throttled: bool,
    /// Seconds of the step that are done at full speed, and that it computed.
    done: f64,
    computed: f64,
    rest_left: f64,
    random: XorShift,
}

/// Who says how fast it goes.
pub(super) enum PaceSource {
    Governed(Box<Governor>),
    Constant(f64),
}

/// What happened, second by second.
#[derive(Clone, Debug, Default)]
pub(super) struct Trace {
    pub celsius: Vec<f64>,
    pub pace: Vec<Pace>,
    /// Seconds of work at full speed.
    pub done: Vec<f64>,
    pub decisions: Vec<(usize, PaceDecision)>,
}

impl SimulatedMachine {
    /// A laptop in a cool room: 95 °C in the long run at full work, which it would hold.
    pub fn laptop() -> Self {
        let state = SimulatedState {
            secs: 0.0,
            die: 0.0,
            sink: 0.0,
            is_fan_on: false,
            is_throttled: false,
            done: 0.0,
            computed: 0.0,
            rest_left: 0.0,
            random: XorShift(7),
        };
        Self {
            ambient: 22.0,
            rise: 73.0,
            die_part: 0.3,
            die_secs: 4.0,
            sink_secs: 90.0,
            fan: None,
            throttle: None,
            sensor: SimulatedSensor::Honest,
            limit: Some(100.0),
            cap: None,
            on_battery: None,
            allowed_bytes: None,
            level_bytes: vec![0],
            step_secs: 0.5,
            bias: 1.0,
            state,
        }
    }

    /// Runs for so many seconds, with something that may happen in each.
    pub fn run(
        &mut self,
        driver: &mut PaceSource,
        secs: usize,
        mut happens: impl FnMut(usize, &mut Self),
    ) -> Trace {
        let mut trace = Trace::default();
        for second in 0..secs {
            happens(second, self);
            let mut done = 0.0;
            let mut decisions = Vec::new();
            for _ in 0..(1.0 / TICK) as usize {
                done += self.tick(driver, &mut decisions);
            }
            if let PaceSource::Governed(governor) = driver {
                let telemetry = self.telemetry(governor.pace().level);
                decisions.extend(governor.observe(self.now(), &telemetry));
            }
            trace.celsius.push(self.celsius());
            trace.pace.push(driver.pace());
            trace.done.push(done);
            trace.decisions.extend(decisions.into_iter().map(|decision| (second, decision)));
        }
        trace
    }

    /// The true temperature.
    pub fn celsius(&self) -> f64 {
        self.ambient + self.state.die + self.state.sink
    }

    fn now(&self) -> Duration {
        Duration::from_secs_f64(self.state.secs)
    }

    /// A quarter of a second. Returns the work that was done.
    fn tick(&mut self, driver: &mut PaceSource, decisions: &mut Vec<PaceDecision>) -> f64 {
        self.state.secs += TICK;
        let pace = driver.pace();
        let busy = if pace.is_paused { 0.0 } else { self.busy(pace.duty) };
        let speed = self.speed();
        self.warm(busy * speed);
        self.state.done += busy * speed * TICK;
        self.state.computed += busy * TICK;
        while self.state.done >= self.step_secs {
            let part = self.step_secs / self.state.done;
            let secs = self.state.computed * part;
            self.state.done -= self.step_secs;
            self.state.computed -= secs;
            if self.step_secs >= LONG_STEP {
                self.state.rest_left = secs * (1.0 / pace.duty - 1.0);
            }
            if let PaceSource::Governed(governor) = driver {
                let took = StepTime { secs, expected_secs: self.step_secs * self.bias };
                decisions.extend(governor.record_step(self.now(), took));
            }
        }
        busy * speed * TICK
    }

    /// The part of a tick that it computes.
    fn busy(&mut self, duty: f64) -> f64 {
        if self.step_secs < LONG_STEP {
            return duty;
        }
        let rest = self.state.rest_left.min(TICK);
        self.state.rest_left -= rest;
        1.0 - rest / TICK
    }

    fn speed(&self) -> f64 {
        let throttle = self.throttle.filter(|_| self.state.is_throttled);
        throttle.map_or(1.0, |throttle| throttle.speed) * self.cap.map_or(1.0, |cap| cap.1)
    }

    fn warm(&mut self, power: f64) {
        let celsius = self.celsius();
        let switch = |is_on: bool, on: f64, off: f64| celsius > on || (is_on && celsius > off);
        if let Some(fan) = self.fan {
            self.state.is_fan_on = switch(self.state.is_fan_on, fan.on, fan.off);
        }
        let fan = self.fan.filter(|_| self.state.is_fan_on).map_or(1.0, |fan| fan.part);
        if let Some(throttle) = self.throttle {
            self.state.is_throttled = switch(self.state.is_throttled, throttle.on, throttle.off);
        }
        // A machine at rest draws a tenth.
        let heat = self.rise * (0.1 + 0.9 * power) * fan;
        let SimulatedState { die, sink, .. } = &mut self.state;
        *die += (self.die_part * heat - *die) * TICK / self.die_secs;
        *sink += ((1.0 - self.die_part) * heat - *sink) * TICK / self.sink_secs;
    }

    fn telemetry(&mut self, level: usize) -> Telemetry {
        let held = self.level_bytes[level];
        let left = |allowed: u64| allowed.cast_signed() - held.cast_signed();
        let is_told = self.throttle.is_some_and(|throttle| throttle.is_told);
        let heat = (is_told && self.state.is_throttled).then_some(ThrottleCause::Heat);
        Telemetry {
            memory: self.allowed_bytes.map(|allowed| ProcessMemory { held, left: left(allowed) }),
            temperature: self.read_sensor().map(|celsius| Temperature {
                sensor: "simulated".into(),
                celsius,
                limit: self.limit,
            }),
            throttled: heat.or(self.cap.and_then(|cap| cap.0)),
            on_battery: self.on_battery,
            ..Telemetry::default()
        }
    }

    fn read_sensor(&mut self) -> Option<f64> {
        let honest = (self.celsius() + 2.0 * self.state.random.part() - 1.0).round();
        match self.sensor {
            SimulatedSensor::Honest => Some(honest),
            SimulatedSensor::Missing => None,
            SimulatedSensor::Stuck(celsius) => Some(celsius),
            SimulatedSensor::Flapping => match self.state.random.below(50) {
                0..25 => None,
                25 => Some(127.0),
                26 => Some(0.0),
                27 => Some(f64::NAN),
                _ => Some(honest),
            },
        }
    }
}

impl PaceSource {
    fn pace(&self) -> Pace {
        match self {
            Self::Governed(governor) => governor.pace(),
            Self::Constant(duty) => Pace { level: 0, duty: *duty, is_paused: false },
        }
    }
}

impl Trace {
    /// The highest temperature from a second on.
    pub fn peak(&self, from: usize) -> f64 {
        self.celsius[from..].iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    /// Work done from a second on, as a share of what full speed would do.
    pub fn done_in_a_second(&self, from: usize) -> f64 {
        let done = &self.done[from..];
        done.iter().sum::<f64>() / done.len() as f64
    }

    /// Changes of pace from a second on, in the hour that has the most.
    pub fn changes_in_an_hour(&self, from: usize) -> usize {
        let is_change = |(_, decision): &&(usize, PaceDecision)| decision.from != decision.to;
        let at: Vec<usize> = self
            .decisions
            .iter()
            .filter(is_change)
            .map(|(at, _)| *at)
            .filter(|at| *at >= from)
            .collect();
        let within =
            |first: &usize| at.iter().filter(|at| (*first..first + 3600).contains(at)).count();
        at.iter().map(within).max().unwrap_or(0)
    }

    /// Seconds from a second on until it goes as fast as at first, for good.
    pub fn recovery(&self, from: usize) -> usize {
        let first = self.pace[0];
        let last = self.pace[from..].iter().rposition(|pace| *pace != first);
        last.map_or(0, |last| last + 1)
    }
}

impl fmt::Display for Trace {
    /// Every decision, and how it went at the end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (second, PaceDecision { to, cause, .. }) in &self.decisions {
            let (level, duty, pause) =
                (to.level, to.duty, if to.is_paused { ", paused" } else { "" });
            writeln!(f, "{second} s: level {level}, duty {duty}{pause}: {cause}")?;
        }
        write!(f, "at the end: {:?} °C", self.celsius.last())
    }
}

/// Random numbers from a seed: xorshift.
#[derive(Clone, Debug)]
pub(super) struct XorShift(pub u64);

impl XorShift {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// From 0 to 1.
    pub fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.part()
    }
}
