//! What of a machine a run may take: which device, and how much of its memory. A decision, not a
//! reading, so every number here says how it came about. Pure: the same machine gives the same
//! budget.

use std::cmp::Ordering;
use std::fmt;

use serde::{Serialize, Serializer};

use crate::gpu::{AppleGpu, ComputeCapability, NvidiaGpu};
use crate::hardware::{CudaVersion, Feature, MIN_CAPABILITY, cpu_features, nvidia_arch};
use crate::memory::{MemoryPressure, PressureLevel, SystemMemory};
use crate::reading::{Bytes, Unknown};
use crate::uses::{DeviceUse, cpu_uses, cuda_uses, metal_uses};
use crate::{Machine, NvidiaStack};

/// What hearth plans with.
#[derive(Clone, Debug, Serialize)]
pub struct Budget {
    /// Where the work is done.
    pub device: DeviceId,
    /// Why there.
    pub why: String,
    /// How much memory it may take, or why that cannot be said.
    #[serde(serialize_with = "known_or_reason")]
    pub memory: Result<MemoryLimit, Unknown>,
    /// CPU threads that a run uses: on the CPU those that compute, beside a GPU those that may prepare data.
    pub threads: Option<u32>,
    /// What the hardware has.
    pub features: Vec<Feature>,
    /// What hearth uses of it.
    pub uses: Vec<DeviceUse>,
}

/// Where a run computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceId {
    /// The NVIDIA GPU with that CUDA index.
    Cuda(u32),
    /// The GPU of an Apple chip, by Metal.
    Metal,
    /// The CPU.
    Cpu,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            // As it is typed: the first of those that compute by Metal or Vulkan.
            Self::Metal => f.write_str("gpu:0"),
            Self::Cpu => f.write_str("cpu"),
        }
    }
}

impl Serialize for DeviceId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A memory limit and how it came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryLimit {
    /// The most a run may hold.
    pub limit: Bytes,
    /// What there is to take from.
    pub available: Bytes,
    /// What is left to the system.
    pub reserved: Bytes,
    /// What set the limit.
    pub bound_by: MemoryBound,
    /// What it can be raised to: with other programs closed where they share the memory.
    pub max_limit: Bytes,
}

/// What set a memory limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryBound {
    /// Main memory not in use.
    MainMemory,
    /// A container's limit.
    Container,
    /// Metal's recommended working set.
    WorkingSet,
    /// Half of Metal's working set: more than is free now.
    HalfWorkingSet,
    /// The GPU's own memory not in use.
    GpuMemory,
}

/// Chosen: 1/16 of main memory is left to the system, within these bounds. Desktops and DGX Spark freeze
/// rather than fail when the last gigabytes go, so the floor is what a bare desktop needs to stay alive and
/// the ceiling what a busy one does.
const RESERVED_PART: u64 = 16;
const RESERVED_LEAST: Bytes = Bytes(512 << 20);
const RESERVED_MOST: Bytes = Bytes(8 << 30);

/// Chosen: a CUDA context with cuBLASLt and cuDNN loaded holds around half a GiB of the GPU
/// that no allocation of ours shows.
const RESERVED_ON_GPU: Bytes = Bytes(640 << 20);

/// Chosen: this part of Metal's working set is a run's even if less is free. macOS compresses the memory of idle
/// programs, and the other half with what Metal leaves to the system is theirs.
const METAL_PART: u64 = 2;

/// Taken: by logs of llama.cpp and MLX, Metal's working set is two thirds of memory on Macs of up to 36 GB, three
/// quarters on larger ones.
const TWO_THIRDS_UP_TO: Bytes = Bytes(36 << 30);

