//! Rates from published figures, for machines that were not measured: a share of the peak FLOPS and memory
//! bandwidth. They say which of two plans is faster, and the time itself to a factor of two or so.

use std::collections::BTreeMap;

use compute::DeviceKind;
use machine::Machine;
use machine::cpu::{CpuFeature, CpuInfo};
use machine::gpu::NvidiaGpu;
use machine::hardware::{apple_bandwidth, apple_core_flops, nvidia_arch};

use super::{ARITHMETIC, CallSizeUnit, FP8, LINK, LOAD, PASS, RateCurve, Rates};

/// FLOPs of one core per clock cycle, best instructions first. Taken: two fused multiply-adds of a whole vector
/// per cycle (Intel and Arm optimisation guides); Apple's and Arm's large cores do
/// four of 128 bits.
const PER_TICK: [(CpuFeature, f64); 3] =
    [(CpuFeature::Avx512, 64.0), (CpuFeature::Avx2, 32.0), (CpuFeature::Neon, 32.0)];
/// Of an unknown CPU: a fused multiply-add of 128 bits.
const PER_TICK_OF_OTHERS: f64 = 8.0;
/// Chosen: what desktop and server CPUs keep up with all cores at work.
const TICKS_PER_SECOND: f64 = 3e9;
/// Share of the peak FLOPS that matmuls reach over a step. Chosen. Measured on the one machine we have: two thirds
/// with vector instructions (docs/measured.md).
const CPU_EFFICIENCY: f64 = 0.5;
/// Bytes per second of a DGX Spark's memory, whose CPU is named by its cores. Taken: NVIDIA's
/// specifications.
const SPARK: (&str, f64) = ("Cortex-X925", 273e9);
/// Chosen: two channels of DDR4, which the slowest computers that people train on have.
const MEMORY_OF_OTHERS: f64 = 40e9;
/// Chosen: what one core reads at most, whatever the memory could give.
const MEMORY_PER_THREAD: f64 = 15e9;
/// Chosen: handing one call to all threads and waiting for the last.
const SECONDS_PER_CALL: f64 = 10e-6;
/// Operations and bytes per second of a GPU of which nothing is known. Chosen: half of what the slowest GPU
/// of NVIDIA's data sheets since capability 8.6 is said to reach in bf16, and of its memory.
const UNKNOWN_NVIDIA: (f64, f64) = (25e12, 180e9);
/// The same of a GPU of which nothing is known. Chosen: about what the smallest of Apple's chips is taken for.
const UNKNOWN_GPU: (f64, f64) = (0.5e12, 60e9);
/// What steps reach of an NVIDIA GPU's published figures, of its arithmetic and of its memory. Measured on the
/// one GPU we have: 0.4 to 0.5 of its arithmetic (docs/measured.md).
const NVIDIA_EFFICIENCY: (f64, f64) = (0.4, 0.8);
/// How much faster their tensor cores multiply fp8 than bf16. Taken: twice in NVIDIA's data sheets of all GPUs that
/// can, 1.75 to 1.95 times on an H200. Chosen: less, for rounding and scaling.
const FP8_GAIN: f64 = 1.6;
/// Chosen for GPUs that do not tell their highest clock: what all of them keep up at work.
const NVIDIA_CLOCK: f64 = 1.6e9;
/// Bytes per second from main memory to a GPU. Chosen: `PCIe` 3.0 x16, which every board since 2012 has.
const GPU_LINK: f64 = 12e9;
/// What kernels reach of an Apple GPU's published figures, of its arithmetic and of its memory. Chosen: nobody
/// measured one. On the one GPU that they ran on, a large one, matmuls reached a ninth (docs/measured.md).
const APPLE_EFFICIENCY: (f64, f64) = (0.2, 0.8);
/// Chosen: an ordinary solid-state disk.
const DISK: f64 = 2e9;

impl Rates {
    /// An estimate from what is known of a machine.
    pub fn documented(machine: &Machine, kind: DeviceKind) -> Self {
        let (flops, bytes) = match kind {
            DeviceKind::Cpu { threads, .. } => {
                let threads = threads as f64;
                let flops = threads * TICKS_PER_SECOND * per_tick(&machine.cpu) * CPU_EFFICIENCY;
                (flops, memory(machine).min(threads * MEMORY_PER_THREAD))
            }
            DeviceKind::Cuda { .. } => slowest_nvidia(machine).unwrap_or(UNKNOWN_NVIDIA),
            DeviceKind::Gpu { .. } => apple(machine).unwrap_or(UNKNOWN_GPU),
        };
        let curves = [
            (ARITHMETIC, steady(CallSizeUnit::Flops, flops)),
            (PASS, steady(CallSizeUnit::Bytes, bytes)),
            (LOAD, steady(CallSizeUnit::Bytes, DISK)),
            (LINK, steady(CallSizeUnit::Bytes, GPU_LINK)),
            (FP8, steady(CallSizeUnit::Flops, FP8_GAIN * flops)),
        ];
        let curves: BTreeMap<_, _> =
            curves.into_iter().map(|(name, curve)| (name.to_owned(), curve)).collect();
        Self { is_measured: false, host_secs: 0.0, curves }
    }
}

fn per_tick(cpu: &CpuInfo) -> f64 {
    let found = PER_TICK.iter().find(|(feature, _)| cpu.has(*feature));
    found.map_or(PER_TICK_OF_OTHERS, |(_, operations)| *operations)
}

/// Bytes per second of main memory.
fn memory(machine: &Machine) -> f64 {
    if let Some(chip) = machine.apple_gpu().and_then(|gpu| gpu.chip.known()) {
        return apple_bandwidth(*chip).unwrap_or(MEMORY_OF_OTHERS);
    }
    let name = machine.cpu.model.known().map_or("", String::as_str);
    let (spark, bytes) = SPARK;
    if name.contains(spark) { bytes } else { MEMORY_OF_OTHERS }
}

/// Operations and bytes per second of the GPU of an Apple chip.
fn apple(machine: &Machine) -> Option<(f64, f64)> {
    let gpu = machine.apple_gpu()?;
    let (chip, cores) = (*gpu.chip.known()?, f64::from(*gpu.cores.known()?));
    let (arithmetic, memory) = APPLE_EFFICIENCY;
    Some((arithmetic * cores * apple_core_flops(chip), memory * apple_bandwidth(chip)?))
}

/// Operations and bytes per second of the slowest of a machine's NVIDIA GPUs.
fn slowest_nvidia(machine: &Machine) -> Option<(f64, f64)> {
    let slower = |one: &(f64, f64), other: &(f64, f64)| one.0.total_cmp(&other.0);
    machine.nvidia_gpus().filter_map(nvidia_rates).min_by(slower)
}

fn nvidia_rates(gpu: &NvidiaGpu) -> Option<(f64, f64)> {
    let class = nvidia_arch(*gpu.capability.known()?)?;
    let units = f64::from(*gpu.multiprocessors.known()?);
    let ticks = gpu.clock_max.known().map_or(NVIDIA_CLOCK, |clock| 1e6 * f64::from(clock.0));
    let (arithmetic, memory) = NVIDIA_EFFICIENCY;
    Some((arithmetic * units * ticks * class.flops_per_cycle, memory * units * class.bandwidth))
}

/// A fixed cost and a rate.
fn steady(measure: CallSizeUnit, per_second: f64) -> RateCurve {
    let sizes = (10..=44).map(|power| f64::from(power).exp2());
    RateCurve::through(measure, sizes.map(|size| (size, SECONDS_PER_CALL + size / per_second)))
}
