//! GPUs as found: NVIDIA's and Apple's.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::hardware::Feature;
use crate::reading::{Bytes, Celsius, Megahertz, Percent, Quantity, Reading, Watts};

/// A GPU that hearth knows.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "maker", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)] // A machine has a handful of these.
pub enum GpuInfo {
    /// Found through NVML and the CUDA driver.
    Nvidia(NvidiaGpu),
    /// Found through Metal.
    Apple(AppleGpu),
}

/// One NVIDIA GPU. Readings come from NVML unless their source says otherwise.
#[derive(Clone, Debug, Serialize)]
pub struct NvidiaGpu {
    /// Its CUDA index; unknown if CUDA does not list it.
    pub cuda_index: Reading<u32>,
    /// E.g. `NVIDIA GeForce RTX 4090`.
    pub name: Reading<String>,
    /// Domain, bus, device and function.
    pub pci_bus_id: Reading<String>,
    /// What decides which instructions it has.
    pub capability: Reading<ComputeCapability>,
    /// Whether it shares main memory: the `integrated` attribute, nothing else.
    pub unified: Reading<bool>,
    /// Its own memory; main memory where unified.
    pub memory_total: Reading<Bytes>,
    /// Not in use by anyone; unknown on unified GPUs, where only the system can tell.
    pub memory_free: Reading<Bytes>,
    /// Streaming multiprocessors.
    pub multiprocessors: Reading<u32>,
    /// Whether it reads ordinary host memory; where it does, copies from a mapped file go page by
    /// page and are slow.
    pub pageable_memory_access: Reading<bool>,
    /// Whether a network card may write into its memory directly.
    pub gpu_direct_rdma: Reading<bool>,
    /// Its current state.
    #[serde(flatten)]
    pub telemetry: GpuTelemetry,
    /// The temperature at which the hardware throttles.
    pub slowdown: Reading<Celsius>,
    /// Power it may draw.
    pub power_limit: Reading<Watts>,
    /// Highest multiprocessor clock.
    pub clock_max: Reading<Megahertz>,
    /// Uncorrected memory errors since the driver started.
    pub ecc_uncorrected: Reading<u64>,
    /// What the hardware has.
    pub features: Vec<Feature>,
}

/// What changes about an NVIDIA GPU from second to second.
#[derive(Clone, Debug, Serialize)]
pub struct GpuTelemetry {
    /// Core temperature.
    pub temperature: Reading<Celsius>,
    /// Power drawn now.
    pub power: Reading<Watts>,
    /// Multiprocessor clock now.
    pub clock: Reading<Megahertz>,
    /// Share of the last moments in which a kernel ran.
    pub utilisation: Reading<Percent>,
    /// Share of the last moments in which its memory was read or written.
    pub memory_utilisation: Reading<Percent>,
    /// Why the clock is below its highest.
    pub throttle: Reading<Vec<ThrottleReason>>,
}

/// Taken from reports of DGX Spark boxes whose USB-C power negotiation failed: busy, but far below
/// the usual 2.4 GHz, with no error flag anywhere.
const STUCK_CLOCK: Megahertz = Megahertz(1000);
const BUSY: Percent = Percent(90.0);

impl GpuTelemetry {
    /// Whether it is busy at a clock that only a stuck power supply explains. That is known of unified
    /// GPUs alone: one in a laptop may well be that slow within its power cap.
    pub fn is_stuck(&self, is_unified: bool) -> bool {
        let is_busy = self.utilisation.known().is_some_and(|load| *load > BUSY);
        let is_slow = self.clock.known().is_some_and(|clock| *clock < STUCK_CLOCK);
        is_unified && is_busy && is_slow
    }
}

