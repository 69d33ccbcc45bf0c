//! The arena's memory on a GPU: one range of addresses, reserved at once and given memory as the
//! arena grows. So a device may be made with a generous limit and takes from the GPU what its
//! tensors reach up to, rounded up to whole pieces.
//!
//! Where the GPU shares main memory, pieces above the last live tensor can be given back, and pieces may be host memory,
//! which the CPU writes to (`host_memory.rs`). A GPU with memory of its own keeps them: nobody but other programs on that
//! GPU could use them, and mapping takes time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::driver::{CudaContext, PieceLocation};
use crate::{ComputeError, Result};

/// Memory is added in pieces of this many bytes, but for the last below the limit. Chosen: a piece
/// takes about a millisecond to add, and a plan is exceeded by no more than this.
pub(super) const PIECE: usize = 64 << 20;

pub(super) struct CudaMemory {
    start: u64,
    /// Bytes of the range.
    bytes: usize,
    granularity: usize,
    state: Mutex<PieceState>,
    /// Whether main memory is what it takes.
    is_shared: AtomicBool,
    committed: Arc<AtomicU64>,
    beside_process: Arc<AtomicU64>,
}

#[derive(Default)]
struct PieceState {
    pieces: Vec<ArenaPiece>,
    /// What new pieces are made of where main memory is what they take.
    host: Option<HostPieces>,
    /// Why the last piece that should have been of host memory is not.
    host_fault: Option<ComputeError>,
}

struct ArenaPiece {
    bytes: usize,
    /// What it is made of, if not the device's memory.
    host: Option<HostPieces>,
}

/// Host memory for pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostPieces {
    pub location: PieceLocation,
    /// Whether the process's own reading of its memory has them.
    pub is_resident: bool,
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
        let (state, is_shared) = <_>::default();
        let (committed, beside_process) = <_>::default();
        Ok(Self { start, bytes, granularity, state, is_shared, committed, beside_process })
    }

    /// Bytes of all pieces, as they come and go.
    pub fn committed(&self) -> &Arc<AtomicU64> {
        &self.committed
    }

    /// Those of them that a reading of the process does not have.
    pub fn beside_process(&self) -> &Arc<AtomicU64> {
        &self.beside_process
    }

    /// Says whether main memory is what it takes.
    pub fn set_shared(&self, is_shared: bool) {
        self.is_shared.store(is_shared, Ordering::Relaxed);
    }

    /// Whether main memory is what it takes.
    pub fn is_shared(&self) -> bool {
        self.is_shared.load(Ordering::Relaxed)
    }

    /// Makes further pieces of host memory, as long as main memory is what it takes.
    pub fn set_host(&self, host: Option<HostPieces>) {
        let mut state = self.state();
        (state.host, state.host_fault) = (host, None);
    }

    /// Why a piece that should have been of host memory is not, if one is not.
    pub fn host_fault(&self) -> Option<ComputeError> {
        self.state().host_fault.as_ref().map(ComputeError::again)
    }

    /// Whether all of some addresses are host memory.
    pub fn is_host(&self, address: u64, bytes: usize) -> bool {
        let from = (address - self.start) as usize;
        is_all_host(&self.state().pieces, from..from + bytes)
    }

    /// A stretch of addresses, cut where pieces of host memory begin and end: the driver sets and copies bytes within
    /// one of them, but not across two.
    pub fn cut(&self, address: u64, bytes: usize) -> Vec<(u64, usize)> {
        let is_own = address.checked_sub(self.start).is_some_and(|at| at < self.bytes as u64);
        if !is_own || !self.is_shared() {
            return vec![(address, bytes)];
        }
        let from = (address - self.start) as usize;
        let cut = cut(&self.state().pieces, from..from + bytes);
        cut.into_iter().map(|part| (self.start + part.start as u64, part.len())).collect()
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
        let mut state = self.state();
        let mut there = state.bytes();
        while there < extent {
            let piece = PIECE.next_multiple_of(self.granularity);
            // Small ones, where they are given back: each is as a whole.
            let asked = if self.is_shared() { piece } else { extent - there };
            let bytes = asked.next_multiple_of(piece);
            let bytes = bytes.min(self.bytes.saturating_sub(there)).max(self.granularity);
            let host = self.map(driver, &mut state, there, bytes)?;
            state.pieces.push(ArenaPiece { bytes, host });
            there += bytes;
            self.count(&state);
        }
        Ok(())
    }

    /// Maps a piece, and says of which host memory it is made. Where that cannot be had, the device's serves as well:
    /// it is only filled another way.
    fn map(
        &self,
        driver: &CudaContext,
        state: &mut PieceState,
        at: usize,
        bytes: usize,
    ) -> Result<Option<HostPieces>> {
        let address = self.start + at as u64;
        if let Some(host) = state.host.filter(|_| self.is_shared()) {
            match driver.map(address, bytes, host.location) {
                Ok(()) => return Ok(Some(host)),
                Err(error) => state.host_fault = Some(error),
            }
        }
        driver.map(address, bytes, PieceLocation::Device).map(|()| None)
    }

    /// Gives pieces that lie above `extent` back; nothing on the GPU may be at work there any more.
    pub fn release_from(&self, driver: &CudaContext, extent: usize) -> Result<()> {
        let mut state = self.state();
        let mut there = state.bytes();
        while let Some(piece) = state.pieces.last().map(|piece| piece.bytes)
            && there - piece >= extent
        {
            there -= piece;
            driver.unmap(self.start + there as u64, piece)?;
            state.pieces.pop();
            self.count(&state);
        }
        Ok(())
    }

    /// Gives everything back; nothing on the GPU may be at work any more.
    pub fn release(&self, driver: &CudaContext) {
        let state = self.state();
        let mut at = self.start;
        for piece in &state.pieces {
            // What fails here is taken back with the process.
            let _ = driver.unmap(at, piece.bytes);
            at += piece.bytes as u64;
        }
        let _ = driver.unreserve(self.start, self.bytes);
    }

    fn count(&self, state: &PieceState) {
        let resident = |piece: &&ArenaPiece| piece.host.is_some_and(|host| host.is_resident);
        let resident: usize = state.pieces.iter().filter(resident).map(|piece| piece.bytes).sum();
        self.committed.store(state.bytes() as u64, Ordering::Relaxed);
        self.beside_process.store((state.bytes() - resident) as u64, Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, PieceState> {
        self.state.lock().expect("nothing panics while pieces are counted")
    }
}

impl PieceState {
    fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }
}

