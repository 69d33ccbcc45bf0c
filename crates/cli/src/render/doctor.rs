//! The doctor's page: the hardware, its telemetry, what hearth plans with and uses, what is wrong.

use std::fmt::Display;

use compute::self_test::OpVerdict;
use machine::budget::{Budget, DeviceId, MemoryBound, MemoryLimit};
use machine::findings::{Finding, Severity};
use machine::gpu::{AppleGpu, GpuInfo, NvidiaGpu};
use machine::hardware::{Feature, nvidia_arch};
use machine::memory::{ContainerLimit, MemoryPressure, SystemMemory};
use machine::power::PowerInfo;
use machine::reading::Percent;
use machine::thermal::{MacThermal, Thermal, ThermalSensor};
use machine::uses::{DeviceUse, UseRole};
use machine::{Bytes, Machine, NvidiaStack, Provenance, Reading};
use serde::Serialize;

use crate::text::{BAD, BOLD, DIM, GOOD, PLAIN, TextPage, WARN, bar};

/// All that doctor has to say.
#[derive(Serialize)]
pub struct Diagnosis {
    pub hearth: &'static str,
    pub machine: Machine,
    pub budget: Budget,
    pub findings: Vec<Finding>,
    /// What computes by Metal or Vulkan; of a recorded machine nobody knows.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<OfferedAdapter>,
    /// How weights are loaded on NVIDIA GPUs that share main memory; of a recorded machine nobody knows.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub host_memory: Vec<WeightLoading>,
}

/// How weights are loaded on an NVIDIA GPU that shares main memory, and what was measured to decide that.
#[derive(Serialize)]
pub struct WeightLoading {
    pub device: String,
    /// Whether they are read straight into memory that the GPU shares, not through buffers.
    pub is_straight: bool,
    /// Whether that was asked for, whatever was measured.
    pub is_forced: bool,
    /// Why nothing could be measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speeds: Option<LoadingSpeeds>,
}

/// Bytes per second, straight and through buffers.
#[derive(Serialize)]
pub struct LoadingSpeeds {
    pub straight: MemorySpeed,
    pub buffered: MemorySpeed,
}

/// Bytes per second of one memory.
#[derive(Serialize)]
pub struct MemorySpeed {
    pub load: f64,
    pub gpu_read: f64,
    pub gpu_write: f64,
}

/// A GPU that `--device gpu` may mean.
#[derive(Serialize)]
pub struct OfferedAdapter {
    /// As it is typed; none where it cannot be used.
    pub device: Option<String>,
    pub name: String,
    pub driver: String,
    pub interface: &'static str,
    pub is_software: bool,
    pub buffer_bytes: usize,
    pub tensor_bytes: usize,
    pub group_bytes: usize,
    /// Whether weights are read into its memory without a copy.
    pub shares_memory: bool,
    /// What it has beyond what every kernel asks for.
    pub offers: Vec<AdapterFeature>,
    pub lacks: Option<&'static str>,
}

/// Something that some GPUs have.
#[derive(Serialize)]
pub struct AdapterFeature {
    pub name: &'static str,
    pub on: bool,
    /// Whether hearth has a use for it.
    pub is_used: bool,
}

/// Draws everything.
pub fn page(diagnosis: &Diagnosis) -> String {
    let Diagnosis { machine, budget, findings, .. } = diagnosis;
    let mut page = TextPage::new();
    page.line(BOLD, &machine.title);
    match &machine.provenance {
        Provenance::Live => {}
        Provenance::Recorded { basis } => page.line(DIM, &format!("recorded by {basis}")),
        Provenance::Documented { basis } => {
            page.line(DIM, &format!("from published facts, not measured: {basis}"));
        }
    }
    page.heading("hardware");
    hardware(machine, &mut page);
    for adapter in &diagnosis.adapters {
        page.row("adapter", PLAIN, &adapter_line(adapter));
        page.row("", DIM, &limits(adapter));
    }
    for loading in &diagnosis.host_memory {
        page.row("weights", PLAIN, &loading_line(loading));
        page.row("", DIM, &loading_figures(loading));
    }
    page.heading("right now");
    live_status(machine, &mut page);
    page.heading("what hearth plans with");
    plan(machine, budget, &mut page);
    page.heading(&format!("what {} has", budget.device));
    features(&budget.features, &mut page);
    page.heading(&format!("what hearth uses on {}", budget.device));
    uses(&budget.uses, &mut page);
    page.heading("what is wrong");
    problems(findings, &mut page);
    page.finish()
}

