//! A device: one arena and the backend that computes in it. The meta device has the arena of
//! the device it stands for, and no memory behind it.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::arena::Arena;
use crate::cancel::CancelToken;
use crate::cpu::CpuBackend;
use crate::cpu::gemm::has_amx;
use crate::cuda::{self, CudaBackend, CudaStream, KernelCache};
use crate::dtype::{Real, with_real};
use crate::gpu::{self, GpuBackend};
use crate::ops::matrix_units_agree;
use crate::random::RandomSequence;
use crate::recording::MemoryRecording;
use crate::tensor::{Tensor, TensorStorage};
use crate::work::{KernelCall, WorkCounter, WorkStats};
use crate::{ComputeError, Dtype, Element, Result, Shape, Tag, Usage};

/// Which backend computes, with what its memory use depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The CPU.
    Cpu {
        /// Worker threads; results do not depend on it, workspaces do.
        threads: usize,
        /// Whether it has AMX.
        has_amx: bool,
    },
    /// A GPU of NVIDIA's. Workspaces follow from shapes, so one is like another.
    Cuda {
        /// Whether a computation gives the same bits every time, which is slower.
        is_deterministic: bool,
    },
    /// A GPU of any make, through Metal or Vulkan.
    Gpu {
        /// Bytes of its largest buffer: no tensor lies across a multiple of this.
        buffer_bytes: usize,
        /// Bytes of the largest tensor.
        tensor_bytes: usize,
    },
}

impl DeviceKind {
    /// This machine's CPU.
    pub fn cpu(threads: usize) -> Self {
        Self::Cpu { threads, has_amx: has_amx() }
    }

    /// The chosen GPU; a typical one if it is not there, which opening it reports.
    pub fn gpu(choice: gpu::GpuChoice) -> Self {
        let found = gpu::buffer_limits(choice);
        found.map_or(Self::gpu_with_buffer(None), |(buffer_bytes, tensor_bytes)| Self::Gpu {
            buffer_bytes,
            tensor_bytes,
        })
    }

    /// A GPU whose largest buffer has so many bytes, all of which a kernel may see: one of Apple's, by Metal;
    /// as most have if nobody knows.
    pub fn gpu_with_buffer(buffer_bytes: Option<usize>) -> Self {
        let bytes =
            buffer_bytes.unwrap_or(gpu::DEFAULT_BUFFER_BYTES) / gpu::ALIGNMENT * gpu::ALIGNMENT;
        Self::Gpu { buffer_bytes: bytes, tensor_bytes: bytes }
    }

    /// Whether a computation gives the same bits every time.
    pub fn is_deterministic(self) -> bool {
        match self {
            Self::Cpu { .. } | Self::Gpu { .. } => true,
            Self::Cuda { is_deterministic } => is_deterministic,
        }
    }

    /// Every tensor starts at a multiple of this: a cache line, which is also the widest vector; on a
    /// GPU, what its copies ask for.
    pub(crate) fn alignment(self) -> usize {
        match self {
            Self::Cpu { .. } => 64,
            Self::Cuda { .. } => cuda::ALIGNMENT,
            Self::Gpu { .. } => gpu::ALIGNMENT,
        }
    }

    /// Bytes of a buffer, of which the arena is made of several.
    fn buffer_bytes(self) -> usize {
        match self {
            Self::Cpu { .. } | Self::Cuda { .. } => usize::MAX,
            Self::Gpu { buffer_bytes, .. } => buffer_bytes,
        }
    }

    /// Says so if a tensor would be too large.
    fn check_bytes(self, asked: usize) -> Result<()> {
        match self {
            Self::Gpu { tensor_bytes: most, .. } if asked > most => {
                Err(ComputeError::GpuTensor { asked, most })
            }
            _ => Ok(()),
        }
    }
}

/// A handle on a device; clones are the same device.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    kind: DeviceKind,
    backend: Backend,
    state: Mutex<DeviceState>,
    counter: Mutex<WorkCounter>,
    /// Of offloaded weights.
    host_bytes: AtomicUsize,
    fill_stats: Mutex<FillStats>,
}

/// How data from files was copied to a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FillStats {
    /// Bytes that were written in place.
    pub in_place: u64,
    /// Bytes that went through a host buffer.
    pub staged: u64,
}

