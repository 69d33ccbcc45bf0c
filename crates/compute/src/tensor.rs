//! A contiguous row-major tensor in a device's arena. Clones share the memory, which goes
//! back to the arena with the last of them; only an unshared tensor can be written to.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::block_swap::BlockSwap;
use crate::cpu::HostMemory;
use crate::device::{Backend, Device};
use crate::op::Op;
use crate::{Dtype, Element, Result, Shape, Tag};

/// Bytes that are copied to the host together. Chosen: a disk takes longer than such a copy, and beside a model it
/// is nothing.
const PIECE_BYTES: usize = 16 << 20;

/// Values of one dtype in one shape.
#[derive(Clone, Debug)]
pub struct Tensor {
    storage: Arc<TensorStorage>,
    /// Bytes from the buffer's start: a leading slice of a tensor shares its buffer.
    start: usize,
    shape: Shape,
    dtype: Dtype,
}

/// A block of an arena, freed when dropped.
#[derive(Debug)]
pub(crate) struct TensorStorage {
    device: Device,
    location: StorageLocation,
    bytes: usize,
    /// The host's copy of indices that lie on a GPU: ops check them without waiting for it.
    indices: OnceLock<Vec<u32>>,
}

/// Where a tensor's memory is.
#[derive(Debug)]
enum StorageLocation {
    /// From here on in the arena.
    Arena(usize),
    /// In an offloaded block, from an offset on.
    BlockSwap(BlockSwap, usize, usize),
}

impl TensorStorage {
    pub fn new(device: Device, offset: usize, bytes: usize) -> Self {
        Self { device, location: StorageLocation::Arena(offset), bytes, indices: OnceLock::new() }
    }

    /// A part of an offloaded block, and where it starts in that.
    pub fn in_block_swap(
        device: Device,
        block_swap: BlockSwap,
        block: usize,
        start: usize,
        bytes: usize,
    ) -> Self {
        let location = StorageLocation::BlockSwap(block_swap, block, start);
        Self { device, location, bytes, indices: OnceLock::new() }
    }

    /// Where it starts in the arena now.
    fn offset(&self) -> usize {
        match &self.location {
            StorageLocation::Arena(offset) => *offset,
            StorageLocation::BlockSwap(block_swap, block, start) => {
                block_swap.offset(*block) + start
            }
        }
    }
}

impl Drop for TensorStorage {
    fn drop(&mut self) {
        match self.location {
            StorageLocation::Arena(offset) if self.bytes > 0 => self.device.free(offset),
            StorageLocation::Arena(_) | StorageLocation::BlockSwap(..) => {}
        }
    }
}

impl Tensor {
    pub(crate) fn new(buffer: TensorStorage, shape: Shape, dtype: Dtype) -> Self {
        Self { storage: Arc::new(buffer), start: 0, shape, dtype }
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Its dtype.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.storage.device
    }

