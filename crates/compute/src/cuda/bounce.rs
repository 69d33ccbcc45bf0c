//! The way from the host to the card for what is large: a few pinned buffers that several threads fill
//! and the card copies from by itself, so that a file is read and copied at the same time and no weight
//! lies on the host as a whole. A card copies from ordinary memory only through such buffers of the
//! driver's, one copy at a time; from a file's mapping it is far slower still.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::driver::{Driver, Event, Lane, Pinned};
use crate::Result;

/// Chosen: what files are read in at a time, and the little that aligns it.
const BYTES: usize = (8 << 20) + 4096;
/// Chosen: two for each of a dozen threads. More would be more memory and no more speed: a few threads
/// read as fast as a link copies.
const MOST: usize = 24;

#[derive(Default)]
pub(super) struct Bounce {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order in which the card copies from them.
    free: VecDeque<Buffer>,
    n_made: usize,
}

struct Buffer {
    memory: Pinned,
    /// When the card has copied all of it.
    copied: Event<Arc<Driver>>,
}

impl Buffer {
    fn new(driver: &Arc<Driver>) -> Result<Self> {
        Ok(Self { memory: Pinned::new(driver, BYTES)?, copied: Event::new(Arc::clone(driver))? })
    }
}

#[allow(unsafe_code)]
impl Buffer {
    /// To be filled, when what was copied before is past.
    fn bytes_mut(&mut self, bytes: usize) -> &mut [u8] {
        // SAFETY: this borrow is exclusive, and `Bounce::take` waited for the card.
        unsafe { self.memory.slice_mut(0, bytes) }
    }
}

impl Bounce {
    /// Lets `write` write `bytes` that the card copies to `to` when it returns well. Returns what it
    /// returned, and whether the copy could be asked for. None if they are more than a buffer holds,
    /// or if there can be none.
    pub fn through<E>(
        &self,
        driver: &Arc<Driver>,
        (to, bytes): (u64, usize),
        write: &mut dyn FnMut(&mut [u8]) -> std::result::Result<(), E>,
    ) -> Option<(std::result::Result<(), E>, Result<()>)> {
        if bytes > BYTES {
            return None;
        }
        let mut buffer = self.take(driver)?;
        let written = write(buffer.bytes_mut(bytes));
        let sent = match &written {
            Ok(()) => buffer.memory.send(to, bytes),
            Err(_) => Ok(()),
        };
        let sent = sent.and_then(|()| buffer.copied.record(Lane::Copies));
        self.give(buffer);
        Some((written, sent))
    }

    /// A buffer that nobody copies from any more.
    fn take(&self, driver: &Arc<Driver>) -> Option<Buffer> {
        let mut state = self.state();
        loop {
            let is_past = state.free.front().is_some_and(|buffer| buffer.copied.is_past());
            if !is_past && state.n_made < MOST {
                state.n_made += 1;
                drop(state);
                let made = Buffer::new(driver).ok();
                self.state().n_made -= usize::from(made.is_none());
                return made;
            }
            if let Some(buffer) = state.free.pop_front() {
                drop(state);
                // What went wrong is said by the next copy.
                _ = buffer.copied.wait();
                return Some(buffer);
            }
            state = self.returned.wait(state).expect(COUNTED);
        }
    }

    fn give(&self, buffer: Buffer) {
        self.state().free.push_back(buffer);
        self.returned.notify_one();
    }

    /// Gives the buffers back to the system that nobody fills.
    pub fn release(&self) {
        let mut state = self.state();
        state.n_made -= state.free.len();
        state.free.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(COUNTED)
    }
}

const COUNTED: &str = "nothing panics while buffers are counted";
