//! Which GPUs there are, by what interface, and which one is meant.

use std::future::Future;
use std::pin::pin;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};

use wgpu::{
    Backend, Backends, CooperativeScalarType, DeviceType, Features, Instance, InstanceDescriptor,
    InstanceFlags,
};

use super::{ALIGNMENT, MIN_GROUP_BYTES, MIN_TENSORS};
use crate::{ComputeError, Dtype, Result};

/// Threads of a subgroup that matrix units may have: of four such a workgroup is made. Software has 8, Apple 32, AMD 64.
const MIN_WIDTH: u32 = 8;
const MAX_WIDTH: u32 = 64;

/// A GPU, as the system describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuAdapter {
    /// Its name.
    pub name: String,
    /// The driver and its version, as far as they are told.
    pub driver: String,
    /// What it is reached by: Metal or Vulkan.
    pub interface: &'static str,
    /// Discrete, integrated or software.
    pub kind: GpuAdapterKind,
    /// Bytes of the largest buffer: no tensor lies across a multiple of this.
    pub buffer_bytes: usize,
    /// Bytes of the largest tensor.
    pub tensor_bytes: usize,
    /// Bytes of memory that the threads of a workgroup share.
    pub group_bytes: usize,
    /// Whether its memory is the CPU's, who may write into the arena.
    pub shares_memory: bool,
    /// What it offers beyond what every kernel asks for.
    pub features: GpuFeatures,
    /// Why it cannot be used, if it cannot.
    pub missing: Option<&'static str>,
}

/// What some GPUs offer, and kernels may use where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuFeatures {
    /// Arithmetic in f16.
    pub shader_f16: bool,
    /// Subgroup operations.
    pub subgroups: bool,
    /// Cooperative matrices (simdgroup matrices), if they are of a kind that we have kernels for.
    pub matrix_units: Option<MatrixUnits>,
    /// Buffers that kernels and the CPU write to.
    pub mappable_buffers: bool,
    /// Timestamp queries.
    pub timestamps: bool,
}

impl GpuFeatures {
    fn of(adapter: &wgpu::Adapter) -> Self {
        let features = adapter.features();
        Self {
            shader_f16: features.contains(Features::SHADER_F16),
            subgroups: features.contains(Features::SUBGROUP),
            matrix_units: matrix_units(adapter),
            mappable_buffers: features.contains(Features::MAPPABLE_PRIMARY_BUFFERS),
            timestamps: features.contains(Features::TIMESTAMP_QUERY),
        }
    }
}

/// Cooperative matrices of eight by eight that we have kernels for; their sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixUnits {
    /// What is multiplied: f32, or f16, for operands that are f16 anyway.
    pub element: Dtype,
    /// Threads of a subgroup, which hold a matrix together.
    pub width: usize,
}

/// What an adapter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuAdapterKind {
    /// A GPU with memory of its own.
    Discrete,
    /// A part of the CPU, with the same memory.
    Integrated,
    /// One of a virtual machine, or of unknown kind.
    Other,
    /// A program on the CPU.
    Software,
}

/// Which adapter is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuChoice {
    /// The one of this number among all that are no software, the best first.
    Index(usize),
    /// The first that is software: to test, never to train.
    Software,
}

/// All GPUs that can be reached, the best first: Metal before all else, GPUs before parts of the
/// CPU, software last.
pub fn adapters() -> Vec<GpuAdapter> {
    all_adapters().iter().map(describe).collect()
}

pub(super) fn describe(adapter: &wgpu::Adapter) -> GpuAdapter {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let features = adapter.features();
    let (kind, offers) = (kind(info.device_type), GpuFeatures::of(adapter));
    let is_unified = matches!(kind, GpuAdapterKind::Integrated | GpuAdapterKind::Software);
    let tensor_bytes = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) as usize;
    let lacks = if !features.contains(Features::IMMEDIATES) || limits.max_immediate_size < 128 {
        Some("128 bytes of arguments for a kernel")
    } else if (limits.max_storage_buffers_per_shader_stage as usize) < MIN_TENSORS {
        Some("twelve tensors for a kernel")
    } else if (limits.max_compute_workgroup_storage_size as usize) < MIN_GROUP_BYTES {
        Some("32 KiB of memory for a group of threads")
    } else {
        None
    };
    GpuAdapter {
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        interface: if info.backend == Backend::Metal { "Metal" } else { "Vulkan" },
        kind,
        buffer_bytes: limits.max_buffer_size as usize / ALIGNMENT * ALIGNMENT,
        tensor_bytes: tensor_bytes / ALIGNMENT * ALIGNMENT,
        group_bytes: limits.max_compute_workgroup_storage_size as usize,
        shares_memory: is_unified && offers.mappable_buffers,
        features: offers,
        missing: lacks,
        name: info.name,
    }
}

