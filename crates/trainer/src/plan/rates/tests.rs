//! Curves by their properties over random points, damaged files, and the work of a real training step.

use std::fs;
use std::path::Path;

use compute::{Device, DeviceKind, RandomSequence};
use machine::{Machine, MachineRecording, ProbeSource};

use super::*;
use crate::bench::cases::{BenchCase, BenchSettings};
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;

/// Points between a microsecond and a second, at sizes of 2⁸ to 2³⁸.
fn random_points(seed: u64) -> Vec<(f64, f64)> {
    let sequence = RandomSequence::new(seed, 0);
    let number = |index| f64::from(sequence.uniform(index));
    let n_points = 1 + seed as usize % 9;
    let point = |index| {
        let size = (8.0 + 30.0 * number(2 * index)).exp2();
        (size, 10f64.powf(-6.0 + 6.0 * number(2 * index + 1)))
    };
    (0..n_points).map(point).collect()
}

#[test]
fn curves_never_fall_and_go_through_their_points() {
    for seed in 0..300 {
        let points = random_points(seed);
        let curve = RateCurve::through(CallSizeUnit::Bytes, points.clone());
        assert!(curve.is_sound());
        for [size, seconds] in curve.points() {
            assert!((curve.seconds(*size) / seconds - 1.0).abs() < 1e-12);
        }
        let times: Vec<f64> =
            (0..500).map(|at| curve.seconds((f64::from(at) / 10.0).exp2())).collect();
        assert!(times.is_sorted(), "{points:?}");
        assert!(times.iter().all(|time| time.is_finite() && *time > 0.0));
    }
}

#[test]
fn what_falls_is_levelled_and_nothing_else_is_changed() {
    let measured = [(1e3, 1e-6), (1e4, 4e-5), (1e5, 1e-5), (1e6, 1e-3)];
    let curve = RateCurve::through(CallSizeUnit::Bytes, measured);
    for (size, seconds) in [(1e3, 1e-6), (1e4, 2e-5), (1e5, 2e-5), (1e6, 1e-3)] {
        assert!((curve.seconds(size) / seconds - 1.0).abs() < 1e-9, "{size}");
    }
    let twice = RateCurve::through(CallSizeUnit::Bytes, [(8.0, 1.0), (8.0, 4.0), (9.0, 5.0)]);
    assert!((twice.seconds(8.0) - 2.0).abs() < 1e-9);
}

#[test]
fn between_points_logarithms_are_straight_and_beyond_them_time_grows_with_size() {
    let curve = RateCurve::through(CallSizeUnit::Flops, [(1e4, 1e-3), (1e6, 1e-1), (1e8, 0.4)]);
    for (size, seconds) in [(1e5, 1e-2), (1e7, 0.2), (1e3, 1e-3), (1e9, 4.0)] {
        assert!((curve.seconds(size) / seconds - 1.0).abs() < 1e-9, "{size}");
    }
    assert!(RateCurve::through(CallSizeUnit::Flops, []).seconds(5.0).abs() < f64::EPSILON);
}

/// A machine of the `machines` folder.
fn machine(name: &str) -> Machine {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../machines");
    let recording = MachineRecording::load(&folder.join(name)).unwrap();
    Machine::probe(&mut ProbeSource::replay(recording))
}

fn kind(threads: usize) -> DeviceKind {
    DeviceKind::Cpu { threads, has_amx: false }
}

fn rates() -> Rates {
    Rates { is_measured: true, ..Rates::documented(&machine("xeon-2-core.toml"), kind(2)) }
}

/// Rates whose numbers round-trip through JSON exactly.
fn plain() -> Rates {
    let curve =
        RateCurve { measure: CallSizeUnit::Bytes, points: vec![[1024.0, 0.5], [4096.0, 2.0]] };
    Rates { is_measured: true, host_secs: 0.0, curves: BTreeMap::from([(PASS.to_owned(), curve)]) }
}

#[test]
fn rates_come_back_for_their_owner_alone() {
    let folder = tempfile::tempdir().unwrap();
    let owner = RatesKey::of(&machine("xeon-2-core.toml"), kind(2), 0);
    assert_eq!(Rates::load(folder.path(), &owner), StoredRates::Missing);
    let path = plain().save(&folder.path().join("new"), &owner).unwrap();
    assert_eq!(Rates::load(path.parent().unwrap(), &owner), StoredRates::Rates(plain()));
    for other in [
        RatesKey { threads: 3, ..owner.clone() },
        RatesKey { version: "0.0.0".into(), ..owner.clone() },
        RatesKey::of(&machine("apple-m1-8gb.toml"), kind(2), 0),
    ] {
        assert_eq!(Rates::load(path.parent().unwrap(), &other), StoredRates::Missing);
        // One that was copied under a wrong name is not taken either.
        fs::copy(&path, other.path(folder.path())).unwrap();
        assert!(matches!(Rates::load(folder.path(), &other), StoredRates::Unusable { .. }));
    }
}

#[test]
fn rates_of_a_gpu_are_not_those_of_the_cpu() {
    let cuda = |is_deterministic| DeviceKind::Cuda { is_deterministic };
    let h200 = |kind, gpu| RatesKey::of(&machine("h200.toml"), kind, gpu);
    let path = h200(cuda(false), 0).path(Path::new(""));
    let end = format!("0-cuda-{}.json", store::VERSION);
    assert_eq!(path.to_str().unwrap(), format!("rates-nvidia-h200-{end}"));
    assert_ne!(h200(cuda(false), 0), h200(cuda(true), 0));
    // No second GPU is known there.
    assert_eq!(h200(cuda(false), 1).name, "unknown");
}

