//! The backend for any other GPU, through wgpu: Metal on a Mac, Vulkan elsewhere. Kernels are WGSL, so
//! that the very ones that a Mac runs are run by our tests on a software driver.
//!
//! As on an NVIDIA GPU, work goes to the GPU in the order in which ops are called, nothing waits for it
//! but whoever reads a number, and what went wrong is kept until somebody asks. Nothing is added up in
//! an order that changes.
//!
//! Left out on purpose: several GPUs in one process, work on several queues, 64-bit types (Apple's GPUs have
//! none).

mod adapter;
pub(crate) mod columns;
mod context;
mod memory;
mod shared;
mod submission;
mod template;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

pub(crate) use adapter::{DEFAULT_BUFFER_BYTES, buffer_limits};
pub use adapter::{
    GpuAdapter, GpuAdapterKind, GpuChoice, GpuFeatures, MatrixUnits, adapter, adapters,
};
use context::WgpuContext;
use memory::{GpuBuffers, MadeBuffers};
pub use submission::GpuFault;
use submission::Submissions;
use wgpu::util::{BufferInitDescriptor, DeviceExt};
use wgpu::{
    BindGroupDescriptor, BindGroupEntry, Buffer, BufferBinding, BufferDescriptor, BufferUsages,
    MapMode,
};

use crate::arena::{Arena, BufferLayout};
use crate::device::DeviceKind;
use crate::random::RandomSequence;
use crate::{ComputeError, Dtype, Result, Tensor};

/// Every tensor starts at a multiple of this. Taken: the most that WebGPU lets an adapter ask of a binding.
pub(crate) const ALIGNMENT: usize = 256;
/// What a GPU must offer. Taken: what Apple's GPUs and all desktop ones do.
const ARGUMENT_BYTES: usize = 128;
const MIN_TENSORS: usize = 12;
const MIN_GROUP_BYTES: usize = 32 << 10;

/// Threads of a workgroup, if its variant has no other number of THREADS.
pub(crate) const THREADS: usize = 256;
/// Threads of a row, where several share one. Taken: the width in which Apple's and NVIDIA's GPUs compute.
const PER_ROW: usize = 32;
/// Workgroups that are started at once. Taken: WebGPU's limit.
const MAX_GROUPS: usize = 65535;
/// Bytes that may wait on the host to be written. Chosen: a model's weights must not lie there twice.
const MAX_WAITING_BYTES: usize = 64 << 20;
/// Bytes of a command buffer's number.
const CANARY_BYTES: u64 = 4;

/// The source of some kernels.
pub(crate) struct WgslSource {
    pub name: &'static str,
    pub text: &'static str,
}

/// For what a kernel is compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct GpuVariant {
    /// X, Y and so on; the last one given stands for those that are not.
    pub formats: Vec<Dtype>,
    /// Compile-time constants of the source.
    pub sizes: Vec<(&'static str, usize)>,
}

impl GpuVariant {
    /// For these dtypes.
    pub fn of(formats: &[Dtype]) -> Self {
        Self { formats: formats.to_vec(), sizes: vec![] }
    }

    /// A compile-time constant.
    fn size(&self, name: &str) -> Option<usize> {
        self.sizes.iter().find(|(of, _)| *of == name).map(|(_, size)| *size)
    }

    /// With another compile-time constant.
    pub fn with(mut self, name: &'static str, size: usize) -> Self {
        self.sizes.push((name, size));
        self
    }
}

/// A GPU at work.
pub(crate) struct GpuBackend {
    context: Arc<WgpuContext>,
    memory: GpuBuffers,
    submissions: Mutex<Submissions>,
    tables: Mutex<HashMap<&'static str, Buffer>>,
    /// Stands for tensors that are not there.
    nothing: Buffer,
    /// Whether matmuls use matrix units.
    uses_matrix_units: AtomicBool,
    /// Bytes written since the queue was last sent off.
    waiting: Mutex<usize>,
    /// Kernels that were started.
    launches: AtomicU64,
    /// Each of them, and the bytes of its tensors.
    #[cfg(test)]
    pub launched: Mutex<Vec<(&'static str, usize)>>,
    /// What went wrong here; what did for all is noted where the adapter is open.
    fault: Mutex<Option<ComputeError>>,
}

impl GpuBackend {
    /// The GPU that is meant, and the kind that it is.
    pub fn open(choice: GpuChoice) -> Result<(Self, DeviceKind)> {
        let (index, adapter) = adapter::find(choice)?;
        Self::on_context(WgpuContext::get(index)?, &adapter)
    }

