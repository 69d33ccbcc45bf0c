//! The CUDA backend: its memory, its one stream, its kernels, and what its ops share.
//!
//! All work goes to one stream in the order in which ops are called, and nothing waits for it but
//! whoever reads a number. So memory that is given back may be taken again at once, as on the
//! CPU. A kernel that cannot be started leaves its error here, and the next tensor that is
//! made, or the next number that is read, returns it: a GPU reports what went wrong late anyway,
//! and ops need no second way to fail.
//!
//! Copies of what is large go to a second stream beside it, and each stream waits for the other where it
//! has to (`bounce.rs`).
//!
//! Where the GPU shares main memory, the arena may be host memory, which the CPU writes to by itself
//! (`host_memory.rs`).
//!
//! Left out on purpose: a second GPU in one process, kernels on several streams.

mod blas;
mod bounce;
pub(crate) mod columns;
mod copy_waits;
pub(crate) mod cudnn;
mod driver;
mod host_memory;
mod kernels;
mod library;
mod memory;
mod nvrtc;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

pub(crate) use blas::{Epilogue, Gemm, GemmOperands, WORKSPACE};
use bounce::BounceBuffers;
use copy_waits::CopyWaits;
use cudnn::{Cudnn, CudnnPlan};
use driver::{CudaContext, CudaEvent, PieceLocation, StreamKind};
pub(crate) use driver::{OUT_OF_MEMORY, PinnedMemory};
pub use host_memory::{HostMemoryTrial, PieceSpeeds, TrialSpeeds, host_memory_trial};
use kernels::CudaKernels;
pub use kernels::KernelCache;
pub(crate) use kernels::{CudaSource, CudaVariant};
use memory::{CudaMemory, HostPieces};
pub use stream::CudaStream;

use crate::random::RandomSequence;
use crate::{ComputeError, Dtype, Result, Tensor};

/// Every tensor starts at a multiple of this: what the tensor cores' copies ask for at most.
pub(crate) const ALIGNMENT: usize = 256;

/// A GPU at work.
pub(crate) struct CudaBackend {
    index: usize,
    kernels: CudaKernels,
    blas: blas::Blas,
    /// None where the library is missing. Under a lock, since it is one at a time.
    cudnn: OnceLock<Option<Mutex<CudnnPlans>>>,
    memory: CudaMemory,
    bounce: BounceBuffers,
    /// Where each lies, and its bytes.
    tables: Mutex<HashMap<&'static str, (u64, usize)>>,
    /// Kernels that were started, and libraries that were asked.
    launches: AtomicU64,
    copy_waits: Mutex<CopyWaits>,
    fault: Mutex<Option<ComputeError>>,
    driver: Arc<CudaContext>,
}

impl CudaBackend {
    /// The GPU of this number, with addresses for an arena of `limit_bytes`.
    pub fn open(
        index: usize,
        limit_bytes: usize,
        is_deterministic: bool,
        cache: Option<Box<dyn KernelCache>>,
    ) -> Result<Self> {
        let driver = Arc::new(CudaContext::open(index)?);
        let kernels = CudaKernels::new(driver.props.capability, cache)?;
        let blas = blas::Blas::open(!is_deterministic)?;
        let memory = CudaMemory::reserve(&driver, limit_bytes)?;
        let (tables, fault, bounce) =
            (Mutex::default(), Mutex::default(), BounceBuffers::default());
        let cudnn = OnceLock::new();
        let (launches, copy_waits) = (AtomicU64::new(0), Mutex::default());
        Ok(Self {
            index,
            kernels,
            blas,
            cudnn,
            memory,
            bounce,
            tables,
            launches,
            copy_waits,
            fault,
            driver,
        })
    }

    /// Where the arena starts.
    pub fn start(&self) -> u64 {
        self.memory.start()
    }

    /// The most that the arena could be given.
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Makes sure that the arena has memory up to `extent`, and that nothing went wrong before.
    pub fn commit(&self, extent: usize) -> Result<()> {
        self.check()?;
        self.memory.commit(&self.driver, extent)
    }

