//! Takes a [`Telemetry`]: the few readings that a run is paced by, again and again.
//!
//! [`Machine::probe`] looks at everything and takes some 16 ms, half a second with a GPU. Here only what
//! changes is asked: what does not (limits, which sensors there are, what counts energy) is remembered
//! from the machine as it was found. Takes no decision, and holds no thread; `sampler.rs` does.

use std::time::{Duration, Instant};

use crate::Machine;
use crate::budget::{DeviceId, main_memory_left, working_set};
use crate::gpu::{GpuInfo, GpuTelemetry, NvidiaGpu, ThrottleReason};
use crate::held::HeldMemory;
use crate::memory::{MemoryPressure, PressureLevel, SystemMemory};
use crate::power::EnergyCounter;
use crate::probe;
use crate::reading::{Bytes, Celsius, Percent, Reading, Watts};
use crate::source::ProbeSource;
use crate::telemetry::{ProcessMemory, Telemetry, Temperature, ThrottleCause};
use crate::thermal::{MacThermal, PowerMode, ThermalSensor};

/// Chosen: plugs and energy modes change by hand. Asking for them wakes a laptop's controller on Linux and
/// starts programs on macOS, so they are asked for this seldom and remembered in between.
const SLOW_INTERVAL: Duration = Duration::from_secs(10);

/// Chosen: counters of energy move in steps of about a millisecond; over a shorter time than this they
/// say little.
const LEAST_COUNTED: Duration = Duration::from_millis(100);

/// Chosen: only to compare sensors that do not tell their limit with those that do; most CPUs
/// and GPUs slow down between 85 and 105 °C.
const USUAL_LIMIT: Celsius = Celsius(95.0);

/// Taken: names in the kernel's `drivers/hwmon` and `drivers/thermal` whose heat is the CPU's or the
/// board's as a whole. Left out are disks, radios and memory, which a run does not heat first; inputs of
/// board chips, of which many lead nowhere; and cores, of which the package shows the hottest.
const SENSORS: &[&str] = &[
    "acpitz",
    "coretemp Package",
    "cpu",
    "k10temp",
    "soc",
    "spark",
    "TCPU",
    "x86_pkg_temp",
    "zenpower",
];

/// Knows what to ask a machine for.
pub struct Monitor {
    cap: Option<Bytes>,
    /// Of Metal, if the run computes by it.
    working_set: Option<Bytes>,
    held: HeldMemory,
    sensors: Vec<SensorFile>,
    gpu: Option<WatchedGpu>,
    meter: PowerMeter,
    slow: Option<(Instant, SlowReadings)>,
}

struct SensorFile {
    name: String,
    path: String,
    limit: Option<f64>,
}

/// The GPU that a run computes on.
struct WatchedGpu {
    index: u32,
    name: String,
    slowdown: Option<f64>,
    is_unified: bool,
}

/// Where power is read. Decided once: power of the GPU and power of the CPU must not take turns
/// in one sum.
enum PowerMeter {
    Gpu,
    Counters(EnergyCounters),
    Battery,
}

struct EnergyCounters {
    counters: Vec<EnergyCounter>,
    before: Option<(Instant, Vec<u64>)>,
}

/// What is asked every [`SLOW_INTERVAL`].
#[derive(Default)]
struct SlowReadings {
    on_battery: Option<bool>,
    drain: Option<f64>,
    throttled: Option<ThrottleCause>,
}

impl Monitor {
    /// For a run on that device of the machine, which may hold as much main memory as `cap`.
    pub fn new(machine: &Machine, device: DeviceId, cap: Option<Bytes>) -> Self {
        let gpu = gpu_of(machine, device);
        let sensors = machine.thermal.sensors.known().into_iter().flatten();
        Self {
            cap,
            working_set: working_set(machine).filter(|_| device == DeviceId::Metal),
            held: HeldMemory::of_process(),
            sensors: sensors.filter_map(sensor_file).collect(),
            meter: power_meter(machine, gpu.map(|(_, gpu)| gpu)),
            gpu: gpu.map(|(index, gpu)| watched_gpu(index, gpu)),
            slow: None,
        }
    }

    /// Counts memory that a device was given beside the process.
    #[must_use]
    pub fn with_held(self, held: HeldMemory) -> Self {
        Self { held, ..self }
    }