    fn on_context(context: Arc<WgpuContext>, adapter: &GpuAdapter) -> Result<(Self, DeviceKind)> {
        let nothing = context.device.create_buffer_init(&BufferInitDescriptor {
            label: None,
            contents: &[0; ALIGNMENT],
            usage: BufferUsages::STORAGE,
        });
        let GpuAdapter { buffer_bytes, tensor_bytes, shares_memory, .. } = *adapter;
        let memory = GpuBuffers::new(buffer_bytes, shares_memory);
        let submissions = Mutex::new(Submissions::new(&context)?);
        let (tables, waiting, fault) = <_>::default();
        let by_units = AtomicBool::new(context.matrix_units_agree.get() == Some(&true));
        let gpu = Self {
            context,
            memory,
            submissions,
            tables,
            nothing,
            uses_matrix_units: by_units,
            waiting,
            launches: AtomicU64::new(0),
            #[cfg(test)]
            launched: Mutex::default(),
            fault,
        };
        Ok((gpu, DeviceKind::Gpu { buffer_bytes, tensor_bytes }))
    }

    /// Kernels that were started so far.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }

    /// Whether it is a program on the CPU, to which other sizes of work are best.
    pub fn is_software(&self) -> bool {
        self.context.is_software
    }

    /// The matrix units that matmuls use, if they do.
    pub fn matrix_units(&self) -> Option<MatrixUnits> {
        self.context.matrix_units.filter(|_| self.uses_matrix_units.load(Ordering::Relaxed))
    }

    /// Uses matrix units for matmuls from here on, or not.
    pub fn set_matrix_units(&self, is_so: bool) {
        self.uses_matrix_units.store(is_so, Ordering::Relaxed);
    }

    /// Uses matrix units if there are any and `trial` finds that they agree with plain matmuls: their kernels
    /// were written without a Mac to run them on.
    pub fn try_matrix_units(&self, trial: impl FnOnce() -> bool) {
        if self.context.matrix_units.is_some() {
            self.set_matrix_units(*self.context.matrix_units_agree.get_or_init(trial));
        }
    }

    /// Workgroups that rows are shared among, of which each is the work of some threads.
    pub fn row_groups(&self, rows: usize, threads: usize) -> usize {
        rows.div_ceil(self.rows_at_once(threads))
    }

    /// Rows that a workgroup of so many threads works at, each the work of some of them.
    pub fn rows_at_once(&self, threads: usize) -> usize {
        threads / self.context.per_row()
    }

    /// One that shares its adapter with nobody, to break it, and as if that offered something else.
    #[cfg(test)]
    pub fn alone(choice: GpuChoice, change: impl FnOnce(&mut GpuAdapter)) -> (Self, DeviceKind) {
        let (index, mut adapter) = adapter::find(choice).unwrap();
        change(&mut adapter);
        Self::on_context(Arc::new(WgpuContext::open(index).unwrap()), &adapter).unwrap()
    }

    /// Makes sure that a block of the arena has memory, and that nothing went wrong before. A buffer is made no
    /// larger than the arena's limit asks for; a higher limit may ask for a longer one in its place.
    pub fn commit(&self, arena: &Arena, block: Range<usize>) -> Result<()> {
        self.check()?;
        let buffer = arena.buffers().buffer_at(block.start);
        let short = self.memory.made().get(buffer.start).cloned();
        if short.as_ref().is_some_and(|short| short.size() >= (block.end - buffer.start) as u64) {
            return Ok(());
        }
        let range = buffer.start..buffer.end.min(arena.limit().max(block.end));
        let Some(short) = short else {
            self.memory.insert(range.start, self.memory.make(&self.context, &range)?);
            return Ok(());
        };
        if arena.blocks_in(&buffer).any(|start| start != block.start) {
            return self.lengthen(&short, &range);
        }
        drop(short);
        // Both at a time would be more memory than was planned.
        self.drop_buffers(|idle| idle.start == range.start);
        self.memory.insert(range.start, self.memory.make(&self.context, &range)?);
        Ok(())
    }

