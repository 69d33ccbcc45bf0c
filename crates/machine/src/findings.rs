//! What is wrong with a machine and how to fix it. Pure: judges readings, takes none.

use serde::Serialize;

use crate::budget::{UnusableGpu, check_usable, is_older};
use crate::cpu::CpuFeature;
use crate::gpu::{AppleGpu, GpuInfo, NvidiaGpu, ThrottleReason};
use crate::hardware::{CudaVersion, MIN_CUDA, NVIDIA_ARCHS};
use crate::memory::{MemoryPressure, PressureLevel};
use crate::reading::{Bytes, Unknown};
use crate::thermal::PowerMode;
use crate::{Machine, NvidiaStack};

/// Something the user should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Severity,
    /// What was found, with its numbers.
    pub what: String,
    /// What to do about it.
    pub hint: String,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Runs will be slow, wrong or impossible until it is fixed.
    Fault,
    /// Runs work, but not as well as they could, or hearth can read less than it could.
    Notice,
}

/// Everything found, faults first.
pub fn findings(machine: &Machine) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(stack) = &machine.nvidia {
        nvidia_stack(machine, stack, &mut found);
    }
    for gpu in &machine.gpus {
        match gpu {
            GpuInfo::Nvidia(gpu) => nvidia_gpu(machine, gpu, &mut found),
            GpuInfo::Apple(gpu) => apple_gpu(machine, gpu, &mut found),
        }
    }
    mac(machine, &mut found);
    power(machine, &mut found);
    memory(machine, &mut found);
    cpu(machine, &mut found);
    sensors(machine, &mut found);
    found.sort_by_key(|finding| finding.level);
    found
}

fn fault(what: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { level: Severity::Fault, what: what.into(), hint: hint.into() }
}

fn notice(what: impl Into<String>, hint: impl Into<String>) -> Finding {
    Finding { level: Severity::Notice, what: what.into(), hint: hint.into() }
}

fn nvidia_stack(machine: &Machine, stack: &NvidiaStack, found: &mut Vec<Finding>) {
    let has_gpus = machine.nvidia_gpus().next().is_some();
    if let (Ok(module), Err(reason)) = (&stack.kernel_module.value, &stack.driver.value) {
        found.push(fault(
            format!("the NVIDIA kernel module {module} is loaded, but NVML does not answer: {reason}"),
            match reason.0.as_str() {
                "driver and library versions differ" => "restart: the driver was updated while the old kernel module was loaded",
                _ => "in a container, start it with the NVIDIA runtime (--gpus all); else reinstall the driver",
            },
        ));
    }
    if has_gpus {
        cuda_libraries(stack, found);
    }
}

fn cuda_libraries(stack: &NvidiaStack, found: &mut Vec<Finding>) {
    let needed = [("NVRTC", &stack.nvrtc), ("cuBLASLt", &stack.cublaslt)];
    let missing = needed
        .iter()
        .filter_map(|(name, library)| Some(format!("{name} ({})", library.value.as_ref().err()?)));
    let missing: Vec<_> = missing.collect();
    if !missing.is_empty() {
        found.push(fault(
            format!("CUDA libraries are missing: {}", missing.join(", ")),
            "install the libraries of CUDA 12 or 13, or add their folder to LD_LIBRARY_PATH",
        ));
    }
    if let Err(reason) = &stack.cudnn.value {
        found.push(notice(
            format!("cuDNN is missing: {reason}"),
            "attention uses hearth's own flash kernel; cuDNN 9 is faster",
        ));
    }
    if let (Some(cuda), Some(nvrtc)) = (stack.cuda.known(), stack.nvrtc.known())
        && let Some(library) = major_zero(nvrtc)
        && is_older(cuda, library)
        && !is_older(cuda, MIN_CUDA)
    {
        found.push(fault(
            format!("the CUDA libraries are version {nvrtc}, but the driver supports CUDA {cuda}"),
            format!("install driver {} or newer, or the libraries of CUDA 12", library.driver),
        ));
    }
}

