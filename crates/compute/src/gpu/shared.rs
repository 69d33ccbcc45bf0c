//! Where GPU and CPU share memory, the CPU writes straight into the arena: no second copy of a weight ever
//! exists. A buffer cannot be both mapped and computed with, so it is mapped
//! for as long as it is written to.
//!
//! wgpu hands out memory that was never used as zeros, which it writes when it is first mapped: a pass over
//! it, and no copy. It is written to and not read: the CPU may not cache it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::mpsc;

use wgpu::{Buffer, BufferViewMut, MapMode};

use super::{GpuBackend, stopped};
use crate::Result;

impl GpuBackend {
    /// Whether the CPU can write into the arena.
    pub fn has_shared_memory(&self) -> bool {
        self.memory.is_shared
    }

    /// Lets `fill` write to places of the arena, none of which overlap, when all work before is done.
    pub fn fill<R>(
        &self,
        places: &[Range<usize>],
        fill: impl FnOnce(Vec<&mut [u8]>) -> R,
    ) -> Result<R> {
        let mapped = self.map(places)?;
        let mut views = places.iter().map(|place| self.view(place)).collect::<Result<Vec<_>>>()?;
        let parts = views.iter_mut().zip(places);
        let done = fill(parts.map(|(view, place)| slice(view.as_mut(), place.len())).collect());
        drop((views, mapped));
        Ok(done)
    }

    /// Maps what places lie in.
    fn map(&self, places: &[Range<usize>]) -> Result<MappedBuffers> {
        self.submissions().send(&self.context);
        let (mut mapped, mut waits) = (MappedBuffers(Vec::new()), Vec::new());
        for (buffer, stretch) in self.memory.made().ranges(places) {
            let (sender, receiver) = mpsc::channel();
            buffer.map_async(MapMode::Write, stretch, move |mapped| _ = sender.send(mapped));
            mapped.0.push(buffer.clone());
            waits.push(receiver);
        }
        self.wait()?;
        for wait in waits {
            wait.recv().map_err(|error| stopped(&error))?.map_err(|error| stopped(&error))?;
        }
        Ok(mapped)
    }

    /// A place of a mapped buffer; nothing of an empty one.
    fn view(&self, place: &Range<usize>) -> Result<Option<BufferViewMut>> {
        if place.is_empty() {
            return Ok(None);
        }
        let buffers = self.memory.made();
        let (buffer, start) = buffers.at(place.start);
        let end = start + place.len().next_multiple_of(4);
        let view = buffer.get_mapped_range_mut(start as u64..end as u64);
        Ok(Some(view.map_err(|error| stopped(&error))?))
    }
}

/// Buffers that are mapped, until they are dropped.
struct MappedBuffers(Vec<Buffer>);

impl Drop for MappedBuffers {
    fn drop(&mut self) {
        self.0.iter().for_each(Buffer::unmap);
    }
}

/// The first bytes of a view.
fn slice(view: Option<&mut BufferViewMut>, bytes: usize) -> &mut [u8] {
    let Some(view) = view else { return &mut [] };
    let start = view.slice(..bytes).as_raw_ptr();
    // SAFETY: wgpu mapped the range, initialised it, and keeps it mapped as long as the view lives, which is
    // borrowed exclusively; views do not overlap, as it checks. wgpu itself hands out no such slice
    // because atomic operations may not work on this memory, and those need `Atomic` types.
    unsafe { &mut *start.as_ptr() }
}
