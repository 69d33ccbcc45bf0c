//! Device, number formats and memory limit: arguments that several commands share.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::OnceLock;

use cluster::{Launched, World};
use compute::gpu::{self, GpuAdapter, GpuAdapterKind, GpuChoice};
use compute::{ComputeError, Device, DeviceKind, Dtype, Quantisation};
use machine::budget::{self, MemoryLimit, cuda_host_limit, cuda_limit, gpu_limit, main_limit};
use machine::cpu::CpuFeature;
use machine::hardware::nvidia_arch;
use machine::held::MemoryPlace;
use machine::monitor::Monitor;
use machine::sampler::TelemetrySampler;
use machine::{Bytes, Machine, ProbeSource};
use trainer::config::RunConfig;
use trainer::config::base::ComputeType;
use trainer::model::build::Precision;
use trainer::plan::RaisableLimit;
use trainer::plan::rates::{self, Rates, RatesKey, StoredRates};
use trainer::{TrainerError, gpu_self_test, train};

use super::named_value;
use crate::failure::Failure;
use crate::render;

/// The help heading of what is about the computer and not about the job. Set argument by argument: a heading for a
/// struct would also apply to all arguments declared after it.
pub const COMPUTER: &str = "Computer";

/// The device.
#[derive(Clone, Debug, clap::Args)]
pub struct DeviceArgs {
    /// CPU threads that compute [default: one per performance core]
    #[arg(long, value_name = "N", help_heading = COMPUTER, value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// Device: cpu, cuda:0 for the first NVIDIA GPU, or gpu:0 for a GPU by Metal or Vulkan
    /// [default: CUDA, else Metal (not yet run on a Mac), else the CPU]
    #[arg(long, help_heading = COMPUTER)]
    device: Option<DeviceChoice>,

    /// On a GPU: the same bits on every run, which is slower
    #[arg(long, help_heading = COMPUTER)]
    deterministic: bool,

    /// The default device, once it was looked for.
    #[arg(skip)]
    detected: OnceLock<DeviceChoice>,

    /// Ranks of one job that share the device.
    #[arg(skip = 1_usize)]
    local_ranks: usize,
}

impl DeviceArgs {
    /// Threads it computes with: of several ranks on one machine each has its part.
    pub fn threads(&self) -> usize {
        let own = || (machine::cores::compute_threads() / self.local_ranks).max(1);
        self.threads.map_or_else(own, usize::from)
    }

    /// The part of this machine that a rank gets, besides others: a GPU of its own where there are several, and its share
    /// of threads and memory.
    #[must_use]
    pub fn for_rank(mut self, world: Option<&World>) -> Self {
        let Some(Launched { local_rank, local_size, .. }) = world.map(World::launched) else {
            return self;
        };
        let n_gpus = Machine::probe(&mut ProbeSource::live()).nvidia_gpus().count();
        self.local_ranks = local_size;
        if self.device.is_none() && n_gpus > 1 {
            self.device = Some(DeviceChoice::Cuda((local_rank % n_gpus) as u32));
            self.local_ranks = local_size.div_ceil(n_gpus);
        }
        self
    }

    /// The device as it is typed, or the best that this machine has.
    fn device(&self) -> DeviceChoice {
        let best = || DeviceChoice::best(&Machine::probe(&mut ProbeSource::live()));
        self.device.unwrap_or_else(|| *self.detected.get_or_init(best))
    }

    /// The device as it was typed, for another command; nothing where none was.
    pub fn device_flag(&self) -> Vec<String> {
        self.device.map_or_else(Vec::new, |device| vec!["--device".into(), device.to_string()])
    }

    /// Its kind, for plans.
    pub fn kind(&self) -> DeviceKind {
        match self.device() {
            DeviceChoice::Cpu => DeviceKind::cpu(self.threads()),
            DeviceChoice::Cuda(_) => DeviceKind::Cuda { is_deterministic: self.deterministic },
            DeviceChoice::Gpu(choice) => DeviceKind::gpu(choice),
        }
    }

    /// The same of a machine that was recorded; where nothing is typed, the best that it has.
    pub fn for_recorded(&self, machine: &Machine) -> (Self, DeviceKind) {
        let device = self.device.unwrap_or_else(|| DeviceChoice::best(machine));
        let kind = match device {
            DeviceChoice::Cpu => {
                let threads = machine.cpu.usable_threads.known().map_or(1, |n| *n as usize);
                DeviceKind::Cpu { threads, has_amx: machine.cpu.has(CpuFeature::AmxBf16) }
            }
            DeviceChoice::Cuda(_) => DeviceKind::Cuda { is_deterministic: self.deterministic },
            DeviceChoice::Gpu(_) => {
                let largest = machine.apple_gpu().and_then(|gpu| gpu.max_buffer.known());
                DeviceKind::gpu_with_buffer(largest.map(|bytes| bytes.0 as usize))
            }
        };
        (Self { device: Some(device), ..self.clone() }, kind)
    }