/// A stretch, cut where pieces of host memory begin and end.
fn cut(pieces: &[ArenaPiece], whole: Range<usize>) -> Vec<Range<usize>> {
    let (mut parts, mut start, mut end) = (Vec::new(), whole.start, 0);
    for piece in pieces {
        let first = end;
        end += piece.bytes;
        let borders = if piece.host.is_some() { [first, end] } else { [0, 0] };
        for border in borders {
            if border > start && border < whole.end {
                parts.push(start..border);
                start = border;
            }
        }
    }
    parts.push(start..whole.end);
    parts
}

/// Whether pieces reach over all of a stretch, and are host memory there.
fn is_all_host(pieces: &[ArenaPiece], wanted: Range<usize>) -> bool {
    let mut end = 0;
    for piece in pieces {
        let start = end;
        end += piece.bytes;
        let is_touched = start < wanted.end && end > wanted.start;
        if is_touched && piece.host.is_none() {
            return false;
        }
    }
    !wanted.is_empty() && wanted.end <= end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_is_cut_at_the_ends_of_host_memory() {
        let host = HostPieces { location: PieceLocation::HostNuma(0), is_resident: false };
        let pieces =
            [None, None, Some(host), Some(host), None].map(|host| ArenaPiece { bytes: 10, host });
        assert_eq!(cut(&pieces, 3..18), vec![3..18; 1]);
        assert_eq!(cut(&pieces, 3..50), [3..20, 20..30, 30..40, 40..50]);
        assert_eq!(cut(&pieces, 20..30), vec![20..30; 1]);
        assert_eq!(cut(&pieces, 25..31), [25..30, 30..31]);
        assert_eq!(cut(&pieces, 41..60), vec![41..60; 1]);
    }

    #[test]
    fn a_stretch_is_written_in_place_only_where_every_piece_is_host_memory() {
        let host = HostPieces { location: PieceLocation::HostNuma(0), is_resident: false };
        let pieces =
            [Some(host), Some(host), None, Some(host)].map(|host| ArenaPiece { bytes: 10, host });
        for (wanted, expected) in [
            (0..10, true),
            (0..20, true),
            (5..15, true),
            (19..21, false),
            (0..40, false),
            (20..30, false),
            (30..40, true),
            // Of what is not mapped, and nothing.
            (35..41, false),
            (40..50, false),
            (5..5, false),
        ] {
            assert_eq!(is_all_host(&pieces, wanted.clone()), expected, "{wanted:?}");
        }
    }
}
