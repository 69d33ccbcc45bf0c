//! Large copies from the host to the GPU go through a few pinned buffers that several threads fill, so that a
//! file is read and copied at the same time and no whole weight is held on the host. The driver copies from
//! pageable memory only through such buffers of its own, one copy at a time; from a mapped file it is far
//! slower still.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::driver::{CudaContext, CudaEvent, PinnedMemory, StreamKind};
use crate::Result;

/// Chosen: what files are read in at a time, and the little that aligns it.
const BUFFER_BYTES: usize = (8 << 20) + 4096;
/// Chosen: two for each of a dozen threads. More would be more memory and no more speed: a few threads
/// read as fast as a link copies.
const MAX_BUFFERS: usize = 24;

#[derive(Default)]
pub(super) struct BounceBuffers {
    state: Mutex<BounceState>,
    returned: Condvar,
}

#[derive(Default)]
struct BounceState {
    /// In the order in which the GPU copies from them.
    free: VecDeque<PinnedBuffer>,
    n_made: usize,
}

struct PinnedBuffer {
    memory: PinnedMemory,
    /// When the GPU has copied all of it.
    copied: CudaEvent<Arc<CudaContext>>,
}

impl PinnedBuffer {
    fn new(driver: &Arc<CudaContext>) -> Result<Self> {
        Ok(Self {
            memory: PinnedMemory::new(driver, BUFFER_BYTES)?,
            copied: CudaEvent::new(Arc::clone(driver))?,
        })
    }
}

#[allow(unsafe_code)]
impl PinnedBuffer {
    /// To be filled, when what was copied before is past.
    fn bytes_mut(&mut self, bytes: usize) -> &mut [u8] {
        // SAFETY: this borrow is exclusive, and `BounceBuffers::take` waited for the GPU.
        unsafe { self.memory.slice_mut(0, bytes) }
    }
}

impl BounceBuffers {
    /// Lets `write` write `bytes` that the GPU copies to `to` when it returns well. Returns what it
    /// returned, and whether the copy could be asked for. None if they are more than a buffer holds,
    /// or if there can be none.
    pub fn copy_through<E>(
        &self,
        driver: &Arc<CudaContext>,
        to: u64,
        bytes: usize,
        write: &mut dyn FnMut(&mut [u8]) -> std::result::Result<(), E>,
    ) -> Option<(std::result::Result<(), E>, Result<()>)> {
        if bytes > BUFFER_BYTES {
            return None;
        }
        let mut buffer = self.take(driver)?;
        let written = write(buffer.bytes_mut(bytes));
        let sent = match &written {
            Ok(()) => buffer.memory.copy_to_device(to, bytes),
            Err(_) => Ok(()),
        };
        let sent = sent.and_then(|()| buffer.copied.record(StreamKind::Copy));
        self.put_back(buffer);
        Some((written, sent))
    }

    /// A buffer that nobody copies from any more.
    fn take(&self, driver: &Arc<CudaContext>) -> Option<PinnedBuffer> {
        let mut state = self.state();
        loop {
            let is_past = state.free.front().is_some_and(|buffer| buffer.copied.is_complete());
            if !is_past && state.n_made < MAX_BUFFERS {
                state.n_made += 1;
                drop(state);
                let made = PinnedBuffer::new(driver).ok();
                self.state().n_made -= usize::from(made.is_none());
                return made;
            }
            if let Some(buffer) = state.free.pop_front() {
                drop(state);
                // The next copy returns the error.
                _ = buffer.copied.synchronise();
                return Some(buffer);
            }
            state = self.returned.wait(state).expect(COUNTED);
        }
    }

    fn put_back(&self, buffer: PinnedBuffer) {
        self.state().free.push_back(buffer);
        self.returned.notify_one();
    }

    /// Gives the buffers back to the system that nobody fills.
    pub fn release(&self) {
        let mut state = self.state();
        state.n_made -= state.free.len();
        state.free.clear();
    }

    fn state(&self) -> MutexGuard<'_, BounceState> {
        self.state.lock().expect(COUNTED)
    }
}

const COUNTED: &str = "nothing panics while buffers are counted";
