//! What people ask of a run, as it comes in. A thread of its own looks into the run's folder now and then, so that a
//! step never waits for a disk. A request to stop is heard as Ctrl-C is; the loop takes the others between two steps.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use compute::CancelToken;

use super::request::{FoundRequest, PendingRequest, RequestAnswer, RunRequest, found, remove};

/// How often the folder is looked into. Chosen: nobody waits for it, and it costs nothing.
const EVERY: Duration = Duration::from_millis(250);

/// Requests of a run that works.
pub(super) struct Inbox {
    run_folder: PathBuf,
    state: Arc<Mutex<InboxState>>,
    /// Dropped at the end, which wakes the thread.
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct InboxState {
    /// All that were ever found, so that each is taken in once.
    known: BTreeSet<String>,
    pending: Vec<PendingRequest>,
    /// Answers that need nothing of the loop.
    answers: Vec<RequestAnswer>,
    is_paused: bool,
}

impl Inbox {
    /// Of the run in a folder, which begins or goes on: what was to stop or pause an earlier program is of no use to
    /// this one, and a run that begins anew was asked nothing yet.
    pub fn begin(run_folder: &Path, resume: bool, stop: &CancelToken) -> Self {
        let is_stale = |request: &RunRequest| {
            !resume || matches!(request, RunRequest::Stop | RunRequest::Pause | RunRequest::Resume)
        };
        let mut state = InboxState::default();
        state.take(found(run_folder), &is_stale, stop);
        let state = Arc::new(Mutex::new(state));
        let (end, ended) = channel();
        let (folder, heard, stop) = (run_folder.to_owned(), Arc::clone(&state), stop.clone());
        let thread = thread::Builder::new().name("requests".into());
        // Without a thread nobody is heard but Ctrl-C.
        let thread = thread.spawn(move || listen(&folder, &heard, &stop, &ended)).ok();
        Self { run_folder: run_folder.into(), state, end: Some(end), thread }
    }

    fn state(&self) -> MutexGuard<'_, InboxState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is still to be done, in order.
    pub fn pending(&self) -> Vec<PendingRequest> {
        self.state().pending.clone()
    }

    /// Whether somebody asked to pause, and nobody to go on.
    pub fn is_paused(&self) -> bool {
        self.state().is_paused
    }

    /// What was asked and needed nothing but to be heard.
    pub fn answers(&self) -> Vec<RequestAnswer> {
        std::mem::take(&mut self.state().answers)
    }

    /// A request is answered, and that is written down.
    pub fn forget(&self, id: &str) {
        remove(&self.run_folder, id);
        self.state().pending.retain(|pending| pending.id != id);
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

fn listen(folder: &Path, state: &Mutex<InboxState>, stop: &CancelToken, ended: &Receiver<()>) {
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(EVERY) {
        let found = found(folder);
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.take(found, &|_| false, stop);
    }
}

impl InboxState {
    /// Takes in what was found and is new.
    fn take(
        &mut self,
        found: Vec<FoundRequest>,
        is_stale: &dyn Fn(&RunRequest) -> bool,
        stop: &CancelToken,
    ) {
        for request in found {
            let (FoundRequest::Whole(PendingRequest { id, .. }) | FoundRequest::Broken(id, _)) =
                &request;
            if !self.known.insert(id.clone()) {
                continue;
            }
            match request {
                FoundRequest::Broken(id, problem) => self.answer(id, None, Some(problem)),
                FoundRequest::Whole(PendingRequest { id, request }) if is_stale(&request) => {
                    let reason = "the run was started again since".into();
                    self.answer(id, Some(request), Some(reason));
                }
                FoundRequest::Whole(pending) => self.hear(pending, stop),
            }
        }
    }

    fn hear(&mut self, PendingRequest { id, request }: PendingRequest, stop: &CancelToken) {
        match request {
            RunRequest::Stop => stop.cancel(),
            RunRequest::Pause => self.is_paused = true,
            RunRequest::Resume => self.is_paused = false,
            request => return self.pending.push(PendingRequest { id, request }),
        }
        self.answer(id, Some(request), None);
    }

    fn answer(&mut self, id: String, asked: Option<RunRequest>, refused: Option<String>) {
        self.answers.push(RequestAnswer { step: 0, id, asked, refused });
    }
}