    /// Puts a longer buffer in the place of a short one, with what that holds.
    fn lengthen(&self, short: &Buffer, range: &Range<usize>) -> Result<()> {
        let long = self.memory.make(&self.context, range)?;
        self.submissions().send_with(&self.context, |encoder, _| {
            encoder.copy_buffer_to_buffer(short, 0, &long, 0, short.size());
        });
        self.memory.insert(range.start, long);
        Ok(())
    }

    /// Drops every buffer without a live block. Returns when the memory is the system's again.
    pub fn trim(&self, arena: &Arena) {
        self.drop_buffers(|buffer| arena.blocks_in(buffer).next().is_none());
    }

    fn drop_buffers(&self, is_idle: impl Fn(&Range<usize>) -> bool) {
        if self.memory.made().any(&is_idle) {
            // wgpu keeps what recorded or submitted work uses. What went wrong is told to whoever asks.
            _ = self.synchronise();
            self.memory.drop_if(is_idle);
        }
    }

    /// Arranges buffers by another layout. There is no live block in any.
    pub fn set_layout(&self, layout: BufferLayout) {
        self.drop_buffers(|_| true);
        self.memory.set_layout(layout);
    }

    /// Bytes of all buffers of the arena, as they come and go.
    pub fn committed(&self) -> &Arc<AtomicU64> {
        self.memory.committed()
    }

    fn check(&self) -> Result<()> {
        let fault = self.fault.lock().expect("nothing panics while a fault is noted");
        fault.as_ref().map_or(Ok(()), |fault| Err(fault.again()))?;
        self.context.check()
    }

    /// Keeps the first fault: it is the cause of all that follow. Who opens a lost GPU again is given another.
    fn note(&self, error: ComputeError) {
        let is_lost = matches!(error, ComputeError::GpuLost { .. });
        let fault = if is_lost { &self.context.fault } else { &self.fault };
        fault.lock().expect("nothing panics while a fault is noted").get_or_insert(error);
    }

    /// Waits for all work, and says whether it went well.
    pub fn synchronise(&self) -> Result<()> {
        self.read_words(0, &mut [])
    }

    /// Injects a fault into the `nth` command buffer from now.
    pub fn inject_fault(&self, nth: u32, fault: GpuFault) {
        self.submissions().inject_fault(nth, fault);
    }

    /// How many command buffers were submitted.
    pub fn n_command_buffers(&self) -> u32 {
        self.submissions().n_command_buffers()
    }

    /// Kernels from here on do so much together.
    pub fn set_op_cost(&self, flops: u64, bytes: u64) {
        self.submissions().set_op_cost(flops, bytes);
    }

