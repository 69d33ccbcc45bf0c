//! Memory of decoding images: what each takes, known from its header, and as many at once as there is room for.

use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};

use super::header;
use super::problem::ProblemKind;
use super::resize::scaling_bytes;

/// Images that are decoded at once, at most. Chosen: a decoder is some ten times as fast as an encoder on the same core.
pub const MAX_DECODERS: usize = 4;

/// Bytes of images that are counted with the program. Measured on a Xeon, 2026-11-15, with latents that are not written
/// yet.
pub const SMALL_BYTES: usize = 24 << 20;

/// Bytes at the peak of decoding an image and scaling it to a width and height.
pub fn decoding_bytes(path: &Path, to: [u32; 2]) -> Result<usize, ProblemKind> {
    let header = header::read(path)?;
    Ok(header.decoding_bytes.max(scaling_bytes(header.size, to)))
}

/// What decoding the images of a job takes in main memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecodingNeed {
    /// The image that takes the most.
    pub largest: PathBuf,
    /// Bytes that it takes.
    pub largest_bytes: usize,
    /// Bytes that all of them would take at once.
    pub all_bytes: usize,
    /// Bytes of images that were decoded and wait to be encoded.
    pub waiting_bytes: usize,
}

impl DecodingNeed {
    /// With another image.
    pub(crate) fn add(&mut self, path: &Path, bytes: usize) {
        self.all_bytes = self.all_bytes.saturating_add(bytes);
        if bytes > self.largest_bytes {
            (self.largest, self.largest_bytes) = (path.into(), bytes);
        }
    }

    /// Bytes that are enough for one image at a time.
    pub fn least_bytes(&self) -> usize {
        self.waiting_bytes.saturating_add(self.largest_bytes)
    }

    /// Bytes for decoders if there is room for so many: for as many images at once as fit; none if one does not.
    pub fn fit(&self, room: usize) -> Option<usize> {
        let room = room.checked_sub(self.waiting_bytes)?;
        let most = self.largest_bytes.saturating_mul(MAX_DECODERS).min(self.all_bytes);
        (room >= self.largest_bytes).then_some(most.min(room))
    }
}

/// Memory for decoders, which wait for each other where it is short.
pub struct DecodingMemory {
    limit: usize,
    taken: Mutex<usize>,
    freed: Condvar,
}

/// A part of it, until it is dropped.
pub struct ReservedDecoding<'a> {
    memory: &'a DecodingMemory,
    bytes: usize,
}

impl DecodingMemory {
    /// Of so many bytes.
    pub fn new(limit: usize) -> Self {
        Self { limit, taken: Mutex::new(0), freed: Condvar::new() }
    }

    /// Waits until so many bytes are free; fails if they never are.
    pub fn reserve(&self, bytes: usize) -> Result<ReservedDecoding<'_>, ProblemKind> {
        if bytes > self.limit {
            return Err(ProblemKind::DecodingMemory { needed: bytes, limit: self.limit });
        }
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let is_short = |taken: &mut usize| *taken + bytes > self.limit;
        let freed = self.freed.wait_while(taken, is_short);
        *freed.unwrap_or_else(PoisonError::into_inner) += bytes;
        Ok(ReservedDecoding { memory: self, bytes })
    }
}

impl Drop for ReservedDecoding<'_> {
    fn drop(&mut self) {
        *self.memory.taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
        self.memory.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread::scope;

    use super::*;

    #[test]
    fn decoders_never_hold_more_than_the_limit() {
        let memory = DecodingMemory::new(10);
        let (held, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        scope(|scope| {
            for bytes in [4, 7, 10, 1, 6, 3] {
                let (memory, held, most) = (&memory, &held, &most);
                scope.spawn(move || {
                    for _ in 0..50 {
                        let _reserved = memory.reserve(bytes).unwrap();
                        most.fetch_max(
                            held.fetch_add(bytes, Ordering::SeqCst) + bytes,
                            Ordering::SeqCst,
                        );
                        held.fetch_sub(bytes, Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 10);
        assert!(matches!(
            memory.reserve(11),
            Err(ProblemKind::DecodingMemory { needed: 11, limit: 10 })
        ));
    }

    #[test]
    fn fewer_are_decoded_at_once_where_memory_is_short() {
        let mut need = DecodingNeed { waiting_bytes: 5, ..DecodingNeed::default() };
        need.add(Path::new("a"), 100);
        assert_eq!(need.fit(1000), Some(100), "there is one alone");
        for _ in 0..20 {
            need.add(Path::new("b"), 30);
        }
        assert_eq!((need.largest.as_path(), need.least_bytes()), (Path::new("a"), 105));
        assert_eq!(
            [104, 105, 255, 1000].map(|room| need.fit(room)),
            [None, Some(100), Some(250), Some(400)]
        );
    }
}