/// Libraries of 13.x need a driver that supports 13.0; within a major version any pair works.
fn major_zero(version: &str) -> Option<CudaVersion> {
    let major: u32 = version.split('.').next()?.parse().ok()?;
    let first =
        |class: &&crate::hardware::NvidiaArch| (class.cuda.major, class.cuda.minor) == (major, 0);
    NVIDIA_ARCHS.iter().find(first).map(|class| class.cuda)
}

fn nvidia_gpu(machine: &Machine, gpu: &NvidiaGpu, found: &mut Vec<Finding>) {
    let name = gpu.name.known().map_or("the NVIDIA GPU", String::as_str);
    if let Err(reason) = check_usable(machine, gpu) {
        found.push(fault(format!("{name} cannot be used: {reason}"), unusable_hint(&reason)));
    }
    let faults: Vec<_> = gpu
        .telemetry
        .throttle
        .known()
        .into_iter()
        .flatten()
        .filter(|cause| cause.is_fault())
        .collect();
    if !faults.is_empty() {
        let causes: Vec<_> = faults.iter().map(|cause| cause.label()).collect();
        found.push(fault(
            format!("{name} is throttled: {}", causes.join(", ")),
            throttle_hint(&faults),
        ));
    }
    if let (Some(load), Some(clock)) =
        (gpu.telemetry.utilisation.known(), gpu.telemetry.clock.known())
        && gpu.telemetry.is_stuck(gpu.unified.known() == Some(&true))
    {
        found.push(fault(
            format!("{name} is busy ({load}) at only {clock}"),
            "unplug the power supply for a minute and use the original one: its power limit is stuck",
        ));
    }
    if let Some(errors) = gpu.ecc_uncorrected.known().filter(|errors| **errors > 0) {
        found.push(fault(
            format!("{name} has {errors} uncorrected memory errors"),
            "restart the machine; if they return, the GPU is failing",
        ));
    }
    if let (Some(free), Some(total)) = (gpu.memory_free.known(), gpu.memory_total.known())
        && free.share_of(*total) < 0.5
    {
        found.push(notice(
            format!("{name} has only {free} of {total} free"),
            "close the programs that nvidia-smi lists",
        ));
    }
}

fn unusable_hint(reason: &UnusableGpu) -> String {
    match reason {
        UnusableGpu::NotOffered(_) => {
            "check CUDA_VISIBLE_DEVICES; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility; \
             else reinstall the driver"
                .into()
        }
        UnusableGpu::Capability(_) => "hearth computes on the CPU instead".into(),
        UnusableGpu::Driver { needs, .. } => format!("install driver {} or newer", needs.driver),
    }
}

fn throttle_hint(causes: &[&ThrottleReason]) -> &'static str {
    if causes.contains(&&ThrottleReason::PowerBrake) {
        "check the power supply and its cables"
    } else {
        "let it cool down, and clean its fans and vents"
    }
}

fn apple_gpu(machine: &Machine, gpu: &AppleGpu, found: &mut Vec<Finding>) {
    if let (Some(Some(limit)), Some(total)) =
        (gpu.wired_limit.known(), machine.memory.total.known())
        && limit.share_of(*total) > 0.85
    {
        found.push(fault(
            format!("iogpu.wired_limit_mb is set to {limit} of {total}"),
            "macOS may panic with that much wired memory; set it to 0 for the system's default",
        ));
    }
    if let Err(reason) = &gpu.working_set.value {
        found.push(notice(
            format!("Metal reports no recommended working set: {reason}"),
            "hearth uses what Macs of that size have: two thirds of memory, three quarters above 36 GB",
        ));
    }
}

