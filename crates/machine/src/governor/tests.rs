//! The governor on simulated machines: it stays under the limit, changes its pace at most six times an hour once it
//! has settled, is back at full pace soon after the cause is gone, and gets nearly as much done as the best constant
//! pace would for the same limit, found by trying them all.

use super::simulated::{Driver, Fan, Machine, Random, Sensor, Throttle, Trace};
use super::*;
use crate::feel::{Heat, Share, Throttled};

/// Seconds after which a governor must have settled.
const SETTLED: usize = 1200;

/// The same where nothing but the time of steps tells: every trial takes minutes.
const SETTLED_BLIND: usize = 3600;

const HOUR: usize = 3600;

fn policy(mode: Mode) -> Policy {
    Policy { mode, max_celsius: None, is_calibrated: false }
}

fn governed(policy: Policy, machine: &Machine) -> Driver {
    let rungs = machine.rung_bytes.iter().map(|bytes| Rung { bytes: *bytes }).collect();
    Driver::Governed(Box::new(Governor::new(policy, rungs)))
}

fn run(
    policy: Policy,
    machine: &Machine,
    secs: usize,
    happens: impl FnMut(usize, &mut Machine),
) -> Trace {
    let mut machine = machine.clone();
    let mut driver = governed(policy, &machine);
    machine.run(&mut driver, secs, happens)
}

/// What the best constant duty gets done in a second while it stays under a limit, and that duty.
fn best_constant(machine: &Machine, limit: f64) -> (f64, f64) {
    let done = (10..=100).filter_map(|percent| {
        let duty = f64::from(percent) / 100.0;
        let trace = machine.clone().run(&mut Driver::Constant(duty), 2 * SETTLED, |_, _| {});
        (trace.peak(0) <= limit).then(|| (trace.done_in_a_second(SETTLED), duty))
    });
    done.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, 0.0))
}

/// The marks for a machine that would get too hot; what is missed is told.
fn missed(what: &str, policy: Policy, machine: &Machine, limit: f64) -> Option<String> {
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
        (Mode::Balanced, 92.0, 80.0, 5),
        (Mode::Overnight, 82.0, 80.0, 5),
        (Mode::Quiet, 75.0, 110.0, 3),
    ];
    none_missed(modes.into_iter().flat_map(|(mode, limit, rise, n_steps)| {
        STEPS[..n_steps].iter().map(move |&step_secs| {
            let machine = Machine { rise, step_secs, ..Machine::laptop() };
            missed(&format!("{mode:?}, steps of {step_secs} s"), policy(mode), &machine, limit)
        })
    }));
}

#[test]
fn a_limit_of_the_users_own_is_kept_in_every_mode() {
    let modes = [Mode::Balanced, Mode::Full, Mode::Overnight];
    none_missed(modes.into_iter().map(|mode| {
        let policy = Policy { max_celsius: Some(70.0), ..policy(mode) };
        missed(&format!("{mode:?} with a limit"), policy, &Machine::laptop(), 70.0)
    }));
}

#[test]
fn fans_flapping_sensors_and_rates_that_are_wrong_change_nothing() {
    let laptop = || Machine { rise: 85.0, ..Machine::laptop() };
    let fan = Some(Fan { on: 70.0, off: 60.0, part: 0.8 });
    let machines = [
        ("a fan below the limit", Machine { rise: 110.0, fan, ..laptop() }),
        ("a flapping sensor", Machine { sensor: Sensor::Flapping, ..laptop() }),
        ("rates that are wrong", Machine { bias: 0.2, ..laptop() }),
        ("a slow heat sink", Machine { sink_secs: 400.0, ..laptop() }),
        ("a fast one", Machine { sink_secs: 25.0, die_part: 0.5, ..laptop() }),
        ("a warm room", Machine { ambient: 38.0, rise: 70.0, ..laptop() }),
    ];
    let balanced = policy(Mode::Balanced);
    none_missed(machines.into_iter().map(|(what, machine)| missed(what, balanced, &machine, 92.0)));
}

