//! The arena's memory by the driver: a range of addresses, and memory that is mapped into it piece by piece.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use super::CudaContext;
use crate::Result;

/// `CUmemAllocationProp`.
#[repr(C)]
pub(super) struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(super) struct AccessDescription {
    location: Location,
    flags: c_int,
}

// Pinned memory on a device, read and written.
const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
const READ_WRITE: c_int = 3;

impl CudaContext {
    /// The size that memory comes in multiples of.
    pub fn granularity(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: reads the properties and writes one size.
        let status = unsafe {
            (self.functions.cuMemGetAllocationGranularity)(&raw mut bytes, &self.properties(), 0)
        };
        self.check("cuMemGetAllocationGranularity", status).map(|()| bytes)
    }

    /// Takes a range of addresses, without memory.
    pub fn reserve(&self, bytes: usize) -> Result<u64> {
        self.bind()?;
        let mut start = 0;
        // SAFETY: writes one address.
        let status =
            unsafe { (self.functions.cuMemAddressReserve)(&raw mut start, bytes, 0, 0, 0) };
        self.check("cuMemAddressReserve", status).map(|()| start)
    }

    /// Gives a range back.
    pub fn unreserve(&self, start: u64, bytes: usize) -> Result<()> {
        // SAFETY: the range is one that `reserve` gave, and nothing is mapped into it any more.
        self.check("cuMemAddressFree", unsafe { (self.functions.cuMemAddressFree)(start, bytes) })
    }

    /// Puts new memory behind some addresses of a reserved range.
    pub fn map(&self, start: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        let mut memory = 0;
        // SAFETY: writes one handle; the size is a multiple of the granularity, by the caller.
        let status =
            unsafe { (self.functions.cuMemCreate)(&raw mut memory, bytes, &self.properties(), 0) };
        self.check("cuMemCreate", status)?;
        // SAFETY: the addresses are reserved and nothing is mapped there yet, by the caller.
        let mapped = unsafe { (self.functions.cuMemMap)(start, bytes, 0, memory, 0) };
        // SAFETY: the mapping keeps the memory; this only gives up the handle.
        unsafe { (self.functions.cuMemRelease)(memory) };
        self.check("cuMemMap", mapped)?;
        let access = AccessDescription { location: self.location(), flags: READ_WRITE };
        // SAFETY: reads one description, for the range that was just mapped.
        let status = unsafe { (self.functions.cuMemSetAccess)(start, bytes, &raw const access, 1) };
        self.check("cuMemSetAccess", status)
    }

    /// Takes the memory behind some addresses away; only what `map` put there as a whole.
    pub fn unmap(&self, start: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the range is one that `map` was called with, by the caller.
        self.check("cuMemUnmap", unsafe { (self.functions.cuMemUnmap)(start, bytes) })
    }

    fn location(&self) -> Location {
        Location { kind: ON_DEVICE, id: self.device }
    }

    fn properties(&self) -> AllocationProperties {
        let location = self.location();
        let (windows, flags) = (null_mut(), [0; 8]);
        AllocationProperties { kind: PINNED, handle_types: 0, location, windows, flags }
    }
}
