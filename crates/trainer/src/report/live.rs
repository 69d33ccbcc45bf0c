//! `report.html` during a run, rewritten now and then by a thread of its own: a step never waits for it. It is made
//! from the folder, as the last one, so it keeps nothing in memory.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::write;
use crate::event::Event;

/// Seconds between two reports, and between two refreshes of a browser. Chosen.
pub const EVERY_SECS: u64 = 10;
/// The time to the next report is at least so many times that of writing one. Chosen: with hundreds of large
/// samples it takes no more than 2 % of one core.
const IDLE_FACTOR: u32 = 49;

/// Rewrites the report of a run until it is dropped.
pub struct LiveReport {
    wake: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LiveReport {
    /// Of the run in a folder.
    pub fn begin(run_folder: PathBuf) -> Self {
        // One pending request is enough: a report reads the folder when it is made.
        let (wake, requests) = sync_channel(1);
        let begun = thread::Builder::new().name("report".into());
        // Without a thread there is still the report at the end.
        let thread = begun.spawn(move || rewrite(&run_folder, &requests)).ok();
        Self { wake: Some(wake), thread }
    }

    /// Notes that there is something new to show.
    pub fn observe(&self, event: &Event) {
        let is_shown = matches!(
            event,
            Event::Step(_)
                | Event::Validation { .. }
                | Event::ImageSample { .. }
                | Event::TextSample { .. }
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

fn rewrite(run_folder: &std::path::Path, requests: &Receiver<()>) {
    let mut next = Instant::now();
    while requests.recv().is_ok() {
        let begun = Instant::now();
        if begun < next {
            continue;
        }
        // Errors are reported when the last one is written.
        _ = write(run_folder);
        next =
            Instant::now() + (begun.elapsed() * IDLE_FACTOR).max(Duration::from_secs(EVERY_SECS));
    }
}