    /// Takes the readings of this moment. Never fails: what cannot be read is not there.
    pub fn read(&mut self, source: &mut ProbeSource, now: Instant) -> Telemetry {
        self.read_slow(source, now);
        let memory = probe::memory(source);
        let gpu = self.gpu.as_ref().map(|gpu| probe::gpu_telemetry(source, gpu.index));
        let slow = self.slow.as_ref().map(|(_, slow)| slow);
        Telemetry {
            memory: self.share(&memory),
            memory_stall: stalled(&memory),
            pressure_level: level(&memory),
            temperature: self.heat(source, gpu.as_ref()),
            throttled: self.throttle_cause(gpu.as_ref()).or(slow.and_then(|slow| slow.throttled)),
            on_battery: slow.and_then(|slow| slow.on_battery),
            watts: self.watts(source, gpu.as_ref(), now),
            gpu_utilisation: gpu.as_ref().and_then(|gpu| share_of(&gpu.utilisation)),
            memory_utilisation: gpu.as_ref().and_then(|gpu| share_of(&gpu.memory_utilisation)),
        }
    }

    fn read_slow(&mut self, source: &mut ProbeSource, now: Instant) {
        let is_fresh =
            |(at, _): &(Instant, SlowReadings)| now.saturating_duration_since(*at) < SLOW_INTERVAL;
        if self.slow.as_ref().is_some_and(is_fresh) {
            return;
        }
        let supplies = probe::power_status(source);
        let slow = SlowReadings {
            on_battery: supplies.on_battery.known().copied(),
            drain: supplies.drain.known().map(|watts| watts.0),
            throttled: probe::mac_thermal(source).and_then(|thermal| mac_throttled(&thermal)),
        };
        self.slow = Some((now, slow));
    }

    /// Of main memory, if that is what the run computes in: a GPU with memory of its own has taken all
    /// that it was given when the run began. What is left is bounded by the machine, by a container and by
    /// what the user allows.
    fn share(&self, memory: &SystemMemory) -> Option<ProcessMemory> {
        if self.gpu.as_ref().is_some_and(|gpu| !gpu.is_unified) {
            return None;
        }
        let held = self.held.main_memory_bytes(memory.held.known()?.0)?;
        let left = main_memory_left(memory, Bytes(held), self.working_set).ok()?;
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let allowed = self.cap.map_or(i64::MAX, |cap| signed(cap.0).saturating_sub(signed(held)));
        Some(ProcessMemory { held, left: left.min(allowed) })
    }

    /// The sensor that is nearest to its limit, the GPU's among them.
    fn heat(&self, source: &mut ProbeSource, gpu: Option<&GpuTelemetry>) -> Option<Temperature> {
        let board = self.sensors.iter().filter_map(|sensor| {
            let celsius = probe::temperature(source, &sensor.path).ok()?.0;
            Some(Temperature { sensor: sensor.name.clone(), celsius, limit: sensor.limit })
        });
        let gpu = self.gpu.as_ref().zip(gpu).and_then(|(gpu, telemetry)| {
            let celsius = telemetry.temperature.known()?.0;
            Some(Temperature { sensor: gpu.name.clone(), celsius, limit: gpu.slowdown })
        });
        let headroom = |heat: &Temperature| heat.limit.unwrap_or(USUAL_LIMIT.0) - heat.celsius;
        board.chain(gpu).min_by(|a, b| headroom(a).total_cmp(&headroom(b)))
    }

    /// What throttles the GPU. A slowdown of which the driver says neither heat nor power brake also comes
    /// with any change of clocks, and is ignored.
    fn throttle_cause(&self, telemetry: Option<&GpuTelemetry>) -> Option<ThrottleCause> {
        let (gpu, telemetry) = (self.gpu.as_ref()?, telemetry?);
        let reasons = telemetry.throttle.known().map_or(&[][..], Vec::as_slice);
        let is_hot = |reason: &ThrottleReason| {
            matches!(reason, ThrottleReason::SoftwareThermal | ThrottleReason::HardwareThermal)
        };
        if reasons.contains(&ThrottleReason::PowerBrake) {
            Some(ThrottleCause::PowerBrake)
        } else if reasons.iter().any(is_hot) {
            Some(ThrottleCause::Heat)
        } else {
            telemetry.is_stuck(gpu.is_unified).then_some(ThrottleCause::StuckPower)
        }
    }

    fn watts(
        &mut self,
        source: &mut ProbeSource,
        gpu: Option<&GpuTelemetry>,
        now: Instant,
    ) -> Option<f64> {
        match &mut self.meter {
            PowerMeter::Gpu => gpu?.power.known().map(|watts| watts.0),
            PowerMeter::Counters(counters) => counters.watts(source, now),
            PowerMeter::Battery => self.slow.as_ref()?.1.drain,
        }
    }
}