    /// What went wrong since the backend was made, if anything did.
    pub fn check(&self) -> Result<()> {
        let fault = self.fault.lock().expect("nothing panics while a fault is noted");
        fault.as_ref().map_or(Ok(()), |fault| Err(fault.again()))
    }

    /// Waits for all work, and says whether it went well.
    pub fn synchronise(&self) -> Result<()> {
        self.note(self.driver.synchronise());
        self.check()
    }

    /// Starts a kernel. `arguments` are what the kernel declares, in its order.
    pub fn launch(
        &self,
        source: &'static CudaSource,
        function: &'static str,
        variant: CudaVariant,
        grid: LaunchConfig,
        arguments: &[CudaArg],
    ) {
        if grid.blocks.contains(&0) {
            return;
        }
        self.count_launch();
        let started = self.kernels.get(&self.driver, source, function, variant).and_then(|found| {
            let mut values: Vec<u64> = arguments.iter().map(|argument| argument.0).collect();
            self.driver.launch(found, grid, &mut values)
        });
        self.note(started);
    }

    /// Whether a matmul should be tried before its output holds anything that must stay.
    pub fn wants_trial(&self, gemm: &Gemm) -> bool {
        self.blas.wants_trial(gemm)
    }

    /// Multiplies; see [`Gemm`].
    pub fn gemm(&self, gemm: &Gemm, operands: GemmOperands) {
        self.count_launch();
        self.note(self.driver.bind());
        self.note(self.blas.multiply(&self.driver, gemm, operands));
    }

    /// Lets `run` run a plan of cuDNN's, which `make` makes the first time it is asked for under a
    /// name with these sizes. False, and nothing is done, where the library is missing or has none
    /// that takes at most `most_workspace` bytes.
    pub fn run_cudnn(
        &self,
        key: CudnnPlanKey,
        most_workspace: usize,
        make: impl FnOnce(&Cudnn) -> Result<CudnnPlan>,
        run: impl FnOnce(&Cudnn, &CudnnPlan) -> Result<()>,
    ) -> bool {
        self.note(self.driver.bind());
        let library = self.cudnn.get_or_init(|| {
            let cudnn = Cudnn::open(self.driver.stream()).ok()?;
            Some(Mutex::new(CudnnPlans { plans: HashMap::new(), cudnn }))
        });
        let Some(library) = library else { return false };
        let mut library = library.lock().expect("nothing panics while a plan is made");
        let CudnnPlans { plans, cudnn } = &mut *library;
        let made = plans.entry(key).or_insert_with(|| make(cudnn).ok());
        let Some(plan) = made.as_ref().filter(|plan| plan.workspace <= most_workspace) else {
            return false;
        };
        self.count_launch();
        self.note(run(cudnn, plan));
        true
    }

