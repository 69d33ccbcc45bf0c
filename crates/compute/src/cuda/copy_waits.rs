//! How long work on the GPU waits for copies from the host: a point in the compute stream's time before each wait, and
//! one after it. Nothing waits for the answer; it is read when both are past.

use std::sync::Arc;

use super::driver::{CudaContext, CudaEvent, StreamKind};
use crate::Result;

/// Waits of the compute stream.
#[derive(Default)]
pub(super) struct CopyWaits {
    /// Those that may not be over, in order.
    pending: Vec<TimedWait>,
    /// Events to use again.
    free: Vec<TimedWait>,
    total_secs: f64,
}

struct TimedWait {
    before: CudaEvent<Arc<CudaContext>>,
    after: CudaEvent<Arc<CudaContext>>,
}

/// Waits that are remembered until somebody asks. Chosen: more than a step of the deepest model has; of a program that
/// never asks, later waits are not timed.
const MOST_PENDING: usize = 4096;

impl CopyWaits {
    /// Lets the compute stream wait, and times that.
    pub fn time(
        &mut self,
        driver: &Arc<CudaContext>,
        wait: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if self.pending.len() == MOST_PENDING {
            return wait();
        }
        let timed = match self.free.pop() {
            Some(timed) => timed,
            None => TimedWait {
                before: CudaEvent::new(Arc::clone(driver))?,
                after: CudaEvent::new(Arc::clone(driver))?,
            },
        };
        timed.before.record(StreamKind::Compute)?;
        wait()?;
        timed.after.record(StreamKind::Compute)?;
        self.pending.push(timed);
        Ok(())
    }

    /// Adds up the waits that are over.
    pub fn collect(&mut self) -> Result<()> {
        let n_over = self.pending.iter().take_while(|timed| timed.after.is_complete()).count();
        for timed in self.pending.drain(..n_over) {
            self.total_secs += f64::from(timed.before.elapsed_ms(&timed.after)?) / 1e3;
            self.free.push(timed);
        }
        Ok(())
    }

    /// Of all waits that were added up.
    pub fn total_secs(&self) -> f64 {
        self.total_secs
    }
}