/// A share from 0 to 1, if it is known and can be one.
fn share_of(reading: &Reading<Percent>) -> Option<f64> {
    reading.known().map(|percent| percent.0 / 100.0).filter(|share| (0.0..=1.0).contains(share))
}

/// The GPU in use with its place in [`Machine::gpus`], by which NVML knows it.
fn gpu_of(machine: &Machine, device: DeviceId) -> Option<(u32, &NvidiaGpu)> {
    let DeviceId::Cuda(wanted) = device else { return None };
    machine.gpus.iter().zip(0..).find_map(|(gpu, index)| match gpu {
        GpuInfo::Nvidia(gpu) if gpu.cuda_index.known() == Some(&wanted) => Some((index, gpu)),
        _ => None,
    })
}

fn watched_gpu(index: u32, gpu: &NvidiaGpu) -> WatchedGpu {
    WatchedGpu {
        index,
        name: gpu.name.known().map_or("NVIDIA GPU", String::as_str).to_owned(),
        slowdown: gpu.slowdown.known().map(|limit| limit.0),
        is_unified: gpu.unified.known() == Some(&true),
    }
}

/// A sensor's source is its file.
fn sensor_file(sensor: &ThermalSensor) -> Option<SensorFile> {
    SENSORS.iter().any(|name| sensor.name.starts_with(name)).then(|| SensorFile {
        name: sensor.name.clone(),
        path: sensor.temperature.source.clone(),
        limit: sensor.critical.map(|limit| limit.0),
    })
}

/// The best that the machine was found to have.
fn power_meter(machine: &Machine, gpu: Option<&NvidiaGpu>) -> PowerMeter {
    let counters = machine.power.counters.known().cloned().unwrap_or_default();
    if gpu.is_some_and(|gpu| gpu.telemetry.power.value.is_ok()) {
        PowerMeter::Gpu
    } else if !counters.is_empty() && counters.iter().all(|one| one.microjoules.value.is_ok()) {
        PowerMeter::Counters(EnergyCounters { counters, before: None })
    } else {
        PowerMeter::Battery
    }
}

impl EnergyCounters {
    /// Mean power since the reading before; the first has none before it.
    fn watts(&mut self, source: &mut ProbeSource, now: Instant) -> Option<f64> {
        let elapsed = |at: Instant| now.saturating_duration_since(at);
        if self.before.as_ref().is_some_and(|(at, _)| elapsed(*at) < LEAST_COUNTED) {
            return None;
        }
        let read = |one: &EnergyCounter| probe::microjoules(source, &one.microjoules.source).ok();
        let counted: Vec<u64> = self.counters.iter().map(read).collect::<Option<_>>()?;
        let (at, before) = self.before.replace((now, counted.clone()))?;
        let pairs = before.iter().zip(&counted).zip(&self.counters);
        let taken: Option<Vec<u64>> =
            pairs.map(|((before, now), one)| counter_delta(*before, *now, one.range)).collect();
        let joules = taken?.into_iter().map(|microjoules| microjoules as f64 / 1e6).sum::<f64>();
        Watts::from_meter(joules / elapsed(at).as_secs_f64()).ok().map(|watts| watts.0)
    }
}

/// Microjoules between two readings of a counter that starts again after its range.
fn counter_delta(before: u64, now: u64, range: u64) -> Option<u64> {
    let is_within = before <= range && now <= range;
    is_within.then(|| if now >= before { now - before } else { range - before + now })
}

fn stalled(memory: &SystemMemory) -> Option<f64> {
    match memory.pressure.known()? {
        MemoryPressure::Stalls(stalls) => Some(stalls.some_10s.0 / 100.0),
        MemoryPressure::Level(_) => None,
    }
}

fn level(memory: &SystemMemory) -> Option<PressureLevel> {
    match memory.pressure.known()? {
        MemoryPressure::Stalls(_) => None,
        MemoryPressure::Level(level) => Some(*level),
    }
}

fn mac_throttled(thermal: &MacThermal) -> Option<ThrottleCause> {
    if thermal.is_hot() {
        return Some(ThrottleCause::Heat);
    }
    (thermal.power_mode.known() == Some(&PowerMode::Low)).then_some(ThrottleCause::LowPower)
}

#[cfg(test)]
mod tests;
