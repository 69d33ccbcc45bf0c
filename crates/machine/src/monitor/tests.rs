//! Feels of every machine on disk, of those with any answer taken away, and of a few made by hand.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use expect_test::expect_file;

use super::*;
use crate::budget::budget;
use crate::held::MemoryPlace;
use crate::recording::testing::source;
use crate::recording::{MachineRecording, RecordedAnswer};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every machine in machines/ by name.
fn machines() -> BTreeMap<String, MachineRecording> {
    let files = std::fs::read_dir(root().join("machines")).unwrap();
    let paths = files.map(|entry| entry.unwrap().path());
    let recordings = paths.filter(|path| path.extension().is_some_and(|kind| kind == "toml"));
    let named = |path: &PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    recordings.map(|path| (named(&path), MachineRecording::load(&path).unwrap())).collect()
}

/// The machine, and its telemetry as a run on it would read it.
fn telemetry(recording: &MachineRecording) -> (Machine, Telemetry) {
    let mut source = ProbeSource::replay(recording.clone());
    let machine = Machine::probe(&mut source);
    let mut monitor = Monitor::new(&machine, budget(&machine).device, None);
    let read = monitor.read(&mut source, Instant::now());
    (machine, read)
}

#[test]
fn every_machine_all_as_it_should() {
    let all: BTreeMap<_, _> =
        machines().into_iter().map(|(name, recording)| (name, telemetry(&recording).1)).collect();
    assert!(all.len() >= 8, "only {} machines were found", all.len());
    let text = serde_json::to_string_pretty(&all).unwrap() + "\n";
    expect_file![root().join("tests/snapshots/feel.json")].assert_eq(&text);
}

/// Whatever is taken away or garbled, what is read is what was there before, or nothing.
#[test]
fn half_a_machine_is_half_felt_and_nothing_is_invented() {
    let nonsense = "-1 \u{fffd} 99999999999999999999999: =,:/ NaN";
    let texts = [None, Some(""), Some(nonsense), Some("0"), Some("-1"), Some("1e400")];
    for (name, whole) in machines() {
        let (machine, expected) = telemetry(&whole);
        for question in whole.answers.keys() {
            for text in texts {
                let mut broken = whole.clone();
                match text {
                    Some(text) => {
                        broken.answers.insert(question.clone(), RecordedAnswer::Text(text.into()))
                    }
                    None => broken.answers.remove(question),
                };
                let case = format!("{name}, {question}: {text:?}");
                holds_true(&machine, &expected, &telemetry(&broken).1, &case);
            }
        }
    }
}

fn holds_true(machine: &Machine, whole: &Telemetry, broken: &Telemetry, case: &str) {
    // Without its GPU, a run computes in main memory.
    let is_other = whole.memory.is_none();
    // Where Metal does not say its working set, the published rule gives no more.
    let is_within = broken
        .memory
        .zip(whole.memory)
        .is_none_or(|(broken, whole)| broken.held == whole.held && broken.left <= whole.left);
    assert!(is_within || is_other, "{case}: {broken:?}");
    let stalled = broken.memory_stall.is_none() || broken.memory_stall == whole.memory_stall;
    assert!(
        stalled
            && (broken.pressure_level.is_none() || broken.pressure_level == whole.pressure_level),
        "{case}"
    );
    assert!(broken.watts.is_none() || broken.watts == whole.watts, "{case}: {broken:?}");
    assert!(broken.on_battery.is_none() || broken.on_battery == whole.on_battery, "{case}");
    assert_eq!(broken.throttled, None, "{case}");
    if let Some(heat) = &broken.temperature {
        let sensors = machine.thermal.sensors.known().into_iter().flatten();
        let board = sensors.filter_map(|sensor| sensor.temperature.known());
        let gpus = machine.gpus.iter().filter_map(|gpu| match gpu {
            GpuInfo::Nvidia(gpu) => gpu.telemetry.temperature.known(),
            GpuInfo::Apple(_) => None,
        });
        assert!(board.chain(gpus).any(|found| found.0 == heat.celsius), "{case}: {heat:?}");
    }
}

