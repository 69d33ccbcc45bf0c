//! A contiguous row-major block of numbers in a device's arena. Clones share the memory, which goes
//! back to the arena with the last of them; only an unshared tensor can be written to.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use crate::cpu::Memory;
use crate::device::{Device, Engine};
use crate::{Dtype, Element, Result, Shape, Tag};

/// Numbers of one format in one shape.
#[derive(Clone, Debug)]
pub struct Tensor {
    buffer: Arc<Buffer>,
    /// Bytes from the buffer's start: a leading slice of a tensor shares its buffer.
    start: usize,
    shape: Shape,
    dtype: Dtype,
}

/// A piece of an arena, given back when dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    device: Device,
    offset: usize,
    bytes: usize,
}

impl Buffer {
    pub fn new(device: Device, offset: usize, bytes: usize) -> Self {
        Self { device, offset, bytes }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.device.give_back(self.offset);
        }
    }
}

impl Tensor {
    pub(crate) fn new(buffer: Buffer, shape: Shape, dtype: Dtype) -> Self {
        Self { buffer: Arc::new(buffer), start: 0, shape, dtype }
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Its number format.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Where it lives.
    pub fn device(&self) -> &Device {
        &self.buffer.device
    }

    /// Bytes of its numbers.
    pub fn bytes(&self) -> usize {
        self.shape.elements() * self.dtype.bytes()
    }

    /// Counts its memory under another tag from now on: it was made for one thing and is kept for
    /// another.
    pub fn count_as(&self, tag: Tag) {
        if self.buffer.bytes > 0 {
            self.device().retag(self.buffer.offset, tag);
        }
    }

    /// The same numbers in another shape of as many.
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
    pub fn part(&self, range: Range<usize>) -> Self {
        let sizes = self.shape.sizes();
        assert!(range.start <= range.end && range.end <= sizes[0], "{range:?} of {}", self.shape);
        let inner: usize = sizes[1..].iter().product();
        let start = self.start + range.start * inner * self.dtype.bytes();
        let mut part = sizes.to_vec();
        part[0] = range.len();
        Self { start, shape: Shape::new(&part), ..self.clone() }
    }

    /// Lets `work` have some of the outermost entries as a tensor of their own. Unlike a
    /// [`Tensor::part`], which shares the memory, it can be written to if the whole can.
    pub(crate) fn within<R>(
        &mut self,
        range: Range<usize>,
        work: impl FnOnce(&mut Self) -> R,
    ) -> R {
        let (start, shape) = (self.start, self.shape);
        let part = self.part(range);
        (self.start, self.shape) = (part.start, part.shape);
        drop(part);
        let done = work(self);
        (self.start, self.shape) = (start, shape);
        done
    }

    /// A copy of the numbers.
    ///
    /// # Panics
    /// On a device that holds no data, or if `T` is not the tensor's format.
    pub fn to_vec<T: Element>(&self) -> Vec<T> {
        self.data::<T>().to_vec()
    }

    /// A copy of the numbers, whatever their real format, as f32.
    ///
    /// # Panics
    /// On a device that holds no data, or for a tensor of integers.
    pub fn to_f32_vec(&self) -> Vec<f32> {
        use crate::dtype::{Real, with_real};
        with_real!(self.dtype, T => self.data::<T>().iter().map(|value| Real::to_f32(*value)).collect())
    }

    /// A copy of the numbers as raw bytes in the tensor's own format.
    ///
    /// # Panics
    /// On a device that holds no data.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.slice::<u8>(self.bytes()).to_vec()
    }

    /// The numbers as raw bytes in the tensor's own format, to be written; nothing on a device without
    /// data.
    ///
    /// # Panics
    /// If the tensor is shared.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        let bytes = self.bytes();
        (!self.device().is_meta()).then(|| self.slice_mut(bytes))
    }

    /// How many tensors share this memory, this one included.
    pub(crate) fn sharers(&self) -> usize {
        Arc::strong_count(&self.buffer)
    }

    /// Itself if nobody shares it, or else a copy.
    pub(crate) fn unshared(self) -> Result<Self> {
        if self.sharers() == 1 {
            return Ok(self);
        }
        let mut copy = self.device().alloc(self.shape, self.dtype)?;
        if !self.device().is_meta() {
            let bytes = self.bytes();
            copy.slice_mut(bytes).copy_from_slice(self.slice::<u8>(bytes));
        }
        Ok(copy)
    }

    pub(crate) fn clear(&mut self) {
        if let Some(bytes) = self.bytes_mut() {
            bytes.fill(0);
        }
    }

    /// Not-a-number in every real format, so that a test sees what an op forgot to write.
    pub(crate) fn poison(&mut self) {
        if let Some(bytes) = self.bytes_mut() {
            bytes.fill(0xff);
        }
    }

    /// The numbers.
    pub(crate) fn data<T: Element>(&self) -> &[T] {
        assert_eq!(self.dtype, T::DTYPE);
        self.slice(self.shape.elements())
    }

    /// The numbers, to be written.
    pub(crate) fn data_mut<T: Element>(&mut self) -> &mut [T] {
        assert_eq!(self.dtype, T::DTYPE);
        self.slice_mut(self.shape.elements())
    }

    fn slice<T: Element>(&self, elements: usize) -> &[T] {
        let memory = self.memory(elements * size_of::<T>());
        // SAFETY: the range is this tensor's own piece of the arena, which is aligned for every
        // format and initialised from the start (a fresh mapping is zero). Writing needs a tensor
        // that nobody shares, borrowed exclusively, so nobody writes while this borrow lives.
        unsafe { memory.slice(self.buffer.offset + self.start, elements) }
    }

    fn slice_mut<T: Element>(&mut self, elements: usize) -> &mut [T] {
        assert_eq!(self.sharers(), 1, "only an unshared tensor is written to");
        let memory = self.memory(elements * size_of::<T>());
        // SAFETY: as in `slice`; and no other tensor shares the piece (asserted; clones are made
        // from `&self`, which cannot exist beside this exclusive borrow).
        unsafe { memory.slice_mut(self.buffer.offset + self.start, elements) }
    }

    /// The memory in which `bytes` from the start of this tensor lie.
    fn memory(&self, bytes: usize) -> &Memory {
        assert!(self.start + bytes <= self.buffer.bytes, "a hollow tensor was used");
        match self.buffer.device.engine() {
            Engine::Cpu(cpu) => cpu.memory(),
            Engine::Meta => panic!("a tensor without data was used"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::device;

    #[test]
    fn some_entries_are_written_and_the_others_left() {
        let mut tensor = device().upload([4, 2], &[1.0f32; 8]).unwrap();
        tensor.within(1..3, |rows| {
            assert_eq!(rows.shape(), [2, 2].into());
            rows.within(1..2, |row| row.data_mut::<f32>().fill(2.0));
        });
        assert_eq!(tensor.shape(), [4, 2].into());
        assert_eq!(tensor.to_vec::<f32>(), [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0]);
    }
}