struct DeviceState {
    arena: Arena,
    /// The tag that callers set for new tensors, if they did.
    tag: Option<Tag>,
    /// Asked at each allocation, if the work at hand can be abandoned.
    cancel: Option<CancelToken>,
    recording: Option<MemoryRecording>,
}

/// What computes. Each op matches on this in one file, its `mod.rs`.
pub(crate) enum Backend {
    /// Nothing: shapes, bytes and FLOPs only.
    Meta,
    Cpu(CpuBackend),
    Cuda(Box<CudaBackend>),
    Gpu(Box<GpuBackend>),
}

impl Device {
    /// The CPU, with an arena of `limit_bytes`.
    pub fn cpu(threads: usize, limit_bytes: usize) -> Result<Self> {
        let backend = Backend::Cpu(CpuBackend::new(threads, limit_bytes, has_amx())?);
        Ok(Self::with(DeviceKind::cpu(threads), backend, limit_bytes))
    }

    /// The NVIDIA GPU of this number, from 0, with an arena of up to `limit_bytes`, which is given
    /// memory as it grows. Kernels are compiled when they are first used, unless the cache has them.
    pub fn cuda(
        index: usize,
        limit_bytes: usize,
        is_deterministic: bool,
        cache: Option<Box<dyn KernelCache>>,
    ) -> Result<Self> {
        let cuda = CudaBackend::open(index, limit_bytes, is_deterministic, cache)?;
        let limit_bytes = limit_bytes.min(cuda.bytes());
        let backend = Backend::Cuda(Box::new(cuda));
        Ok(Self::with(DeviceKind::Cuda { is_deterministic }, backend, limit_bytes))
    }

    /// The GPU that is meant, with an arena of up to `limit_bytes`, which is given memory a large buffer
    /// at a time. Kernels are compiled when they are first used in this process.
    pub fn gpu(choice: gpu::GpuChoice, limit_bytes: usize) -> Result<Self> {
        let open = |limit_bytes| -> Result<Self> {
            let (gpu, kind) = GpuBackend::open(choice)?;
            Ok(Self::with(kind, Backend::Gpu(Box::new(gpu)), limit_bytes))
        };
        let device = open(limit_bytes)?;
        if let Backend::Gpu(gpu) = device.backend() {
            gpu.try_matrix_units(|| {
                open(1 << 20).and_then(|trial| matrix_units_agree(&trial)).unwrap_or(false)
            });
        }
        Ok(device)
    }

    /// A GPU whose adapter nobody else has open, as if that offered something else.
    #[cfg(test)]
    pub(crate) fn gpu_alone(
        choice: gpu::GpuChoice,
        limit_bytes: usize,
        change: impl FnOnce(&mut gpu::GpuAdapter),
    ) -> Self {
        let (gpu, kind) = GpuBackend::alone(choice, change);
        Self::with(kind, Backend::Gpu(Box::new(gpu)), limit_bytes)
    }

    /// The CPU without AMX.
    #[cfg(test)]
    pub(crate) fn cpu_without_amx(threads: usize, limit_bytes: usize) -> Self {
        let backend = Backend::Cpu(CpuBackend::new(threads, limit_bytes, false).unwrap());
        Self::with(DeviceKind::Cpu { threads, has_amx: false }, backend, limit_bytes)
    }

    /// A meta device: computes shapes, bytes and FLOPs exactly as one of `kind` would, and no data.
    pub fn meta(kind: DeviceKind, limit_bytes: usize) -> Self {
        Self::with(kind, Backend::Meta, limit_bytes)
    }

    fn with(kind: DeviceKind, backend: Backend, limit_bytes: usize) -> Self {
        let arena = Arena::new(limit_bytes, kind.alignment()).in_buffers(kind.buffer_bytes());
        Self(Arc::new(DeviceInner {
            kind,
            backend,
            state: Mutex::new(DeviceState { arena, tag: None, cancel: None, recording: None }),
            counter: Mutex::default(),
            host_bytes: AtomicUsize::new(0),
            fill_stats: Mutex::default(),
        }))
    }

    /// What it is, or stands for.
    pub fn kind(&self) -> DeviceKind {
        self.0.kind
    }

