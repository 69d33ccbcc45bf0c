//! The allocator of a device's arena: which bytes are in use. It never touches memory, so the meta device
//! runs the same code over an imaginary range.
//!
//! Best fit among the free blocks; only if none is large enough the range grows at its top. So a tensor's
//! offset never depends on the limit: a sequence of allocations that needed N bytes once always fits into N
//! bytes. Only a limit that is lowered below what is in use changes that: nothing new is placed beyond it,
//! and what is there already stays.
//!
//! Where memory is made of buffers ([`BufferLayout`]), no block lies across two of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use crate::{ComputeError, Result};

/// What memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
pub enum Tag {
    Weights,
    Parameters,
    Gradients,
    Optimizer,
    Data,
    Activations,
    Workspace,
}

impl Tag {
    /// All of them, in the order of [`Usage`]'s columns.
    pub const ALL: [Self; 7] = [
        Self::Weights,
        Self::Parameters,
        Self::Gradients,
        Self::Optimizer,
        Self::Data,
        Self::Activations,
        Self::Workspace,
    ];
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::Optimizer => "optimizer",
            Self::Data => "data",
            Self::Activations => "activations",
            Self::Workspace => "workspace",
        })
    }
}

/// Bytes of an arena, now and at the worst moment so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of live tensors, each rounded up to the alignment.
    pub in_use: usize,
    /// The most that was in use at once.
    pub peak: usize,
    /// The highest end of a block so far, free blocks below it included: the memory that a run needs.
    pub extent: usize,
    /// Bytes in use by [`Tag`].
    pub by_tag: [usize; Tag::ALL.len()],
    /// The same at the moment of the peak.
    pub by_tag_at_peak: [usize; Tag::ALL.len()],
}

/// Where the buffers begin and end that an arena's memory is made of: from zero on, each as large as it can be,
/// and from `resident_bytes` on again. So no buffer has both what lives as long as a run and what does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferLayout {
    /// Bytes of a buffer at most.
    pub buffer_bytes: usize,
    /// The first bytes of the arena, for what lives as long as a run. A multiple of the alignment.
    pub resident_bytes: usize,
}

impl BufferLayout {
    /// The buffer that a byte lies in.
    pub fn buffer_at(&self, offset: usize) -> Range<usize> {
        let Self { buffer_bytes, resident_bytes } = *self;
        if offset < resident_bytes {
            let start = offset - offset % buffer_bytes;
            start..start.saturating_add(buffer_bytes).min(resident_bytes)
        } else {
            let start = offset - (offset - resident_bytes) % buffer_bytes;
            start..start.saturating_add(buffer_bytes)
        }
    }

    /// The first offset from `start` on at which a block lies within one buffer. It is no larger than a buffer.
    fn place(&self, mut start: usize, size: usize) -> usize {
        loop {
            let buffer = self.buffer_at(start);
            if size <= buffer.end - start || buffer.end == usize::MAX {
                return start;
            }
            // The next one may be too short as well: the last of the resident part.
            start = buffer.end;
        }
    }
}

pub(crate) struct Arena {
    /// Bytes there are.
    size: usize,
    /// Nothing new ends beyond this.
    limit: usize,
    alignment: usize,
    buffers: BufferLayout,
    /// Everything from here on is free.
    top: usize,
    taken: BTreeMap<usize, (usize, Tag)>,
    holes: BTreeMap<usize, usize>,
    holes_by_size: BTreeSet<(usize, usize)>,
    usage: Usage,
    /// Allocations so far, those that failed included.
    n_requests: u64,
    /// The allocation that fails even if there is memory (for tests).
    fails_at: Option<u64>,
}

impl Arena {
    pub fn new(size: usize, alignment: usize) -> Self {
        Self {
            size,
            limit: size,
            alignment,
            buffers: BufferLayout { buffer_bytes: usize::MAX, resident_bytes: 0 },
            top: 0,
            taken: BTreeMap::new(),
            holes: BTreeMap::new(),
            holes_by_size: BTreeSet::new(),
            usage: Usage::default(),
            n_requests: 0,
            fails_at: None,
        }
    }

    /// With buffers of so many bytes each.
    pub fn in_buffers(mut self, bytes: usize) -> Self {
        self.buffers.buffer_bytes = bytes;
        self
    }

    /// Sets how much of it is for what lives as long as a run.
    ///
    /// # Panics
    /// If anything is allocated: it may lie across the boundary.
    pub fn set_resident(&mut self, bytes: usize) {
        assert!(self.taken.is_empty(), "buffers are arranged before anything is allocated");
        self.buffers.resident_bytes = bytes.next_multiple_of(self.alignment);
    }

