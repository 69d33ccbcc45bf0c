//! The arena's memory on a GPU: as few buffers as its limits allow, each made when the arena first
//! reaches into it and kept until the end. Drivers have trouble with many that come and go.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use wgpu::{Buffer, BufferDescriptor, BufferUsages};

use super::context::WgpuContext;
use crate::Result;

pub(super) struct GpuBuffers {
    /// Bytes of every buffer but the last.
    buffer_bytes: usize,
    /// Bytes of all.
    bytes: usize,
    /// Whether the CPU may write into them.
    pub is_shared: bool,
    buffers: Vec<OnceLock<Buffer>>,
}

impl GpuBuffers {
    pub fn new(bytes: usize, each: usize, is_shared: bool) -> Self {
        let count = bytes.div_ceil(each).max(1);
        let buffers = (0..count).map(|_| OnceLock::new()).collect();
        Self { buffer_bytes: each, bytes, is_shared, buffers }
    }

    /// Makes sure that there is memory up to `extent`.
    pub fn commit(&self, context: &WgpuContext, extent: usize) -> Result<()> {
        for (index, place) in
            self.buffers.iter().take(extent.div_ceil(self.buffer_bytes)).enumerate()
        {
            if place.get().is_none() {
                let bytes = self.buffer_bytes.min(self.bytes - index * self.buffer_bytes);
                let made =
                    context.with_error_scope("taking memory", || self.make(context, bytes))?;
                place.get_or_init(|| made);
            }
        }
        Ok(())
    }

    /// The buffer that a place of the arena lies in, and where in it.
    pub fn at(&self, offset: usize) -> (&Buffer, usize) {
        let buffer = self.buffers[offset / self.buffer_bytes].get();
        (buffer.expect("no tensor lies beyond what was committed"), offset % self.buffer_bytes)
    }

    /// The buffers in which places of the arena lie, each with the stretch that covers those of them
    /// that lie in it.
    pub fn buffer_ranges(&self, places: &[Range<usize>]) -> Vec<(&Buffer, Range<u64>)> {
        let mut found: BTreeMap<usize, Range<usize>> = BTreeMap::new();
        for place in places.iter().filter(|place| !place.is_empty()) {
            let stretch =
                found.entry(place.start / self.buffer_bytes).or_insert_with(|| place.clone());
            *stretch = stretch.start.min(place.start)..stretch.end.max(place.end);
        }
        let within = |(index, stretch): (usize, Range<usize>)| {
            let (buffer, start) = self.at(stretch.start);
            let end = (stretch.end - index * self.buffer_bytes).next_multiple_of(super::ALIGNMENT);
            (buffer, start as u64..end as u64)
        };
        found.into_iter().map(within).collect()
    }

    fn make(&self, context: &WgpuContext, bytes: usize) -> Buffer {
        let mut usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        usage.set(BufferUsages::MAP_WRITE, self.is_shared);
        let size = bytes.next_multiple_of(super::ALIGNMENT) as u64;
        let description = BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
        context.device.create_buffer(&description)
    }
}