/// An op that may not be used.
pub fn wrong_op(verdict: &OpVerdict) -> String {
    let OpVerdict { name, dtype, error, allowed } = verdict;
    format!(
        "{name} in {dtype} is wrong: max error {error:.1e} of the largest value, tolerance {allowed:.1e}"
    )
}

/// What a self-test came to.
pub fn tested(device: &str, all: usize, wrong: usize) -> String {
    if wrong == 0 {
        return format!("{device}: all {all} checks agree with the CPU");
    }
    format!("{device}: {wrong} of {all} checks do not agree with the CPU; do not train on it")
}

fn adapter_line(adapter: &OfferedAdapter) -> String {
    let OfferedAdapter { name, driver, interface, .. } = adapter;
    let device = match (&adapter.device, adapter.lacks) {
        (Some(device), _) => format!("--device {device}"),
        (None, lacks) => format!("not used, it lacks {}", lacks.unwrap_or("something")),
    };
    let software = if adapter.is_software { ", software" } else { "" };
    format!("{device}: {name} by {interface}{software}, {driver}")
}

fn limits(adapter: &OfferedAdapter) -> String {
    let bytes = [adapter.buffer_bytes, adapter.tensor_bytes, adapter.group_bytes];
    let [buffer, tensor, group] = bytes.map(|bytes| Bytes(bytes as u64));
    let memory = if adapter.shares_memory { "shared with the CPU" } else { "of its own" };
    let list = |is_listed: fn(&AdapterFeature) -> bool| {
        let names = adapter.offers.iter().filter(|offer| is_listed(offer)).map(|offer| offer.name);
        Some(names.collect::<Vec<_>>().join(", ")).filter(|names| !names.is_empty())
    };
    let mut parts = vec![
        format!("buffers up to {buffer}, tensors up to {tensor}, workgroup memory {group}"),
        format!("memory {memory}"),
    ];
    parts.extend(list(|offer| offer.on && offer.is_used).map(|names| format!("uses {names}")));
    parts
        .extend(list(|offer| offer.on && !offer.is_used).map(|names| format!("not used: {names}")));
    parts.extend(list(|offer| !offer.on).map(|names| format!("without {names}")));
    parts.join(" · ")
}

fn loading_line(loading: &WeightLoading) -> String {
    let WeightLoading { device, is_straight, is_forced, .. } = loading;
    let how = match (is_straight, is_forced) {
        (true, false) => "read straight into memory that CPU and GPU share, without buffers",
        (true, true) => "read straight into host memory, as HEARTH_FORCE_UNIFIED asks",
        (false, _) => "loaded through pinned buffers",
    };
    format!("{device}: {how}")
}

/// What decided it.
fn loading_figures(WeightLoading { unknown, speeds, .. }: &WeightLoading) -> String {
    let Some(LoadingSpeeds { straight, buffered }) = speeds else {
        let reason = unknown.as_deref().unwrap_or("not measured");
        return format!("no memory for both: {reason}");
    };
    let figures = [
        ("loading", straight.load, buffered.load),
        ("GPU reads", straight.gpu_read, buffered.gpu_read),
        ("GPU writes", straight.gpu_write, buffered.gpu_write),
    ];
    let figure = |(name, straight, buffered): (_, f64, f64)| {
        format!("{name} {} and {}", rate(straight), rate(buffered))
    };
    format!("GiB/s straight and through buffers: {}", figures.map(figure).join(" · "))
}

fn rate(bytes_per_second: f64) -> String {
    format!("{:.1}", bytes_per_second / f64::from(1 << 30))
}

