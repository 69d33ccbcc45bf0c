//! The arena's memory on a GPU: one range of addresses, reserved at once and given memory as the
//! arena grows. So a device may be made with a generous limit and takes from the GPU what its
//! tensors reach up to, rounded up to whole pieces.
//!
//! Where the GPU shares main memory, pieces above the last live tensor can be given back. A GPU with memory of its own
//! keeps them: nobody but other programs on that GPU could use them, and mapping takes time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::driver::CudaContext;
use crate::Result;

/// Memory is added in pieces of this many bytes, but for the last below the limit. Chosen: a piece
/// takes about a millisecond to add, and a plan is exceeded by no more than this.
const PIECE: usize = 64 << 20;

pub(super) struct CudaMemory {
    start: u64,
    /// Bytes of the range.
    bytes: usize,
    granularity: usize,
    pieces: Mutex<Vec<usize>>,
    /// Whether main memory is what it takes.
    is_shared: AtomicBool,
    committed: Arc<AtomicU64>,
}

impl CudaMemory {
    /// A range that ends at the first whole piece beyond `limit`.
    pub fn reserve(driver: &CudaContext, limit: usize) -> Result<Self> {
        driver.bind()?;
        let granularity = driver.granularity()?;
        let (_, total) = driver.memory()?;
        // More than the GPU has will never be used, and addresses are not without end either.
        let bytes = limit.min(total).max(1).next_multiple_of(granularity);
        let start = driver.reserve(bytes)?;
        let (pieces, is_shared, committed) = <_>::default();
        Ok(Self { start, bytes, granularity, pieces, is_shared, committed })
    }

    /// Bytes of all pieces, as they come and go.
    pub fn committed(&self) -> &Arc<AtomicU64> {
        &self.committed
    }

    /// Says whether main memory is what it takes.
    pub fn set_shared(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Relaxed);
    }

    /// Whether main memory is what it takes.
    pub fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    pub fn start(&self) -> u64 {
        self.start
    }

    /// How far it reaches.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes sure that there is memory up to `extent` bytes from the start.
    pub fn commit(&self, driver: &CudaContext, extent: usize) -> Result<()> {
        let mut pieces = self.pieces();
        let mut there: usize = pieces.iter().sum();
        while there < extent {
            let piece = PIECE.next_multiple_of(self.granularity);
            // Small ones, where they are given back: each is as a whole.
            let asked = if self.is_shared() { piece } else { extent - there };
            let piece = asked.next_multiple_of(piece);
            let piece = piece.min(self.bytes.saturating_sub(there)).max(self.granularity);
            driver.map(self.start + there as u64, piece)?;
            pieces.push(piece);
            there += piece;
            self.committed.store(there as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Gives pieces that lie above `extent` back; nothing on the GPU may be at work there any more.
    pub fn release_from(&self, driver: &CudaContext, extent: usize) -> Result<()> {
        let mut pieces = self.pieces();
        let mut there: usize = pieces.iter().sum();
        while let Some(piece) = pieces.last().copied()
            && there - piece >= extent
        {
            there -= piece;
            driver.unmap(self.start + there as u64, piece)?;
            pieces.pop();
            self.committed.store(there as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Gives everything back; nothing on the GPU may be at work any more.
    pub fn release(&self, driver: &CudaContext) {
        let pieces = self.pieces();
        let mut at = self.start;
        for piece in &*pieces {
            // What fails here is taken back with the process.
            let _ = driver.unmap(at, *piece);
            at += *piece as u64;
        }
        let _ = driver.unreserve(self.start, self.bytes);
    }

    fn pieces(&self) -> MutexGuard<'_, Vec<usize>> {
        self.pieces.lock().expect("nothing panics while pieces are counted")
    }
}
