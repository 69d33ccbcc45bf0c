//! Rates from published figures, for machines that nobody measured: what the processor could compute
//! and read at best, with a share taken off. They say which of two plans is faster, and the time
//! itself to a factor of two or so.

use std::collections::BTreeMap;

use compute::Kind;
use machine::Machine;
use machine::cpu::{Cpu, CpuFeature};
use machine::gpu::NvidiaCard;
use machine::hardware::{apple_core_flops, apple_memory, nvidia_class};

use super::{ARITHMETIC, Curve, LINK, LOAD, Measure, PASS, Rates};

/// Operations that one core does per clock tick, best instructions first. Taken: two multiply-adds
/// of a whole vector per tick (Intel and Arm optimisation guides); Apple's and Arm's large cores do
/// four of 128 bits.
const PER_TICK: [(CpuFeature, f64); 3] =
    [(CpuFeature::Avx512, 64.0), (CpuFeature::Avx2, 32.0), (CpuFeature::Neon, 32.0)];
/// Of an unknown processor: a multiply-add of 128 bits.
const PER_TICK_OF_OTHERS: f64 = 8.0;
/// Chosen: what desktop and server processors keep up with all cores at work.
const TICKS_PER_SECOND: f64 = 3e9;
/// Chosen: what products reach of the peak beside all else that a step does. Measured on the one
/// machine we have: two thirds of it by vectors (docs/measured.md).
const REACHED: f64 = 0.5;
/// Bytes per second of a DGX Spark's memory, whose processor is named by its cores. Taken: NVIDIA's
/// specifications.
const SPARK: (&str, f64) = ("Cortex-X925", 273e9);
/// Chosen: two channels of DDR4, which the slowest computers that people train on have.
const MEMORY_OF_OTHERS: f64 = 40e9;
/// Chosen: what one core reads at most, whatever the memory could give.
const MEMORY_PER_THREAD: f64 = 15e9;
/// Chosen: handing one call to all threads and waiting for the last.
const SECONDS_PER_CALL: f64 = 10e-6;
/// Operations and bytes per second of a card of which nothing is known. Chosen: half of what the slowest card
/// of NVIDIA's data sheets since capability 8.6 is said to reach in bf16, and of its memory.
const CARD: (f64, f64) = (25e12, 180e9);
/// The same of a GPU of which nothing is known. Chosen: about what the smallest of Apple's chips is taken for.
const GPU: (f64, f64) = (0.5e12, 60e9);
/// What steps reach of an NVIDIA card's published figures, of its arithmetic and of its memory. Measured on the
/// one card we have: 0.4 to 0.5 of its arithmetic (docs/measured.md).
const REACHED_BY_CARDS: (f64, f64) = (0.4, 0.8);
/// Chosen for cards that do not tell their highest clock: what all of them keep up at work.
const TICKS_OF_CARDS: f64 = 1.6e9;
/// Bytes per second from main memory to a card. Chosen: what sixteen lanes of the third generation give,
/// which every board since 2012 has.
const LINK_OF_CARDS: f64 = 12e9;
/// What kernels reach of an Apple GPU's published figures, of its arithmetic and of its memory. Chosen: nobody
/// measured one. On the one card that they ran on, a large one, products reached a ninth (docs/measured.md).
const REACHED_BY_KERNELS: (f64, f64) = (0.2, 0.8);
/// Chosen: an ordinary solid-state disk.
const DISK: f64 = 2e9;

impl Rates {
    /// An estimate from what is known of a machine.
    pub fn documented(machine: &Machine, kind: Kind) -> Self {
        let (flops, bytes) = match kind {
            Kind::Cpu { threads, .. } => {
                let threads = threads as f64;
                let flops = threads * TICKS_PER_SECOND * per_tick(&machine.cpu) * REACHED;
                (flops, memory(machine).min(threads * MEMORY_PER_THREAD))
            }
            Kind::Cuda { .. } => slowest_card(machine).unwrap_or(CARD),
            Kind::Gpu { .. } => apple(machine).unwrap_or(GPU),
        };
        let curves = [
            (ARITHMETIC, steady(Measure::Flops, flops)),
            (PASS, steady(Measure::Bytes, bytes)),
            (LOAD, steady(Measure::Bytes, DISK)),
            (LINK, steady(Measure::Bytes, LINK_OF_CARDS)),
        ];
        let curves: BTreeMap<_, _> =
            curves.into_iter().map(|(name, curve)| (name.to_owned(), curve)).collect();
        Self { is_measured: false, host_secs: 0.0, curves }
    }
}

fn per_tick(cpu: &Cpu) -> f64 {
    let found = PER_TICK.iter().find(|(feature, _)| cpu.has(*feature));
    found.map_or(PER_TICK_OF_OTHERS, |(_, operations)| *operations)
}

/// Bytes per second of main memory.
fn memory(machine: &Machine) -> f64 {
    if let Some(chip) = machine.apple_gpu().and_then(|gpu| gpu.chip.known()) {
        return apple_memory(*chip).unwrap_or(MEMORY_OF_OTHERS);
    }
    let name = machine.cpu.model.known().map_or("", String::as_str);
    let (spark, bytes) = SPARK;
    if name.contains(spark) { bytes } else { MEMORY_OF_OTHERS }
}

/// Operations and bytes per second of the GPU of an Apple chip.
fn apple(machine: &Machine) -> Option<(f64, f64)> {
    let gpu = machine.apple_gpu()?;
    let (chip, cores) = (*gpu.chip.known()?, f64::from(*gpu.cores.known()?));
    let (arithmetic, memory) = REACHED_BY_KERNELS;
    Some((arithmetic * cores * apple_core_flops(chip), memory * apple_memory(chip)?))
}

/// Operations and bytes per second of the slowest of a machine's NVIDIA cards.
fn slowest_card(machine: &Machine) -> Option<(f64, f64)> {
    let slower = |one: &(f64, f64), other: &(f64, f64)| one.0.total_cmp(&other.0);
    machine.nvidia_cards().filter_map(card).min_by(slower)
}

fn card(card: &NvidiaCard) -> Option<(f64, f64)> {
    let class = nvidia_class(*card.capability.known()?)?;
    let units = f64::from(*card.multiprocessors.known()?);
    let ticks = card.clock_max.known().map_or(TICKS_OF_CARDS, |clock| 1e6 * f64::from(clock.0));
    let (arithmetic, memory) = REACHED_BY_CARDS;
    Some((arithmetic * units * ticks * class.per_tick, memory * units * class.memory))
}

/// A fixed cost and a rate.
fn steady(measure: Measure, per_second: f64) -> Curve {
    let sizes = (10..=44).map(|power| f64::from(power).exp2());
    Curve::through(measure, sizes.map(|size| (size, SECONDS_PER_CALL + size / per_second)))
}