fn hardware(machine: &Machine, page: &mut TextPage) {
    for gpu in &machine.gpus {
        match gpu {
            GpuInfo::Nvidia(gpu) => page.row("gpu", PLAIN, &nvidia_gpu(gpu)),
            GpuInfo::Apple(gpu) => page.row("gpu", PLAIN, &apple_gpu(gpu)),
        }
    }
    if machine.gpus.is_empty() {
        page.row("gpu", PLAIN, "none found");
    }
    let cpu = &machine.cpu;
    let mut parts = vec![shown(&cpu.model), format!("{} threads", shown(&cpu.threads))];
    if let (Some(all), Some(usable)) = (cpu.threads.known(), cpu.usable_threads.known())
        && usable < all
    {
        parts.push(format!("{usable} of them for this process"));
    }
    match &cpu.features.value {
        Ok(features) => parts.extend(features.iter().map(|feature| feature.label().to_owned())),
        Err(reason) => parts.push(format!("instructions unknown: {reason}")),
    }
    page.row("cpu", PLAIN, &parts.join(" · "));
    page.row("memory", PLAIN, &memory(&machine.memory));
    page.row("system", PLAIN, &format!("{} · {}", shown(&machine.system), machine.arch));
    if let Some(stack) = machine.nvidia.as_ref().filter(|_| !machine.gpus.is_empty()) {
        nvidia_stack(stack, page);
    }
}

fn nvidia_gpu(gpu: &NvidiaGpu) -> String {
    let mut parts = vec![shown(&gpu.name)];
    parts.push(match gpu.capability.known() {
        Some(capability) => {
            let class = nvidia_arch(*capability).map_or("unknown class", |class| class.name);
            format!("compute capability {capability}, {class}")
        }
        None => format!("compute capability {}", shown(&gpu.capability)),
    });
    parts.push(match (gpu.unified.known(), gpu.memory_free.known()) {
        (Some(true), _) => "shares main memory".into(),
        (_, Some(free)) => format!("{} of its own, {free} free", shown(&gpu.memory_total)),
        (_, None) => {
            format!("{} of its own, free {}", shown(&gpu.memory_total), shown(&gpu.memory_free))
        }
    });
    parts.join(" · ")
}

fn apple_gpu(gpu: &AppleGpu) -> String {
    let mut parts = vec![shown(&gpu.name), format!("{} cores", shown(&gpu.cores))];
    parts.push(match gpu.unified.known() {
        Some(true) => "shares main memory".into(),
        Some(false) => "memory of its own".into(),
        None => format!("unified memory {}", shown(&gpu.unified)),
    });
    parts.push(format!("working set {}", shown(&gpu.working_set)));
    if let Some(Some(limit)) = gpu.wired_limit.known() {
        parts.push(format!("wired limit set to {limit}"));
    }
    parts.join(" · ")
}

fn memory(memory: &SystemMemory) -> String {
    let text = match (memory.total.known(), memory.available.known()) {
        (Some(total), Some(available)) => {
            format!("{} {available} available of {total}", bar(available.share_of(*total)))
        }
        _ => format!("{}, available {}", shown(&memory.total), shown(&memory.available)),
    };
    let binds = |limit| memory.total.known().is_none_or(|total| limit < *total);
    match memory.container.known().copied().flatten() {
        Some(ContainerLimit { limit, left }) if binds(limit) => {
            format!("{text} · container limit {limit}, {left} left")
        }
        _ => text,
    }
}

fn nvidia_stack(stack: &NvidiaStack, page: &mut TextPage) {
    page.row("driver", PLAIN, &format!("{} · CUDA {}", shown(&stack.driver), shown(&stack.cuda)));
    let libraries = [
        ("NVRTC", &stack.nvrtc),
        ("cuBLASLt", &stack.cublaslt),
        ("cuDNN", &stack.cudnn),
        ("NCCL", &stack.nccl),
    ];
    let libraries = libraries.map(|(name, version)| format!("{name} {}", shown(version)));
    page.row("libraries", PLAIN, &libraries.join(" · "));
}

fn live_status(machine: &Machine, page: &mut TextPage) {
    for gpu in &machine.gpus {
        if let GpuInfo::Nvidia(gpu) = gpu {
            page.row("gpu", PLAIN, &gpu_status(gpu));
        }
    }
    heat(&machine.thermal, page);
    page.row("power", PLAIN, &power(&machine.power));
    let pressure = match &machine.memory.pressure.value {
        Ok(MemoryPressure::Stalls(stalls)) => format!(
            "stalled on memory {} of the last 10 s, {} of the last minute",
            stalls.some_10s, stalls.some_60s
        ),
        Ok(MemoryPressure::Level(level)) => format!("{level:?}").to_lowercase(),
        Err(reason) => format!("unknown: {reason}"),
    };
    page.row("pressure", PLAIN, &pressure);
    let swap = match (machine.memory.swap_total.known(), machine.memory.swap_free.known()) {
        (Some(total), _) if total.0 == 0 => "none".into(),
        (Some(total), Some(free)) => format!("{} of {total} in use", total.saturating_sub(*free)),
        _ => shown(&machine.memory.swap_total),
    };
    page.row("swap", PLAIN, &swap);
}