    /// Where its buffers begin and end.
    pub fn buffers(&self) -> BufferLayout {
        self.buffers
    }

    /// Where live blocks begin in a range of bytes.
    pub fn blocks_in(&self, range: &Range<usize>) -> impl Iterator<Item = usize> {
        self.taken.range(range.clone()).map(|(start, _)| *start)
    }

    /// Nothing new ends beyond this.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Sets the limit for new allocations, at most the arena's size.
    pub fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes.min(self.size);
    }

    /// Everything from here on is free.
    pub fn top(&self) -> usize {
        self.top
    }

    pub fn n_requests(&self) -> u64 {
        self.n_requests
    }

    /// The `nth` allocation from now, the next being the first, fails once.
    pub fn fail_request(&mut self, nth: u64) {
        self.fails_at = Some(self.n_requests + nth);
    }

    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Peaks from now on.
    pub fn reset_peak(&mut self) {
        self.usage.peak = self.usage.in_use;
        self.usage.by_tag_at_peak = self.usage.by_tag;
        self.usage.extent = self.top;
    }

    /// Allocates `bytes` and returns the offset.
    pub fn alloc(&mut self, bytes: usize, tag: Tag) -> Result<usize> {
        let out_of_memory = |arena: &Self| ComputeError::OutOfMemory {
            asked: bytes,
            in_use: arena.usage.in_use,
            limit: arena.limit,
            largest_free: arena.largest_free(),
            tag,
        };
        self.n_requests += 1;
        if self.fails_at.take_if(|at| *at == self.n_requests).is_some() {
            return Err(out_of_memory(self));
        }
        let size = bytes.checked_next_multiple_of(self.alignment);
        let size = size.ok_or_else(|| out_of_memory(self))?;
        let offset = self.find_offset(size).ok_or_else(|| out_of_memory(self))?;
        self.taken.insert(offset, (size, tag));
        self.count(size, tag);
        Ok(offset)
    }

    /// Frees what `alloc` returned.
    pub fn free(&mut self, offset: usize) {
        let (size, tag) = self.taken.remove(&offset).expect("every block is freed once");
        self.usage.in_use -= size;
        self.usage.by_tag[tag as usize] -= size;
        let (mut start, mut end) = (offset, offset + size);
        if let Some((&before, &length)) = self.holes.range(..start).next_back()
            && before + length == start
        {
            self.remove_hole(before, length);
            start = before;
        }
        if let Some(&length) = self.holes.get(&end) {
            self.remove_hole(end, length);
            end += length;
        }
        if end == self.top {
            self.top = start;
        } else {
            self.insert_hole(start, end - start);
        }
    }

    /// Counts what `alloc` returned under another tag from now on.
    pub fn retag(&mut self, offset: usize, tag: Tag) {
        let (size, before) = self.taken.get_mut(&offset).expect("only live blocks are counted");
        self.usage.by_tag[*before as usize] -= *size;
        self.usage.by_tag[tag as usize] += *size;
        *before = tag;
    }

    fn find_offset(&mut self, size: usize) -> Option<usize> {
        if size > self.buffers.buffer_bytes {
            return None;
        }
        let mut holes = self.holes_by_size.range((size, 0)..);
        let fits = |&&(length, hole): &&(usize, usize)| {
            let end = self.buffers.place(hole, size) + size;
            end <= hole + length && end <= self.limit
        };
        if let Some(&(length, hole)) = holes.find(fits) {
            let start = self.buffers.place(hole, size);
            self.remove_hole(hole, length);
            self.keep_hole(hole, start);
            self.keep_hole(start + size, hole + length);
            return Some(start);
        }
        let start = self.buffers.place(self.top, size);
        let end = start.checked_add(size).filter(|end| *end <= self.limit)?;
        self.keep_hole(self.top, start);
        self.top = end;
        self.usage.extent = self.usage.extent.max(end);
        Some(start)
    }

    fn count(&mut self, size: usize, tag: Tag) {
        let usage = &mut self.usage;
        usage.in_use += size;
        usage.by_tag[tag as usize] += size;
        if usage.in_use > usage.peak {
            usage.peak = usage.in_use;
            usage.by_tag_at_peak = usage.by_tag;
        }
    }

    fn largest_free(&self) -> usize {
        let free = |(start, length): (&usize, &usize)| {
            (start + length).min(self.limit).saturating_sub(*start)
        };
        let hole = self.holes.iter().map(free).max().unwrap_or(0);
        hole.max(self.limit.saturating_sub(self.top))
    }

    fn keep_hole(&mut self, start: usize, end: usize) {
        if start < end {
            self.insert_hole(start, end - start);
        }
    }

    fn insert_hole(&mut self, start: usize, length: usize) {
        self.holes.insert(start, length);
        self.holes_by_size.insert((length, start));
    }

    fn remove_hole(&mut self, start: usize, length: usize) {
        self.holes.remove(&start);
        self.holes_by_size.remove(&(length, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::TestRng;

    /// Random allocations and frees; returns what is still allocated.
    fn churn(arena: &mut Arena, seed: u64, moves: usize) -> Vec<(usize, usize)> {
        let mut random = TestRng::new(seed);
        let mut held: Vec<(usize, usize)> = Vec::new();
        for _ in 0..moves {
            if held.is_empty() || random.below(5) < 3 {
                let most = if random.below(9) == 0 { 9000 } else { 300 };
                let bytes = 1 + random.below(most);
                if let Ok(offset) = arena.alloc(bytes, Tag::Activations) {
                    held.push((offset, bytes));
                }
            } else {
                let (offset, _) = held.swap_remove(random.below(held.len()));
                arena.free(offset);
            }
        }
        held
    }

    #[test]
    fn blocks_never_overlap_and_all_are_freed() {
        for seed in 0..50 {
            let mut arena = Arena::new(1 << 20, 64);
            let mut held = churn(&mut arena, seed, 2000);
            held.sort_unstable();
            for pair in held.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            let in_use: usize = held.iter().map(|(_, bytes)| bytes.next_multiple_of(64)).sum();
            assert_eq!(arena.usage().in_use, in_use);
            for (offset, _) in held {
                arena.free(offset);
            }
            assert_eq!((arena.usage().in_use, arena.top, arena.holes.len()), (0, 0, 0));
        }
    }

    #[test]
    fn what_fitted_once_fits_into_exactly_its_extent() {
        for seed in 0..50 {
            let mut endless = Arena::new(usize::MAX, 64);
            let held = churn(&mut endless, seed, 2000);
            let mut exact = Arena::new(endless.usage().extent, 64);
            assert_eq!(churn(&mut exact, seed, 2000), held);
            assert_eq!(exact.usage(), endless.usage());
        }
    }

    #[test]
    fn blocks_lie_within_one_buffer_each() {
        for seed in 0..50 {
            let mut arena = Arena::new(1 << 20, 64).in_buffers(10_048);
            let mut held = churn(&mut arena, seed, 2000);
            held.sort_unstable();
            for (offset, bytes) in &held {
                assert_eq!(offset / 10_048, (offset + bytes - 1) / 10_048, "{offset} {bytes}");
            }
            assert!(held.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
            let mut exact = Arena::new(arena.usage().extent, 64).in_buffers(10_048);
            let mut again = churn(&mut exact, seed, 2000);
            again.sort_unstable();
            assert_eq!((again, exact.usage()), (held, arena.usage()));
            let left: Vec<usize> = arena.taken.keys().copied().collect();
            for offset in left {
                arena.free(offset);
            }
            assert_eq!((arena.usage().in_use, arena.top, arena.holes.len()), (0, 0, 0));
        }
        assert!(Arena::new(1 << 20, 64).in_buffers(10_048).alloc(10_049, Tag::Data).is_err());
    }

    #[test]
    fn no_block_lies_across_the_end_of_the_resident_part() {
        // Multiples of the buffer, and sizes that leave a last buffer of 64 bytes or half a buffer.
        for resident in [0, 10_048, 10_112, 15_104, 30_144] {
            let new = |size| {
                let mut arena = Arena::new(size, 64).in_buffers(10_048);
                arena.set_resident(resident);
                arena
            };
            for seed in 0..20 {
                let mut arena = new(1 << 20);
                let held = churn(&mut arena, seed, 2000);
                let layout = arena.buffers();
                for (offset, bytes) in &held {
                    let buffer = layout.buffer_at(*offset);
                    assert!(buffer.end - buffer.start <= 10_048);
                    assert!(buffer.end <= resident || buffer.start >= resident, "{buffer:?}");
                    assert!(offset + bytes <= buffer.end, "{offset} {bytes} {buffer:?}");
                    assert!(arena.blocks_in(&buffer).any(|start| start == *offset));
                }
                let mut exact = new(arena.usage().extent);
                assert_eq!(churn(&mut exact, seed, 2000), held);
                let left: Vec<usize> = arena.taken.keys().copied().collect();
                for offset in left {
                    arena.free(offset);
                }
                assert_eq!(arena.blocks_in(&layout.buffer_at(resident)).next(), None);
                assert_eq!((arena.usage().in_use, arena.top, arena.holes.len()), (0, 0, 0));
            }
        }
    }

    #[test]
    fn a_block_skips_a_last_resident_buffer_that_is_too_short() {
        let mut arena = Arena::new(1 << 20, 64).in_buffers(1024);
        arena.set_resident(1024 + 128);
        assert_eq!(arena.alloc(960, Tag::Weights).unwrap(), 0);
        assert_eq!(arena.alloc(512, Tag::Activations).unwrap(), 1152);
        assert_eq!(arena.alloc(128, Tag::Weights).unwrap(), 1024);
        assert_eq!(arena.alloc(1024, Tag::Activations).unwrap(), 1152 + 1024);
    }

    #[test]
    fn the_smallest_free_block_that_fits_is_taken() {
        let mut arena = Arena::new(1 << 20, 64);
        let sizes = [256, 64, 128, 64, 512, 64];
        let at: Vec<usize> =
            sizes.iter().map(|size| arena.alloc(*size, Tag::Data).unwrap()).collect();
        for hole in [0, 2, 4] {
            arena.free(at[hole]);
        }
        assert_eq!(arena.alloc(100, Tag::Data).unwrap(), at[2]);
        assert_eq!(arena.alloc(129, Tag::Data).unwrap(), at[0]);
    }

    #[test]
    fn running_out_says_what_was_asked_and_what_there_is() {
        let mut arena = Arena::new(1000, 64);
        let first = arena.alloc(300, Tag::Weights).unwrap();
        arena.alloc(300, Tag::Weights).unwrap();
        arena.free(first);
        let error = arena.alloc(500, Tag::Gradients).unwrap_err().to_string();
        let message = "out of memory for gradients: asked 500 B, in use 320 B of 1000 B, largest free block 360 B";
        assert_eq!(error, message);
        assert!(arena.alloc(usize::MAX, Tag::Data).is_err());
        assert_eq!(arena.alloc(320, Tag::Data).unwrap(), first);
    }

    #[test]
    fn a_lowered_limit_keeps_what_is_there_and_places_nothing_beyond() {
        let mut arena = Arena::new(1024, 64);
        let at: Vec<usize> = (0..5).map(|_| arena.alloc(128, Tag::Data).unwrap()).collect();
        arena.set_limit(300);
        // Of two free blocks that fit, the one within the limit is taken, and then none.
        arena.free(at[3]);
        arena.free(at[1]);
        assert_eq!(arena.alloc(128, Tag::Data).unwrap(), at[1]);
        let error = arena.alloc(64, Tag::Data).unwrap_err().to_string();
        assert!(error.ends_with("in use 512 B of 300 B, largest free block 0 B"), "{error}");
        // A free block across the limit counts as far as it is within.
        arena.free(at[2]);
        let error = arena.alloc(128, Tag::Data).unwrap_err().to_string();
        assert!(error.ends_with("in use 384 B of 300 B, largest free block 44 B"), "{error}");
        arena.set_limit(usize::MAX);
        assert_eq!(arena.alloc(128, Tag::Data).unwrap(), at[2]);
        assert!(arena.alloc(1024, Tag::Data).is_err(), "more than there is");
        for taken in [0, 1, 2, 4] {
            arena.free(at[taken]);
        }
        assert_eq!((arena.usage().in_use, arena.top), (0, 0));
    }

    #[test]
    fn one_allocation_fails_on_request() {
        let mut arena = Arena::new(1 << 20, 64);
        arena.alloc(64, Tag::Data).unwrap();
        arena.fail_request(2);
        arena.alloc(64, Tag::Data).unwrap();
        let before = arena.usage();
        let error = arena.alloc(64, Tag::Weights).unwrap_err().to_string();
        assert!(error.starts_with("out of memory for weights: asked 64 B, in use 128 B"));
        assert_eq!((arena.usage(), arena.n_requests()), (before, 3));
        arena.alloc(64, Tag::Data).unwrap();
    }

    #[test]
    fn tags_are_counted_now_and_at_the_peak() {
        let mut arena = Arena::new(1 << 20, 64);
        arena.alloc(64, Tag::Weights).unwrap();
        let big = arena.alloc(640, Tag::Activations).unwrap();
        arena.free(big);
        let data = arena.alloc(128, Tag::Activations).unwrap();
        arena.retag(data, Tag::Data);
        let usage = arena.usage();
        let of = |tags: [usize; 7], tag: Tag| tags[tag as usize];
        assert_eq!((usage.in_use, usage.peak, usage.extent), (192, 704, 704));
        assert_eq!(of(usage.by_tag_at_peak, Tag::Activations), 640);
        assert_eq!((of(usage.by_tag, Tag::Activations), of(usage.by_tag, Tag::Data)), (0, 128));
        arena.free(data);
        assert_eq!(arena.usage().by_tag, [64, 0, 0, 0, 0, 0, 0]);
    }
}
