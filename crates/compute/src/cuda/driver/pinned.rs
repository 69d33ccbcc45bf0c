//! Host memory that a GPU copies from by itself, and points in a stream's time, by which one stream or
//! the host waits for the other.

use std::ffi::c_void;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::Arc;

use super::{CudaContext, StreamKind};
use crate::Result;

/// A point in a stream's time.
pub(in crate::cuda) struct CudaEvent<D: Deref<Target = CudaContext>> {
    driver: D,
    raw: *mut c_void,
}

// SAFETY: a handle of the driver's, which may be used from any thread.
unsafe impl<D: Deref<Target = CudaContext> + Send> Send for CudaEvent<D> {}
// SAFETY: as above.
unsafe impl<D: Deref<Target = CudaContext> + Sync> Sync for CudaEvent<D> {}

impl<D: Deref<Target = CudaContext>> CudaEvent<D> {
    /// One that is past until it is recorded.
    pub fn new(driver: D) -> Result<Self> {
        driver.bind()?;
        let mut raw = null_mut();
        // SAFETY: writes one handle, in the context that is current.
        let status = unsafe { (driver.functions.cuEventCreate)(&raw mut raw, 0) };
        driver.check("cuEventCreate", status)?;
        Ok(Self { driver, raw })
    }

    /// Makes it the point that the stream has been asked up to now.
    pub fn record(&self, lane: StreamKind) -> Result<()> {
        self.driver.bind()?;
        // SAFETY: the event is this value's own, and the stream lives as long as the driver.
        let status =
            unsafe { (self.driver.functions.cuEventRecord)(self.raw, self.driver.stream_of(lane)) };
        self.driver.check("cuEventRecord", status)
    }

    /// What is asked of the stream from now on waits until this is past. The host does not.
    pub fn make_stream_wait(&self, lane: StreamKind) -> Result<()> {
        self.driver.bind()?;
        // SAFETY: as above; the flags must be 0.
        let status = unsafe {
            (self.driver.functions.cuStreamWaitEvent)(self.driver.stream_of(lane), self.raw, 0)
        };
        self.driver.check("cuStreamWaitEvent", status)
    }

    /// Whether it is past. One that failed counts as past: waiting for it says what happened.
    pub fn is_complete(&self) -> bool {
        // SAFETY: the event is this value's own.
        unsafe { (self.driver.functions.cuEventQuery)(self.raw) != NOT_READY }
    }

    /// Lets the host wait until it is past.
    pub fn synchronise(&self) -> Result<()> {
        // SAFETY: the event is this value's own.
        let status = unsafe { (self.driver.functions.cuEventSynchronize)(self.raw) };
        self.driver.check("cuEventSynchronize", status)
    }

    /// Milliseconds from this one to a later one, both of which are past.
    pub fn elapsed_ms(&self, later: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: writes one number; an event that was not recorded, or is not past, is an error.
        let status = unsafe {
            (self.driver.functions.cuEventElapsedTime)(&raw mut milliseconds, self.raw, later.raw)
        };
        self.driver.check("cuEventElapsedTime", status).map(|()| milliseconds)
    }
}

impl<D: Deref<Target = CudaContext>> Drop for CudaEvent<D> {
    fn drop(&mut self) {
        // SAFETY: the event is this value's own.
        unsafe { (self.driver.functions.cuEventDestroy_v2)(self.raw) };
    }
}

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: i32 = 600;

/// Host memory that stays where it is.
pub(crate) struct PinnedMemory {
    driver: Arc<CudaContext>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: memory of this value's own, borrowed by Rust's rules.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// So many bytes, with anything in them.
    pub(in crate::cuda) fn new(driver: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        driver.bind()?;
        let mut start = null_mut();
        // SAFETY: writes one address, of memory that this value frees; no flags.
        let status = unsafe { (driver.functions.cuMemHostAlloc)(&raw mut start, bytes.max(1), 0) };
        driver.check("cuMemHostAlloc", status)?;
        Ok(Self { driver: Arc::clone(driver), start: start.cast(), bytes })
    }

    /// Some of it.
    ///
    /// # Safety
    /// Nobody writes to it while the slice lives.
    pub unsafe fn slice(&self, at: usize, bytes: usize) -> &[u8] {
        assert!(at + bytes <= self.bytes, "{bytes} at {at} of {}", self.bytes);
        // SAFETY: the range was just checked, and is as the system gave it: any bytes are u8.
        unsafe { std::slice::from_raw_parts(self.start.wrapping_add(at), bytes) }
    }

    /// Some of it, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes it while the slice lives, the GPU included.
    #[allow(clippy::mut_from_ref)] // Exclusiveness is the caller's, piece by piece.
    pub unsafe fn slice_mut(&self, at: usize, bytes: usize) -> &mut [u8] {
        assert!(at + bytes <= self.bytes, "{bytes} at {at} of {}", self.bytes);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.wrapping_add(at), bytes) }
    }

    /// Asks the second stream to copy the first `bytes` to the GPU.
    ///
    /// # Panics
    /// If it has fewer.
    pub fn copy_to_device(&self, to: u64, bytes: usize) -> Result<()> {
        assert!(bytes <= self.bytes, "{bytes} of {}", self.bytes);
        self.driver.bind()?;
        // SAFETY: the memory lives until the stream has passed the copy, which whoever drops or borrows
        // it waits for; the range on the GPU is a tensor's own, by the callers.
        let status = unsafe {
            (self.driver.functions.cuMemcpyHtoDAsync_v2)(
                to,
                self.start.cast(),
                bytes,
                self.driver.copy_stream,
            )
        };
        self.driver.check("cuMemcpyHtoDAsync", status)
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        _ = self.driver.bind();
        // SAFETY: the stream is the driver's own, and the memory this value's: nothing copies from it
        // any more. What fails here is taken back with the process.
        unsafe {
            (self.driver.functions.cuStreamSynchronize)(self.driver.copy_stream);
            (self.driver.functions.cuMemFreeHost)(self.start.cast());
        }
    }
}
