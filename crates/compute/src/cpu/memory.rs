//! The arena's memory on the CPU: one anonymous mapping, filled with zeros by the system and
//! resident only where it was touched.
#![allow(unsafe_code)]

use memmap2::{MmapMut, MmapOptions, UncheckedAdvice};

use crate::{ComputeError, Element, Result};

/// One range of addresses.
pub(crate) struct HostMemory {
    start: *mut u8,
    bytes: usize,
    /// Unmaps the range when dropped.
    mapping: MmapMut,
}

// SAFETY: the range belongs to this value alone; who may read or write which part of it is up to
// the callers of `slice` and `slice_mut`.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub fn reserve(bytes: usize) -> Result<Self> {
        let refused = |source| ComputeError::Reserve { bytes, source };
        let mut options = MmapOptions::new();
        // An empty mapping is an error to the system, not to us.
        let mut mapping =
            options.len(bytes.max(1)).no_reserve_swap().map_anon().map_err(refused)?;
        large_pages(&mapping);
        Ok(Self { start: mapping.as_mut_ptr(), bytes, mapping })
    }

    /// Numbers at an offset in bytes.
    ///
    /// # Safety
    /// Nobody writes to them while the slice lives.
    pub unsafe fn slice<T: Element>(&self, offset: usize, elements: usize) -> &[T] {
        let start = self.pointer::<T>(offset, elements);
        // SAFETY: `place` checked bounds and alignment, the mapping is initialised, every bit
        // pattern is an `Element`, and the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(start, elements) }
    }

    /// Numbers at an offset in bytes, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes them while the slice lives.
    #[allow(clippy::mut_from_ref)] // Exclusiveness is the caller's, piece by piece.
    pub unsafe fn slice_mut<T: Element>(&self, offset: usize, elements: usize) -> &mut [T] {
        let start = self.pointer::<T>(offset, elements);
        // SAFETY: as in `slice`, and the caller keeps everyone else away.
        unsafe { std::slice::from_raw_parts_mut(start, elements) }
    }

    /// Leaves everything from an offset on to the system, until it is touched again.
    ///
    /// # Safety
    /// Nobody reads or writes there meanwhile; what it held is lost.
    pub unsafe fn release_from(&self, offset: usize) {
        // The system deals in pages; the largest of today's machines have 64 KiB.
        let start = offset.next_multiple_of(64 << 10);
        if start >= self.bytes {
            return;
        }
        // macOS keeps such pages until somebody needs them, and counts them as free.
        let advice = if cfg!(target_os = "linux") {
            UncheckedAdvice::DontNeed
        } else {
            UncheckedAdvice::Free
        };
        // SAFETY: numbers of any kind stay valid when they become zeros, and the caller keeps everyone
        // away. A system that refuses has only kept its pages.
        _ = unsafe { self.mapping.unchecked_advise_range(advice, start, self.bytes - start) };
    }

    fn pointer<T>(&self, offset: usize, elements: usize) -> *mut T {
        assert!(
            offset + elements * size_of::<T>() <= self.bytes
                && offset.is_multiple_of(align_of::<T>())
        );
        self.start.wrapping_add(offset).cast()
    }
}

/// Pages of 2 MiB spare the CPU most look-ups in a range this large. Only a wish: where the
/// system does not grant it, everything works, slower.
fn large_pages(mapping: &MmapMut) {
    #[cfg(target_os = "linux")]
    let _ = mapping.advise(memmap2::Advice::HugePage);
    #[cfg(not(target_os = "linux"))]
    let _ = mapping;
}