/// Picks the device, its memory limit and the CPU threads of a run.
pub fn budget(machine: &Machine) -> Budget {
    let threads = machine.cpu.usable_threads.known().copied();
    let gpus = machine.nvidia_gpus();
    let usable = gpus.filter_map(|gpu| Some((check_usable(machine, gpu).ok()?, gpu)));
    let first = usable.min_by_key(|(index, _)| *index).filter(|_| has_libraries(machine));
    if let Some((index, gpu)) = first {
        return Budget {
            device: DeviceId::Cuda(index),
            why: "the first GPU that CUDA offers".into(),
            memory: nvidia_limit(machine, gpu),
            threads,
            features: gpu.features.clone(),
            uses: cuda_uses(machine),
        };
    }
    if let Some(gpu) = machine.apple_gpu() {
        return Budget {
            device: DeviceId::Metal,
            why: "the GPU of the chip".into(),
            memory: apple_limit(machine, gpu),
            threads,
            features: gpu.features.clone(),
            uses: metal_uses(),
        };
    }
    Budget {
        device: DeviceId::Cpu,
        why: if machine.gpus.is_empty() { "no GPU was found" } else { "no GPU here can be used" }
            .into(),
        memory: main_limit(machine),
        threads: machine.cpu.compute_threads(),
        features: cpu_features(&machine.cpu),
        uses: cpu_uses(&machine.cpu),
    }
}

/// Whether the libraries are there that a GPU cannot compute without.
fn has_libraries(machine: &Machine) -> bool {
    let has_both = |stack: &NvidiaStack| stack.nvrtc.known().and(stack.cublaslt.known()).is_some();
    machine.nvidia.as_ref().is_some_and(has_both)
}

/// Why a GPU cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnusableGpu {
    /// CUDA does not list it, or tells too little about it.
    NotOffered(Unknown),
    /// Its compute capability is too old.
    Capability(ComputeCapability),
    /// The driver is too old for it.
    Driver {
        /// The newest CUDA version that the driver supports.
        supports: String,
        /// The oldest that supports the GPU.
        needs: CudaVersion,
    },
}

impl fmt::Display for UnusableGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOffered(reason) => write!(f, "{reason}"),
            Self::Capability(capability) => {
                write!(f, "its compute capability is {capability}, hearth needs {MIN_CAPABILITY}")
            }
            Self::Driver { supports, needs } => {
                write!(f, "the driver supports CUDA {supports}, it needs {needs}")
            }
        }
    }
}

/// CUDA's index of a GPU that hearth can use, or why it cannot.
pub fn check_usable(machine: &Machine, gpu: &NvidiaGpu) -> Result<u32, UnusableGpu> {
    let index = gpu.cuda_index.value.clone().map_err(UnusableGpu::NotOffered)?;
    let capability = gpu.capability.value.clone().map_err(UnusableGpu::NotOffered)?;
    let class = nvidia_arch(capability).filter(|_| capability >= MIN_CAPABILITY);
    let needs = class.ok_or(UnusableGpu::Capability(capability))?.cuda;
    match machine.nvidia.as_ref().and_then(|stack| stack.cuda.known()) {
        Some(supports) if is_older(supports, needs) => {
            Err(UnusableGpu::Driver { supports: supports.clone(), needs })
        }
        _ => Ok(index),
    }
}

/// Whether a version such as `12.8` comes before another; one that cannot be read does not.
pub fn is_older(version: &str, than: CudaVersion) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) < (than.major, than.minor),
        _ => false,
    }
}

/// What a run may take of the memory of the NVIDIA GPU with this CUDA index.
pub fn cuda_limit(machine: &Machine, index: u32) -> Result<MemoryLimit, Unknown> {
    let gpu = machine.cuda_gpu(index);
    let gpu = gpu.ok_or_else(|| Unknown(format!("CUDA has no GPU {index}")))?;
    nvidia_limit(machine, gpu)
}

/// What a run may take of main memory for offloaded weights of that GPU; nothing where the GPU computes
/// in main memory itself, or where that is not known.
pub fn cuda_host_limit(machine: &Machine, index: u32) -> Option<Bytes> {
    let gpu = machine.cuda_gpu(index)?;
    if gpu.unified.require().unwrap_or(true) {
        return None;
    }
    main_limit(machine).ok().map(|limit| limit.limit)
}

fn nvidia_limit(machine: &Machine, gpu: &NvidiaGpu) -> Result<MemoryLimit, Unknown> {
    if gpu.unified.require()? {
        return main_limit(machine);
    }
    let available = gpu.memory_free.require()?;
    let reserved = RESERVED_ON_GPU;
    let limit = available.saturating_sub(reserved);
    let bound_by = MemoryBound::GpuMemory;
    // What others hold of a GPU's own memory, such as the display, is not known to end with a program.
    Ok(MemoryLimit { limit, available, reserved, bound_by, max_limit: limit })
}