#[test]
fn nothing_is_felt_of_an_empty_machine() {
    for os in ["linux", "macos", "plan9"] {
        let mut recording = MachineRecording::of_this_computer();
        recording.os = os.into();
        assert_eq!(telemetry(&recording).1, Telemetry::default(), "{os}");
    }
}

/// A recording that doctor made answers all that a run asks.
#[test]
fn what_is_asked_again_was_asked_before() {
    let mut source = ProbeSource::live();
    let machine = Machine::probe(&mut source);
    let asked: Vec<_> = source.recording().answers.keys().cloned().collect();
    Monitor::new(&machine, budget(&machine).device, None).read(&mut source, Instant::now());
    assert!(source.recording().answers.keys().eq(&asked));
}

/// On the computer at hand memory is read, and taking it shows.
#[cfg(target_os = "linux")]
#[test]
fn what_this_process_takes_is_felt() {
    let mut source = ProbeSource::live();
    let machine = Machine::probe(&mut source);
    let mut monitor = Monitor::new(&machine, DeviceId::Cpu, None);
    let mut held = || monitor.read(&mut source, Instant::now()).memory.unwrap().held;
    let before = held();
    let taken = std::hint::black_box(vec![1_u8; 64 << 20]);
    let grown = held() - before;
    assert!(grown > (60 << 20), "{grown} bytes more with {} taken", taken.len());
}

const MEMORY: &[(&str, &str)] = &[
    ("file /proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 20971520 kB\n"),
    ("file /proc/self/status", "VmRSS: 1048576 kB\n"),
];

/// What a run on that device reads of a machine with these answers.
fn telemetry_of(answers: &[(&str, &str)], device: DeviceId, cap: Option<Bytes>) -> Telemetry {
    let mut source = source(answers);
    let machine = Machine::probe(&mut source);
    Monitor::new(&machine, device, cap).read(&mut source, Instant::now())
}

#[test]
fn the_users_own_limit_bounds_what_is_left() {
    let left = |cap: Option<u64>| {
        let read = telemetry_of(MEMORY, DeviceId::Cpu, cap.map(|gib| Bytes(gib << 30)));
        let share = read.memory.unwrap();
        assert_eq!(share.held, 1 << 30);
        share.left >> 30
    };
    assert_eq!(left(None), 18);
    assert_eq!(left(Some(100)), 18);
    assert_eq!(left(Some(4)), 3);
    assert_eq!(left(Some(0)), -1);
}

/// A run at its own default limit is not throttled for the memory that is free beside it.
#[test]
fn on_every_mac_a_run_may_hold_its_default_limit() {
    for (name, recording) in machines().into_iter().filter(|(name, _)| name.starts_with("apple")) {
        let (machine, read) = telemetry(&recording);
        let (limit, share) = (budget(&machine).memory.unwrap(), read.memory.unwrap());
        let in_all = share.left + i64::try_from(share.held).unwrap();
        assert!(in_all >= i64::try_from(limit.limit.0).unwrap(), "{name}: {share:?} {limit:?}");
        assert!(limit.limit <= limit.max_limit, "{name}: {limit:?}");
    }
}

/// What a GPU was given counts as soon as it is, where it shares main memory, and bounds what is left.
#[test]
fn memory_of_a_device_beside_the_process_is_held_too() {
    let mut source = source(MEMORY);
    let machine = Machine::probe(&mut source);
    let device_bytes = Arc::new(AtomicU64::new(0));
    let mut read = |place, gib: u64| {
        device_bytes.store(gib << 30, Ordering::Relaxed);
        let held = HeldMemory::new(place, device_bytes.clone());
        let monitor = Monitor::new(&machine, DeviceId::Cpu, Some(Bytes(4 << 30)));
        let read = monitor.with_held(held).read(&mut source, Instant::now());
        read.memory.map(|share| (share.held >> 30, share.left >> 30))
    };
    assert_eq!(read(MemoryPlace::BesideProcess, 0), Some((1, 3)));
    assert_eq!(read(MemoryPlace::BesideProcess, 2), Some((3, 1)));
    assert_eq!(read(MemoryPlace::Process, 2), Some((1, 3)));
    assert_eq!(read(MemoryPlace::Gpu, 2), None);
}

