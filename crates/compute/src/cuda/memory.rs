//! The arena's memory on a GPU: one range of addresses, reserved at once and given memory as the
//! arena grows. So a device may be made with a generous limit and takes from the GPU what its
//! tensors reach up to, rounded up to whole pieces.

use std::sync::Mutex;

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
        Ok(Self { start, bytes, granularity, pieces: Mutex::default() })
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
        let mut pieces = self.pieces.lock().expect("nothing panics while pieces are counted");
        let mut there: usize = pieces.iter().sum();
        while there < extent {
            let piece = PIECE.next_multiple_of(self.granularity);
            let piece = piece.max((extent - there).next_multiple_of(piece));
            let piece = piece.min(self.bytes.saturating_sub(there)).max(self.granularity);
            driver.map(self.start + there as u64, piece)?;
            pieces.push(piece);
            there += piece;
        }
        Ok(())
    }

    /// Gives everything back; nothing on the GPU may be at work any more.
    pub fn release(&self, driver: &CudaContext) {
        let pieces = self.pieces.lock().expect("nothing panics while pieces are counted");
        let mut at = self.start;
        for piece in &*pieces {
            // What fails here is taken back with the process.
            let _ = driver.unmap(at, *piece);
            at += *piece as u64;
        }
        let _ = driver.unreserve(self.start, self.bytes);
    }
}