    /// The device, with an arena of `bytes`.
    pub fn open(&self, bytes: usize) -> Result<Device, Failure> {
        self.check_trust()?;
        let device = self.arena(bytes)?;
        if let DeviceChoice::Cuda(_) = self.device() {
            let place = self.memory_place(&Machine::probe(&mut ProbeSource::live()));
            device.set_shared_memory(place == MemoryPlace::BesideProcess);
        }
        Ok(device)
    }

    fn arena(&self, bytes: usize) -> compute::Result<Device> {
        match self.device() {
            DeviceChoice::Cpu => Device::cpu(self.threads(), bytes),
            DeviceChoice::Cuda(index) => {
                let cache = trainer::kernel_cache::cache();
                Device::cuda(index as usize, bytes, self.deterministic, cache)
            }
            DeviceChoice::Gpu(choice) => Device::gpu(choice, bytes),
        }
    }

    /// Fails if the self-test found an op wrong on it.
    pub fn check_trust(&self) -> Result<(), Failure> {
        match (self.device(), gpu_self_test::folder()) {
            (DeviceChoice::Gpu(choice), Some(folder)) => {
                Ok(gpu_self_test::check(&folder, &gpu::adapter(choice)?)?)
            }
            _ => Ok(()),
        }
    }

    /// For a run, which opens it itself.
    pub fn device_setup(
        &self,
        limit: Option<MemoryLimitArg>,
    ) -> Result<train::DeviceSetup<'_>, Failure> {
        let (machine, cap) = (Machine::probe(&mut ProbeSource::live()), limit);
        self.check_limit(&machine, limit)?;
        Ok(train::DeviceSetup {
            kind: self.kind(),
            name: self.name(),
            limit_bytes: self.limit_bytes_of(&machine, limit),
            host_bytes: self.host_bytes_of(&machine),
            raisable: self.raisable_of(&machine),
            rates: self.rates(&machine),
            memory_place: self.memory_place(&machine),
            open: Box::new(|bytes| self.arena(bytes)),
            start_sampler: Box::new(move |held| {
                let (device, cap) = match self.device() {
                    DeviceChoice::Cpu => (budget::DeviceId::Cpu, cap),
                    // The limit is of the GPU's memory, which the arena takes whole.
                    DeviceChoice::Cuda(index) => (budget::DeviceId::Cuda(index), None),
                    DeviceChoice::Gpu(_) => (budget::DeviceId::Metal, cap),
                };
                let cap = cap.map(|cap| Bytes(self.limit_bytes_of(&machine, Some(cap)) as u64));
                let monitor = Monitor::new(&machine, device, cap).with_held(held);
                // Without a thread for telemetry the run goes on, without a governor.
                TelemetrySampler::start(ProbeSource::live(), monitor).ok()
            }),
            world: None,
        })
    }

    /// Refuses a job in fp8 for a GPU that is known not to multiply so.
    pub fn check_fp8(&self, config: &RunConfig, machine: &Machine) -> Result<(), ComputeError> {
        let DeviceChoice::Cuda(index) = self.device() else { return Ok(()) };
        let gpu = machine.cuda_gpu(index).filter(|_| config.base.compute == ComputeType::Fp8);
        let known = gpu.and_then(|gpu| Some((gpu, *gpu.capability.known()?)));
        let Some((gpu, capability)) = known else { return Ok(()) };
        if nvidia_arch(capability).is_some_and(|arch| arch.fp8) {
            return Ok(());
        }
        let name = gpu.name.known().map_or("it", String::as_str);
        let device = format!("cuda:{index}");
        let problem = format!("{name} has compute capability {capability}, fp8 needs 8.9");
        Err(ComputeError::Fp8 { device, problem })
    }

    /// Where the memory of the device lies. Metal's counts as the process's own on macOS, and a software driver's is.
    fn memory_place(&self, machine: &Machine) -> MemoryPlace {
        match self.device() {
            DeviceChoice::Cpu => MemoryPlace::Process,
            DeviceChoice::Cuda(index) => {
                let gpu = machine.cuda_gpu(index);
                let is_unified = gpu.is_some_and(|gpu| gpu.unified.known() == Some(&true));
                if is_unified { MemoryPlace::BesideProcess } else { MemoryPlace::Gpu }
            }
            DeviceChoice::Gpu(choice) => match gpu::adapter(choice) {
                Ok(GpuAdapter { kind: GpuAdapterKind::Discrete, .. }) => MemoryPlace::Gpu,
                Ok(GpuAdapter {
                    kind: GpuAdapterKind::Integrated, interface: "Vulkan", ..
                }) => MemoryPlace::BesideProcess,
                _ => MemoryPlace::Process,
            },
        }
    }

    /// How fast this machine is: measured, else from published figures.
    pub fn rates(&self, machine: &Machine) -> Rates {
        let kept = self.kept_rates(machine, rates::folder());
        kept.unwrap_or_else(|| Rates::documented(machine, self.kind()))
    }

    /// The rates that were measured and kept in a folder, if they can be used.
    pub fn kept_rates(&self, machine: &Machine, folder: Option<PathBuf>) -> Option<Rates> {
        match Rates::load(&folder?, &self.owner(machine)) {
            StoredRates::Rates(rates) => Some(rates),
            StoredRates::Missing => None,
            StoredRates::Unusable { problem, path } => {
                let path = path.display();
                render::warn(&format!("stored rates are not used: {problem}: {path}"));
                None
            }
        }
    }

    /// What measured rates belong to.
    pub fn owner(&self, machine: &Machine) -> RatesKey {
        let index = if let DeviceChoice::Cuda(index) = self.device() { index } else { 0 };
        RatesKey::of(machine, self.kind(), index)
    }

    /// The same for a job, which may ask for equal bits too.
    #[must_use]
    pub fn for_job(&self, config: &RunConfig) -> Self {
        let deterministic = self.deterministic || config.machine.deterministic;
        Self { deterministic, ..self.clone() }
    }

    /// As it is typed.
    pub fn name(&self) -> String {
        self.device().to_string()
    }

    /// Bytes a run may hold on this machine; fails where it does not have as many.
    pub fn limit_bytes(&self, limit: Option<MemoryLimitArg>) -> Result<usize, Failure> {
        let machine = Machine::probe(&mut ProbeSource::live());
        self.check_limit(&machine, limit)?;
        Ok(self.limit_bytes_of(&machine, limit))
    }

    /// That a machine has as much memory as a run may take of it.
    fn check_limit(&self, machine: &Machine, limit: Option<MemoryLimitArg>) -> Result<(), Failure> {
        let total = match self.device() {
            DeviceChoice::Cuda(index) => {
                machine.cuda_gpu(index).and_then(|gpu| gpu.memory_total.known())
            }
            DeviceChoice::Cpu | DeviceChoice::Gpu(_) => machine.memory.total.known(),
        };
        match (limit, total) {
            (Some(MemoryLimitArg::Bytes(asked)), Some(total)) if asked > *total => {
                let problem =
                    format!("--limit {asked} is more than the memory of {}, {total}", self.name());
                let hint =
                    "leave --limit out to use what is free; `hearth plan` plans for any size";
                Err(TrainerError::Request { problem, hint }.into())
            }
            _ => Ok(()),
        }
    }

    /// The limit on a machine where none is typed; none where the system does not say.
    pub fn default_limit_of(&self, machine: &Machine) -> Option<MemoryLimit> {
        let found = match self.device() {
            DeviceChoice::Cpu => main_limit(machine),
            DeviceChoice::Cuda(index) => cuda_limit(machine, index),
            DeviceChoice::Gpu(_) => gpu_limit(machine),
        };
        found.ok()
    }

    /// What a limit may be raised to on a machine.
    pub fn raisable_of(&self, machine: &Machine) -> Option<RaisableLimit> {
        let MemoryLimit { limit, max_limit, .. } = self.default_limit_of(machine)?;
        let [default_bytes, max_limit_bytes] = [limit, max_limit].map(|bytes| bytes.0 as usize);
        Some(RaisableLimit { default_bytes, max_limit_bytes })
    }

    /// Bytes a run may hold on a machine.
    pub fn limit_bytes_of(&self, machine: &Machine, limit: Option<MemoryLimitArg>) -> usize {
        let found = self.default_limit_of(machine);
        // Where the system does not say, the arena itself will tell.
        let available = found.map_or(u64::MAX / 4, |limit| limit.limit.0);
        let available = self.address_space().map_or(available, |left| left.min(available));
        let available = available / self.local_ranks as u64;
        match limit {
            Some(MemoryLimitArg::Bytes(bytes)) => bytes.0 as usize,
            Some(MemoryLimitArg::Percent(percent)) => (available as f64 * percent / 100.0) as usize,
            None => available as usize,
        }
    }

    /// What `ulimit -v` leaves, where the device computes in main memory.
    fn address_space(&self) -> Option<u64> {
        /// Stacks of threads and what the allocator reserves. Measured with two threads: 150 MiB.
        const RESERVED: u64 = 256 << 20;
        let is_main = matches!(self.device(), DeviceChoice::Cpu | DeviceChoice::Gpu(_));
        let left = machine::process::address_space_left().filter(|_| is_main)?;
        Some(left.saturating_sub(RESERVED))
    }

    /// Bytes of main memory on this machine that are not the device's own; nothing where it is the same memory.
    pub fn host_bytes(&self) -> Option<usize> {
        self.host_bytes_of(&Machine::probe(&mut ProbeSource::live()))
    }

    /// Bytes of main memory for offloaded weights; nothing where it is the same memory.
    pub fn host_bytes_of(&self, machine: &Machine) -> Option<usize> {
        match self.device() {
            DeviceChoice::Cuda(index) => {
                cuda_host_limit(machine, index).map(|limit| limit.0 as usize)
            }
            DeviceChoice::Cpu | DeviceChoice::Gpu(_) => None,
        }
    }
}

