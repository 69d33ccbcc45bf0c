//! The arena's memory on a GPU: as few buffers as its limits allow, each made when the arena first
//! reaches into it and kept until the end. Drivers have trouble with many that come and go.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

use wgpu::{Buffer, BufferDescriptor, BufferUsages};

use super::opened::Opened;
use crate::Result;

pub(super) struct Memory {
    /// Bytes of every buffer but the last.
    each: usize,
    /// Bytes of all.
    bytes: usize,
    /// Whether the processor may write into them.
    pub is_shared: bool,
    buffers: Vec<OnceLock<Buffer>>,
}

impl Memory {
    pub fn new(bytes: usize, each: usize, is_shared: bool) -> Self {
        let count = bytes.div_ceil(each).max(1);
        let buffers = (0..count).map(|_| OnceLock::new()).collect();
        Self { each, bytes, is_shared, buffers }
    }

    /// Makes sure that there is memory up to `extent`.
    pub fn commit(&self, opened: &Opened, extent: usize) -> Result<()> {
        for (index, place) in self.buffers.iter().take(extent.div_ceil(self.each)).enumerate() {
            if place.get().is_none() {
                let bytes = self.each.min(self.bytes - index * self.each);
                let made = opened.try_to("taking memory", || self.make(opened, bytes))?;
                place.get_or_init(|| made);
            }
        }
        Ok(())
    }

    /// The buffer that a place of the arena lies in, and where in it.
    pub fn at(&self, offset: usize) -> (&Buffer, usize) {
        let buffer = self.buffers[offset / self.each].get();
        (buffer.expect("no tensor lies beyond what was committed"), offset % self.each)
    }

    /// The buffers in which places of the arena lie, each with the stretch that covers those of them
    /// that lie in it.
    pub fn stretches(&self, places: &[Range<usize>]) -> Vec<(&Buffer, Range<u64>)> {
        let mut found: BTreeMap<usize, Range<usize>> = BTreeMap::new();
        for place in places.iter().filter(|place| !place.is_empty()) {
            let stretch = found.entry(place.start / self.each).or_insert_with(|| place.clone());
            *stretch = stretch.start.min(place.start)..stretch.end.max(place.end);
        }
        let within = |(index, stretch): (usize, Range<usize>)| {
            let (buffer, start) = self.at(stretch.start);
            let end = (stretch.end - index * self.each).next_multiple_of(super::ALIGNMENT);
            (buffer, start as u64..end as u64)
        };
        found.into_iter().map(within).collect()
    }

    fn make(&self, opened: &Opened, bytes: usize) -> Buffer {
        let mut usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        usage.set(BufferUsages::MAP_WRITE, self.is_shared);
        let size = bytes.next_multiple_of(super::ALIGNMENT) as u64;
        let description = BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
        opened.device.create_buffer(&description)
    }
}