fn mac(machine: &Machine, found: &mut Vec<Finding>) {
    if machine.translated.as_ref().is_some_and(|translated| translated.known() == Some(&true)) {
        found.push(fault(
            "this is the Intel build, translated by Rosetta",
            "install the Apple Silicon build of hearth",
        ));
    }
    let Some(thermal) = &machine.thermal.mac else { return };
    if thermal.power_mode.known() == Some(&PowerMode::Low) {
        found.push(notice(
            "low power mode is on",
            "turn it off in System Settings, Battery, for full speed",
        ));
    }
    let hot_state = thermal.state.known().filter(|state| state.is_hot());
    let hot_pressure = thermal.pressure.known().filter(|level| level.is_hot());
    let slow = thermal.cpu_speed_limit.known().filter(|limit| limit.0 < 100.0);
    let signs: Vec<String> = [
        hot_state.map(|state| format!("thermal state {state:?}").to_lowercase()),
        hot_pressure.map(|level| format!("thermal pressure {level:?}").to_lowercase()),
        slow.map(|limit| format!("CPU limited to {limit}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    if !signs.is_empty() {
        found.push(fault(
            format!("the Mac is throttled by heat: {}", signs.join(", ")),
            "let it cool down; on a laptop, improve the airflow below",
        ));
    }
}

fn power(machine: &Machine, found: &mut Vec<Finding>) {
    if machine.power.on_battery.known() == Some(&true) {
        found.push(notice(
            "running on battery",
            "plug it in before a long run; on battery it is slower, and hearth lowers the pace",
        ));
    }
}

/// Chosen: below a quarter of memory free, plans get so small that closing a browser pays more
/// than any technique.
const SCARCE: f64 = 0.25;

fn memory(machine: &Machine, found: &mut Vec<Finding>) {
    let memory = &machine.memory;
    if let Err(reason) = memory.total.require().and(memory.available.require()) {
        found.push(fault(
            format!("free memory is unknown: {reason}"),
            "without it no limit can be set; in a sandbox, make /proc readable",
        ));
    }
    if let (Some(available), Some(total)) = (memory.available.known(), memory.total.known())
        && available.share_of(*total) < SCARCE
    {
        found.push(notice(
            format!("only {available} of {total} memory is available"),
            "close other programs before a run",
        ));
    }
    if let (Some(Some(container)), Some(total)) = (memory.container.known(), memory.total.known())
        && container.limit < Bytes(total.0 / 10 * 9)
    {
        found.push(notice(
            format!("a container limits memory to {} of {total}", container.limit),
            "raise it (docker run --memory, systemd MemoryMax) if the run should have more",
        ));
    }
    match memory.pressure.known() {
        Some(MemoryPressure::Stalls(stalls)) if stalls.some_10s.0 >= 10.0 => found.push(fault(
            format!("programs stalled on memory {} of the last 10 s", stalls.some_10s),
            "close other programs: the machine is close to swapping",
        )),
        Some(MemoryPressure::Level(level)) if *level != PressureLevel::Normal => found.push(fault(
            format!("macOS reports {level:?} memory pressure").to_lowercase().replace("macos", "macOS"),
            "close other programs before a run",
        )),
        Some(_) => {}
        None => found.push(notice(
            format!("memory pressure is unknown: {}", reason(&memory.pressure.value)),
            if machine.thermal.mac.is_some() { "hearth watches available memory instead" } else {
                "hearth watches MemAvailable instead; booting with psi=1 lets the kernel warn earlier"
            },
        )),
    }
}

fn cpu(machine: &Machine, found: &mut Vec<Finding>) {
    let vectors = [CpuFeature::Avx2, CpuFeature::Avx512, CpuFeature::Neon];
    if machine.cpu.features.value.is_ok()
        && !vectors.iter().any(|feature| machine.cpu.has(*feature))
    {
        found.push(notice(
            "the CPU has neither AVX2 nor NEON",
            "computing on it will be several times slower than it could be",
        ));
    }
}

fn sensors(machine: &Machine, found: &mut Vec<Finding>) {
    let gpu_heat = machine.gpus.iter().any(|gpu| match gpu {
        GpuInfo::Nvidia(gpu) => gpu.telemetry.temperature.value.is_ok(),
        GpuInfo::Apple(_) => false,
    });
    let mac = machine.thermal.mac.as_ref();
    let mac_heat = mac.is_some_and(|mac| mac.state.value.is_ok() || mac.pressure.value.is_ok());
    let sensors = machine.thermal.sensors.known().into_iter().flatten();
    let board_heat = sensors.clone().any(|sensor| sensor.temperature.value.is_ok());
    if !(gpu_heat || mac_heat || board_heat) {
        let why = match sensors.count() {
            0 => reason(&machine.thermal.sensors.value),
            count => format!("all {count} sensors give implausible values"),
        };
        found.push(notice(
            format!("no temperature can be read: {why}"),
            "hearth sets the pace by step time, which needs no sensor",
        ));
    }
}

fn reason<T>(value: &Result<T, Unknown>) -> String {
    value.as_ref().err().map_or_else(String::new, ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::testing::source;

    const CALM: &[(&str, &str)] = &[
        ("file /proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 30000000 kB\n"),
        ("file /proc/cpuinfo", "processor : 0\nmodel name : X\nflags : avx2 fma\n"),
        ("file /proc/self/cgroup", "0::/\n"),
        ("file /proc/pressure/memory", "some avg10=0.00 avg60=0.00\nfull avg10=0.00 avg60=0.00\n"),
        ("folder /sys/class/thermal", "thermal_zone0"),
        ("file /sys/class/thermal/thermal_zone0/type", "acpitz"),
        ("file /sys/class/thermal/thermal_zone0/temp", "40000"),
    ];

    /// A calm machine with a few answers changed finds exactly these.
    fn check(changed: &[(&str, &str)], expected: &[&str]) {
        let mut answers: Vec<_> = CALM.to_vec();
        answers.retain(|(key, _)| !changed.iter().any(|(other, _)| other == key));
        answers.extend(changed.iter().filter(|(_, text)| !text.is_empty()));
        let found = findings(&Machine::probe(&mut source(&answers)));
        let whats: Vec<_> = found.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(whats.len(), expected.len(), "{whats:#?}");
        for (what, expected) in whats.iter().zip(expected) {
            assert!(what.contains(expected), "{what:?} does not say {expected:?}");
        }
        assert!(found.iter().all(|finding| !finding.hint.is_empty()));
    }

    #[test]
    fn a_calm_machine_has_nothing_wrong() {
        check(&[], &[]);
    }

    #[test]
    fn missing_and_implausible_sensors_are_named() {
        check(&[("folder /sys/class/thermal", "")], &["no temperature can be read"]);
        check(
            &[("file /sys/class/thermal/thermal_zone0/temp", "-274000")],
            &["all 1 sensors give implausible values"],
        );
        check(&[("file /proc/pressure/memory", "")], &["memory pressure is unknown"]);
        check(
            &[("file /proc/meminfo", "")],
            &["free memory is unknown: /proc/meminfo MemTotal: not in"],
        );
    }

    #[test]
    fn scarce_memory_and_containers_are_named() {
        check(
            &[("file /proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 4000000 kB\n")],
            &["only 3.8 GiB of 32.0 GiB memory is available"],
        );
        check(
            &[
                ("file /sys/fs/cgroup/memory.max", "8589934592"),
                ("file /sys/fs/cgroup/memory.current", "0"),
            ],
            &["a container limits memory to 8.0 GiB of 32.0 GiB"],
        );
        check(
            &[(
                "file /proc/pressure/memory",
                "some avg10=31.00 avg60=9.00\nfull avg10=12.00 avg60=0.00\n",
            )],
            &["programs stalled on memory 31.0 %"],
        );
    }

    #[test]
    fn a_battery_in_use_is_named() {
        let supply = |status| {
            [
                ("folder /sys/class/power_supply", "BAT0"),
                ("file /sys/class/power_supply/BAT0/type", "Battery"),
                ("file /sys/class/power_supply/BAT0/status", status),
            ]
        };
        check(&supply("Discharging"), &["running on battery"]);
        check(&supply("Charging"), &[]);
    }

    #[test]
    fn half_present_drivers_are_named() {
        let module = (
            "file /proc/driver/nvidia/version",
            "NVRM version: NVIDIA Module  580.95.05  Release\n",
        );
        check(&[module], &["the NVIDIA kernel module 580.95.05 is loaded, but"]);
        let nvml = ("nvml", "driver: 580.95.05\ncuda: 13.0\ncards: 1\n");
        let libraries = ("cuda libraries", "nvrtc: 13.0\ncublaslt: 13.1.0\ncudnn: 9.13.0\n");
        let gpu = ("nvml card 0", "name: NVIDIA X\npci_bus_id: 1\n");
        check(&[nvml, gpu, libraries], &["NVIDIA X cannot be used: not in the recording"]);
    }

    fn gpu_with<'a>(cuda: &'a str, nvml: &'a str, libraries: &'a str) -> [(&'a str, &'a str); 6] {
        [
            ("nvml", "driver: 580.95.05\ncuda: 13.0\ncards: 1\n"),
            ("nvml card 0", nvml),
            ("nvml feel 0", nvml),
            ("cuda", cuda),
            ("cuda card 0", "pci_bus_id: 1\ncompute_capability: 8.6\nintegrated: 0\n"),
            ("cuda libraries", libraries),
        ]
    }

    const CUDA_13: &str = "cuda: 13.0\ncards: 1\n";
    const LIBRARIES: &str = "nvrtc: 13.0\ncublaslt: 13.1.0\ncudnn: 9.13.0\n";

    #[test]
    fn old_drivers_and_missing_libraries_are_named() {
        let gpu = "name: NVIDIA X\npci_bus_id: 1\n";
        check(&gpu_with(CUDA_13, gpu, LIBRARIES), &[]);
        check(
            &gpu_with(
                "cuda: 11.8\ncards: 1\n",
                gpu,
                "nvrtc: 12.4\ncublaslt: 12.4.0\ncudnn: 9.1.0\n",
            ),
            &["NVIDIA X cannot be used: the driver supports CUDA 11.8, it needs 12.0"],
        );
        check(
            &gpu_with("cuda: 12.8\ncards: 1\n", gpu, LIBRARIES),
            &["the CUDA libraries are version 13.0, but the driver supports CUDA 12.8"],
        );
        check(
            &gpu_with(CUDA_13, gpu, "nvrtc: ? not found\ncublaslt: 13.1.0\ncudnn: ? not found\n"),
            &["CUDA libraries are missing: NVRTC (not found)", "cuDNN is missing"],
        );
    }

    #[test]
    fn a_stuck_power_supply_shows_on_a_unified_gpu() {
        let check_at = |clock: &str, expected: &[&str]| {
            let telemetry = format!("utilisation_percent: 94\nsm_clock_mhz: {clock}\n");
            let mut answers = gpu_with(CUDA_13, "name: NVIDIA X\npci_bus_id: 1\n", LIBRARIES);
            let unified = "pci_bus_id: 1\ncompute_capability: 12.1\nintegrated: 1\n";
            for (question, answer) in &mut answers {
                match *question {
                    "nvml feel 0" => *answer = &telemetry,
                    "cuda card 0" => *answer = unified,
                    _ => {}
                }
            }
            check(&answers, expected);
        };
        check_at("507", &["is busy (94.0 %) at only 507 MHz"]);
        check_at("2400", &[]);
    }

    #[test]
    fn throttled_gpus_are_named_and_busy_ones_are_not() {
        let gpu = |facts: &str| format!("name: NVIDIA X\npci_bus_id: 1\n{facts}");
        let check_gpu = |facts: &str, expected: &[&str]| {
            check(&gpu_with(CUDA_13, &gpu(facts), LIBRARIES), expected);
        };
        check_gpu("throttle_bits: 4\n", &[]);
        check_gpu("throttle_bits: 64\n", &["NVIDIA X is throttled: heat (hardware)"]);
        check_gpu("utilisation_percent: 94\nsm_clock_mhz: 507\n", &[]);
        check_gpu("ecc_uncorrected: 3\n", &["3 uncorrected memory errors"]);
        check_gpu(
            "memory_total_bytes: 25757220864\nmemory_free_bytes: 5368709120\n",
            &["only 5.0 GiB of 24.0 GiB free"],
        );
    }
}