    /// Launches so many workgroups of a kernel. `arguments` are those of its signature, in order.
    pub fn launch(
        &self,
        source: &'static WgslSource,
        kernel: &'static str,
        variant: &GpuVariant,
        groups: usize,
        arguments: &[GpuArg<'_>],
    ) {
        if groups == 0 {
            return;
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        #[cfg(test)]
        let bytes = arguments.iter().map(GpuArg::bytes).sum();
        #[cfg(test)]
        self.launched.lock().unwrap().push((kernel, bytes));
        let kernel = match self.context.kernel(source, kernel, variant) {
            Ok(kernel) => kernel,
            Err(error) => return self.note(error),
        };
        let (mut entries, mut numbers) = (Vec::new(), vec![0]);
        let (tables, buffers) = (self.tables(), self.memory.made());
        for argument in arguments {
            let (binding, number) = self.binding(argument, &tables, &buffers);
            numbers.push(number);
            entries.extend(binding);
        }
        let entries: Vec<_> = (0..)
            .zip(entries)
            .map(|(binding, resource)| BindGroupEntry { binding, resource })
            .collect();
        let layout = &kernel.layout.tensors;
        let description = BindGroupDescriptor { label: None, layout, entries: &entries };
        let tensors = self.context.device.create_bind_group(&description);
        let mut submissions = self.submissions();
        let each = groups.div_ceil(submissions.n_pieces()).min(MAX_GROUPS);
        for first in (0..groups).step_by(each) {
            numbers[0] = first as u32;
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let count = each.min(groups - first) as u32;
            submissions.add(&self.context, &kernel, &tensors, &bytes, count);
        }
    }

    /// What a kernel is bound to for an argument, if it is no number, and the number that it is told.
    fn binding<'a>(
        &'a self,
        argument: &GpuArg<'_>,
        tables: &'a HashMap<&'static str, Buffer>,
        buffers: &'a MadeBuffers,
    ) -> (Option<wgpu::BindingResource<'a>>, u32) {
        let nothing = || Some(self.nothing.as_entire_binding());
        match *argument {
            GpuArg::Number(number) => (None, number),
            GpuArg::None => (nothing(), u32::MAX),
            GpuArg::Table(name) => (Some(tables[name].as_entire_binding()), 0),
            GpuArg::Tensor(tensor) | GpuArg::Bytes(tensor) if tensor.bytes() == 0 => (nothing(), 0),
            GpuArg::Tensor(tensor) | GpuArg::Bytes(tensor) => {
                let offset = tensor.offset();
                let (buffer, start) = buffers.at(offset / ALIGNMENT * ALIGNMENT);
                let (before, bytes) = (offset % ALIGNMENT, tensor.bytes());
                let size = std::num::NonZero::new((before + bytes).next_multiple_of(4) as u64);
                let binding = BufferBinding { buffer, offset: start as u64, size };
                let is_bytes = matches!(argument, GpuArg::Bytes(_));
                let each = if is_bytes { 1 } else { tensor.dtype().bytes() };
                (Some(wgpu::BindingResource::Buffer(binding)), (before / each) as u32)
            }
        }
    }

    /// A small table of numbers that kernels read, by name; made on first use, beside the arena.
    pub fn table(&self, name: &'static str, values: impl FnOnce() -> Vec<f32>) -> GpuArg<'static> {
        self.tables().entry(name).or_insert_with(|| {
            let bytes: Vec<u8> = values().iter().flat_map(|number| number.to_le_bytes()).collect();
            let (contents, usage) = (&bytes[..], BufferUsages::STORAGE);
            self.context.device.create_buffer_init(&BufferInitDescriptor {
                label: None,
                contents,
                usage,
            })
        });
        GpuArg::Table(name)
    }

    /// Copies from the host to a tensor.
    pub fn write(&self, tensor: &Tensor, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let (start, end) = (tensor.offset(), tensor.offset() + bytes.len());
        let words = start / 4 * 4..end.next_multiple_of(4);
        // Where words are shared with other numbers, those are read first.
        let mut all = vec![0; words.len()];
        let is_shared = start % 4 != 0 || (end % 4 != 0 && !tensor.is_last());
        if is_shared && let Err(error) = self.read_words(words.start, &mut all) {
            return self.note(error);
        }
        let bytes = if words.len() == bytes.len() {
            bytes
        } else {
            all[start - words.start..][..bytes.len()].copy_from_slice(bytes);
            &all
        };
        // Writes come before all that is submitted later, so earlier work is submitted first.
        self.submissions().send(&self.context);
        let buffers = self.memory.made();
        let (buffer, start) = buffers.at(words.start);
        for (index, piece) in bytes.chunks(MAX_WAITING_BYTES).enumerate() {
            self.context.queue.write_buffer(
                buffer,
                (start + index * MAX_WAITING_BYTES) as u64,
                piece,
            );
            self.send_writes(piece.len());
        }
    }

    /// Submits pending writes if they are many bytes.
    fn send_writes(&self, bytes: usize) {
        let mut waiting = self.waiting.lock().expect("nothing panics while bytes are counted");
        *waiting += bytes;
        if *waiting >= MAX_WAITING_BYTES {
            self.context.queue.submit([]);
            // What it finds is told to whoever waits for a result.
            _ = self.context.device.poll(submission::poll_with_timeout(None));
            *waiting = 0;
        }
    }

    /// Copies a tensor to the host, when all work before is done.
    pub fn read(&self, tensor: &Tensor, bytes: &mut [u8]) -> Result<()> {
        if bytes.is_empty() {
            return self.check();
        }
        let (start, end) = (tensor.offset(), tensor.offset() + bytes.len());
        let first = start / 4 * 4;
        if (start, end) == (first, end / 4 * 4) {
            return self.read_words(first, bytes);
        }
        let mut words = vec![0; end.next_multiple_of(4) - first];
        self.read_words(first, &mut words)?;
        bytes.copy_from_slice(&words[start - first..][..bytes.len()]);
        Ok(())
    }

    fn read_words(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let size = to.len() as u64;
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        // The number of the last command buffer is read too.
        let all = size + CANARY_BYTES;
        let description =
            BufferDescriptor { label: None, size: all, usage, mapped_at_creation: false };
        let make = || self.context.device.create_buffer(&description);
        let copy = self.context.with_error_scope("taking memory to read", make)?;
        // Taken before the lock of submissions, as a launch does: the other order could wait in a circle.
        let buffers = self.memory.made();
        let n_lists = self.submissions().send_with(&self.context, |encoder, canary| {
            if size > 0 {
                let (buffer, start) = buffers.at(offset);
                encoder.copy_buffer_to_buffer(buffer, start as u64, &copy, 0, size);
            }
            encoder.copy_buffer_to_buffer(canary, 0, &copy, size, CANARY_BYTES);
        });
        drop(buffers);
        let (sender, receiver) = mpsc::channel();
        copy.map_async(MapMode::Read, .., move |mapped| _ = sender.send(mapped));
        self.wait()?;
        // Another thread that waits may be the one that is told.
        let mapped = receiver.recv().map_err(|error| stopped(&error))?;
        mapped.map_err(|error| stopped(&error))?;
        let read = copy.get_mapped_range(..).map_err(|error| stopped(&error))?;
        let (numbers, canary) = read.split_at(to.len());
        if canary != n_lists.to_le_bytes() {
            self.note(ComputeError::GpuLost {
                message: "a command buffer did not complete".into(),
            });
        }
        to.copy_from_slice(numbers);
        self.check()
    }

    /// Waits until nothing is under way.
    fn wait(&self) -> Result<()> {
        if let Err(error) = self.context.device.poll(submission::poll_with_timeout(None)) {
            self.note(stopped(&error));
        }
        self.check()
    }

    /// Copies to a tensor of the same dtype that starts at a whole word.
    pub fn copy(&self, from: &Tensor, to: &mut Tensor) {
        let (n, words) = (to.bytes(), to.bytes().div_ceil(4));
        let arguments = [GpuArg::Bytes(from), GpuArg::Bytes(to), n.into()];
        self.launch(&MOVES, "copy", &GpuVariant::default(), singles(words), &arguments);
    }

    /// Sets every byte.
    pub fn fill_bytes(&self, to: &mut Tensor, byte: u8) {
        let n = to.bytes();
        let words = if n == 0 { 0 } else { (to.offset() % 4 + n).div_ceil(4) };
        let arguments = [GpuArg::Bytes(to), n.into(), u32::from_ne_bytes([byte; 4]).into()];
        self.launch(&MOVES, "fill", &GpuVariant::default(), singles(words), &arguments);
    }

    /// Normal random numbers; see [`RandomSequence::normal`].
    pub fn normal(&self, tensor: &mut Tensor, deviation: f32, sequence: RandomSequence) {
        let (n, variant) = (tensor.shape().elements(), GpuVariant::of(&[tensor.dtype()]));
        let arguments =
            [&arguments![&*tensor, n, deviation][..], &sequence_args(sequence)].concat();
        self.launch(&RANDOM, "normal", &variant, pairs(n), &arguments);
    }

    fn submissions(&self) -> MutexGuard<'_, Submissions> {
        self.submissions.lock().expect("nothing panics while work is gathered")
    }

    fn tables(&self) -> MutexGuard<'_, HashMap<&'static str, Buffer>> {
        self.tables.lock().expect("nothing panics while a table is made")
    }
}

/// Copies, fills, and the end of a command buffer.
const MOVES: WgslSource = WgslSource { name: "moves", text: include_str!("moves.wgsl") };
const RANDOM: WgslSource = WgslSource { name: "random", text: include_str!("random.wgsl") };

/// Workgroups with a thread for every two of `n` elements.
pub(crate) fn pairs(n: usize) -> usize {
    n.div_ceil(2 * THREADS)
}

/// Workgroups with a thread for every eight of `n` elements.
pub(crate) fn eights(n: usize) -> usize {
    n.div_ceil(8 * THREADS)
}

/// Workgroups with a thread for each of `n` elements.
pub(crate) fn singles(n: usize) -> usize {
    n.div_ceil(THREADS)
}

/// Whether rows of this width can be read eight elements at a time from all of these tensors.
pub(crate) fn is_wide(width: usize, tensors: &[Option<&Tensor>]) -> bool {
    let starts_even = |tensor: &&Tensor| {
        tensor.bytes() == 0 || tensor.offset().is_multiple_of(8 * tensor.dtype().bytes())
    };
    width.is_multiple_of(8) && tensors.iter().flatten().all(starts_even)
}

/// A random sequence as kernel arguments.
pub(crate) fn sequence_args(sequence: RandomSequence) -> Vec<GpuArg<'static>> {
    let words = sequence.parts().into_iter().flat_map(|part| [part as u32, (part >> 32) as u32]);
    words.map(GpuArg::Number).collect()
}

fn stopped(error: &impl ToString) -> ComputeError {
    ComputeError::GpuLost { message: error.to_string() }
}

/// A value that a kernel is given.
#[derive(Clone, Copy)]
pub(crate) enum GpuArg<'a> {
    Tensor(&'a Tensor),
    /// A tensor as bytes, whatever its dtype.
    Bytes(&'a Tensor),
    /// One made by [`GpuBackend::table`].
    Table(&'static str),
    /// In place of a tensor that is not there.
    None,
    /// A number of 32 bits, of whatever type.
    Number(u32),
}

#[cfg(test)]
impl GpuArg<'_> {
    /// Bytes of the tensor that it is.
    fn bytes(&self) -> usize {
        match self {
            Self::Tensor(tensor) | Self::Bytes(tensor) => tensor.bytes(),
            Self::Table(_) | Self::None | Self::Number(_) => 0,
        }
    }
}

impl<'a> From<&'a Tensor> for GpuArg<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Tensor(tensor)
    }
}