#[test]
fn a_machine_that_stays_cool_is_left_alone() {
    for mode in [Mode::Balanced, Mode::Full, Mode::Overnight, Mode::Quiet] {
        let cool = Machine { rise: 40.0, ..Machine::laptop() };
        assert_eq!(run(policy(mode), &cool, HOUR, |_, _| {}).decisions, [], "{mode:?}");
    }
    // Full lets the hardware do what it does: a sensor at its own limit is no reason.
    let throttle = Some(Throttle { on: 100.0, off: 99.0, speed: 0.8, is_told: true });
    let hot = Machine { rise: 90.0, throttle, ..Machine::laptop() };
    let trace = run(policy(Mode::Full), &hot, HOUR, |_, _| {});
    assert_eq!(trace.changes_in_an_hour(0), 0, "{trace}");
    assert_eq!(
        causes(&trace, |cause| matches!(cause, Cause::ThrottledByHeat { .. })),
        1,
        "{trace}"
    );
}

/// Something that comes and goes.
type Happening = (&'static str, fn(&mut Machine, bool));

#[test]
fn the_pace_is_back_within_two_minutes_of_the_cause_going_away() {
    let causes: [Happening; 3] = [
        ("hot air", |machine, is_there| machine.ambient = if is_there { 50.0 } else { 10.0 }),
        ("battery", |machine, is_there| machine.on_battery = Some(is_there)),
        ("a throttle that no duty ends", |machine, is_there| {
            let on = if is_there { 0.0 } else { 200.0 };
            machine.throttle = Some(Throttle { on, off: on, speed: 0.7, is_told: true });
        }),
    ];
    for (what, happens) in causes {
        let machine = Machine { rise: 62.0, sink_secs: 60.0, ..Machine::laptop() };
        let trace =
            run(policy(Mode::Balanced), &machine, 2 * HOUR, |second, machine| match second {
                600 => happens(machine, true),
                4800 => happens(machine, false),
                _ => {}
            });
        assert!(trace.pace[4799].duty < 0.95, "{what} is paced\n{trace}");
        let recovery = trace.recovery(4800);
        assert!(recovery <= 120, "{what}: {recovery} s\n{trace}");
    }
}

#[test]
fn memory_that_others_take_is_given_back_and_regained() {
    const GIB: u64 = 1 << 30;
    for step_secs in [0.05, 2.0] {
        let machine = Machine {
            rung_bytes: [24, 20, 17, 15, 13].map(|gib| gib * GIB).to_vec(),
            allowed_bytes: Some(25 * GIB),
            step_secs,
            rise: 40.0,
            ..Machine::laptop()
        };
        // It grows by a GiB every five seconds, stays for ten minutes, and ends.
        let trace = run(policy(Mode::Balanced), &machine, HOUR, |second, machine| {
            let hog = if (600..1200).contains(&second) { (second as u64 - 600) / 5 } else { 0 };
            machine.allowed_bytes = Some((25 - hog.min(11)) * GIB);
        });
        assert_eq!(trace.pace[1199].rung, 4, "{trace}");
        assert!(!trace.pace.iter().any(|pace| pace.is_paused), "{trace}");
        assert!(trace.recovery(1200) <= 120, "{}\n{trace}", trace.recovery(1200));
        // Too much even for the tightest rung: it stands still, and goes on.
        let trace = run(policy(Mode::Balanced), &machine, HOUR, |second, machine| {
            machine.allowed_bytes = Some(if (600..1200).contains(&second) { 8 } else { 25 } * GIB);
        });
        assert!(trace.pace[700..1200].iter().all(|pace| pace.is_paused), "{trace}");
        assert!(trace.recovery(1200) <= 120, "{}\n{trace}", trace.recovery(1200));
    }
}

#[test]
fn heat_that_no_sensor_shows_is_found_by_the_clock() {
    for sensor in [Sensor::Missing, Sensor::Stuck(45.0)] {
        for (speed, step_secs) in [(0.35, 0.5), (0.5, 2.0), (0.7, 0.5), (0.35, 10.0)] {
            // It collapses at 88 °C and comes back at 75, and says nothing.
            let throttle = Some(Throttle { on: 88.0, off: 75.0, speed, is_told: false });
            let machine =
                Machine { throttle, sensor, step_secs, rise: 75.0, bias: 3.0, ..Machine::laptop() };
            let secs = 6 * HOUR;
            let trace = run(policy(Mode::Balanced), &machine, secs, |_, _| {});
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
        let machine = Machine { rise: 40.0, ..Machine::laptop() };
        let trace =
            run(policy(Mode::Balanced), &machine, 4 * HOUR, |second, machine| match second {
                1200 => machine.cap = Some((None, speed)),
                10000 => machine.cap = None,
                _ => {}
            });
        assert_eq!(causes(&trace, |cause| matches!(cause, Cause::NotHeat { .. })), 1, "{trace}");
        assert!(trace.pace[2400..].iter().all(|pace| pace.duty == 1.0), "{trace}");
    }
    // Full never tries.
    let trace = run(policy(Mode::Full), &Machine::laptop(), HOUR, |second, machine| {
        machine.cap = (second > 600).then_some((None, 0.5));
    });
    assert_eq!(trace.decisions, []);
}

#[test]
fn a_power_supply_that_is_stuck_is_said_once() {
    for (told, cause) in [
        (Throttled::StuckPower, Cause::StuckPower),
        (Throttled::PowerBrake, Cause::PowerBrake),
        (Throttled::LowPower, Cause::LowPower),
    ] {
        // A DGX Spark at 500 of 2400 MHz.
        let machine = Machine { cap: Some((Some(told), 0.25)), limit: None, ..Machine::laptop() };
        let trace = run(policy(Mode::Balanced), &machine, HOUR, |_, _| {});
        let said: Vec<_> = trace.decisions.iter().map(|(_, decision)| &decision.cause).collect();
        assert_eq!(said, [&cause]);
        assert!(cause.hint().is_some());
    }
}

#[test]
fn a_sensor_that_is_stuck_at_a_high_value_does_not_end_a_run() {
    let machine = Machine { sensor: Sensor::Stuck(99.0), rise: 40.0, ..Machine::laptop() };
    let trace = run(policy(Mode::Balanced), &machine, HOUR, |_, _| {});
    assert_eq!(causes(&trace, |cause| matches!(cause, Cause::SensorStuck { .. })), 1, "{trace}");
    assert!(trace.pace[900..].iter().all(|pace| pace.duty == 1.0 && !pace.is_paused), "{trace}");
}

/// Recorded: a card under products for 14 of every 20 seconds, with `examples/feel.rs`, 2026-11-16.
const H200: &str = include_str!("recorded/h200.jsonl");

/// What is decided on a recorded card, whose heat does not answer to the pace.
fn decided_on_h200(policy: Policy) -> Vec<Decision> {
    #[derive(Deserialize)]
    struct Line {
        secs: f64,
        feel: Feel,
    }
    let mut governor = Governor::new(policy, vec![Rung { bytes: 1 << 30 }]);
    let lines = H200.lines().map(|line| serde_json::from_str::<Line>(line).unwrap());
    lines
        .flat_map(|Line { secs, feel }| governor.feel(Duration::from_secs_f64(secs), &feel))
        .collect()
}

#[test]
fn a_recorded_card_is_left_alone_unless_it_is_to_be_cooler() {
    for mode in [Mode::Balanced, Mode::Full, Mode::Overnight] {
        assert_eq!(decided_on_h200(policy(mode)), []);
    }
    let cooler = Policy { max_celsius: Some(55.0), ..policy(Mode::Balanced) };
    let decided = decided_on_h200(cooler);
    assert!(decided.first().is_some_and(|first| first.to.duty < 1.0 || first.to.is_paused));
    let is_heat = |it: &Decision| {
        matches!(it.cause, Cause::Hot { .. } | Cause::TooHot { .. } | Cause::Cool { .. })
    };
    assert!(decided.iter().all(is_heat) && decided.len() <= 8, "{decided:?}");
}

#[test]
fn a_cause_comes_back_from_a_file_as_it_went() {
    let machine = Machine { rise: 85.0, ..Machine::laptop() };
    let trace = run(policy(Mode::Overnight), &machine, HOUR, |second, machine| {
        machine.on_battery = Some((600..1200).contains(&second));
        machine.cap = (second > 2400).then_some((Some(Throttled::StuckPower), 0.5));
    });
    assert!(trace.decisions.len() > 4);
    for (_, decision) in &trace.decisions {
        let line = serde_json::to_string(decision).unwrap();
        assert_eq!(&serde_json::from_str::<Decision>(&line).unwrap(), decision, "{line}");
        let text = decision.cause.to_string();
        assert!(text.starts_with(|c: char| c.is_lowercase()) && !text.ends_with('.'), "{text}");
    }
}

/// A machine as nobody would build it.
fn any_machine(random: &mut Random) -> Machine {
    let throttle = (random.below(2) == 0).then(|| {
        let on = random.between(80.0, 105.0);
        Throttle {
            on,
            off: on - random.between(0.0, 20.0),
            speed: random.between(0.35, 0.9),
            is_told: random.below(2) == 0,
        }
    });
    let fan = (random.below(2) == 0).then(|| {
        let on = random.between(50.0, 90.0);
        Fan { on, off: on - random.between(2.0, 15.0), part: random.between(0.6, 0.95) }
    });
    let celsius = random.between(20.0, 120.0);
    let sensors =
        [Sensor::Honest, Sensor::Honest, Sensor::Flapping, Sensor::Missing, Sensor::Stuck(celsius)];
    let mut bytes: Vec<u64> = (0..=random.below(6)).map(|_| 1 + random.below(1 << 35)).collect();
    bytes.sort_by(|a, b| b.cmp(a));
    Machine {
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
        rung_bytes: bytes,
        step_secs: f64::exp(random.between(f64::ln(0.05), f64::ln(60.0))),
        bias: random.between(0.1, 10.0),
        ..Machine::laptop()
    }
}

fn any_policy(random: &mut Random) -> Policy {
    let modes = [Mode::Quiet, Mode::Balanced, Mode::Full, Mode::Overnight];
    let mode = modes[random.below(4) as usize];
    let max_celsius = (random.below(3) == 0).then(|| random.between(50.0, 95.0));
    Policy { mode, max_celsius, is_calibrated: random.below(2) == 0 }
}

/// A world in which something changes now and then for half an hour, and then nothing for two.
fn any_run(seed: u64) -> (Machine, Policy, Trace) {
    let mut random = Random(seed);
    let (machine, policy) = (any_machine(&mut random), any_policy(&mut random));
    let most = machine.rung_bytes[0] + (1 << 30);
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
            pace.rung < machine.rung_bytes.len() && (MIN_DUTY..=1.0).contains(&pace.duty)
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

#[test]
fn the_same_readings_give_the_same_decisions() {
    let (first, second) = (any_run(99).2, any_run(99).2);
    assert_eq!(first.decisions, second.decisions);
    assert!(!first.decisions.is_empty());
}

#[test]
fn nonsense_is_survived() {
    let mut random = Random(3);
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
    let mut random = Random(5);
    for n_rungs in [0, 1, 3] {
        for _ in 0..20 {
            let mode = any_policy(&mut random).mode;
            let policy = Policy { mode, max_celsius: Some(odd()), is_calibrated: true };
            let mut governor = Governor::new(policy, vec![Rung { bytes: random.next() }; n_rungs]);
            let mut now = 0;
            for _ in 0..500 {
                now = if random.below(50) == 0 {
                    random.next()
                } else {
                    now.wrapping_add(random.below(2000))
                };
                let at = Duration::from_millis(now);
                let sensor = String::new();
                let feel = Feel {
                    memory: (random.below(2) == 0)
                        .then(|| Share { held: random.next(), left: random.next().cast_signed() }),
                    stalled: Some(odd()),
                    heat: (random.below(3) > 0).then(|| Heat {
                        sensor,
                        celsius: odd(),
                        limit: Some(odd()),
                    }),
                    throttled: (random.below(2) == 0).then_some(Throttled::Heat),
                    watts: Some(odd()),
                    ..Feel::default()
                };
                governor.feel(at, &feel);
                governor.took(at, Took { secs: odd(), expected_secs: odd() });
                if random.below(100) == 0 {
                    governor.refused(at);
                }
                let pace = governor.pace();
                assert!(
                    pace.rung < n_rungs.max(1) && (MIN_DUTY..=1.0).contains(&pace.duty),
                    "{pace:?}"
                );
            }
        }
    }
}
