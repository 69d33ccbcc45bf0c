//! Prefetching: a thread reads batches ahead of the step that needs them.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::{Result, TrainerError};

/// Batches that are prepared while a step is computed. Chosen: one is enough; a few bridge a disk that
/// is busy for a moment.
pub(crate) const PREFETCH_BATCHES: usize = 4;

/// A thread that prepares batches.
pub struct Prefetch<B> {
    /// Taken away to end the thread.
    batches: Option<Receiver<Result<B>>>,
    thread: Option<JoinHandle<()>>,
    /// Why the system gives no thread.
    no_thread: Option<String>,
}

impl<B: Send + 'static> Prefetch<B> {
    /// Starts with batch number `from`, and reads a few ahead.
    pub fn begin(from: u64, mut read: impl FnMut(u64) -> Result<B> + Send + 'static) -> Self {
        let (sender, batches) = sync_channel(PREFETCH_BATCHES);
        let thread = thread::Builder::new().spawn(move || {
            for number in from.. {
                let batch = read(number);
                let is_last = batch.is_err();
                // The receiver is gone, or this batch was an error.
                if sender.send(batch).is_err() || is_last {
                    break;
                }
            }
        });
        let no_thread = thread.as_ref().err().map(ToString::to_string);
        Self { batches: Some(batches), thread: thread.ok(), no_thread }
    }

    /// The next batch, and the time spent waiting for it. After an error there are no more.
    pub fn next_batch(&mut self) -> Result<(B, Duration)> {
        let begun = Instant::now();
        let received = self.batches.as_ref().and_then(|batches| batches.recv().ok());
        let ready = received.unwrap_or_else(|| match &self.no_thread {
            Some(why) => Err(TrainerError::Request {
                problem: format!("no thread to read batches: {why}"),
                hint: "end other programs, or raise the limit of processes (ulimit -u)",
            }),
            None => Err(TrainerError::Request {
                problem: "no more batches are read after an error".into(),
                hint: "begin again at the batch that failed",
            }),
        })?;
        Ok((ready, begun.elapsed()))
    }
}

impl<B> Drop for Prefetch<B> {
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // It may have panicked, which is not worth another panic here.
            _ = thread.join();
        }
    }
}