    fn count_launch(&self) {
        self.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Kernels that were started and libraries that were asked so far.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Copies from the host to a tensor.
    pub fn write(&self, to: u64, bytes: &[u8]) {
        let mut rest = bytes;
        for (to, n) in self.memory.cut(to, bytes.len()).into_iter().filter(|(_, n)| *n > 0) {
            let (part, after) = rest.split_at(n);
            self.note(self.driver.write(to, part));
            rest = after;
        }
    }

    /// Lets `fill` write to tensors by [`CudaBackend::upload`], from several threads. Copies wait for all work that
    /// was asked for before, and all work that is asked for later waits for them.
    pub fn with_uploads<T>(&self, fill: impl FnOnce() -> T) -> T {
        self.note(self.fence(StreamKind::Compute, StreamKind::Copy));
        let filled = fill();
        self.wait_for_copies();
        filled
    }

    /// Lets one stream wait for all that was asked of the other.
    fn fence(&self, from: StreamKind, holds: StreamKind) -> Result<()> {
        let reached = CudaEvent::new(&*self.driver)?;
        reached.record(from)?;
        reached.make_stream_wait(holds)
    }

    /// Lets `write` write bytes that go to a tensor's place, within [`CudaBackend::with_uploads`].
    pub fn upload<E>(
        &self,
        to: u64,
        bytes: usize,
        write: &mut dyn FnMut(&mut [u8]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        if let Some((written, sent)) = self.bounce.copy_through(&self.driver, to, bytes, write) {
            self.note(sent);
            return written;
        }
        let mut copy = vec![0; bytes];
        write(&mut copy)?;
        self.write(to, &copy);
        Ok(())
    }

    /// Host memory that the GPU copies from by itself.
    pub fn pin(&self, bytes: usize) -> Result<PinnedMemory> {
        PinnedMemory::new(&self.driver, bytes).map_err(|error| match error {
            ComputeError::Cuda { name, .. } => ComputeError::Pin { bytes, name },
            error => error,
        })
    }

    /// For a slot that is copied to while the GPU computes elsewhere. Work that was launched before may still
    /// use it.
    pub fn copy_events(&self) -> Result<CopyEvents> {
        let event = || CudaEvent::new(Arc::clone(&self.driver));
        let gate = CopyEvents { released: event()?, copied: event()? };
        gate.released.record(StreamKind::Compute)?;
        Ok(gate)
    }

    /// Copies to a slot as soon as all work that used it before its release is done.
    pub fn copy_async(&self, events: &CopyEvents, from: &PinnedMemory, to: u64, bytes: usize) {
        let held = events.released.make_stream_wait(StreamKind::Copy);
        let sent =
            held.and_then(|()| if bytes > 0 { from.copy_to_device(to, bytes) } else { Ok(()) });
        self.note(sent.and_then(|()| events.copied.record(StreamKind::Copy)));
    }

    /// All work from now on waits for the copy to the slot.
    pub fn wait_for_copy(&self, events: &CopyEvents) {
        let mut waits = self.copy_waits.lock().expect("nothing panics while a wait is timed");
        self.note(waits.time(&self.driver, || events.copied.make_stream_wait(StreamKind::Compute)));
    }

    /// Seconds that work waited for copies so far, of those waits that are over.
    pub fn copy_wait_secs(&self) -> f64 {
        let mut waits = self.copy_waits.lock().expect("nothing panics while a wait is timed");
        self.note(waits.collect());
        waits.total_secs()
    }

    /// Lets the host wait for the copy to the slot.
    pub fn sync_copy(&self, events: &CopyEvents) {
        self.note(events.copied.synchronise());
    }

    /// No work from now on uses the slot.
    pub fn release(&self, events: &CopyEvents) {
        self.note(events.released.record(StreamKind::Compute));
    }

    /// All work from now on waits for all copies.
    pub fn wait_for_copies(&self) {
        self.note(self.fence(StreamKind::Copy, StreamKind::Compute));
    }

    /// Gives back host memory that is only needed for copies; and where the GPU shares main memory, the arena's
    /// own above `top`, where no tensor lies.
    pub fn trim(&self, top: usize) {
        self.bounce.release();
        if self.memory.is_shared() {
            let released = self
                .driver
                .synchronise()
                .and_then(|()| self.memory.release_from(&self.driver, top));
            self.note(released);
        }
    }

    /// Says whether main memory is what the arena takes. Whether it then takes host memory is measured once for all
    /// devices of this process.
    pub fn set_shared_memory(&self, is_shared: bool) {
        let host = if is_shared { host_memory_trial(self.index).pieces() } else { None };
        self.set_pieces(is_shared, host);
    }

    /// Makes further pieces of host memory, whatever was measured, or no longer; false where the driver has none.
    #[cfg(test)]
    pub fn take_host_memory(&self, is_host: bool) -> bool {
        let host = host_memory_trial(self.index).host;
        self.set_pieces(true, host.filter(|_| is_host));
        host.is_some()
    }

    /// What the arena's further pieces are made of.
    fn set_pieces(&self, is_shared: bool, host: Option<HostPieces>) {
        self.memory.set_shared(is_shared);
        self.memory.set_host(host);
    }

    /// Where the CPU may write some bytes of the arena, when all work that was asked for is done; none if it does not
    /// reach all of them.
    pub fn wait_for_host_access(&self, address: u64, bytes: usize) -> Option<*mut u8> {
        if !self.memory.is_host(address, bytes) {
            return None;
        }
        self.note(self.driver.synchronise().and_then(|()| self.driver.synchronise_copies()));
        Some(std::ptr::with_exposed_provenance_mut(address as usize))
    }

    /// Bytes that the arena was given, as they come and go.
    pub fn committed(&self) -> &Arc<AtomicU64> {
        self.memory.committed()
    }

    /// Those of them that a reading of the process does not have.
    pub fn beside_process(&self) -> &Arc<AtomicU64> {
        self.memory.beside_process()
    }

    /// Copies a tensor to the host, when all work before is done.
    pub fn read(&self, from: u64, bytes: &mut [u8]) -> Result<()> {
        let mut rest = bytes;
        for (from, n) in self.memory.cut(from, rest.len()).into_iter().filter(|(_, n)| *n > 0) {
            let (part, after) = rest.split_at_mut(n);
            self.note(self.driver.read(from, part));
            rest = after;
        }
        self.check()
    }

    pub fn copy(&self, from: u64, to: u64, bytes: usize) {
        for (part, n) in self.memory.cut(from, bytes) {
            let to = to + (part - from);
            for (at, n) in self.memory.cut(to, n).into_iter().filter(|(_, n)| *n > 0) {
                self.note(self.driver.copy(part + (at - to), at, n));
            }
        }
    }

    pub fn fill_bytes(&self, to: u64, byte: u8, bytes: usize) {
        for (to, n) in self.memory.cut(to, bytes).into_iter().filter(|(_, n)| *n > 0) {
            self.note(self.driver.fill(to, byte, n));
        }
    }

    /// A matmul in fp8 as the library can do it; see [`blas::Blas::feasible`].
    pub fn feasible(&self, wanted: &Gemm) -> Gemm {
        self.blas.feasible(wanted)
    }

    /// From now on as on GPUs whose library takes no scales of rows.
    #[cfg(test)]
    pub fn scale_no_fp8_rows(&self) {
        self.blas.scale_nothing();
    }

    /// A small table of numbers that kernels read, by name; made on first use, beside the arena.
    pub fn table(&self, name: &'static str, values: impl FnOnce() -> Vec<f32>) -> CudaArg {
        let mut tables = self.tables.lock().expect("nothing panics while a table is made");
        let (address, _) = *tables.entry(name).or_insert_with(|| {
            let bytes: Vec<u8> = values().iter().flat_map(|number| number.to_le_bytes()).collect();
            self.make_table(&bytes).unwrap_or_else(|error| {
                self.note(Err(error));
                (0, 0)
            })
        });
        CudaArg(address)
    }

    fn make_table(&self, bytes: &[u8]) -> Result<(u64, usize)> {
        let size = bytes.len().next_multiple_of(self.driver.granularity()?);
        let address = self.driver.reserve(size)?;
        self.driver.map(address, size, PieceLocation::Device)?;
        self.driver.write(address, bytes)?;
        Ok((address, size))
    }

    /// Normal random numbers; see [`RandomSequence::normal`].
    pub fn normal(&self, tensor: &mut Tensor, deviation: f32, sequence: RandomSequence) {
        let n = tensor.shape().elements();
        let [seed, number, first] = sequence.parts();
        let arguments = arguments![&mut *tensor, n, deviation, seed, number, first];
        let variant = CudaVariant::of(&[tensor.dtype()]);
        self.launch(&RANDOM, "normal", variant, LaunchConfig::per_element(n), &arguments);
    }

    fn note(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            let mut fault = self.fault.lock().expect("nothing panics while a fault is noted");
            // The first is the cause of all that follow.
            fault.get_or_insert(error);
        }
    }
}

/// Events by which the two streams wait for each other over one slot.
pub(crate) struct CopyEvents {
    released: CudaEvent<Arc<CudaContext>>,
    copied: CudaEvent<Arc<CudaContext>>,
}

/// What a plan of cuDNN's is for.
pub(crate) type CudnnPlanKey = (&'static str, Dtype, [usize; 7]);

/// Plans are dropped before the library.
struct CudnnPlans {
    plans: HashMap<CudnnPlanKey, Option<CudnnPlan>>,
    cudnn: Cudnn,
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // The memory may still be worked in.
        let _ = self.driver.synchronise();
        self.memory.release(&self.driver);
        if let Ok(tables) = self.tables.get_mut() {
            for (address, bytes) in tables.values().filter(|(_, bytes)| *bytes > 0) {
                let _ = self.driver.unmap(*address, *bytes);
                let _ = self.driver.unreserve(*address, *bytes);
            }
        }
    }
}

const RANDOM: CudaSource = CudaSource { name: "random", text: include_str!("random.cu") };

/// How many threads a kernel gets.
#[derive(Clone, Copy)]
pub(crate) struct LaunchConfig {
    pub blocks: [u32; 3],
    pub threads: u32,
    /// Of shared memory that the kernel does not declare.
    pub shared_bytes: u32,
}

/// Threads of a block where nothing speaks for another number.
pub(crate) const THREADS: usize = 256;
/// Threads of a warp.
pub(crate) const WARP: usize = 32;

impl LaunchConfig {
    /// A thread for each of `n`.
    pub fn per_element(n: usize) -> Self {
        Self::blocks(n.div_ceil(THREADS))
    }