    /// Whether it computes shapes only.
    pub fn is_meta(&self) -> bool {
        matches!(self.0.backend, Backend::Meta)
    }

    /// The arena's bytes, now and at their peak.
    pub fn usage(&self) -> Usage {
        self.state().arena.usage()
    }

    /// The most bytes that the arena may take.
    pub fn limit(&self) -> usize {
        self.state().arena.limit()
    }

    /// Bytes of offloaded weights on the host.
    pub fn host_bytes(&self) -> usize {
        self.0.host_bytes.load(Ordering::Relaxed)
    }

    /// Counts some of them, until they are gone.
    pub(crate) fn add_host_bytes(&self, bytes: usize) {
        self.0.host_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn sub_host_bytes(&self, bytes: usize) {
        self.0.host_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Lets the arena take up to this much from now on, never more than it was made with. What is in
    /// use stays, also if that is more.
    pub fn set_limit(&self, bytes: usize) {
        self.state().arena.set_limit(bytes);
    }

    /// Keeps the first `bytes` of the arena for what lives as long as the run. On a Metal or Vulkan GPU all
    /// else then lies in buffers of its own, which [`Device::trim`] can drop; other devices give memory back in
    /// smaller pieces, and lay out their tensors as before.
    ///
    /// # Panics
    /// If a tensor is alive.
    pub fn set_resident(&self, bytes: usize) {
        let mut state = self.state();
        if let DeviceKind::Gpu { .. } = self.kind() {
            state.arena.set_resident(bytes);
        }
        if let Backend::Gpu(gpu) = self.backend() {
            gpu.set_layout(state.arena.buffers());
        }
    }

    /// Where the last live tensor ends.
    pub fn top(&self) -> usize {
        self.state().arena.top()
    }

    /// Bytes of GPU memory that the arena was given, as they come and go. Always none on the CPU, whose pages are
    /// the process's own.
    pub fn committed_bytes(&self) -> Arc<AtomicU64> {
        match self.backend() {
            Backend::Meta | Backend::Cpu(_) => Arc::default(),
            Backend::Cuda(cuda) => Arc::clone(cuda.committed()),
            Backend::Gpu(gpu) => Arc::clone(gpu.committed()),
        }
    }

    /// Those of them that a reading of the process does not have.
    pub fn bytes_beside_process(&self) -> Arc<AtomicU64> {
        match self.backend() {
            Backend::Cuda(cuda) => Arc::clone(cuda.beside_process()),
            Backend::Meta | Backend::Cpu(_) | Backend::Gpu(_) => self.committed_bytes(),
        }
    }

    /// Says whether an NVIDIA GPU computes in main memory, so that [`Device::trim`] gives back what it took of it. Where
    /// it does, [`crate::host_memory_trial`] decides whether weights are read straight into the arena. Does nothing on
    /// other devices.
    pub fn set_shared_memory(&self, is_shared: bool) {
        if let Backend::Cuda(cuda) = self.backend() {
            cuda.set_shared_memory(is_shared);
        }
    }

    /// Lets the arena of an NVIDIA GPU grow in host memory, whatever was measured, or no longer; false where the driver
    /// has none.
    #[cfg(test)]
    pub(crate) fn take_host_memory(&self, is_host: bool) -> bool {
        let Backend::Cuda(cuda) = self.backend() else { return false };
        cuda.take_host_memory(is_host)
    }

    /// Gives memory that no live tensor is in back to the system, which gives it again when it is needed. Between
    /// steps that is all but what lives as long as the run. On the CPU that is what lies above the last live
    /// tensor; on a Metal or Vulkan GPU, every buffer without one. An NVIDIA GPU gives back as the CPU does if it
    /// shares main memory, else none of its own.
    #[allow(unsafe_code)]
    pub fn trim(&self) {
        let state = self.state();
        match &self.0.backend {
            Backend::Meta => {}
            Backend::Gpu(gpu) => gpu.trim(&state.arena),
            Backend::Cuda(cuda) => cuda.trim(state.arena.top()),
            // SAFETY: no tensor lies above the top, and none can be made while the arena is locked.
            Backend::Cpu(cpu) => unsafe { cpu.memory().release_from(state.arena.top()) },
        }
    }

    /// How often memory was asked for so far, in vain or not.
    pub fn n_allocations(&self) -> u64 {
        self.state().arena.n_requests()
    }

    /// Lets the `nth` allocation from now, the next being the first, fail once as if the arena were
    /// full. For tests and fault injection.
    pub fn fail_allocation(&self, nth: u64) {
        self.state().arena.fail_request(nth);
    }

    /// How many command buffers were submitted to a Metal or Vulkan GPU so far.
    pub fn n_command_buffers(&self) -> u32 {
        if let Backend::Gpu(gpu) = self.backend() { gpu.n_command_buffers() } else { 0 }
    }

    /// Injects a fault into the `nth` command buffer of such a GPU, the next being the first. Does nothing on
    /// other devices. For tests and fault injection.
    pub fn fail_command_buffer(&self, nth: u32, fault: gpu::GpuFault) {
        if let Backend::Gpu(gpu) = self.backend() {
            gpu.inject_fault(nth, fault);
        }
    }

    /// Counts peaks from here.
    pub fn reset_peak(&self) {
        self.state().arena.reset_peak();
    }

    /// Kernels that were launched on a GPU so far, calls of its libraries included; none on a CPU.
    pub fn launches(&self) -> Option<u64> {
        match self.backend() {
            Backend::Meta | Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.launches()),
            Backend::Gpu(gpu) => Some(gpu.launches()),
        }
    }

    /// The same since an earlier count.
    pub fn launches_since(&self, before: Option<u64>) -> Option<u64> {
        self.launches().zip(before).map(|(after, before)| after - before)
    }

    /// Seconds that a GPU's work waited for copies of offloaded weights so far; none where nobody can tell.
    pub fn copy_wait_secs(&self) -> Option<f64> {
        match self.backend() {
            Backend::Meta | Backend::Cpu(_) | Backend::Gpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda.copy_wait_secs()),
        }
    }

