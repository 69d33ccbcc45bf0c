//! One run as its folder tells, for all who look at it: read once, by one thread. Whoever streams it waits here for
//! what is new. A run that is over and that nobody looks at is let go of, but for a summary.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use trainer::error::Result;
use trainer::event::tail::{EventTail, TailedEvent, TailedEvents};
use trainer::event::{journal, lock};

use super::fold::RunFold;
use super::log::log_line;
use super::view;

/// Lines that somebody who was away for a moment gets one by one; who was away for longer gets the run anew.
const STREAMED_LINES: usize = 1000;
/// Seconds between two summaries of one run. Chosen: half a second is live to people; ten a second are work.
const SUMMARY_EVERY: Duration = Duration::from_millis(500);

/// A run that is followed.
pub struct FollowedRun {
    /// Its name in URLs: stays as long as its folder.
    pub id: String,
    /// Its name for people, unique among those served.
    pub name: String,
    pub folder: PathBuf,
    state: Mutex<FollowState>,
    changed: Condvar,
}

struct FollowState {
    tail: EventTail,
    fold: RunFold,
    is_held: bool,
    /// Whether `fold` is that of the whole file.
    is_read: bool,
    /// The file as it was when it was read last.
    stamp: Option<(u64, SystemTime)>,
    line: u64,
    /// The file was begun anew so many times.
    epoch: u64,
    /// So many changes were seen.
    version: u64,
    lines: VecDeque<(u64, Arc<str>)>,
    summary: Arc<str>,
    is_summary_old: bool,
    summed_at: Option<Instant>,
    /// When somebody looked last.
    seen: Instant,
    /// Why it cannot be read.
    problem: Option<String>,
}

/// Where somebody is who streams a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPosition {
    pub epoch: u64,
    pub line: u64,
    pub version: u64,
}

/// What is new for somebody who streams a run.
pub struct StreamBatch {
    pub position: StreamPosition,
    /// The run has to be asked for anew: its file is another one, or too much was missed.
    pub is_reload: bool,
    /// Number and JSON of lines.
    pub lines: Vec<(u64, Arc<str>)>,
    pub summary: Option<Arc<str>>,
}

