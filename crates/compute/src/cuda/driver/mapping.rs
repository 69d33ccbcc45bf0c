//! The arena's memory by the driver: a range of addresses, and memory that is mapped into it piece by piece. A piece
//! is memory of the device or of the host; host memory has the same addresses for the CPU as for the GPU.

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

// Taken from `CUmemAllocationType`, `CUmemLocationType` and `CUmemAccess_flags`.
const PINNED: c_int = 1;
const ON_DEVICE: c_int = 1;
const ON_HOST: c_int = 2;
const ON_HOST_NUMA: c_int = 3;
const READ_WRITE: c_int = 3;

// Taken from `CUdevice_attribute`; the second and third are of CUDA 12.9 and 13.0.
const HOST_NUMA_ID: c_int = 134;
const HOST_NUMA_PIECES: c_int = 141;
const HOST_PIECES: c_int = 145;

/// Where the memory of a piece lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum PieceLocation {
    /// With the device, as the driver sees it.
    Device,
    /// In main memory, on a NUMA node.
    HostNuma(c_int),
    /// In main memory, on any node.
    Host,
}

impl PieceLocation {
    fn raw(self, device: c_int) -> Location {
        match self {
            Self::Device => Location { kind: ON_DEVICE, id: device },
            Self::HostNuma(node) => Location { kind: ON_HOST_NUMA, id: node },
            Self::Host => Location { kind: ON_HOST, id: 0 },
        }
    }

    fn properties(self, device: c_int) -> AllocationProperties {
        let (location, windows, flags) = (self.raw(device), null_mut(), [0; 8]);
        AllocationProperties { kind: PINNED, handle_types: 0, location, windows, flags }
    }
}

impl CudaContext {
    /// Host memory that pieces may be made of, best first. A driver that is older than the question may have the first.
    pub fn host_locations(&self) -> Vec<PieceLocation> {
        // Without NUMA there is no number, and 0 must be given.
        let node = self.attribute(HOST_NUMA_ID).map_or(0, |node| node.max(0));
        let is_numa_denied = self.attribute(HOST_NUMA_PIECES).is_ok_and(|value| value == 0);
        let has_any = self.attribute(HOST_PIECES).is_ok_and(|value| value != 0);
        let numa = (!is_numa_denied).then_some(PieceLocation::HostNuma(node));
        numa.into_iter().chain(has_any.then_some(PieceLocation::Host)).collect()
    }

    fn attribute(&self, number: c_int) -> Result<c_int> {
        self.functions.attribute(self.device, number)
    }

    /// The size that memory comes in multiples of.
    pub fn granularity(&self) -> Result<usize> {
        let mut bytes = 0;
        let properties = PieceLocation::Device.properties(self.device);
        // SAFETY: reads the properties and writes one size.
        let status = unsafe {
            (self.functions.cuMemGetAllocationGranularity)(&raw mut bytes, &raw const properties, 0)
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

    /// Puts new memory behind some addresses of a reserved range. If that fails, there is none.
    pub fn map(&self, start: u64, bytes: usize, location: PieceLocation) -> Result<()> {
        self.bind()?;
        let mut memory = 0;
        let properties = location.properties(self.device);
        // SAFETY: reads the properties and writes one handle; a size that is no multiple of the granularity is an
        // error.
        let status = unsafe {
            (self.functions.cuMemCreate)(&raw mut memory, bytes, &raw const properties, 0)
        };
        self.check("cuMemCreate", status)?;
        // SAFETY: the addresses are reserved and nothing is mapped there yet, by the caller.
        let mapped = unsafe { (self.functions.cuMemMap)(start, bytes, 0, memory, 0) };
        // SAFETY: the mapping keeps the memory; this only gives up the handle.
        unsafe { (self.functions.cuMemRelease)(memory) };
        self.check("cuMemMap", mapped)?;
        self.set_access(start, bytes, location).inspect_err(|_| _ = self.unmap(start, bytes))
    }

    /// Lets the GPU use what was mapped, and the CPU too if it lies in main memory.
    fn set_access(&self, start: u64, bytes: usize, location: PieceLocation) -> Result<()> {
        let host = (location != PieceLocation::Device).then_some(location);
        // One call for each, as NVIDIA's own libraries do.
        for who in [Some(PieceLocation::Device), host].into_iter().flatten() {
            let access = AccessDescription { location: who.raw(self.device), flags: READ_WRITE };
            // SAFETY: reads one description, for the range that was just mapped.
            let status =
                unsafe { (self.functions.cuMemSetAccess)(start, bytes, &raw const access, 1) };
            self.check("cuMemSetAccess", status)?;
        }
        Ok(())
    }

    /// Takes the memory behind some addresses away; only what `map` put there as a whole.
    pub fn unmap(&self, start: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the range is one that `map` was called with, by the caller.
        self.check("cuMemUnmap", unsafe { (self.functions.cuMemUnmap)(start, bytes) })
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// As a C compiler packs them, from `cuda.h` of CUDA 13.2.
    #[test]
    fn structs_are_the_drivers() {
        assert_eq!((size_of::<Location>(), size_of::<AccessDescription>()), (8, 12));
        assert_eq!(size_of::<AllocationProperties>(), 32);
        let at = |name| match name {
            "location" => offset_of!(AllocationProperties, location),
            "windows" => offset_of!(AllocationProperties, windows),
            _ => offset_of!(AllocationProperties, flags),
        };
        assert_eq!(["location", "windows", "flags"].map(at), [8, 16, 24]);
    }

    #[test]
    fn pieces_name_a_device_a_node_or_the_host() {
        let raw = |location: PieceLocation| {
            let Location { kind, id } = location.properties(3).location;
            (kind, id)
        };
        assert_eq!(raw(PieceLocation::Device), (1, 3));
        assert_eq!(raw(PieceLocation::Host), (2, 0));
        assert_eq!(raw(PieceLocation::HostNuma(1)), (3, 1));
    }
}
