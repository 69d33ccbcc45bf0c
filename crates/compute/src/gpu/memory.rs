//! The arena's memory on a GPU: as few buffers as its limits allow, each made when the arena first
//! reaches into it and kept until the end. Drivers have trouble with many that come and go.

use std::sync::OnceLock;

use wgpu::{Buffer, BufferDescriptor, BufferUsages};

use super::opened::Opened;
use crate::Result;

pub(super) struct Memory {
    /// Bytes of every buffer but the last.
    each: usize,
    /// Bytes of all.
    bytes: usize,
    buffers: Vec<OnceLock<Buffer>>,
}

impl Memory {
    pub fn new(bytes: usize, each: usize) -> Self {
        let count = bytes.div_ceil(each).max(1);
        Self { each, bytes, buffers: (0..count).map(|_| OnceLock::new()).collect() }
    }

    /// Makes sure that there is memory up to `extent`.
    pub fn commit(&self, opened: &Opened, extent: usize) -> Result<()> {
        for (index, place) in self.buffers.iter().take(extent.div_ceil(self.each)).enumerate() {
            if place.get().is_none() {
                let bytes = self.each.min(self.bytes - index * self.each);
                let made = opened.try_to("taking memory", || make(&opened.device, bytes))?;
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
}

fn make(device: &wgpu::Device, bytes: usize) -> Buffer {
    let usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
    let size = bytes.next_multiple_of(super::ALIGNMENT) as u64;
    device.create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
}