/// A device, as it is typed.
#[derive(Clone, Copy, Debug)]
pub enum DeviceChoice {
    Cpu,
    /// The NVIDIA GPU with this CUDA index.
    Cuda(u32),
    /// A GPU by Metal or Vulkan, or a software one.
    Gpu(GpuChoice),
}

impl DeviceChoice {
    /// The best that a machine has.
    fn best(machine: &Machine) -> Self {
        match budget::budget(machine).device {
            budget::DeviceId::Cuda(index) => Self::Cuda(index),
            budget::DeviceId::Metal => Self::Gpu(GpuChoice::Index(0)),
            budget::DeviceId::Cpu => Self::Cpu,
        }
    }

    /// Any but the CPU.
    pub fn parse_gpu(text: &str) -> Result<Self, String> {
        match text.parse()? {
            Self::Cpu => Err("the CPU is the reference that GPUs are compared with".to_owned()),
            other => Ok(other),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_wrong =
            || format!("{text} is not a device, expected cpu, cuda:0, gpu:0 or gpu:software");
        let (engine, which) = text.split_once(':').unwrap_or((text, "0"));
        let number = || which.parse().map_err(|_| is_wrong());
        match (engine, which) {
            ("cpu", _) if text == "cpu" => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(number()?)),
            ("gpu", "software") => Ok(Self::Gpu(GpuChoice::Software)),
            ("gpu", _) => Ok(Self::Gpu(GpuChoice::Index(number()? as usize))),
            _ => Err(is_wrong()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Gpu(choice) => write!(f, "{choice}"),
        }
    }
}

/// Number formats of a model.
#[derive(Debug, clap::Args)]
pub struct FormatArgs {
    /// Number format of weights and activations; adapters are always f32
    #[arg(long, default_value = "bf16", value_parser = named_value::parser::<Dtype>())]
    pub dtype: Dtype,