/// What a run may take of the memory of a GPU by Metal or Vulkan. How much memory of its own a GPU has is
/// not known here, so it is that of main memory.
pub fn gpu_limit(machine: &Machine) -> Result<MemoryLimit, Unknown> {
    let apple = machine.apple_gpu();
    apple.map_or_else(|| main_limit(machine), |gpu| apple_limit(machine, gpu))
}

fn apple_limit(machine: &Machine, gpu: &AppleGpu) -> Result<MemoryLimit, Unknown> {
    let main = main_limit(machine)?;
    let working_set = working_set_of(gpu, machine.memory.total.require()?);
    let left = metal_left(signed(main.limit), Bytes(0), working_set, &machine.memory);
    let limit = Bytes(left.max(0).unsigned_abs());
    let bound_by = match limit.cmp(&main.limit) {
        Ordering::Less => MemoryBound::WorkingSet,
        Ordering::Equal => main.bound_by,
        Ordering::Greater => MemoryBound::HalfWorkingSet,
    };
    Ok(MemoryLimit { limit, bound_by, max_limit: working_set, ..main })
}

/// The most that a run by Metal may hold on this machine; nothing where there is no Metal, or memory is not known.
pub fn working_set(machine: &Machine) -> Option<Bytes> {
    Some(working_set_of(machine.apple_gpu()?, *machine.memory.total.known()?))
}

/// As Metal says; else by the published rule.
fn working_set_of(gpu: &AppleGpu, total: Bytes) -> Bytes {
    let by_rule = if total <= TWO_THIRDS_UP_TO { total.0 / 3 * 2 } else { total.0 / 4 * 3 };
    gpu.working_set.known().copied().unwrap_or(Bytes(by_rule))
}

/// Bytes that a run by Metal may take on top of what it holds, if `left` of main memory are. The one rule of the
/// limit before a run and of the governor in it: they must not disagree.
fn metal_left(left: i64, held: Bytes, working_set: Bytes, memory: &SystemMemory) -> i64 {
    let up_to = |bytes: u64| signed(Bytes(bytes)).saturating_sub(signed(held));
    // Under pressure macOS has compressed what it can.
    let least = if is_pressed(memory) { left } else { up_to(working_set.0 / METAL_PART) };
    left.max(least).min(up_to(working_set.0))
}

fn is_pressed(memory: &SystemMemory) -> bool {
    let pressure = memory.pressure.known();
    matches!(pressure, Some(MemoryPressure::Level(level)) if *level > PressureLevel::Normal)
}

/// What a run may take of main memory.
pub fn main_limit(machine: &Machine) -> Result<MemoryLimit, Unknown> {
    limit_of(&machine.memory)
}

fn limit_of(memory: &SystemMemory) -> Result<MemoryLimit, Unknown> {
    let available = memory.available.require()?;
    let total = memory.total.require()?;
    let reserved = Bytes(total.0 / RESERVED_PART).clamp(RESERVED_LEAST, RESERVED_MOST);
    let main = MemoryLimit {
        limit: available.saturating_sub(reserved),
        available,
        reserved,
        bound_by: MemoryBound::MainMemory,
        max_limit: total.saturating_sub(reserved),
    };
    let Some(Some(container)) = memory.container.known() else { return Ok(main) };
    // A container need not leave memory to the rest of the system: only the floor is kept.
    let [left, most] =
        [container.left, container.limit].map(|bytes| bytes.saturating_sub(RESERVED_LEAST));
    let max_limit = main.max_limit.min(most);
    if left >= main.limit {
        return Ok(MemoryLimit { max_limit, ..main });
    }
    Ok(MemoryLimit {
        limit: left,
        available: container.left,
        reserved: RESERVED_LEAST,
        bound_by: MemoryBound::Container,
        max_limit,
    })
}

/// Bytes that a run may take on top of what it holds; below zero once it uses what is kept for
/// the system. By the rules of [`main_limit`], and with a working set of [`gpu_limit`].
pub fn main_memory_left(
    memory: &SystemMemory,
    held: Bytes,
    working_set: Option<Bytes>,
) -> Result<i64, Unknown> {
    let MemoryLimit { available, reserved, .. } = limit_of(memory)?;
    let left = signed(available).saturating_sub(signed(reserved));
    Ok(working_set.map_or(left, |set| metal_left(left, held, set, memory)))
}