    /// Bytes of its data.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.bytes()
    }

    /// Counts its memory under another tag from now on: it was made for one thing and is kept for
    /// another.
    pub fn set_tag(&self, tag: Tag) {
        match self.storage.location {
            StorageLocation::Arena(offset) if self.storage.bytes > 0 => {
                self.device().retag(offset, tag);
            }
            StorageLocation::Arena(_) | StorageLocation::BlockSwap(..) => {}
        }
    }

    /// The same data in another shape of as many elements.
    ///
    /// # Panics
    /// If the shapes differ in their number of elements; callers derive one from the other.
    #[must_use]
    pub fn reshape(&self, shape: impl Into<Shape>) -> Self {
        self.clone().into_shape(shape.into())
    }

    pub(crate) fn into_shape(self, shape: Shape) -> Self {
        assert_eq!(shape.elements(), self.shape.elements(), "{} to {shape}", self.shape);
        Self { shape, ..self }
    }

    /// Some of the outermost entries, sharing the memory.
    ///
    /// # Panics
    /// If the range is not inside the first dimension.
    #[must_use]
    pub fn narrow(&self, range: Range<usize>) -> Self {
        let sizes = self.shape.sizes();
        assert!(range.start <= range.end && range.end <= sizes[0], "{range:?} of {}", self.shape);
        let inner: usize = sizes[1..].iter().product();
        let start = self.start + range.start * inner * self.dtype.bytes();
        let mut part = sizes.to_vec();
        part[0] = range.len();
        Self { start, shape: Shape::new(&part), ..self.clone() }
    }

    /// Lets `work` have some of the outermost entries as a tensor of their own. Unlike a
    /// [`Tensor::narrow`], which shares the memory, it can be written to if the whole can.
    pub(crate) fn with_range_mut<R>(
        &mut self,
        range: Range<usize>,
        work: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let (start, shape) = (self.start, self.shape);
        let part = self.narrow(range);
        (self.start, self.shape) = (part.start, part.shape);
        drop(part);
        let done = work(self);
        (self.start, self.shape) = (start, shape);
        done
    }

    /// A copy of the data; an error on a GPU that has failed.
    ///
    /// # Panics
    /// On a meta device, or if `T` is not the tensor's dtype.
    pub fn read<T: Element>(&self) -> Result<Vec<T>> {
        assert_eq!(self.dtype, T::DTYPE);
        let mut numbers = vec![T::default(); self.shape.elements()];
        self.copy_to(bytes_of_mut(&mut numbers))?;
        Ok(numbers)
    }

    /// The same of any real dtype, as f32.
    ///
    /// # Panics
    /// As [`Tensor::read`], and for a tensor of integers.
    pub fn read_f32(&self) -> Result<Vec<f32>> {
        use crate::dtype::{Real, with_real};
        with_real!(self.dtype, T => {
            Ok(self.read::<T>()?.into_iter().map(Real::to_f32).collect())
        })
    }

    /// Writes the data as raw bytes in the tensor's own dtype, a piece at a time: the host never has a copy of all of
    /// it. Fails if `out` does, or on a GPU that has failed.
    ///
    /// # Panics
    /// On a meta device.
    pub fn write_to(&self, out: &mut dyn io::Write) -> io::Result<()> {
        let (n, each) = (self.shape.elements(), PIECE_BYTES / self.dtype.bytes());
        let flat = Self { shape: Shape::new(&[n]), ..self.clone() };
        let mut buffer = vec![0; n.min(each) * self.dtype.bytes()];
        for first in (0..n).step_by(each) {
            let piece = flat.narrow(first..n.min(first + each));
            let bytes = &mut buffer[..piece.bytes()];
            piece.copy_to(bytes).map_err(io::Error::other)?;
            out.write_all(bytes)?;
        }
        Ok(())
    }

    /// A copy of the data, where nothing can be done about a GPU that has failed.
    ///
    /// # Panics
    /// As [`Tensor::read`], and on such a GPU.
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        self.read().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The same of any real dtype, as f32.
    ///
    /// # Panics
    /// As [`Tensor::to_vec`], and for a tensor of integers.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        self.read_f32().unwrap_or_else(|error| panic!("{error}"))
    }

    pub(crate) fn copy_to(&self, bytes: &mut [u8]) -> Result<()> {
        if let StorageLocation::BlockSwap(block_swap, block, start) = &self.storage.location {
            bytes.copy_from_slice(block_swap.host_data(*block, start + self.start, bytes.len()));
            return Ok(());
        }
        match self.device().backend() {
            Backend::Meta | Backend::Cpu(_) => bytes.copy_from_slice(self.slice(bytes.len())),
            Backend::Cuda(cuda) => cuda.read(self.address(), bytes)?,
            Backend::Gpu(gpu) => gpu.read(self, bytes)?,
        }
        Ok(())
    }

    /// Writes these values; does nothing on a meta device.
    ///
    /// # Panics
    /// If they are of another dtype or number, or if the memory is shared.
    pub fn write<T: Element>(&mut self, values: &[T]) {
        assert_eq!((self.dtype, self.shape.elements()), (T::DTYPE, values.len()));
        match self.device().clone().backend() {
            Backend::Meta => {}
            Backend::Cpu(_) => self.data_mut::<T>().copy_from_slice(values),
            Backend::Cuda(_) | Backend::Gpu(_) => {
                self.write_bytes(bytes_of(values));
                self.keep_indices(values);
            }
        }
    }

    /// Writes its data as raw bytes; does nothing on a meta device.
    ///
    /// # Panics
    /// If they are more or fewer, or if the memory is shared.
    pub fn write_bytes(&mut self, bytes: &[u8]) {
        assert_eq!(self.bytes(), bytes.len());
        match self.device().clone().backend() {
            Backend::Meta => {}
            Backend::Cpu(_) => self.writable_bytes().copy_from_slice(bytes),
            Backend::Cuda(cuda) => cuda.write(self.address_mut(), bytes),
            Backend::Gpu(gpu) => gpu.write(self, bytes),
        }
    }

    /// Keeps indices on the host too.
    fn keep_indices<T: Element>(&self, values: &[T]) {
        if T::DTYPE == Dtype::U32 && self.start == 0 {
            let whole = bytes_of(values).as_chunks().0;
            let indices = whole.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            self.storage.indices.get_or_init(|| indices);
        }
    }

    /// Indices, to be looked at by an op; none on a meta device.
    pub(crate) fn indices(&self) -> Cow<'_, [u32]> {
        assert_eq!(self.dtype, Dtype::U32);
        match (self.device().backend(), self.storage.indices.get()) {
            (Backend::Meta, _) => Cow::Borrowed(&[]),
            (Backend::Cpu(_), _) => Cow::Borrowed(self.data()),
            (Backend::Cuda(_) | Backend::Gpu(_), Some(all)) => {
                Cow::Borrowed(&all[self.start / 4..][..self.shape.elements()])
            }
            (Backend::Cuda(_) | Backend::Gpu(_), None) => Cow::Owned(self.to_vec()),
        }
    }

    /// Where it starts in the memory of a GPU.
    pub(crate) fn address(&self) -> u64 {
        assert!(self.start + self.bytes() <= self.storage.bytes, "a meta tensor was used");
        let Backend::Cuda(cuda) = self.device().backend() else {
            panic!("a tensor that lies on no GPU was used there")
        };
        cuda.start() + (self.storage.offset() + self.start) as u64
    }

    /// The same, to be written to.
    pub(crate) fn address_mut(&mut self) -> u64 {
        assert_eq!(self.ref_count(), 1, "only an unshared tensor is written to");
        self.address()
    }

    /// Where it starts in the arena.
    pub(crate) fn offset(&self) -> usize {
        assert!(self.start + self.bytes() <= self.storage.bytes, "a meta tensor was used");
        self.storage.offset() + self.start
    }

    /// Its data on the host, to be written.
    ///
    /// # Panics
    /// If it is shared, or not offloaded.
    pub(crate) fn host_data_mut(&mut self) -> &mut [u8] {
        assert_eq!(self.ref_count(), 1, "only an unshared tensor is written to");
        let StorageLocation::BlockSwap(block_swap, block, start) = &self.storage.location else {
            panic!("a tensor on the device was read as an offloaded one")
        };
        // SAFETY: nobody shares the tensor, and this borrow is exclusive.
        unsafe { block_swap.host_data_mut(*block, start + self.start, self.bytes()) }
    }

    /// Its bytes, where the CPU writes them.
    pub(crate) fn writable_bytes(&mut self) -> &mut [u8] {
        let bytes = self.bytes();
        if self.is_offloaded() { self.host_data_mut() } else { self.slice_mut(bytes) }
    }

    /// Its bytes in host memory of an NVIDIA GPU's arena, where the CPU writes them when the GPU has done all it was
    /// asked for. None where the CPU does not reach them.
    pub(crate) fn shared_bytes_mut(&mut self) -> Option<&mut [u8]> {
        let device = self.device().clone();
        let Backend::Cuda(cuda) = device.backend() else { return None };
        let (address, bytes) = (self.address_mut(), self.bytes());
        let start = cuda.wait_for_host_access(address, bytes)?;
        // SAFETY: the CPU may read and write all of it, and any bytes are u8. It stays mapped, since only what lies
        // above the last live tensor is unmapped. No other tensor shares it (asserted), this borrow is exclusive, and
        // the GPU has done all that was asked for; what is asked for later is for others' tensors, or comes after it.
        Some(unsafe { std::slice::from_raw_parts_mut(start, bytes) })
    }

    pub(crate) fn is_offloaded(&self) -> bool {
        matches!(self.storage.location, StorageLocation::BlockSwap(..))
    }

    /// Whether nothing follows it in its block of the arena.
    pub(crate) fn is_last(&self) -> bool {
        self.start + self.bytes() == self.storage.bytes
    }

    /// How many tensors share this memory, this one included.
    pub(crate) fn ref_count(&self) -> usize {
        Arc::strong_count(&self.storage)
    }

    /// Itself if nobody shares it, or else a copy.
    pub(crate) fn into_unique(self) -> Result<Self> {
        if self.ref_count() == 1 {
            return Ok(self);
        }
        let mut copy = self.device().alloc(self.shape, self.dtype)?;
        copy.copy_from(&self);
        Ok(copy)
    }

    /// Writes another tensor, of fewer rows, over its own from the row `first` on.
    ///
    /// # Panics
    /// If the memory is shared.
    pub fn write_rows(&mut self, first: usize, rows: &Self) -> Result<()> {
        let device = self.device().clone();
        let op = Op::standalone("write_rows", &device);
        let [n_own, width] = op.expect_rank("the whole", self)?;
        let [n, _] = op.expect_rank("rows", rows)?;
        op.expect_dtype("rows", rows, self.dtype)?;
        op.expect_shape("rows", rows, [n, width])?;
        let is_fit = first + n <= n_own;
        op.expect_range("the last row", &(first + n), is_fit, &format!("at most {n_own}"))?;
        op.count(0, &[rows, rows]);
        self.with_range_mut(first..first + n, |own| own.copy_from(rows));
        Ok(())
    }

    /// Copies the data of another of the same shape and dtype.
    fn copy_from(&mut self, other: &Self) {
        let bytes = other.bytes();
        match other.device().backend() {
            Backend::Meta => {}
            Backend::Cpu(_) => self.slice_mut(bytes).copy_from_slice(other.slice::<u8>(bytes)),
            Backend::Cuda(cuda) => cuda.copy(other.address(), self.address_mut(), bytes),
            Backend::Gpu(gpu) => gpu.copy(other, self),
        }
    }

    pub(crate) fn fill_zeros(&mut self) {
        self.set_bytes(0);
    }

    /// NaN in every real dtype, so that a test sees what an op forgot to write.
    pub(crate) fn fill_nan(&mut self) {
        self.set_bytes(0xff);
    }

    fn set_bytes(&mut self, byte: u8) {
        let bytes = self.bytes();
        match self.device().clone().backend() {
            Backend::Meta => {}
            Backend::Cpu(_) => self.slice_mut(bytes).fill(byte),
            Backend::Cuda(cuda) => cuda.fill_bytes(self.address_mut(), byte, bytes),
            Backend::Gpu(gpu) => gpu.fill_bytes(self, byte),
        }
    }

    /// The data.
    pub(crate) fn data<T: Element>(&self) -> &[T] {
        assert_eq!(self.dtype, T::DTYPE);
        self.slice(self.shape.elements())
    }

    /// The data, to be written.
    pub(crate) fn data_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE);
        self.slice_mut(self.shape.elements())
    }

    fn slice<T: Element>(&self, elements: usize) -> &[T] {
        let memory = self.memory(elements * size_of::<T>());
        // SAFETY: the range is this tensor's own piece of the arena, which is aligned for every
        // dtype and initialised from the start (a fresh mapping is zero). Writing needs a tensor
        // that nobody shares, borrowed exclusively, so nobody writes while this borrow lives. A slot
        // of offloaded blocks is written to between two ops, when no op holds such a borrow.
        unsafe { memory.slice(self.storage.offset() + self.start, elements) }
    }

    fn slice_mut<T: Element>(&mut self, elements: usize) -> &mut [T] {
        assert_eq!(self.ref_count(), 1, "only an unshared tensor is written to");
        assert!(!self.is_offloaded(), "an offloaded tensor is written to on the host");
        let memory = self.memory(elements * size_of::<T>());
        // SAFETY: as in `slice`; and no other tensor shares the piece (asserted; clones are made
        // from `&self`, which cannot exist beside this exclusive borrow).
        unsafe { memory.slice_mut(self.storage.offset() + self.start, elements) }
    }

    /// The memory in which `bytes` from the start of this tensor lie.
    fn memory(&self, bytes: usize) -> &HostMemory {
        assert!(self.start + bytes <= self.storage.bytes, "a meta tensor was used");
        match self.storage.device.backend() {
            Backend::Cpu(cpu) => cpu.memory(),
            Backend::Meta => panic!("a meta tensor was used"),
            Backend::Cuda(_) | Backend::Gpu(_) => {
                panic!("a tensor that lies on a GPU was used on the CPU")
            }
        }
    }
}

