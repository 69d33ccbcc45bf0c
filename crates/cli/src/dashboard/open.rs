//! A dashboard beside a run of this program, on a thread of its own.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{DashboardEnd, restore, watch};
use crate::interrupt;

/// How long a dashboard has to close. Chosen: several drawings over a slow connection.
const PATIENCE: Duration = Duration::from_secs(2);

/// A dashboard that has the terminal until it is closed, or somebody leaves it.
pub struct OpenDashboard {
    is_open: Arc<AtomicBool>,
    is_closed: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl OpenDashboard {
    /// Of the run in a folder, which need not exist yet; `page` is its URL, if it has one.
    pub fn begin(run_folder: &Path, page: Option<String>) -> Self {
        let [is_open, is_closed] = [true, false].map(|value| Arc::new(AtomicBool::new(value)));
        let (folder, open, closed) =
            (run_folder.to_owned(), Arc::clone(&is_open), Arc::clone(&is_closed));
        let thread = thread::Builder::new().name("dashboard".into()).spawn(move || {
            // Where it cannot be drawn there are lines.
            let end = watch(&folder, page.as_deref(), &closed);
            open.store(false, Ordering::SeqCst);
            if matches!(end, Ok(DashboardEnd::Interrupted)) {
                interrupt::raise();
            }
        });
        if thread.is_err() {
            is_open.store(false, Ordering::SeqCst);
        }
        Self { is_open, is_closed, thread: Mutex::new(thread.ok()) }
    }

    /// Whether it has the terminal.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::SeqCst)
    }

    /// Gives the terminal back. A terminal that is gone, as after a lost connection, can keep the thread for ever in
    /// reading its keys: then it is left behind, and ends with the program.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else { return };
        let begun = Instant::now();
        while !thread.is_finished() && begun.elapsed() < PATIENCE {
            thread::sleep(PATIENCE / 200);
        }
        if thread.is_finished() {
            _ = thread.join();
        } else {
            restore();
        }
    }
}
