//! The governor on simulated machines: it stays under the limit, changes its pace at most six times an hour once it
//! has settled, is back at full pace soon after the cause is gone, and gets nearly as much done as the best constant
//! pace would for the same limit, found by trying them all.

use super::simulated::{
    PaceSource, SimulatedFan, SimulatedMachine, SimulatedSensor, SimulatedThrottle, Trace, XorShift,
};
use super::*;
use crate::telemetry::{ProcessMemory, Temperature, ThrottleCause};

/// Seconds after which a governor must have settled.
const SETTLED: usize = 1200;

/// The same where nothing but the time of steps tells: every trial takes minutes.
const SETTLED_BLIND: usize = 3600;

const HOUR: usize = 3600;

fn policy(mode: GovernorMode) -> GovernorPolicy {
    GovernorPolicy { mode, max_celsius: None, is_calibrated: false }
}

fn governed(policy: GovernorPolicy, machine: &SimulatedMachine) -> PaceSource {
    let levels = machine.level_bytes.iter().map(|bytes| GovernorLevel { bytes: *bytes }).collect();
    PaceSource::Governed(Box::new(Governor::new(policy, levels)))
}

fn run(
    policy: GovernorPolicy,
    machine: &SimulatedMachine,
    secs: usize,
    happens: impl FnMut(usize, &mut SimulatedMachine),
) -> Trace {
    let mut machine = machine.clone();
    let mut driver = governed(policy, &machine);
    machine.run(&mut driver, secs, happens)
}

/// What the best constant duty gets done in a second while it stays under a limit, and that duty.
fn best_constant(machine: &SimulatedMachine, limit: f64) -> (f64, f64) {
    let done = (10..=100).filter_map(|percent| {
        let duty = f64::from(percent) / 100.0;
        let trace = machine.clone().run(&mut PaceSource::Constant(duty), 2 * SETTLED, |_, _| {});
        (trace.peak(0) <= limit).then(|| (trace.done_in_a_second(SETTLED), duty))
    });
    done.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, 0.0))
}

/// The marks for a machine that would get too hot; what is missed is told.
fn missed(
    what: &str,
    policy: GovernorPolicy,
    machine: &SimulatedMachine,
    limit: f64,
) -> Option<String> {
    let secs = 3 * HOUR;
    let trace = run(policy, machine, secs, |_, _| {});
    let (best, duty) = best_constant(machine, limit);
    let (peak, later) = (trace.peak(0), trace.peak(SETTLED));
    let (changes, part) =
        (trace.changes_in_an_hour(SETTLED), trace.done_in_a_second(SETTLED) / best);
    let is_kept =
        peak <= limit + OVERSHOOT + 1.0 && later <= limit + 1.5 && changes <= 6 && part >= 0.95;
    (!is_kept).then(|| {
        format!(
            "{what}: peak {peak:.1}, later {later:.1}, {changes} changes an hour, {part:.3} of the best at {duty}\n{trace}"
        )
    })
}