    /// A warp for each of `n` rows.
    pub fn per_row(n: usize) -> Self {
        Self::blocks(n.div_ceil(THREADS / WARP))
    }

    /// So many blocks.
    pub fn blocks(n: usize) -> Self {
        let n = u32::try_from(n).expect("a tensor has fewer rows than a GPU has blocks");
        Self { blocks: [n, 1, 1], threads: THREADS as u32, shared_bytes: 0 }
    }
}

/// A value that a kernel is given, as eight bytes of which it reads as many as it declares.
#[derive(Clone, Copy)]
pub(crate) struct CudaArg(pub u64);

impl CudaArg {
    /// In place of a tensor that is not there.
    pub const NONE: Self = Self(0);
}

impl From<&Tensor> for CudaArg {
    fn from(tensor: &Tensor) -> Self {
        Self(tensor.address())
    }
}

impl From<&mut Tensor> for CudaArg {
    fn from(tensor: &mut Tensor) -> Self {
        Self(tensor.address_mut())
    }
}

impl From<Option<&Tensor>> for CudaArg {
    fn from(tensor: Option<&Tensor>) -> Self {
        tensor.map_or(Self::NONE, Self::from)
    }
}

impl From<Option<&mut Tensor>> for CudaArg {
    fn from(tensor: Option<&mut Tensor>) -> Self {
        tensor.map_or(Self::NONE, Self::from)
    }
}

impl From<usize> for CudaArg {
    fn from(size: usize) -> Self {
        Self(size as u64)
    }
}

impl From<u64> for CudaArg {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

impl From<u32> for CudaArg {
    fn from(number: u32) -> Self {
        Self(u64::from(number))
    }
}

impl From<f32> for CudaArg {
    fn from(number: f32) -> Self {
        Self(u64::from(number.to_bits()))
    }
}

impl From<f64> for CudaArg {
    fn from(number: f64) -> Self {
        Self(number.to_bits())
    }
}

impl From<bool> for CudaArg {
    fn from(flag: bool) -> Self {
        Self(u64::from(flag))
    }
}

/// What a kernel is given, in its order.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        [$($crate::cuda::CudaArg::from($value)),*]
    };
}
pub(crate) use arguments;

/// How many elements a thread takes at a time: several, if rows of `width` are made of such packs and
/// lie where they can be read as such.
pub(crate) fn pack(width: usize, tensors: &[&Tensor]) -> usize {
    let is_fit = |tensor: &&Tensor| tensor.address().is_multiple_of(16);
    if width.is_multiple_of(PACK) && tensors.iter().all(is_fit) { PACK } else { 1 }
}

/// Elements of two bytes that a thread reads at a time: as many as it can.
const PACK: usize = 8;

/// The name of a dtype in kernels.
fn type_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float",
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "f16",
        Dtype::U32 => "u32",
        Dtype::I32 => "int",
        Dtype::U8 => "u8",
    }
}