/// A GPU with this to say, on a machine with a package, a disk and a radio.
fn with_gpu(nvml: &str, integrated: &str) -> Telemetry {
    let cuda = format!("pci_bus_id: 1\ncompute_capability: 12.1\nintegrated: {integrated}\n");
    let zone = "/sys/class/hwmon/hwmon";
    let mut answers: Vec<(String, &str)> = vec![
        ("nvml".into(), "driver: 580.95.05\ncuda: 13.0\ncards: 1\n"),
        ("nvml card 0".into(), "name: NVIDIA X\npci_bus_id: 1\nslowdown_celsius: 89\n"),
        ("nvml feel 0".into(), nvml),
        ("cuda".into(), "cuda: 13.0\ncards: 1\n"),
        ("cuda card 0".into(), &cuda),
        ("folder /sys/class/hwmon".into(), "hwmon0\nhwmon1\nhwmon2"),
    ];
    for (chip, name, celsius) in
        [(0, "coretemp", "70000"), (1, "nvme", "84000"), (2, "iwlwifi_1", "99000")]
    {
        answers.push((format!("folder {zone}{chip}"), "temp1_input\ntemp1_crit\ntemp1_label"));
        answers.push((format!("file {zone}{chip}/name"), name));
        answers.push((format!("file {zone}{chip}/temp1_input"), celsius));
        answers.push((format!("file {zone}{chip}/temp1_crit"), "100000"));
        answers.push((format!("file {zone}{chip}/temp1_label"), "Package id 0"));
    }
    let answers: Vec<_> = answers.iter().map(|(key, text)| (key.as_str(), *text)).collect();
    telemetry_of(&answers, DeviceId::Cuda(0), None)
}

#[test]
fn the_sensor_nearest_to_its_limit_is_felt() {
    let heat = |nvml: &str| {
        let heat = with_gpu(nvml, "0").temperature.unwrap();
        (heat.sensor, heat.celsius, heat.limit)
    };
    let package = || ("coretemp Package id 0".to_owned(), 70.0, Some(100.0));
    assert_eq!(heat("temperature_celsius: 58"), package());
    assert_eq!(heat("temperature_celsius: 60"), ("NVIDIA X".to_owned(), 60.0, Some(89.0)));
    assert_eq!(heat("temperature_celsius: 255"), package(), "nonsense is not near");
}

#[test]
fn utilisation_is_a_share_and_nonsense_is_unknown() {
    let check = |nvml: &str, expected: [Option<f64>; 2]| {
        let telemetry = with_gpu(nvml, "0");
        assert_eq!([telemetry.gpu_utilisation, telemetry.memory_utilisation], expected, "{nvml}");
    };
    check("utilisation_percent: 94\nmemory_utilisation_percent: 40", [Some(0.94), Some(0.4)]);
    check("utilisation_percent: 940\nmemory_utilisation_percent: -1", [None, None]);
    check("utilisation_percent: ? not supported by this GPU", [None, None]);
}

#[test]
fn what_throttles_a_gpu_is_reported_and_a_power_cap_is_not() {
    let check = |nvml: &str, integrated: &str, expected| {
        assert_eq!(with_gpu(nvml, integrated).throttled, expected, "{nvml}");
    };
    check("throttle_bits: 0", "0", None);
    check("throttle_bits: 4", "0", None);
    check("throttle_bits: 8", "0", None);
    check("throttle_bits: 32", "0", Some(ThrottleCause::Heat));
    check("throttle_bits: 76", "0", Some(ThrottleCause::Heat));
    check("throttle_bits: 200", "0", Some(ThrottleCause::PowerBrake));
    let stuck = "utilisation_percent: 94\nsm_clock_mhz: 507";
    check(stuck, "1", Some(ThrottleCause::StuckPower));
    check(stuck, "0", None);
    check("utilisation_percent: 94\nsm_clock_mhz: 2400", "1", None);
}