impl FollowedRun {
    pub fn new(id: String, name: String, folder: PathBuf) -> Self {
        let state = FollowState {
            tail: EventTail::new(&folder),
            fold: RunFold::default(),
            is_held: false,
            is_read: false,
            stamp: None,
            line: 0,
            epoch: 0,
            version: 0,
            lines: VecDeque::new(),
            summary: "null".into(),
            is_summary_old: false,
            summed_at: None,
            seen: Instant::now(),
            problem: None,
        };
        Self { id, name, folder, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, FollowState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what was added.
    pub fn poll(&self) {
        let mut state = self.state();
        let stamp = stamp(&self.folder);
        // Before the file is read: a run that ends meanwhile has then written how.
        let is_held = lock::is_held(&self.folder);
        let is_first = state.version == 0;
        if is_first || is_held != state.is_held || stamp != state.stamp {
            (state.is_held, state.stamp, state.is_read) = (is_held, stamp, true);
            let polled = state.read(&self.folder);
            state.problem = polled.err().map(|error| error.to_string());
            (state.version, state.is_summary_old) = (state.version + 1, true);
        }
        // The time left of a run that goes on changes by itself.
        if state.is_summary_old || is_held {
            state.sum_up(self);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a program works on it, as it was when it was read last.
    pub fn is_held(&self) -> bool {
        self.state().is_held
    }

    /// Lets go of a run that is over; its summary stays.
    pub fn release(&self) {
        let mut state = self.state();
        if state.is_held {
            return;
        }
        (state.fold, state.tail) = (RunFold::default(), EventTail::new(&self.folder));
        (state.is_read, state.line) = (false, 0);
        state.lines = VecDeque::new();
        state.epoch += 1;
    }

    /// Steps that are held in memory, and since when nobody looked; nothing of a run that goes on.
    pub fn idle(&self) -> Option<(usize, Duration)> {
        let state = self.state();
        (!state.is_held && state.is_read)
            .then(|| (state.fold.history.steps.len(), state.seen.elapsed()))
    }

    /// What of the run is shown in a list, as JSON.
    pub fn summary(&self) -> Arc<str> {
        Arc::clone(&self.state().summary)
    }

    /// Hands on the run as it is, read whole.
    pub fn look<T>(&self, see: impl FnOnce(&RunFold, bool) -> T) -> T {
        let is_read = {
            let mut state = self.state();
            state.seen = Instant::now();
            state.is_read
        };
        if !is_read {
            self.poll_anew();
        }
        let state = self.state();
        see(&state.fold, state.is_held)
    }

    /// Hands on what is known without reading anything; nothing of a run that was let go.
    pub fn peek<T>(&self, see: impl FnOnce(&RunFold, bool) -> T) -> Option<T> {
        let state = self.state();
        state.is_read.then(|| see(&state.fold, state.is_held))
    }

    fn poll_anew(&self) {
        // Another stamp, so that the file is read.
        self.state().stamp = None;
        self.poll();
    }

    /// All that a page shows of the run when it is opened, and where the stream goes on.
    pub fn snapshot(&self) -> Value {
        let mut value = self.look(|fold, is_held| view::snapshot(self, fold, is_held));
        let state = self.state();
        value["line"] = json!(state.line);
        value["epoch"] = json!(state.epoch);
        value
    }

    /// Waits until there is something new, or for so long.
    pub fn wait(&self, at: StreamPosition, patience: Duration) -> StreamBatch {
        let state = self.state();
        let waited = self.changed.wait_timeout_while(state, patience, |state| {
            state.epoch == at.epoch && state.version == at.version && state.line == at.line
        });
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.seen = Instant::now();
        let first = state.lines.front().map_or(state.line + 1, |(line, _)| *line);
        let is_reload = state.epoch != at.epoch || at.line > state.line || at.line + 1 < first;
        let lines = state.lines.iter().filter(|(line, _)| !is_reload && *line > at.line);
        StreamBatch {
            position: StreamPosition {
                epoch: state.epoch,
                line: state.line,
                version: state.version,
            },
            is_reload,
            lines: lines.cloned().collect(),
            summary: (state.version != at.version).then(|| Arc::clone(&state.summary)),
        }
    }
}

impl FollowState {
    fn read(&mut self, folder: &Path) -> Result<()> {
        loop {
            let TailedEvents { is_restarted, has_more, events } = self.tail.poll()?;
            if is_restarted {
                self.fold = RunFold::default();
                self.lines.clear();
                (self.line, self.epoch) = (0, self.epoch + 1);
            }
            let n = events.len();
            for (at, TailedEvent { line, record }) in events.iter().enumerate() {
                self.fold.apply(folder, *line, record);
                self.line = *line;
                // Nobody streams lines from so far back.
                if at + STREAMED_LINES >= n {
                    let text = json!({ "record": record, "log": log_line(*line, self.fold.time, &record.event) });
                    self.lines.push_back((*line, text.to_string().into()));
                }
            }
            let excess = self.lines.len().saturating_sub(STREAMED_LINES);
            self.lines.drain(..excess);
            if !has_more {
                return Ok(());
            }
        }
    }

    /// A new summary, unless there was one just now.
    fn sum_up(&mut self, run: &FollowedRun) {
        if self.summed_at.is_some_and(|at| at.elapsed() < SUMMARY_EVERY) {
            return;
        }
        let mut summary = view::summary(run, &self.fold, self.is_held);
        summary["problem"] = json!(self.problem);
        let summary = summary.to_string();
        if *summary != *self.summary {
            self.summary = summary.into();
            self.version += 1;
        }
        (self.summed_at, self.is_summary_old) = (Some(Instant::now()), false);
    }
}

/// Length and time of a run's file.
fn stamp(folder: &Path) -> Option<(u64, SystemTime)> {
    let about = fs::metadata(folder.join(journal::FILE_NAME)).ok()?;
    Some((about.len(), about.modified().ok()?))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;

    use super::super::fold::tests::{BEGIN, step};
    use super::*;

    fn write(folder: &Path, lines: &[String]) {
        let path = folder.join(journal::FILE_NAME);
        let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
        for line in lines {
            file.write_all(format!("{}\n", line.replace('\n', "")).as_bytes()).unwrap();
        }
    }

    fn begun(steps: u64) -> (tempfile::TempDir, FollowedRun) {
        let folder = tempfile::tempdir().unwrap();
        let lines: Vec<String> = (1..=steps).map(|n| step(n, "0.5")).collect();
        write(folder.path(), &[vec![BEGIN.into()], lines].concat());
        let run = FollowedRun::new("id".into(), "run".into(), folder.path().into());
        run.poll();
        (folder, run)
    }

    fn at(run: &FollowedRun, line: u64) -> StreamPosition {
        StreamPosition {
            line,
            ..run.wait(StreamPosition { epoch: 0, line: 0, version: 0 }, Duration::ZERO).position
        }
    }

    #[test]
    fn who_streams_gets_every_line_once_from_where_it_was() {
        let (folder, run) = begun(3);
        let batch = run.wait(at(&run, 2), Duration::ZERO);
        assert_eq!(batch.lines.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [3, 4]);
        assert!(!batch.is_reload && batch.lines[0].1.contains("\"step\":2"));
        let before = batch.position;
        assert!(run.wait(before, Duration::from_millis(5)).lines.is_empty());
        write(folder.path(), &[step(4, "0.25")]);
        run.poll();
        let batch = run.wait(before, Duration::from_secs(9));
        assert_eq!(batch.lines.len(), 1);
        assert_eq!(batch.position.line, 5);
    }

    #[test]
    fn who_missed_too_much_or_another_run_asks_anew() {
        let (folder, run) = begun(STREAMED_LINES as u64 + 100);
        assert!(run.wait(at(&run, 5), Duration::ZERO).is_reload);
        assert!(!run.wait(at(&run, 300), Duration::ZERO).is_reload);
        let before = at(&run, 300);
        fs::remove_file(folder.path().join(journal::FILE_NAME)).unwrap();
        write(folder.path(), &[BEGIN.into()]);
        run.poll();
        assert!(run.wait(before, Duration::ZERO).is_reload);
        assert_eq!(run.look(|fold, _| fold.history.steps.len()), 0);
    }

    #[test]
    fn a_run_that_nobody_looks_at_is_let_go_and_read_again() {
        let (_folder, run) = begun(3);
        let summary = run.summary();
        assert_eq!(run.idle().unwrap().0, 3);
        run.release();
        run.poll();
        assert!(run.idle().is_none() && run.summary() == summary);
        assert_eq!(run.look(|fold, _| fold.history.steps.len()), 3);
        assert_eq!(run.snapshot()["line"], 4);
    }
}