fn signed(bytes: Bytes) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX)
}

fn known_or_reason<S: Serializer>(
    memory: &Result<MemoryLimit, Unknown>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match memory {
        Ok(limit) => limit.serialize(serializer),
        Err(Unknown(unknown)) => {
            #[derive(Serialize)]
            struct Reason<'a> {
                limit: Option<u64>,
                unknown: &'a str,
            }
            Reason { limit: None, unknown }.serialize(serializer)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::recording::testing::source;
    use crate::recording::{MachineRecording, RecordedAnswer};
    use crate::source::ProbeSource;

    fn decide(answers: &[(&str, &str)]) -> Budget {
        budget(&Machine::probe(&mut source(answers)))
    }

    const MEMORY: (&str, &str) =
        ("file /proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 20971520 kB\n");
    const NVML: (&str, &str) = ("nvml", "driver: 580.95.05\ncuda: 13.0\ncards: 1\n");
    const CUDA: (&str, &str) = ("cuda", "cuda: 13.0\ncards: 1\n");
    const LIBRARIES: (&str, &str) = ("cuda libraries", "nvrtc: 13.0\ncublaslt: 13.1.0\n");
    const ADDRESS: &str = "pci_bus_id: 0000:01:00.0\n";

    #[test]
    fn a_gpu_without_its_libraries_is_not_used() {
        let gpu = format!("{ADDRESS}compute_capability: 8.6\nintegrated: 0\n");
        for (libraries, device) in [
            (LIBRARIES.1, DeviceId::Cuda(0)),
            ("nvrtc: 13.0\ncublaslt: ? not found\n", DeviceId::Cpu),
            ("nvrtc: ? not found\ncublaslt: 13.1.0\n", DeviceId::Cpu),
        ] {
            let answers = [MEMORY, CUDA, ("cuda libraries", libraries), ("cuda card 0", &gpu)];
            assert_eq!(decide(&answers).device, device, "{libraries}");
        }
    }

    #[test]
    fn on_the_cpu_a_thread_per_performance_core_computes() {
        let cpus = "processor : 0\nprocessor : 1\nprocessor : 2\nprocessor : 3\n";
        let cpuinfo = ("file /proc/cpuinfo", cpus);
        assert_eq!(decide(&[cpuinfo, ("performance cores", "2")]).threads, Some(2));
        assert_eq!(decide(&[cpuinfo, ("performance cores", "8")]).threads, Some(4));
        assert_eq!(decide(&[cpuinfo]).threads, Some(4));
    }

    #[test]
    fn the_cpu_gets_what_is_free_less_a_share() {
        let budget = decide(&[MEMORY]);
        assert_eq!(budget.device, DeviceId::Cpu);
        assert_eq!(budget.memory.unwrap().limit, Bytes((20 - 2) << 30));
    }

    #[test]
    fn a_container_binds_before_the_machine_does() {
        let budget = decide(&[
            MEMORY,
            ("file /proc/self/cgroup", "0::/\n"),
            ("file /sys/fs/cgroup/memory.max", "4294967296\n"),
            ("file /sys/fs/cgroup/memory.current", "1073741824\n"),
        ]);
        let limit = budget.memory.unwrap();
        assert_eq!(limit.bound_by, MemoryBound::Container);
        assert_eq!(limit.limit, Bytes((3 << 30) - (512 << 20)));
        assert_eq!(limit.max_limit, Bytes((4 << 30) - (512 << 20)));
    }

    /// The recorded Mac of 8 GB with some of its words replaced.
    fn mac(words: &[(&str, &str)]) -> Machine {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../machines/apple-m1-8gb.toml");
        let mut recording = MachineRecording::load(&file).unwrap();
        for answer in recording.answers.values_mut() {
            if let RecordedAnswer::Text(text) = answer {
                *text = words.iter().fold(text.clone(), |text, (old, new)| text.replace(old, new));
            }
        }
        Machine::probe(&mut ProbeSource::replay(recording))
    }

    #[test]
    fn a_mac_gets_half_of_its_working_set_even_if_less_is_free() {
        let (memory, set) = (mac(&[]).memory, Bytes(6 << 30));
        let left =
            |left: i64, held: u64| metal_left(left << 30, Bytes(held << 30), set, &memory) >> 30;
        assert_eq!([left(1, 0), left(4, 0), left(20, 0), left(-1, 0)], [3, 4, 6, 3]);
        // The same while the run holds some of it: what it may hold in all stays.
        assert_eq!([left(-1, 2), left(-1, 4), left(3, 4)], [1, -1, 2]);
    }

    #[test]
    fn under_pressure_a_mac_gives_only_what_is_free() {
        use MemoryBound::{HalfWorkingSet, MainMemory};
        let bound = |level: &str| {
            let name = "kern.memorystatus_vm_pressure_level: ";
            let machine = mac(&[(&format!("{name}1"), &format!("{name}{level}"))]);
            gpu_limit(&machine).unwrap().bound_by
        };
        assert_eq!(["1", "2", "4"].map(bound), [HalfWorkingSet, MainMemory, MainMemory]);
    }

    #[test]
    fn where_metal_does_not_say_its_working_set_the_published_rule_does() {
        let set = |gib: u64, metal: &str| {
            let total = (gib << 30).to_string();
            let words = [("8589934592", total.as_str()), ("recommended_bytes: 5726633984", metal)];
            working_set(&mac(&words)).unwrap().0
        };
        assert_eq!([set(24, ""), set(64, "")], [16 << 30, 48 << 30]);
        assert_eq!(set(64, "recommended_bytes: 7"), 7);
    }

    #[test]
    fn what_is_left_falls_below_zero() {
        let left = |answers: &[(&str, &str)]| {
            main_memory_left(&Machine::probe(&mut source(answers)).memory, Bytes(0), None)
        };
        assert_eq!(left(&[MEMORY]), Ok(18 << 30));
        let scarce = ("file /proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 1048576 kB\n");
        assert_eq!(left(&[scarce]), Ok(-(1 << 30)));
        let container = [
            ("file /proc/self/cgroup", "0::/\n"),
            ("file /sys/fs/cgroup/memory.max", "4294967296\n"),
            ("file /sys/fs/cgroup/memory.current", "4026531840\n"),
        ];
        assert_eq!(left(&[&[MEMORY], &container[..]].concat()), Ok(-(256 << 20)));
        assert!(left(&[]).is_err());
    }

    #[test]
    fn a_discrete_gpu_is_bound_by_its_own_memory_a_unified_one_by_the_systems() {
        let facts = |integrated: &str| {
            format!("{ADDRESS}compute_capability: 12.1\nintegrated: {integrated}\n")
        };
        let gpu =
            format!("{ADDRESS}memory_total_bytes: 25757220864\nmemory_free_bytes: 25000000000\n");
        for (integrated, bound) in [("0", MemoryBound::GpuMemory), ("1", MemoryBound::MainMemory)] {
            let cuda_gpu = facts(integrated);
            let budget = decide(&[
                MEMORY,
                NVML,
                CUDA,
                LIBRARIES,
                ("nvml card 0", &gpu),
                ("cuda card 0", &cuda_gpu),
            ]);
            assert_eq!(budget.device, DeviceId::Cuda(0));
            assert_eq!(budget.memory.unwrap().bound_by, bound);
        }
    }

    #[test]
    fn an_old_gpu_or_an_old_driver_is_not_used() {
        let check = |capability: &str, cuda: &str, device| {
            let facts = format!("{ADDRESS}compute_capability: {capability}\nintegrated: 0\n");
            let library = format!("cuda: {cuda}\ncards: 1\n");
            let budget = decide(&[MEMORY, LIBRARIES, ("cuda", &library), ("cuda card 0", &facts)]);
            assert_eq!(budget.device, device, "capability {capability}, CUDA {cuda}");
        };
        check("8.6", "12.0", DeviceId::Cuda(0));
        check("7.5", "13.0", DeviceId::Cpu);
        check("8.6", "11.8", DeviceId::Cpu);
        check("12.0", "12.6", DeviceId::Cpu);
    }

    #[test]
    fn without_a_reading_there_is_no_limit() {
        let budget = decide(&[]);
        assert_eq!(
            budget.memory.unwrap_err().0,
            "/proc/meminfo MemAvailable: not in the recording"
        );
    }
}
