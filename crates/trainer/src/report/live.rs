//! `report.html` of a run that still goes on, rewritten now and then on a thread of its own: a step never
//! waits for it. It is made of the folder like the last one, so nothing is kept in memory for it.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::write;
use crate::event::Event;

/// Seconds between two reports, and between two looks of a browser. Chosen: as often as somebody who
/// watches looks again.
pub const EVERY_SECS: u64 = 10;
/// How much longer than the work for a report the time to the next one is, at least. Chosen: a run with
/// hundreds of large samples spends no more than two in a hundred seconds of one core on it.
const IDLE_FACTOR: u32 = 49;

/// Rewrites the report of a run until it is dropped.
pub struct LiveReport {
    wake: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LiveReport {
    /// Of the run in a folder.
    pub fn begin(run_folder: PathBuf) -> Self {
        // One that waits is enough: what a report shows is read when it is made.
        let (wake, woken) = sync_channel(1);
        let begun = thread::Builder::new().name("report".into());
        // Where there is no thread for it, there is a report at the end.
        let thread = begun.spawn(move || rewrite(&run_folder, &woken)).ok();
        Self { wake: Some(wake), thread }
    }

    /// Notes that there is something new to show.
    pub fn observe(&self, event: &Event) {
        let is_shown = matches!(
            event,
            Event::Step(_)
                | Event::Validation { .. }
                | Event::Sample { .. }
                | Event::Written { .. }
                | Event::Checkpoint { .. }
        );
        if let Some(wake) = self.wake.as_ref().filter(|_| is_shown) {
            _ = wake.try_send(());
        }
    }
}

impl Drop for LiveReport {
    /// Waits for a report that is being written, so that no older one takes the place of the last.
    fn drop(&mut self) {
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

fn rewrite(run_folder: &std::path::Path, woken: &Receiver<()>) {
    let mut next = Instant::now();
    while woken.recv().is_ok() {
        let begun = Instant::now();
        if begun < next {
            continue;
        }
        // What cannot be written now is said when the last one is.
        _ = write(run_folder);
        next =
            Instant::now() + (begun.elapsed() * IDLE_FACTOR).max(Duration::from_secs(EVERY_SECS));
    }
}