fn gpu_status(gpu: &NvidiaGpu) -> String {
    let telemetry = &gpu.telemetry;
    // Without NVML nothing is known, which need not be said five times.
    if let (Err(heat), Err(power), Err(clock)) =
        (&telemetry.temperature.value, &telemetry.power.value, &telemetry.clock.value)
        && heat == power
        && heat == clock
    {
        return format!("unknown: {heat}");
    }
    let heat = shown(&telemetry.temperature) + &after(", throttles at ", gpu.slowdown.known());
    let power = shown(&telemetry.power) + &after(" of ", gpu.power_limit.known());
    let clock = shown(&telemetry.clock) + &after(" of ", gpu.clock_max.known());
    let held = match &telemetry.throttle.value {
        Ok(causes) if causes.is_empty() => "not throttled".into(),
        Ok(causes) => {
            let causes: Vec<_> = causes.iter().map(|cause| cause.label()).collect();
            format!("clock limited by: {}", causes.join(", "))
        }
        Err(reason) => format!("throttle reasons unknown: {reason}"),
    };
    [heat, power, clock, format!("{} busy", shown(&telemetry.utilisation)), held].join(" · ")
}

fn heat(thermal: &Thermal, page: &mut TextPage) {
    if let Some(mac) = &thermal.mac {
        page.row("thermal", PLAIN, &mac_heat(mac));
        return;
    }
    let text = match &thermal.sensors.value {
        Ok(sensors) => hottest(sensors),
        Err(reason) => format!("unknown: {reason}"),
    };
    page.row("thermal", PLAIN, &text);
}

fn power(power: &PowerInfo) -> String {
    let charge = power.charge.known().copied().flatten();
    let charge = charge.map(|Percent(share)| format!("{share:.0} %"));
    match (&power.on_battery.value, charge) {
        (Ok(true), charge) => "battery".to_owned() + &after(", ", charge.as_ref()),
        (Ok(false), charge) => "mains".to_owned() + &after(", battery at ", charge.as_ref()),
        (Err(reason), _) => format!("unknown: {reason}"),
    }
}

fn hottest(sensors: &[ThermalSensor]) -> String {
    let known = sensors.iter().filter_map(|sensor| Some((sensor, *sensor.temperature.known()?)));
    let Some((sensor, degrees)) = known.max_by(|(_, a), (_, b)| a.0.total_cmp(&b.0)) else {
        let first = sensors.first().map_or_else(String::new, |sensor| shown(&sensor.temperature));
        return format!("{first} ({} sensors, none of them plausible)", sensors.len());
    };
    let more =
        if sensors.len() > 1 { format!(" (hottest of {})", sensors.len()) } else { String::new() };
    format!("{} {degrees}{}{more}", sensor.name, after(", critical at ", sensor.critical.as_ref()))
}

fn mac_heat(mac: &MacThermal) -> String {
    [
        format!("thermal state {}", named(&mac.state)),
        format!("thermal pressure {}", named(&mac.pressure)),
        format!("power mode {}", named(&mac.power_mode)),
    ]
    .into_iter()
    .chain(mac.cpu_speed_limit.known().map(|limit| format!("CPU speed limit {limit}")))
    .collect::<Vec<_>>()
    .join(" · ")
}

fn plan(machine: &Machine, budget: &Budget, page: &mut TextPage) {
    page.row("device", PLAIN, &format!("{}, {}", budget.device, budget.why));
    match &budget.memory {
        Ok(limit) => page.row("memory", PLAIN, &limit_line(limit)),
        Err(reason) => page.row("memory", WARN, &format!("no limit can be set: {reason}")),
    }
    if let Some(threads) = budget.threads {
        let what_for = match (budget.device, machine.cpu.performance_cores.known()) {
            (DeviceId::Cuda(_) | DeviceId::Metal, _) => "at most, to load and prepare data",
            (DeviceId::Cpu, Some(_)) => "to compute, at most one per performance core",
            (DeviceId::Cpu, None) => "to compute, all that this process may use",
        };
        page.row("threads", PLAIN, &format!("{threads} {what_for}"));
    }
}