/// Values as their bytes.
fn bytes_of<T: Element>(numbers: &[T]) -> &[u8] {
    // SAFETY: an `Element` has no padding, and any bytes are u8; the borrow is the numbers' own.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

/// Values as their bytes, to be written.
fn bytes_of_mut<T: Element>(numbers: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes are an `Element`.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::device;

    #[test]
    fn some_entries_are_written_and_the_others_left() {
        let mut tensor = device().upload([4, 2], &[1.0f32; 8]).unwrap();
        tensor.with_range_mut(1..3, |rows| {
            assert_eq!(rows.shape(), [2, 2].into());
            rows.with_range_mut(1..2, |row| row.write(&[2.0f32; 2]));
        });
        assert_eq!(tensor.shape(), [4, 2].into());
        assert_eq!(tensor.to_vec::<f32>(), [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]);
    }

    #[test]
    fn data_is_written_in_pieces() {
        let n = PIECE_BYTES / 2 + 3;
        let values: Vec<u32> = (0..n as u32).map(|index| index.wrapping_mul(0x9e37_79b9)).collect();
        let tensor = device().upload([n], &values).unwrap();
        let mut written = Vec::new();
        tensor.write_to(&mut written).unwrap();
        let read: Vec<u32> =
            written.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        assert!(read == values && written.len() > PIECE_BYTES);
        device().alloc([0], Dtype::U8).unwrap().write_to(&mut written).unwrap();
        assert_eq!(written.len(), n * 4);
        // As of a disk that is full.
        assert!(tensor.write_to(&mut &mut [0; 5][..]).is_err());
    }

    #[test]
    fn rows_are_written_over_others() {
        let device = device();
        let mut tensor = device.upload([4, 2], &[1.0f32; 8]).unwrap();
        let rows = device.upload([2, 2], &[2.0f32, 3.0, 4.0, 5.0]).unwrap();
        tensor.write_rows(1, &rows).unwrap();
        assert_eq!(tensor.to_vec::<f32>(), [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0]);
        let error = tensor.write_rows(3, &rows).unwrap_err().to_string();
        assert_eq!(error, "write_rows: the last row is 5, expected at most 4");
        let wide = device.upload([1, 3], &[0.0f32; 3]).unwrap();
        let error = tensor.write_rows(0, &wide).unwrap_err().to_string();
        assert_eq!(error, "write_rows: rows has shape [1, 3], expected [1, 2]");
    }
}