    /// The same since an earlier answer; none if it did not wait.
    pub fn copy_wait_secs_since(&self, before: Option<f64>) -> Option<f64> {
        let since = self.copy_wait_secs().zip(before).map(|(after, before)| after - before);
        since.filter(|secs| *secs > 0.0)
    }

    /// Arithmetic so far.
    pub fn work(&self) -> WorkStats {
        let mut tally = self.counter();
        if tally.is_timed() {
            self.finish();
        }
        tally.work()
    }

    /// Counts the arithmetic since `before` so many times more: of equal parts a dry run does one.
    pub fn repeat_work(&self, before: &WorkStats, times: u64) {
        self.counter().repeat(before, times);
    }

    /// Whether calls are timed from here on. Each lasts until the next call, or until the work is asked
    /// for, so what happens between calls is a part of them.
    pub fn time_calls(&self, is_timed: bool) {
        self.counter().set_timed(is_timed);
    }

    /// Records every change of memory from here until [`Device::stop_recording`].
    pub fn start_recording(&self) {
        let mut state = self.state();
        state.recording = Some(MemoryRecording::begin(state.arena.usage().by_tag));
    }

    /// Names what follows, if memory is recorded.
    pub fn mark(&self, name: &'static str) {
        if let Some(recording) = &mut self.state().recording {
            recording.mark(name);
        }
    }

    /// Ends the recording and gives it back; an empty one if there was none.
    pub fn stop_recording(&self) -> MemoryRecording {
        self.state().recording.take().unwrap_or_default()
    }

    /// Tensors made by `make` count under `tag`. Without one, what is uploaded counts as data and
    /// all else as activations.
    pub fn with_tag<T>(&self, tag: Tag, make: impl FnOnce() -> T) -> T {
        let before = self.state().tag.replace(tag);
        let made = make();
        self.state().tag = before;
        made
    }

    /// Runs `work`, of which nothing stays if it fails: once the token is cancelled, the next allocation is
    /// [`ComputeError::Cancelled`].
    pub fn cancellable<T>(&self, token: &CancelToken, work: impl FnOnce() -> T) -> T {
        let before = self.state().cancel.replace(token.clone());
        let done = work();
        self.state().cancel = before;
        done
    }