#[test]
fn a_macs_signals_are_felt() {
    let check = |thermal: &str, settings: &str, expected| {
        let mut recording = MachineRecording::of_this_computer();
        recording.os = "macos".into();
        for (question, text) in [("mac thermal", thermal), ("run pmset -g", settings)] {
            recording.answers.insert(question.into(), RecordedAnswer::Text(text.into()));
        }
        assert_eq!(telemetry(&recording).1.throttled, expected, "{thermal} {settings}");
    };
    check("state: 0\npressure: 0", " lowpowermode 0", None);
    check("state: 1\npressure: 1", " lowpowermode 0", None);
    check("state: 2\npressure: 1", " lowpowermode 0", Some(ThrottleCause::Heat));
    check("state: 0\npressure: 2", " lowpowermode 1", Some(ThrottleCause::Heat));
    check("state: 0\npressure: 0", " lowpowermode 1", Some(ThrottleCause::LowPower));
}

/// A machine whose counter stands at `counted`.
fn counting(counted: &str) -> ProbeSource {
    let zone = "file /sys/class/powercap/intel-rapl:0";
    source(&[
        ("folder /sys/class/powercap", "intel-rapl:0"),
        (&format!("{zone}/name"), "package-0"),
        (&format!("{zone}/max_energy_range_uj"), "1000000000"),
        (&format!("{zone}/energy_uj"), counted),
    ])
}

#[test]
fn power_is_the_slope_of_the_counter_even_where_it_starts_again() {
    let machine = Machine::probe(&mut counting("0"));
    let mut monitor = Monitor::new(&machine, DeviceId::Cpu, None);
    let start = Instant::now();
    let mut watts = |secs: f64, counted: &str| {
        monitor.read(&mut counting(counted), start + Duration::from_secs_f64(secs)).watts
    };
    assert_eq!(watts(0.0, "900000000"), None, "one reading has no slope");
    assert_eq!(watts(1.0, "950000000"), Some(50.0));
    assert_eq!(watts(1.01, "950100000"), None, "too soon");
    assert_eq!(watts(2.0, "20000000"), Some(70.0), "it started again");
    assert_eq!(watts(3.0, "lots"), None);
    assert_eq!(watts(4.0, "120000000"), Some(50.0), "over both seconds");
    assert_eq!(watts(5.0, "1000000001"), None, "beyond its range");
    assert_eq!(watts(4.5, "130000000"), None, "the clock went back");
}

#[test]
fn the_plug_is_asked_for_seldom() {
    let at = |status: &str| {
        source(&[
            ("folder /sys/class/power_supply", "BAT0"),
            ("file /sys/class/power_supply/BAT0/type", "Battery"),
            ("file /sys/class/power_supply/BAT0/status", status),
            ("file /sys/class/power_supply/BAT0/power_now", "21000000"),
        ])
    };
    let machine = Machine::probe(&mut at("Full"));
    let mut monitor = Monitor::new(&machine, DeviceId::Cpu, None);
    let start = Instant::now();
    let mut power = |secs, status| {
        let read = monitor.read(&mut at(status), start + Duration::from_secs(secs));
        (read.on_battery, read.watts)
    };
    assert_eq!(power(0, "Full"), (Some(false), None));
    assert_eq!(power(9, "Discharging"), (Some(false), None));
    assert_eq!(power(10, "Discharging"), (Some(true), Some(21.0)));
    assert_eq!(power(11, "Full"), (Some(true), Some(21.0)));
}