/// The matrix units that our kernels multiply with: f32 if there are such, as Apple's, else f16. Of other sizes, NVIDIA's
/// 16 for one, nothing is made. Subgroups of Apple's GPUs are known to be 32 wide, which Metal does not tell.
pub(super) fn matrix_units(adapter: &wgpu::Adapter) -> Option<MatrixUnits> {
    let (info, features) = (adapter.get_info(), adapter.features());
    let width = match (info.subgroup_min_size, info.subgroup_max_size) {
        _ if info.backend == Backend::Metal => 32,
        (least, most) if least == most && (MIN_WIDTH..=MAX_WIDTH).contains(&least) => least,
        _ => return None,
    };
    if !features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return None;
    }
    let offered = adapter.cooperative_matrix_properties();
    let is_offered = |element| {
        let is_one = |units: &wgpu::CooperativeMatrixProperties| {
            (units.m_size, units.n_size, units.k_size) == (8, 8, 8)
                && (units.ab_type, units.cr_type) == (element, CooperativeScalarType::F32)
        };
        offered.iter().any(is_one)
    };
    let element = if is_offered(CooperativeScalarType::F32) {
        Dtype::F32
    } else if is_offered(CooperativeScalarType::F16) && features.contains(Features::SHADER_F16) {
        Dtype::F16
    } else {
        return None;
    };
    Some(MatrixUnits { element, width: width as usize })
}

fn kind(device_type: DeviceType) -> GpuAdapterKind {
    match device_type {
        DeviceType::DiscreteGpu => GpuAdapterKind::Discrete,
        DeviceType::IntegratedGpu => GpuAdapterKind::Integrated,
        DeviceType::Cpu => GpuAdapterKind::Software,
        DeviceType::VirtualGpu | DeviceType::Other => GpuAdapterKind::Other,
    }
}

/// Bytes of the largest buffer and tensor, where nobody knows. Taken: the least that Vulkan's drivers for
/// GPUs of today and Metal on Apple's chips offer.
pub(crate) const DEFAULT_BUFFER_BYTES: usize = 4 << 30;

/// Bytes of the largest buffer and of the largest tensor of the adapter that is meant, if it is there.
pub(crate) fn buffer_limits(choice: GpuChoice) -> Option<(usize, usize)> {
    find(choice).ok().map(|(_, found)| (found.buffer_bytes, found.tensor_bytes))
}

/// The adapter that is meant.
pub fn adapter(choice: GpuChoice) -> Result<GpuAdapter> {
    Ok(find(choice)?.1)
}

/// The same, with its place among all.
pub(super) fn find(choice: GpuChoice) -> Result<(usize, GpuAdapter)> {
    let all: Vec<_> = adapters().into_iter().enumerate().collect();
    let is_software =
        |(_, adapter): &&(usize, GpuAdapter)| adapter.kind == GpuAdapterKind::Software;
    let (mut software, mut others) =
        (all.iter().filter(is_software), all.iter().filter(|a| !is_software(a)));
    let found = match choice {
        GpuChoice::Index(index) => others.nth(index),
        GpuChoice::Software => software.next(),
    };
    let found = found.cloned().ok_or_else(|| {
        let names = all.iter().map(|(_, adapter)| adapter.name.as_str());
        ComputeError::GpuAdapter {
            asked: choice.to_string(),
            found: names.collect::<Vec<_>>().join(", "),
        }
    })?;
    match found.1.missing {
        None => Ok(found),
        Some(lacks) => Err(ComputeError::GpuLacks { name: found.1.name, lacks }),
    }
}

impl std::fmt::Display for GpuChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Index(index) => write!(f, "gpu:{index}"),
            Self::Software => f.write_str("gpu:software"),
        }
    }
}

/// All adapters, looked for once: a driver that is loaded stays so.
pub(super) fn all_adapters() -> &'static [wgpu::Adapter] {
    static FOUND: OnceLock<Vec<wgpu::Adapter>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let backends = Backends::METAL | Backends::VULKAN;
        // Without flags: checks of indirect calls would halve the largest buffers, and there are none.
        let (flags, plain) =
            (InstanceFlags::empty(), InstanceDescriptor::new_without_display_handle());
        let instance = Instance::new(InstanceDescriptor { backends, flags, ..plain });
        let mut found = block_on(instance.enumerate_adapters(backends));
        found.sort_by_key(|adapter| {
            let info = adapter.get_info();
            (info.backend != Backend::Metal, kind(info.device_type))
        });
        found
    })
}

/// What a future gives that never waits: those of wgpu do not, outside of browsers.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        std::thread::yield_now();
    }
}