    /// Fails if somebody asked to stop, as allocations do: for work that waits and takes no memory.
    pub fn check_cancelled(&self) -> Result<()> {
        match &self.state().cancel {
            Some(token) if token.is_cancelled() => Err(ComputeError::Cancelled),
            _ => Ok(()),
        }
    }

    /// The work at hand has changed what stays, so it is finished whoever asks to stop.
    pub fn ignore_cancel(&self) {
        self.state().cancel = None;
    }

    /// An uninitialised tensor.
    pub fn alloc(&self, shape: impl Into<Shape>, dtype: Dtype) -> Result<Tensor> {
        self.alloc_for(Tag::Activations, shape.into(), dtype)
    }

    /// Counts under `untagged` if the caller did not say otherwise.
    fn alloc_for(&self, untagged: Tag, shape: Shape, dtype: Dtype) -> Result<Tensor> {
        let bytes = shape.elements() * dtype.bytes();
        self.kind().check_bytes(bytes)?;
        let offset = if bytes == 0 { 0 } else { self.alloc_bytes(bytes, untagged)? };
        let mut tensor = Tensor::new(TensorStorage::new(self.clone(), offset, bytes), shape, dtype);
        if cfg!(test) {
            tensor.fill_nan();
        }
        Ok(tensor)
    }

    /// A tensor that has a shape and no memory, for an op that will not run.
    pub(crate) fn meta_tensor(&self, shape: Shape, dtype: Dtype) -> Tensor {
        Tensor::new(TensorStorage::new(self.clone(), 0, 0), shape, dtype)
    }

    /// A tensor of zeros.
    pub fn zeros(&self, shape: impl Into<Shape>, dtype: Dtype) -> Result<Tensor> {
        let mut tensor = self.alloc(shape, dtype)?;
        self.count(&KernelCall::new("clear", 0, &[&tensor]));
        tensor.fill_zeros();
        Ok(tensor)
    }

    /// A tensor of these values.
    pub fn upload<T: Element>(&self, shape: impl Into<Shape>, values: &[T]) -> Result<Tensor> {
        let shape = shape.into();
        if shape.elements() != values.len() {
            return Err(ComputeError::Length { shape, got: values.len() });
        }
        let mut tensor = self.alloc_for(Tag::Data, shape, T::DTYPE)?;
        self.count(&KernelCall::new("upload", 0, &[&tensor]));
        tensor.write(values);
        Ok(tensor)
    }

    /// A tensor of values that are only made where there is a place for them: not on the meta device, which would make
    /// the same tables again in every dry run of a plan.
    pub fn upload_with<T: Element>(
        &self,
        shape: impl Into<Shape>,
        make: impl FnOnce() -> Vec<T>,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let values = if self.is_meta() { vec![T::default(); shape.elements()] } else { make() };
        self.upload(shape, &values)
    }

    /// A tensor of these values in another real dtype.
    ///
    /// # Panics
    /// For a dtype of integers.
    pub fn upload_as(
        &self,
        shape: impl Into<Shape>,
        values: &[f32],
        dtype: Dtype,
    ) -> Result<Tensor> {
        self.upload_parts(shape, &[values], dtype)
    }

    /// The same of values in several slices, one after the other.
    ///
    /// # Panics
    /// For a dtype of integers.
    pub fn upload_parts(
        &self,
        shape: impl Into<Shape>,
        parts: &[&[f32]],
        dtype: Dtype,
    ) -> Result<Tensor> {
        let shape = shape.into();
        let got = parts.iter().map(|part| part.len()).sum();
        if shape.elements() != got {
            return Err(ComputeError::Length { shape, got });
        }
        let mut tensor = self.alloc_for(Tag::Data, shape, dtype)?;
        self.count(&KernelCall::new("upload", 0, &[&tensor]));
        let numbers = parts.iter().copied().flatten();
        with_real!(dtype, T => match self.backend() {
            Backend::Meta => {}
            Backend::Cpu(_) => {
                for (to, from) in tensor.data_mut::<T>().iter_mut().zip(numbers) {
                    *to = T::from_f32(*from);
                }
            }
            Backend::Cuda(_) | Backend::Gpu(_) => {
                tensor.write(&numbers.map(|from| T::from_f32(*from)).collect::<Vec<_>>());
            }
        });
        Ok(tensor)
    }

