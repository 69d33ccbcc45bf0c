//! The stream of a GPU for other libraries of NVIDIA's, which work on tensors where they lie, as NCCL does.

use std::ffi::c_void;

use super::CudaBackend;
use super::driver::{CudaEvent, StreamKind};
use crate::Result;

/// A GPU's stream, on which all ops run.
pub struct CudaStream<'d>(pub(crate) &'d CudaBackend);

impl CudaStream<'_> {
    /// The GPU's own name among all GPUs.
    pub fn gpu(&self) -> Result<[u8; 16]> {
        self.0.driver.uuid()
    }

    /// The stream itself; the calling thread has the GPU's context from then on.
    pub fn bind(&self) -> Result<*mut c_void> {
        self.0.driver.bind().map(|()| self.0.driver.stream())
    }

    /// Whether all is done that was asked of the stream before this call, asked later.
    pub fn reached(&self) -> Result<impl Fn() -> bool> {
        let event = CudaEvent::new(&*self.0.driver)?;
        event.record(StreamKind::Compute)?;
        Ok(move || event.is_complete())
    }
}