fn none_missed(missed: impl Iterator<Item = Option<String>>) {
    let missed: Vec<_> = missed.flatten().collect();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

fn causes(trace: &Trace, is_it: impl Fn(&Cause) -> bool) -> usize {
    trace.decisions.iter().filter(|(_, decision)| is_it(&decision.cause)).count()
}

const STEPS: [f64; 5] = [0.05, 0.5, 3.0, 20.0, 60.0];

#[test]
fn a_limit_is_kept_without_waste() {
    // What the modes make of a sensor whose own limit is 100 °C.
    // Rests between long steps do not keep a small heat sink at 75.
    let modes = [
        (GovernorMode::Balanced, 92.0, 80.0, 5),
        (GovernorMode::Overnight, 82.0, 80.0, 5),
        (GovernorMode::Quiet, 75.0, 110.0, 3),
    ];
    none_missed(modes.into_iter().flat_map(|(mode, limit, rise, n_steps)| {
        STEPS[..n_steps].iter().map(move |&step_secs| {
            let machine = SimulatedMachine { rise, step_secs, ..SimulatedMachine::laptop() };
            missed(&format!("{mode:?}, steps of {step_secs} s"), policy(mode), &machine, limit)
        })
    }));
}

#[test]
fn a_limit_of_the_users_own_is_kept_in_every_mode() {
    let modes = [GovernorMode::Balanced, GovernorMode::Full, GovernorMode::Overnight];
    none_missed(modes.into_iter().map(|mode| {
        let policy = GovernorPolicy { max_celsius: Some(70.0), ..policy(mode) };
        missed(&format!("{mode:?} with a limit"), policy, &SimulatedMachine::laptop(), 70.0)
    }));
}

#[test]
fn fans_flapping_sensors_and_rates_that_are_wrong_change_nothing() {
    let laptop = || SimulatedMachine { rise: 85.0, ..SimulatedMachine::laptop() };
    let fan = Some(SimulatedFan { on: 70.0, off: 60.0, part: 0.8 });
    let machines = [
        ("a fan below the limit", SimulatedMachine { rise: 110.0, fan, ..laptop() }),
        ("a flapping sensor", SimulatedMachine { sensor: SimulatedSensor::Flapping, ..laptop() }),
        ("rates that are wrong", SimulatedMachine { bias: 0.2, ..laptop() }),
        ("a slow heat sink", SimulatedMachine { sink_secs: 400.0, ..laptop() }),
        ("a fast one", SimulatedMachine { sink_secs: 25.0, die_part: 0.5, ..laptop() }),
        ("a warm room", SimulatedMachine { ambient: 38.0, rise: 70.0, ..laptop() }),
    ];
    let balanced = policy(GovernorMode::Balanced);
    none_missed(machines.into_iter().map(|(what, machine)| missed(what, balanced, &machine, 92.0)));
}

#[test]
fn a_machine_that_stays_cool_is_left_alone() {
    for mode in
        [GovernorMode::Balanced, GovernorMode::Full, GovernorMode::Overnight, GovernorMode::Quiet]
    {
        let cool = SimulatedMachine { rise: 40.0, ..SimulatedMachine::laptop() };
        assert_eq!(run(policy(mode), &cool, HOUR, |_, _| {}).decisions, [], "{mode:?}");
    }
    // Full lets the hardware do what it does: a sensor at its own limit is no reason.
    let throttle = Some(SimulatedThrottle { on: 100.0, off: 99.0, speed: 0.8, is_told: true });
    let hot = SimulatedMachine { rise: 90.0, throttle, ..SimulatedMachine::laptop() };
    let trace = run(policy(GovernorMode::Full), &hot, HOUR, |_, _| {});
    assert_eq!(trace.changes_in_an_hour(0), 0, "{trace}");
    assert_eq!(
        causes(&trace, |cause| matches!(cause, Cause::ThrottledByHeat { .. })),
        1,
        "{trace}"
    );
}

/// Something that comes and goes.
type SimulatedEvent = (&'static str, fn(&mut SimulatedMachine, bool));

#[test]
fn the_pace_is_back_within_two_minutes_of_the_cause_going_away() {
    let causes: [SimulatedEvent; 3] = [
        ("hot air", |machine, is_there| machine.ambient = if is_there { 50.0 } else { 10.0 }),
        ("battery", |machine, is_there| machine.on_battery = Some(is_there)),
        ("a throttle that no duty ends", |machine, is_there| {
            let on = if is_there { 0.0 } else { 200.0 };
            machine.throttle = Some(SimulatedThrottle { on, off: on, speed: 0.7, is_told: true });
        }),
    ];
    for (what, happens) in causes {
        let machine =
            SimulatedMachine { rise: 62.0, sink_secs: 60.0, ..SimulatedMachine::laptop() };
        let trace =
            run(
                policy(GovernorMode::Balanced),
                &machine,
                2 * HOUR,
                |second, machine| match second {
                    600 => happens(machine, true),
                    4800 => happens(machine, false),
                    _ => {}
                },
            );
        assert!(trace.pace[4799].duty < 0.95, "{what} is paced\n{trace}");
        let recovery = trace.recovery(4800);
        assert!(recovery <= 120, "{what}: {recovery} s\n{trace}");
    }
}

#[test]
fn memory_that_others_take_is_given_back_and_regained() {
    const GIB: u64 = 1 << 30;
    for step_secs in [0.05, 2.0] {
        let machine = SimulatedMachine {
            level_bytes: [24, 20, 17, 15, 13].map(|gib| gib * GIB).to_vec(),
            allowed_bytes: Some(25 * GIB),
            step_secs,
            rise: 40.0,
            ..SimulatedMachine::laptop()
        };
        // It grows by a GiB every five seconds, stays for ten minutes, and ends.
        let trace = run(policy(GovernorMode::Balanced), &machine, HOUR, |second, machine| {
            let hog = if (600..1200).contains(&second) { (second as u64 - 600) / 5 } else { 0 };
            machine.allowed_bytes = Some((25 - hog.min(11)) * GIB);
        });
        assert_eq!(trace.pace[1199].level, 4, "{trace}");
        assert!(!trace.pace.iter().any(|pace| pace.is_paused), "{trace}");
        assert!(trace.recovery(1200) <= 120, "{}\n{trace}", trace.recovery(1200));
        // Too much even for the tightest level: it stands still, and goes on.
        let trace = run(policy(GovernorMode::Balanced), &machine, HOUR, |second, machine| {
            machine.allowed_bytes = Some(if (600..1200).contains(&second) { 8 } else { 25 } * GIB);
        });
        assert!(trace.pace[700..1200].iter().all(|pace| pace.is_paused), "{trace}");
        assert!(trace.recovery(1200) <= 120, "{}\n{trace}", trace.recovery(1200));
    }
}

#[test]
fn heat_that_no_sensor_shows_is_found_by_the_clock() {
    for sensor in [SimulatedSensor::Missing, SimulatedSensor::Stuck(45.0)] {
        for (speed, step_secs) in [(0.35, 0.5), (0.5, 2.0), (0.7, 0.5), (0.35, 10.0)] {
            // It collapses at 88 °C and comes back at 75, and says nothing.
            let throttle = Some(SimulatedThrottle { on: 88.0, off: 75.0, speed, is_told: false });
            let machine = SimulatedMachine {
                throttle,
                sensor,
                step_secs,
                rise: 75.0,
                bias: 3.0,
                ..SimulatedMachine::laptop()
            };
            let secs = 6 * HOUR;
            let trace = run(policy(GovernorMode::Balanced), &machine, secs, |_, _| {});
            let (best, duty) = best_constant(&machine, 200.0);
            let part = trace.done_in_a_second(SETTLED_BLIND) / best;
            let what =
                format!("{sensor:?}, {speed} of the speed, steps of {step_secs} s, best {duty}");
            assert!(part >= 0.95, "{what}: {part:.3}\n{trace}");
            assert!(trace.changes_in_an_hour(SETTLED_BLIND) <= 6, "{what}\n{trace}");
        }
    }
}

#[test]
fn slow_steps_that_are_no_heat_are_said_once_and_not_paced() {
    for speed in [0.35, 0.6, 0.85] {
        let machine = SimulatedMachine { rise: 40.0, ..SimulatedMachine::laptop() };
        let trace =
            run(
                policy(GovernorMode::Balanced),
                &machine,
                4 * HOUR,
                |second, machine| match second {
                    1200 => machine.cap = Some((None, speed)),
                    10000 => machine.cap = None,
                    _ => {}
                },
            );
        assert_eq!(causes(&trace, |cause| matches!(cause, Cause::NotHeat { .. })), 1, "{trace}");
        assert!(trace.pace[2400..].iter().all(|pace| pace.duty == 1.0), "{trace}");
    }
    // Full never tries.
    let trace =
        run(policy(GovernorMode::Full), &SimulatedMachine::laptop(), HOUR, |second, machine| {
            machine.cap = (second > 600).then_some((None, 0.5));
        });
    assert_eq!(trace.decisions, []);
}

#[test]
fn a_power_supply_that_is_stuck_is_said_once() {
    for (told, cause) in [
        (ThrottleCause::StuckPower, Cause::StuckPower),
        (ThrottleCause::PowerBrake, Cause::PowerBrake),
        (ThrottleCause::LowPower, Cause::LowPower),
    ] {
        // A DGX Spark at 500 of 2400 MHz.
        let machine = SimulatedMachine {
            cap: Some((Some(told), 0.25)),
            limit: None,
            ..SimulatedMachine::laptop()
        };
        let trace = run(policy(GovernorMode::Balanced), &machine, HOUR, |_, _| {});
        let said: Vec<_> = trace.decisions.iter().map(|(_, decision)| &decision.cause).collect();
        assert_eq!(said, [&cause]);
        assert!(cause.hint().is_some());
    }
}

#[test]
fn a_sensor_that_is_stuck_at_a_high_value_does_not_end_a_run() {
    let machine = SimulatedMachine {
        sensor: SimulatedSensor::Stuck(99.0),
        rise: 40.0,
        ..SimulatedMachine::laptop()
    };
    let trace = run(policy(GovernorMode::Balanced), &machine, HOUR, |_, _| {});
    assert_eq!(causes(&trace, |cause| matches!(cause, Cause::SensorStuck { .. })), 1, "{trace}");
    assert!(trace.pace[900..].iter().all(|pace| pace.duty == 1.0 && !pace.is_paused), "{trace}");
}

/// Recorded: a GPU running matmuls for 14 of every 20 seconds, with `examples/telemetry.rs`, 2026-11-16.
const H200: &str = include_str!("recorded/h200.jsonl");

/// What is decided on a recorded GPU, whose heat does not answer to the pace.
fn decided_on_h200(policy: GovernorPolicy) -> Vec<PaceDecision> {
    #[derive(Deserialize)]
    struct Line {
        secs: f64,
        #[serde(rename = "feel")]
        telemetry: Telemetry,
    }
    let mut governor = Governor::new(policy, vec![GovernorLevel { bytes: 1 << 30 }]);
    let lines = H200.lines().map(|line| serde_json::from_str::<Line>(line).unwrap());
    lines
        .flat_map(|Line { secs, telemetry }| {
            governor.observe(Duration::from_secs_f64(secs), &telemetry)
        })
        .collect()
}

#[test]
fn a_recorded_gpu_keeps_its_pace_unless_a_lower_limit_is_asked_for() {
    for mode in [GovernorMode::Balanced, GovernorMode::Full, GovernorMode::Overnight] {
        assert_eq!(decided_on_h200(policy(mode)), []);
    }
    let cooler = GovernorPolicy { max_celsius: Some(55.0), ..policy(GovernorMode::Balanced) };
    let decided = decided_on_h200(cooler);
    assert!(decided.first().is_some_and(|first| first.to.duty < 1.0 || first.to.is_paused));
    let is_heat = |it: &PaceDecision| {
        matches!(it.cause, Cause::Hot { .. } | Cause::TooHot { .. } | Cause::Cool { .. })
    };
    assert!(decided.iter().all(is_heat) && decided.len() <= 8, "{decided:?}");
}

#[test]
fn a_cause_comes_back_from_a_file_as_it_went() {
    let machine = SimulatedMachine { rise: 85.0, ..SimulatedMachine::laptop() };
    let trace = run(policy(GovernorMode::Overnight), &machine, HOUR, |second, machine| {
        machine.on_battery = Some((600..1200).contains(&second));
        machine.cap = (second > 2400).then_some((Some(ThrottleCause::StuckPower), 0.5));
    });
    assert!(trace.decisions.len() > 4);
    for (_, decision) in &trace.decisions {
        let line = serde_json::to_string(decision).unwrap();
        assert_eq!(&serde_json::from_str::<PaceDecision>(&line).unwrap(), decision, "{line}");
        let text = decision.cause.to_string();
        assert!(text.starts_with(|c: char| c.is_lowercase()) && !text.ends_with('.'), "{text}");
    }
}

/// A machine as nobody would build it.
fn any_machine(random: &mut XorShift) -> SimulatedMachine {
    let throttle = (random.below(2) == 0).then(|| {
        let on = random.between(80.0, 105.0);
        SimulatedThrottle {
            on,
            off: on - random.between(0.0, 20.0),
            speed: random.between(0.35, 0.9),
            is_told: random.below(2) == 0,
        }
    });
    let fan = (random.below(2) == 0).then(|| {
        let on = random.between(50.0, 90.0);
        SimulatedFan { on, off: on - random.between(2.0, 15.0), part: random.between(0.6, 0.95) }
    });
    let celsius = random.between(20.0, 120.0);
    let sensors = [
        SimulatedSensor::Honest,
        SimulatedSensor::Honest,
        SimulatedSensor::Flapping,
        SimulatedSensor::Missing,
        SimulatedSensor::Stuck(celsius),
    ];
    let mut bytes: Vec<u64> = (0..=random.below(6)).map(|_| 1 + random.below(1 << 35)).collect();
    bytes.sort_by(|a, b| b.cmp(a));
    SimulatedMachine {
        ambient: random.between(5.0, 40.0),
        rise: random.between(20.0, 110.0),
        die_part: random.between(0.1, 0.6),
        die_secs: random.between(1.0, 8.0),
        sink_secs: random.between(20.0, 500.0),
        fan,
        throttle,
        sensor: sensors[random.below(5) as usize],
        limit: (random.below(2) == 0).then(|| random.between(80.0, 110.0)),
        allowed_bytes: (random.below(4) > 0).then_some(bytes[0] + (1 << 30)),
        level_bytes: bytes,
        step_secs: f64::exp(random.between(f64::ln(0.05), f64::ln(60.0))),
        bias: random.between(0.1, 10.0),
        ..SimulatedMachine::laptop()
    }
}

fn any_policy(random: &mut XorShift) -> GovernorPolicy {
    let modes =
        [GovernorMode::Quiet, GovernorMode::Balanced, GovernorMode::Full, GovernorMode::Overnight];
    let mode = modes[random.below(4) as usize];
    let max_celsius = (random.below(3) == 0).then(|| random.between(50.0, 95.0));
    GovernorPolicy { mode, max_celsius, is_calibrated: random.below(2) == 0 }
}

/// A world in which something changes now and then for half an hour, and then nothing for two.
fn any_run(seed: u64) -> (SimulatedMachine, GovernorPolicy, Trace) {
    let mut random = XorShift(seed);
    let (machine, policy) = (any_machine(&mut random), any_policy(&mut random));
    let most = machine.level_bytes[0] + (1 << 30);
    let trace = run(policy, &machine, 9000, |second, machine| {
        if second >= 1800 || random.below(120) > 0 {
            return;
        }
        match random.below(4) {
            0 => machine.ambient = random.between(5.0, 40.0),
            1 => {
                let allowed = most / 2 + random.below(most / 2);
                machine.allowed_bytes = machine.allowed_bytes.map(|_| allowed);
            }
            2 => machine.on_battery = Some(random.below(2) == 0),
            _ => machine.cap = (random.below(2) == 0).then(|| (None, random.between(0.35, 1.0))),
        }
    });
    (machine, policy, trace)
}

#[test]
fn any_machine_is_paced_within_bounds_and_without_haste() {
    none_missed((1..=100).map(|seed| {
        let (machine, policy, trace) = any_run(seed * 7919);
        let is_within = |pace: &Pace| {
            pace.level < machine.level_bytes.len() && (MIN_DUTY..=1.0).contains(&pace.duty)
        };
        // Half an hour of changes, an hour to settle, and an hour to hold still.
        let is_kept = trace.pace.iter().all(is_within)
            && is_told(&trace)
            && trace.changes_in_an_hour(5400) <= 6;
        (!is_kept).then(|| format!("seed {seed}: {policy:?} {machine:?}\n{trace}"))
    }));
}

/// Whether every change of pace is a decision, each from where the one before led.
fn is_told(trace: &Trace) -> bool {
    let first = trace.decisions.first().map_or(trace.pace[0], |(_, first)| first.from);
    let last = trace
        .decisions
        .iter()
        .try_fold(first, |pace, (_, decision)| (decision.from == pace).then_some(decision.to));
    last == trace.pace.last().copied()
}

/// What a monitor sees of a run's memory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum SeenMemory {
    /// All that was planned.
    Planned,
    /// A tenth more.
    More,
    /// None of it: a device that no reading shows.
    Nothing,
    /// There is no reading: a GPU with memory of its own.
    Unread,
}

/// A run that shares its memory with others.
struct ContendedRun {
    governor: Governor,
    levels: Vec<u64>,
    /// What it holds while it is paused.
    resident: u64,
    seen: SeenMemory,
    step_secs: u64,
    now: u64,
}

impl ContendedRun {
    /// With up to four levels, some of which take little more than what always stays.
    fn any(random: &mut XorShift) -> Self {
        let resident = 1 + random.below(20 << 30);
        let mut above = 1 + random.below(20 << 30);
        let levels: Vec<u64> = (0..=random.below(4))
            .map(|_| {
                above = above * (1 + random.below(99)) / 100;
                resident + above
            })
            .collect();
        let governed = levels.iter().map(|bytes| GovernorLevel { bytes: *bytes }).collect();
        let (more, nothing) = (SeenMemory::More, SeenMemory::Nothing);
        let seen = [SeenMemory::Planned, more, nothing, SeenMemory::Unread];
        Self {
            governor: Governor::new(policy(GovernorMode::Full), governed),
            levels,
            resident,
            seen: seen[random.below(4) as usize],
            step_secs: 1 + random.below(60),
            now: 0,
        }
    }

    /// What is seen of it where it computes at a level.
    fn seen_at(&self, level: usize) -> u64 {
        self.seen_of(self.levels[level])
    }

    fn seen_of(&self, held: u64) -> u64 {
        match self.seen {
            SeenMemory::Planned | SeenMemory::Unread => held,
            SeenMemory::More => held + held / 10,
            SeenMemory::Nothing => 0,
        }
    }

    /// A second in which it may hold so much.
    fn second(&mut self, allowed: u64, pressure: Telemetry) {
        self.now += 1;
        let (at, pace) = (Duration::from_secs(self.now), self.governor.pace());
        if !pace.is_paused && self.now.is_multiple_of(self.step_secs) {
            let secs = self.step_secs as f64;
            self.governor.record_step(at, StepTime { secs, expected_secs: secs });
        }
        let held =
            if pace.is_paused { self.seen_of(self.resident) } else { self.seen_at(pace.level) };
        let left = allowed.cast_signed() - held.cast_signed();
        let memory = (self.seen != SeenMemory::Unread).then_some(ProcessMemory { held, left });
        self.governor.observe(at, &Telemetry { memory, ..pressure });
    }

    /// Minutes in which anything may happen.
    fn troubled(&mut self, random: &mut XorShift) {
        for _ in 0..random.below(40) {
            let allowed = random.below(2 * self.levels[0]);
            let stall = [0.0, 0.0, 0.04, 0.2, 0.9][random.below(5) as usize];
            let level = [None, None, Some(PressureLevel::Warning), Some(PressureLevel::Critical)]
                [random.below(4) as usize];
            let pressure =
                Telemetry { memory_stall: Some(stall), pressure_level: level, ..<_>::default() };
            let is_silent = random.below(8) == 0;
            for _ in 0..random.below(300) {
                if is_silent {
                    self.now += 1;
                    self.governor.observe(Duration::from_secs(self.now), &pressure);
                } else {
                    self.second(allowed, pressure.clone());
                }
            }
            let is_last = self.governor.pace().level + 1 == self.levels.len();
            if random.below(5) == 0 && !is_last {
                self.governor.out_of_memory(Duration::from_secs(self.now));
            }
        }
    }
}

#[test]
fn a_standstill_ends_when_memory_is_there_whatever_happened_before() {
    let mut n_paused = 0;
    for seed in 1..300 {
        let mut random = XorShift(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut run = ContendedRun::any(&mut random);
        run.troubled(&mut random);
        let pace = run.governor.pace();
        n_paused += usize::from(pace.is_paused);
        if random.below(4) == 0 {
            // Its last readings were of short memory, and no more follow.
            run.seen = SeenMemory::Unread;
        }
        // As much as its level takes; planned sizes count where nothing is seen.
        let needed = run.seen_at(pace.level).max(run.levels[pace.level]);
        for _ in 0..700 {
            run.second(needed, Telemetry::default());
        }
        let end = run.governor.pace();
        let about = format!("{seed}: {:?}, {:?} of {needed}", run.seen, run.levels);
        assert!(!end.is_paused, "{about}: stands still beside free memory");
        // With a little more than the plan it is back there, when what failed before may be tried again.
        let plenty = run.seen_at(0).max(run.levels[0]) / 100 * 111 + 100;
        for _ in 0..3 * HOUR {
            run.second(plenty, Telemetry::default());
            assert!(!run.governor.pace().is_paused, "{about}");
        }
        assert_eq!(run.governor.pace().level, 0, "{about}");
    }
    assert!(n_paused > 30, "{n_paused} of all were paused");
}

#[test]
fn the_same_readings_give_the_same_decisions() {
    let (first, second) = (any_run(99).2, any_run(99).2);
    assert_eq!(first.decisions, second.decisions);
    assert!(!first.decisions.is_empty());
}

#[test]
fn nonsense_is_survived() {
    let mut random = XorShift(3);
    let mut odd = move || {
        let odd = [
            f64::NAN,
            f64::INFINITY,
            -f64::INFINITY,
            -1.0,
            0.0,
            1e-300,
            0.5,
            1.0,
            60.0,
            99.0,
            1e9,
            f64::MAX,
        ];
        odd[random.below(12) as usize]
    };
    let mut random = XorShift(5);
    for n_levels in [0, 1, 3] {
        for _ in 0..20 {
            let mode = any_policy(&mut random).mode;
            let policy = GovernorPolicy { mode, max_celsius: Some(odd()), is_calibrated: true };
            let mut governor =
                Governor::new(policy, vec![GovernorLevel { bytes: random.next() }; n_levels]);
            let mut now = 0;
            for _ in 0..500 {
                now = if random.below(50) == 0 {
                    random.next()
                } else {
                    now.wrapping_add(random.below(2000))
                };
                let at = Duration::from_millis(now);
                let sensor = String::new();
                let telemetry = Telemetry {
                    memory: (random.below(2) == 0).then(|| ProcessMemory {
                        held: random.next(),
                        left: random.next().cast_signed(),
                    }),
                    memory_stall: Some(odd()),
                    temperature: (random.below(3) > 0).then(|| Temperature {
                        sensor,
                        celsius: odd(),
                        limit: Some(odd()),
                    }),
                    throttled: (random.below(2) == 0).then_some(ThrottleCause::Heat),
                    watts: Some(odd()),
                    ..Telemetry::default()
                };
                governor.observe(at, &telemetry);
                governor.record_step(at, StepTime { secs: odd(), expected_secs: odd() });
                if random.below(100) == 0 {
                    governor.out_of_memory(at);
                }
                let pace = governor.pace();
                assert!(
                    pace.level < n_levels.max(1) && (MIN_DUTY..=1.0).contains(&pace.duty),
                    "{pace:?}"
                );
            }
        }
    }
}