    /// A tensor of normal random numbers with mean zero, from a sequence.
    pub fn normal(
        &self,
        shape: impl Into<Shape>,
        dtype: Dtype,
        std: f32,
        sequence: RandomSequence,
    ) -> Result<Tensor> {
        let mut tensor = self.alloc(shape, dtype)?;
        self.count(&KernelCall::new("normal", 0, &[&tensor]));
        match self.backend() {
            Backend::Meta => {}
            Backend::Cpu(cpu) => cpu.fill(&mut tensor, |index| std * sequence.normal(index)),
            Backend::Cuda(cuda) => cuda.normal(&mut tensor, std, sequence),
            Backend::Gpu(gpu) => gpu.normal(&mut tensor, std, sequence),
        }
        Ok(tensor)
    }

    /// Waits for all that was asked of the device, and says whether it went well. Only a GPU has
    /// anything to wait for.
    pub fn synchronise(&self) -> Result<()> {
        match self.backend() {
            Backend::Meta | Backend::Cpu(_) => Ok(()),
            Backend::Cuda(cuda) => cuda.synchronise(),
            Backend::Gpu(gpu) => gpu.synchronise(),
        }
    }

    /// Its stream, where it is an NVIDIA GPU.
    pub fn cuda_stream(&self) -> Option<CudaStream<'_>> {
        match self.backend() {
            Backend::Cuda(cuda) => Some(CudaStream(cuda)),
            Backend::Meta | Backend::Cpu(_) | Backend::Gpu(_) => None,
        }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.0.backend
    }

    pub(crate) fn count(&self, call: &KernelCall) {
        let mut tally = self.counter();
        if tally.is_timed() {
            self.finish();
        }
        tally.add(call);
        if let Backend::Gpu(gpu) = self.backend() {
            gpu.set_op_cost(call.flops, call.bytes);
        }
    }

    /// Notes a copy from the host for the plan, and whether earlier copies are waited for. Only on a meta
    /// device: in a run the list would grow without end.
    pub(crate) fn note_copy(&self, copied: usize, is_waited_for: bool) {
        if self.is_meta() {
            self.counter().note_copy(copied as u64, is_waited_for);
        }
    }

    /// How data was copied here by [`crate::fill_all`] so far.
    pub fn fill_stats(&self) -> FillStats {
        *self.0.fill_stats.lock().expect("nothing panics while bytes are counted")
    }

    pub(crate) fn note_fill(&self, bytes: usize, is_staged: bool) {
        let mut filled = self.0.fill_stats.lock().expect("nothing panics while bytes are counted");
        let FillStats { in_place, staged } = &mut *filled;
        *(if is_staged { staged } else { in_place }) += bytes as u64;
    }

    /// Waits for what is timed. What went wrong is told to whoever waits for a result.
    fn finish(&self) {
        _ = self.synchronise();
    }

    fn counter(&self) -> MutexGuard<'_, WorkCounter> {
        self.0.counter.lock().expect("nothing panics while work is counted")
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Changes of memory belong to `op` from here on, if they are recorded.
    pub(crate) fn enter_op(&self, op: &'static str) {
        if let Some(recording) = &mut self.state().recording {
            recording.enter(op);
        }
    }

    pub(crate) fn free(&self, offset: usize) {
        let mut state = self.state();
        state.arena.free(offset);
        state.note();
    }

    pub(crate) fn retag(&self, offset: usize, tag: Tag) {
        let mut state = self.state();
        state.arena.retag(offset, tag);
        state.note();
    }

    fn alloc_bytes(&self, bytes: usize, untagged: Tag) -> Result<usize> {
        let mut state = self.state();
        if state.cancel.as_ref().is_some_and(CancelToken::is_cancelled) {
            return Err(ComputeError::Cancelled);
        }
        let tag = state.tag.unwrap_or(untagged);
        let offset = state.arena.alloc(bytes, tag)?;
        let block = offset..offset + bytes;
        let committed = match self.backend() {
            Backend::Meta | Backend::Cpu(_) => Ok(()),
            Backend::Cuda(cuda) => cuda.commit(block.end),
            Backend::Gpu(gpu) => gpu.commit(&state.arena, block),
        };
        if let Err(error) = committed {
            state.arena.free(offset);
            let Usage { in_use, .. } = state.arena.usage();
            // Another program has what the arena was promised.
            return Err(match error {
                ComputeError::Cuda { code: cuda::OUT_OF_MEMORY, .. }
                | ComputeError::GpuMemory { .. } => {
                    let (limit, largest_free) = (in_use, 0);
                    ComputeError::OutOfMemory { asked: bytes, in_use, limit, largest_free, tag }
                }
                other => other,
            });
        }
        state.note();
        Ok(offset)
    }

    fn state(&self) -> MutexGuard<'_, DeviceState> {
        self.0.state.lock().expect("nothing panics while the arena is locked")
    }
}

