//! The arena's memory on a GPU: as few buffers as its limits allow, arranged by [`BufferLayout`]. Each is made when
//! the arena first reaches into it. One without a live block can be dropped, and is made again when it is needed:
//! drivers have trouble with many that come and go, but not with a few, between steps.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

use wgpu::{Buffer, BufferDescriptor, BufferUsages};

use super::context::WgpuContext;
use crate::Result;
use crate::arena::BufferLayout;

pub(super) struct GpuBuffers {
    /// Whether the CPU may write into them.
    pub is_shared: bool,
    made: RwLock<MadeBuffers>,
    committed: Arc<AtomicU64>,
}

/// The buffers that there are.
pub(super) struct MadeBuffers {
    layout: BufferLayout,
    /// By where in the arena they begin.
    by_start: BTreeMap<usize, Buffer>,
}

impl GpuBuffers {
    /// None yet, each of up to `buffer_bytes`.
    pub fn new(buffer_bytes: usize, is_shared: bool) -> Self {
        let layout = BufferLayout { buffer_bytes, resident_bytes: 0 };
        let made = RwLock::new(MadeBuffers { layout, by_start: BTreeMap::new() });
        Self { is_shared, made, committed: Arc::default() }
    }

    /// Bytes of all that there are, as they come and go.
    pub fn committed(&self) -> &Arc<AtomicU64> {
        &self.committed
    }

    /// Those that there are, which stay as long as this is borrowed.
    pub fn made(&self) -> RwLockReadGuard<'_, MadeBuffers> {
        self.made.read().expect("nothing panics while a buffer is made")
    }

    /// Makes the buffer that begins at `range.start`.
    pub fn make(&self, context: &WgpuContext, range: &Range<usize>) -> Result<Buffer> {
        let mut usage = BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST;
        usage.set(BufferUsages::MAP_WRITE, self.is_shared);
        let size = range.len().next_multiple_of(super::ALIGNMENT) as u64;
        let description = BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
        context.with_error_scope("taking memory", || context.device.create_buffer(&description))
    }

    /// Puts a buffer in its place, instead of any that is there.
    pub fn insert(&self, start: usize, buffer: Buffer) {
        self.change(|made| _ = made.by_start.insert(start, buffer));
    }

    /// Drops buffers, by the range of the arena that each may reach over. Work that uses them must be done.
    pub fn drop_if(&self, is_idle: impl Fn(&Range<usize>) -> bool) {
        self.change(|made| {
            let layout = made.layout;
            made.by_start.retain(|start, _| !is_idle(&layout.buffer_at(*start)));
        });
    }

    /// Drops all; those that follow are arranged by another layout.
    pub fn set_layout(&self, layout: BufferLayout) {
        self.change(|made| *made = MadeBuffers { layout, by_start: BTreeMap::new() });
    }

    fn change(&self, change: impl FnOnce(&mut MadeBuffers)) {
        let mut made: RwLockWriteGuard<'_, _> =
            self.made.write().expect("nothing panics while a buffer is made");
        change(&mut made);
        let bytes = made.by_start.values().map(Buffer::size).sum();
        self.committed.store(bytes, Ordering::Relaxed);
    }
}

impl MadeBuffers {
    /// The buffer that begins there, if it was made.
    pub fn get(&self, start: usize) -> Option<&Buffer> {
        self.by_start.get(&start)
    }

    /// Whether any of them may be dropped.
    pub fn any(&self, is_idle: impl Fn(&Range<usize>) -> bool) -> bool {
        self.by_start.keys().any(|start| is_idle(&self.layout.buffer_at(*start)))
    }

    /// The buffer that a place of the arena lies in, and where in it.
    pub fn at(&self, offset: usize) -> (&Buffer, usize) {
        let start = self.layout.buffer_at(offset).start;
        let buffer = self.get(start).expect("no tensor lies beyond what was committed");
        (buffer, offset - start)
    }

    /// The buffers in which places of the arena lie, each with the stretch that covers those of them
    /// that lie in it.
    pub fn ranges(&self, places: &[Range<usize>]) -> Vec<(&Buffer, Range<u64>)> {
        let mut found: BTreeMap<usize, Range<usize>> = BTreeMap::new();
        for place in places.iter().filter(|place| !place.is_empty()) {
            let start = self.layout.buffer_at(place.start).start;
            let stretch = found.entry(start).or_insert_with(|| place.clone());
            *stretch = stretch.start.min(place.start)..stretch.end.max(place.end);
        }
        let within = |(start, stretch): (usize, Range<usize>)| {
            let (buffer, from) = self.at(stretch.start);
            let end = (stretch.end - start).next_multiple_of(super::ALIGNMENT);
            (buffer, from as u64..end as u64)
        };
        found.into_iter().map(within).collect()
    }
}
