//! What the computer is, and its telemetry.
//!
//! [`ProbeSource`] asks the machine (or a recording of one), [`Machine::probe`] turns the answers into
//! readings, [`budget`] says what of it a run may take, and [`findings`] names what is wrong and
//! how to fix it. While a run goes on, [`sampler`] reads telemetry on a thread of its own, the only
//! place that waits for time to pass. This crate knows no model and never invents a reading.

pub mod awake;
pub mod budget;
pub mod cores;
pub mod cpu;
pub mod energy;
pub mod findings;
pub mod folders;
pub mod governor;
pub mod gpu;
pub mod hardware;
pub mod held;
pub mod key_values;
#[cfg(target_os = "linux")]
mod landlock;
mod live;
pub mod memory;
pub mod monitor;
pub mod power;
pub mod pressure;
mod probe;
pub mod process;
pub mod reading;
pub mod recording;
pub mod sampler;
pub mod source;
pub mod telemetry;
pub mod thermal;
pub mod uses;

use serde::Serialize;

pub use crate::reading::{Bytes, Reading, Unknown};
pub use crate::recording::{MachineRecording, RecordingError};
pub use crate::source::ProbeSource;

/// A computer as found.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// What people call it.
    pub title: String,
    /// Whether this is the computer at hand, a recording or documentation.
    pub provenance: Provenance,
    /// Operating system and version.
    pub system: Reading<String>,
    /// CPU architecture this program was built for.
    pub arch: String,
    /// The CPU.
    pub cpu: cpu::CpuInfo,
    /// Main memory.
    pub memory: memory::SystemMemory,
    /// Temperatures outside the GPUs.
    pub thermal: thermal::Thermal,
    /// Mains or battery.
    pub power: power::PowerInfo,
    /// GPUs, in NVML's order.
    pub gpus: Vec<gpu::GpuInfo>,
    /// NVIDIA's driver and libraries; absent on macOS, which cannot have them.
    pub nvidia: Option<NvidiaStack>,
    /// Whether this is an Intel program translated on Apple Silicon; absent elsewhere.
    pub translated: Option<Reading<bool>>,
}

impl Machine {
    /// Looks at everything the source can tell.
    pub fn probe(source: &mut ProbeSource) -> Self {
        probe::probe(source)
    }

    /// The NVIDIA GPU that CUDA gives this number.
    pub fn cuda_gpu(&self, index: u32) -> Option<&gpu::NvidiaGpu> {
        self.nvidia_gpus().find(|gpu| gpu.cuda_index.known() == Some(&index))
    }

    /// The GPU of an Apple chip.
    pub fn apple_gpu(&self) -> Option<&gpu::AppleGpu> {
        self.gpus.iter().find_map(|gpu| match gpu {
            gpu::GpuInfo::Apple(gpu) => Some(gpu),
            gpu::GpuInfo::Nvidia(_) => None,
        })
    }

    /// Its NVIDIA GPUs.
    pub fn nvidia_gpus(&self) -> impl Iterator<Item = &gpu::NvidiaGpu> {
        self.gpus.iter().filter_map(|gpu| match gpu {
            gpu::GpuInfo::Nvidia(gpu) => Some(gpu),
            gpu::GpuInfo::Apple(_) => None,
        })
    }
}

/// Where the facts come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Provenance {
    /// Asked just now on this computer.
    Live,
    /// Replayed from a recording made on the machine itself.
    Recorded {
        /// Program and version that asked.
        basis: String,
    },
    /// Replayed from a file written after published facts; nobody measured it.
    Documented {
        /// The documents.
        basis: String,
    },
}

impl Provenance {
    fn of(source: &ProbeSource) -> Self {
        let basis = source.recording().basis.clone();
        match source.recording().origin {
            _ if source.is_live() => Self::Live,
            recording::RecordingOrigin::Recorded => Self::Recorded { basis },
            recording::RecordingOrigin::Documented => Self::Documented { basis },
        }
    }
}

/// NVIDIA's software, from the kernel up.
#[derive(Clone, Debug, Serialize)]
pub struct NvidiaStack {
    /// Version of the loaded kernel module.
    pub kernel_module: Reading<String>,
    /// Version of the driver, by NVML.
    pub driver: Reading<String>,
    /// The newest CUDA version that the driver supports.
    pub cuda: Reading<String>,
    /// Run-time compiler.
    pub nvrtc: Reading<String>,
    /// Matmuls.
    pub cublaslt: Reading<String>,
    /// Attention.
    pub cudnn: Reading<String>,
    /// Sums of gradients between the GPUs of several ranks.
    pub nccl: Reading<String>,
}