impl DeviceState {
    /// After a change.
    fn note(&mut self) {
        if let Some(recording) = &mut self.recording {
            recording.push_snapshot(self.arena.usage().by_tag);
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", if self.is_meta() { "meta of " } else { "" }, self.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::TestRng;

    /// A random program of tensors made, shared, sliced and dropped.
    fn churn(device: &Device, seed: u64) -> Vec<Usage> {
        let mut random = TestRng::new(seed);
        let mut held = Vec::new();
        let mut usages = Vec::new();
        for _ in 0..400 {
            match random.below(6) {
                0..3 => {
                    let shape = [1 + random.below(40), 1 + random.below(40)];
                    let dtype = [Dtype::F32, Dtype::Bf16, Dtype::U8][random.below(3)];
                    let tag = Tag::ALL[random.below(7)];
                    // The limit is low enough for some to fail, on both devices alike.
                    held.extend(device.with_tag(tag, || device.alloc(shape, dtype)).ok());
                }
                3 if !held.is_empty() => {
                    let tensor: &Tensor = &held[random.below(held.len())];
                    let half = tensor.shape().sizes()[0] / 2;
                    held.push(tensor.narrow(0..half));
                }
                _ if !held.is_empty() => drop(held.swap_remove(random.below(held.len()))),
                _ => {}
            }
            usages.push(device.usage());
        }
        usages
    }

    #[test]
    fn the_meta_device_takes_the_same_bytes_at_every_moment() {
        let limit = 100_000;
        for seed in 0..40 {
            let real = Device::cpu(1, limit).unwrap();
            let meta = Device::meta(real.kind(), limit);
            assert_eq!(churn(&real, seed), churn(&meta, seed));
            assert!(real.usage().peak > limit / 2 && real.usage().in_use == 0);
        }
    }

    #[test]
    fn what_is_trimmed_can_be_taken_again_and_the_rest_stays() {
        let device = Device::cpu(1, 8 << 20).unwrap();
        let stays = device.upload([4], &[1u32, 2, 3, 4]).unwrap();
        let numbers = vec![7u8; 4 << 20];
        drop(device.upload([4 << 20], &numbers).unwrap());
        device.trim();
        assert_eq!(stays.to_vec::<u32>(), [1, 2, 3, 4]);
        // Zeros are the system's: tests' own fill is of other numbers.
        let Backend::Cpu(cpu) = device.backend() else { unreachable!("it was made so") };
        // SAFETY: nothing was taken since.
        #[allow(unsafe_code)]
        let left = unsafe { cpu.memory().slice::<u8>(1 << 20, 1 << 20) };
        assert_eq!(left.iter().any(|byte| *byte != 0), !cfg!(target_os = "linux"));
        assert_eq!(device.upload([4 << 20], &numbers).unwrap().to_vec::<u8>(), numbers);
    }

    #[test]
    fn values_are_uploaded_and_read_back() {
        let device = Device::cpu(1, 1000).unwrap();
        let tensor = device.upload([2, 2], &[1u32, 2, 3, 4]).unwrap();
        assert_eq!(tensor.narrow(1..2).to_vec::<u32>(), [3, 4]);
        let error = device.upload([3], &[1.0f32]).unwrap_err().to_string();
        assert_eq!(error, "1 values do not fill a tensor of shape [3], which has 3");
        let same = |stream| {
            device
                .normal([8], Dtype::F32, 2.0, RandomSequence::new(5, stream))
                .unwrap()
                .to_f32_vec()
        };
        assert_eq!(same(1), same(1));
        assert_ne!(same(1), same(2));
    }
}