    /// Quantise the weights of transformer blocks (kept quantised, dequantised for each matmul)
    #[arg(long, value_name = "FORMAT", value_parser = named_value::parser::<Quantisation>())]
    pub quantise: Option<Quantisation>,

    /// Multiply in fp8 (base.compute), with --quantise fp8
    #[arg(long, requires = "quantise")]
    pub fp8_matmuls: bool,
}

impl FormatArgs {
    /// As it is meant.
    pub fn precision(&self) -> Precision {
        let base = self.quantise;
        let multiplies_fp8 = self.fp8_matmuls;
        Precision { base, multiplies_fp8, ..Precision::plain(self.dtype) }
    }
}

/// A memory limit as it is typed: bytes, or a share of the default limit.
#[derive(Clone, Copy, Debug)]
pub enum MemoryLimitArg {
    Bytes(Bytes),
    Percent(f64),
}

impl FromStr for MemoryLimitArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(percent) = text.strip_suffix('%') else {
            let bytes: Bytes = text.parse()?;
            if bytes < LEAST_LIMIT {
                return Err(format!(
                    "{bytes} is too little for any run; write a size such as 16GB or 900MB, or 70%"
                ));
            }
            return Ok(Self::Bytes(bytes));
        };
        match percent.trim().parse() {
            Ok(percent) if (1.0..=100.0).contains(&percent) => Ok(Self::Percent(percent)),
            _ => Err(format!("{text} is not a share from 1% to 100%")),
        }
    }
}

/// Less is a size without its unit, or a mistake. Chosen: the smallest model of the tests takes more.
const LEAST_LIMIT: Bytes = Bytes(1_000_000);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_no_run_can_keep_are_refused_with_what_is_accepted() {
        for text in ["0", "0B", "0GB", "16", "999KB", "0%", "0.5%", "-5%", "101%", "NaN%", "many"] {
            let said = text.parse::<MemoryLimitArg>().unwrap_err();
            let is_told = ["16GB", "10GB", "1% to 100%"].iter().any(|what| said.contains(what));
            assert!(is_told, "{text}: {said}");
        }
        for text in ["1MB", "16GB", "1%", "100%"] {
            text.parse::<MemoryLimitArg>().unwrap();
        }
    }
}