fn features(features: &[Feature], page: &mut TextPage) {
    for Feature { name, on, why } in features {
        let (mark, style) = match on {
            Some(true) => ("✓", GOOD),
            Some(false) => ("✗", DIM),
            None => ("?", WARN),
        };
        page.item(mark, style, &format!("{name}: {why}"));
    }
}

fn uses(uses: &[DeviceUse], page: &mut TextPage) {
    for DeviceUse { name, role, how } in uses {
        match role {
            UseRole::Compute => page.item("✓", GOOD, &format!("{name}: {how}")),
            UseRole::Storage => page.item("~", PLAIN, &format!("{name}: storage only, {how}")),
            UseRole::Never => page.item("✗", DIM, &format!("{name}: never, {how}")),
        }
    }
}

/// How a limit came about, and what it can be raised to.
pub fn limit_line(memory: &MemoryLimit) -> String {
    let MemoryLimit { limit, available, reserved, bound_by, max_limit } = memory;
    let why = match bound_by {
        MemoryBound::MainMemory => {
            format!("{available} available less {reserved} kept for the system")
        }
        MemoryBound::Container => {
            format!("{available} left in the container less {reserved} kept for it")
        }
        MemoryBound::WorkingSet => "Metal's recommended working set".into(),
        MemoryBound::HalfWorkingSet => {
            let free = available.saturating_sub(*reserved);
            format!(
                "half of Metal's working set of {max_limit}; {free} are free now, macOS compresses \
                 other programs for the rest"
            )
        }
        MemoryBound::GpuMemory => {
            format!("{available} free on the GPU less {reserved} kept for the driver")
        }
    };
    let raised = (max_limit > limit).then(|| format!("; --limit can raise it to {max_limit}"));
    format!("limit {limit}: {why}{}", raised.unwrap_or_default())
}

fn problems(findings: &[Finding], page: &mut TextPage) {
    if findings.is_empty() {
        page.item("✓", GOOD, "nothing found");
    }
    for Finding { level, what, hint } in findings {
        match level {
            Severity::Fault => page.item("✗", BAD, what),
            Severity::Notice => page.item("!", WARN, what),
        }
        page.below(DIM, &format!("hint: {hint}"));
    }
}

fn shown<T: Display>(reading: &Reading<T>) -> String {
    match &reading.value {
        Ok(value) => value.to_string(),
        Err(reason) => format!("unknown ({reason})"),
    }
}

/// A second value after the first, if there is one.
fn after<T: Display>(words: &str, value: Option<&T>) -> String {
    value.map_or_else(String::new, |value| format!("{words}{value}"))
}

/// For the levels that are Apple's own words.
fn named<T: std::fmt::Debug>(reading: &Reading<T>) -> String {
    match &reading.value {
        Ok(value) => format!("{value:?}").to_lowercase(),
        Err(reason) => format!("unknown ({reason})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_weights_are_loaded_is_said_with_its_figures() {
        let speed = |load| MemorySpeed { load, gpu_read: 4.0 * load, gpu_write: 3.0 * load };
        let gib = f64::from(1 << 30);
        let mut loading = WeightLoading {
            device: "cuda:0".into(),
            is_straight: true,
            is_forced: false,
            unknown: None,
            speeds: Some(LoadingSpeeds {
                straight: speed(20.0 * gib),
                buffered: speed(10.0 * gib),
            }),
        };
        let line = loading_line(&loading);
        assert_eq!(
            line,
            "cuda:0: read straight into memory that CPU and GPU share, without buffers"
        );
        let figures = loading_figures(&loading);
        let expected = "GiB/s straight and through buffers: loading 20.0 and 10.0 · GPU reads 80.0 and 40.0 · \
                        GPU writes 60.0 and 30.0";
        assert_eq!(figures, expected);
        loading.is_straight = false;
        loading.speeds = None;
        loading.unknown = Some("the driver maps no host memory".into());
        assert_eq!(loading_line(&loading), "cuda:0: loaded through pinned buffers");
        let figures = loading_figures(&loading);
        assert_eq!(figures, "no memory for both: the driver maps no host memory");
    }
}