#[test]
fn a_damaged_file_is_reported_and_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let owner = RatesKey::of(&machine("xeon-2-core.toml"), kind(2), 0);
    let path = plain().save(folder.path(), &owner).unwrap();
    let whole = fs::read_to_string(&path).unwrap();
    let (falling, negative) = (whole.replace("0.5", "9.0"), whole.replace("0.5", "-1.0"));
    assert!(falling != whole && negative != whole);
    for text in ["", "{}", &whole[..whole.len() / 2], &falling, &negative] {
        fs::write(&path, text).unwrap();
        let found = Rates::load(folder.path(), &owner);
        assert!(
            matches!(&found, StoredRates::Unusable { path: at, .. } if *at == path),
            "{found:?}"
        );
    }
}

/// The work of a training step on a device.
fn step(device: &Device) -> WorkStats {
    let settings = BenchSettings {
        samples: 1,
        micro_batch: 1,
        recompute: Recompute::None,
        offload: Offload::None,
        quantise: None,
        multiplies_fp8: false,
    };
    let mut prepared = BenchCase::Sd3Tiny.prepare(device, compute::Dtype::Bf16, settings).unwrap();
    let before = device.work();
    prepared.run().unwrap();
    device.work().since(&before)
}

#[test]
fn a_step_of_sd3_is_counted_the_same_on_the_meta_device() {
    let real = Device::cpu(2, 1 << 30).unwrap();
    let work = step(&real);
    assert_eq!(work, step(&Device::meta(real.kind(), usize::MAX / 2)));
    assert!(work.calls.keys().any(|class| class.kernel == "attention of narrow heads backward"));
    let sum: f64 = work.calls.iter().map(|(class, calls)| rates().seconds_of(class, calls)).sum();
    assert!(sum > 0.0 && (rates().seconds(&work) / sum - 1.0).abs() < 1e-9);
}

#[test]
fn a_class_that_was_not_measured_takes_the_time_of_its_kernel_or_of_the_roof() {
    let work = step(&Device::meta(kind(2), usize::MAX / 2));
    let roof = rates().seconds(&work);
    let mut rates = rates();
    let ten = RateCurve::through(CallSizeUnit::Flops, [(1.0, 10.0), (1e15, 10.0)]);
    rates.curves.insert("attention of narrow heads, f32".into(), ten);
    let n_calls: u64 = work
        .calls
        .iter()
        .filter_map(|(class, calls)| {
            (class.kernel == "attention of narrow heads").then_some(calls.count)
        })
        .sum();
    let more = rates.seconds(&work) - roof;
    assert!(n_calls > 0 && (more / (10.0 * n_calls as f64) - 1.0).abs() < 0.01, "{more}");
}

#[test]
fn more_threads_and_faster_memory_are_faster() {
    let work = step(&Device::meta(kind(2), usize::MAX / 2));
    let seconds = |name: &str, threads| {
        let rates = Rates::documented(&machine(name), kind(threads));
        assert!(!rates.is_measured);
        rates.seconds(&work)
    };
    assert!(seconds("xeon-2-core.toml", 2) < seconds("xeon-2-core.toml", 1));
    assert!(seconds("apple-m3-max-128gb.toml", 12) < seconds("apple-m1-8gb.toml", 4));
}

#[test]
fn a_gpu_is_as_fast_as_its_multiprocessors() {
    // 0.4 of NVIDIA's 989 TFLOPS, at 1830 MHz, of an H200, and of 128 multiprocessors of a 4090 at 1.6 GHz.
    for (name, flops) in [
        ("h200.toml", 0.4 * 989e12 * 1980.0 / 1830.0),
        ("rtx-4090.toml", 0.4 * 165e12 * 1.6 / 2.52),
        ("xeon-2-core.toml", 25e12),
    ] {
        let kind = DeviceKind::Cuda { is_deterministic: false };
        let rates = Rates::documented(&machine(name), kind);
        let size = 2f64.powi(44);
        let found = size / rates.curves[ARITHMETIC].seconds(size);
        assert!((found / flops - 1.0).abs() < 0.01, "{name}: {found}");
    }
}

#[test]
fn asking_for_many_small_calls_takes_longer_than_computing_them() {
    let work = step(&Device::meta(kind(2), usize::MAX / 2));
    let n_calls: u64 = work.calls.values().map(|calls| calls.count).sum();
    let asked = |host_secs| Rates { host_secs, ..rates() }.seconds(&work);
    assert_eq!(asked(0.0).to_bits(), asked(1e-12).to_bits());
    assert!((asked(10.0) / (10.0 * n_calls as f64) - 1.0).abs() < 1e-9);
}

#[test]
fn an_apple_gpu_is_as_fast_as_its_cores_and_its_memory() {
    // A fifth of Apple's 2.6 TFLOPS of an M1, and 0.36 per core of those after it; 0.8 of the memory.
    for (name, flops, bytes) in [
        ("apple-m1-8gb.toml", 0.2 * 2.6e12, 0.8 * 68e9),
        ("apple-m2-ultra-192gb.toml", 0.2 * 76.0 * 0.36e12, 0.8 * 800e9),
    ] {
        let rates = Rates::documented(&machine(name), DeviceKind::gpu_with_buffer(None));
        let per_second = |class: &str| 2f64.powi(44) / rates.curves[class].seconds(2f64.powi(44));
        assert!((per_second(ARITHMETIC) / flops - 1.0).abs() < 1e-3, "{name}");
        assert!((per_second(PASS) / bytes - 1.0).abs() < 1e-3, "{name}");
        assert!(!rates.is_measured);
    }
}