impl<'a> From<&'a mut Tensor> for GpuArg<'a> {
    fn from(tensor: &'a mut Tensor) -> Self {
        assert_eq!(tensor.ref_count(), 1, "only an unshared tensor is written to");
        Self::Tensor(tensor)
    }
}

impl<'a> From<Option<&'a Tensor>> for GpuArg<'a> {
    fn from(tensor: Option<&'a Tensor>) -> Self {
        tensor.map_or(Self::None, Self::Tensor)
    }
}

impl<'a> From<Option<&'a mut Tensor>> for GpuArg<'a> {
    fn from(tensor: Option<&'a mut Tensor>) -> Self {
        tensor.map_or(Self::None, Self::from)
    }
}

impl From<usize> for GpuArg<'_> {
    fn from(size: usize) -> Self {
        Self::Number(u32::try_from(size).expect("a tensor that can be bound has fewer numbers"))
    }
}

impl From<u32> for GpuArg<'_> {
    fn from(number: u32) -> Self {
        Self::Number(number)
    }
}

impl From<f32> for GpuArg<'_> {
    fn from(number: f32) -> Self {
        Self::Number(number.to_bits())
    }
}

impl From<bool> for GpuArg<'_> {
    fn from(flag: bool) -> Self {
        Self::Number(flag.into())
    }
}

/// Kernel arguments, in the order of its signature.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => {
        [$($crate::gpu::GpuArg::from($value)),*]
    };
}
pub(crate) use arguments;