/// The GPU of an Apple chip.
#[derive(Clone, Debug, Serialize)]
pub struct AppleGpu {
    /// E.g. `Apple M3 Max`.
    pub name: Reading<String>,
    /// Family and tier, from the chip's name.
    pub chip: Reading<AppleChip>,
    /// GPU cores.
    pub cores: Reading<u32>,
    /// Whether it shares main memory.
    pub unified: Reading<bool>,
    /// What Metal recommends as the most to use at once.
    pub working_set: Reading<Bytes>,
    /// The user's own limit on wired memory (`iogpu.wired_limit_mb`), if one is set.
    pub wired_limit: Reading<Option<Bytes>>,
    /// The largest single buffer.
    pub max_buffer: Reading<Bytes>,
    /// What the hardware has.
    pub features: Vec<Feature>,
}

/// NVIDIA's compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeCapability {
    /// Before the point.
    pub major: u32,
    /// After it.
    pub minor: u32,
}

impl ComputeCapability {
    /// From its two parts.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Serialize for ComputeCapability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Quantity for ComputeCapability {
    const UNIT: &'static str = "version";
}

/// An Apple M-series chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AppleChip {
    /// 3 for M3.
    pub family: u32,
    /// Size within the family.
    pub tier: AppleTier,
}

impl Quantity for AppleChip {
    const UNIT: &'static str = "chip";
}

/// The sizes in which an M-series chip is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // Apple's own words.
pub enum AppleTier {
    Base,
    Pro,
    Max,
    Ultra,
}

/// Why a GPU's clock is below its highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ThrottleReason {
    /// Nothing to do.
    Idle,
    /// Clocks set by the user.
    UserClocks,
    /// At its power limit: normal under full load.
    PowerCap,
    /// The hardware slowed down, cause not reported.
    HardwareSlowdown,
    /// Held to the clock of a group of GPUs.
    SyncBoost,
    /// The driver slowed it down for heat.
    SoftwareThermal,
    /// The hardware slowed down for heat.
    HardwareThermal,
    /// The power supply asked for less.
    PowerBrake,
    /// Held by display settings.
    DisplayClocks,
}

/// Taken from `nvmlClocksEventReason*` in nvml.h: bit, reason, words for people.
const THROTTLE_BITS: &[(u64, ThrottleReason, &str)] = &[
    (0x1, ThrottleReason::Idle, "idle"),
    (0x2, ThrottleReason::UserClocks, "clocks set by the user"),
    (0x4, ThrottleReason::PowerCap, "power cap"),
    (0x8, ThrottleReason::HardwareSlowdown, "hardware slowdown"),
    (0x10, ThrottleReason::SyncBoost, "sync boost"),
    (0x20, ThrottleReason::SoftwareThermal, "heat (driver)"),
    (0x40, ThrottleReason::HardwareThermal, "heat (hardware)"),
    (0x80, ThrottleReason::PowerBrake, "power brake"),
    (0x100, ThrottleReason::DisplayClocks, "display clocks"),
];

impl ThrottleReason {
    /// The reasons set in NVML's bit field; undocumented bits are ignored.
    pub fn from_bits(bits: u64) -> Vec<Self> {
        THROTTLE_BITS
            .iter()
            .filter(|(bit, ..)| bits & bit != 0)
            .map(|(_, reason, _)| *reason)
            .collect()
    }

    /// In words.
    pub fn label(self) -> &'static str {
        let found = THROTTLE_BITS.iter().find(|(_, reason, _)| *reason == self);
        found.expect("every reason has a bit").2
    }

    /// Whether it is a fault rather than normal operation.
    pub fn is_fault(self) -> bool {
        matches!(
            self,
            Self::HardwareSlowdown
                | Self::SoftwareThermal
                | Self::HardwareThermal
                | Self::PowerBrake
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throttle_bits_become_reasons() {
        assert_eq!(ThrottleReason::from_bits(0), []);
        assert_eq!(ThrottleReason::from_bits(0x1), [ThrottleReason::Idle]);
        assert_eq!(
            ThrottleReason::from_bits(0x44),
            [ThrottleReason::PowerCap, ThrottleReason::HardwareThermal]
        );
        assert_eq!(ThrottleReason::from_bits(1 << 40), []);
    }

    #[test]
    fn a_power_cap_is_no_fault() {
        assert!(!ThrottleReason::PowerCap.is_fault());
        assert!(ThrottleReason::PowerBrake.is_fault());
    }
}
