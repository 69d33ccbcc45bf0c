//! A request to stop. Whoever wants work to end cancels the token; long work asks it now and then. Within
//! [`Device::cancellable`] every allocation asks, so a request is heard between two ops of a step, and ends the
//! work as running out of memory does: nothing of it stays.
//!
//! [`Device::cancellable`]: crate::Device::cancellable

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A handle on a request to stop; clones are the same request.
#[derive(Clone, Debug, Default)]
pub struct CancelToken(Arc<AtomicU64>);

/// Values of the token. Larger ones count down to `CANCELLED`, one with each question.
const WANTED: u64 = 0;
const CANCELLED: u64 = 1;

impl CancelToken {
    /// Asks to stop. It cannot be taken back.
    pub fn cancel(&self) {
        self.0.store(CANCELLED, Ordering::Relaxed);
    }

    /// Asks to stop after the next `n_asked` questions have been answered with no. For tests.
    pub fn cancel_after(&self, n_asked: u64) {
        self.0.store(CANCELLED + n_asked, Ordering::Relaxed);
    }

    /// Whether somebody asked to stop.
    pub fn is_cancelled(&self) -> bool {
        match self.0.load(Ordering::Relaxed) {
            WANTED => false,
            CANCELLED => true,
            _ => {
                let count = |left: u64| (left > CANCELLED).then(|| left - 1);
                self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count).is_err()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ComputeError, Device, Dtype, Result};

    #[test]
    fn a_request_is_heard_by_all_clones_and_stays() {
        let token = CancelToken::default();
        let other = token.clone();
        assert!(!token.is_cancelled() && !other.is_cancelled());
        other.cancel();
        assert!(token.is_cancelled() && token.is_cancelled());
        token.cancel_after(2);
        assert_eq!([0; 4].map(|_| other.is_cancelled()), [false, false, true, true]);
    }

    #[test]
    fn allocations_hear_it_within_work_that_can_be_cancelled_and_nowhere_else() {
        let (device, token) = (Device::cpu(1, 1 << 20).unwrap(), CancelToken::default());
        let alloc = || device.alloc([4], Dtype::F32);
        let allocs = |n: usize| (0..n).map(|_| alloc()).collect::<Result<Vec<_>>>();
        token.cancel_after(2);
        assert!(matches!(device.cancellable(&token, || allocs(3)), Err(ComputeError::Cancelled)));
        assert_eq!(device.usage().in_use, 0);
        allocs(3).unwrap();
        // What can no longer be abandoned is finished.
        let finished = device.cancellable(&token, || {
            assert!(alloc().is_err());
            device.ignore_cancel();
            allocs(3)
        });
        assert!(finished.is_ok() && device.cancellable(&token, alloc).is_err());
    }
}
