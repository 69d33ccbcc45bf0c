//! `events.jsonl`: what happened in a run, one JSON object per line, in the order in which it
//! happened. Lines are only ever added, so that other programs can follow a run. A run that was killed
//! may leave half a line behind, which is cut off when the run goes on.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

use weights::plain_file::{open_own, open_plain, read_plain};

use super::{Event, EventRecord};
use crate::error::{Result, TrainerError};

/// What the file is called in a run's folder.
pub const FILE_NAME: &str = "events.jsonl";

/// Whether a run has begun in a folder.
pub fn has_begun(folder: &Path) -> bool {
    has(folder, |event| matches!(event, Event::Begin(_)))
}

/// Whether a run in a folder has saved a checkpoint, which may be gone by now.
pub fn has_saved(folder: &Path) -> bool {
    has(folder, |event| matches!(event, Event::Checkpoint { .. }))
}

/// Whether anything ever happened in a folder.
pub fn has_any(folder: &Path) -> bool {
    has(folder, |_| true)
}

fn has(folder: &Path, is_it: impl Fn(&Event) -> bool) -> bool {
    let text = read_plain(&folder.join(FILE_NAME)).unwrap_or_default();
    let mut lines = text.split(|byte| *byte == b'\n');
    lines.any(|line| serde_json::from_slice(line).is_ok_and(|event| is_it(&event)))
}

/// Whether a file is such a history, by its first line, of which a kill may have left a half.
pub fn is_ours(path: &Path) -> bool {
    let mut line = String::new();
    let read = open_plain(path).and_then(|file| BufReader::new(file).read_line(&mut line));
    if line.ends_with('\n') {
        return serde_json::from_str::<Event>(&line).is_ok();
    }
    read.is_ok() && (line.starts_with(START) || START.starts_with(&line))
}

/// How every line begins.
const START: &str = "{\"event\":";

/// Lines that are no events: a disk lost a bit, or was full when they were written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BrokenLines {
    /// Their numbers, from 1.
    pub lines: Vec<u64>,
}

/// Hands every whole line of such a file on, in order. Broken ones are left out: the others still tell of the run.
pub fn read(path: &Path, mut take: impl FnMut(EventRecord)) -> Result<BrokenLines> {
    let failed = |source| TrainerError::Io { what: "read", path: path.into(), source };
    let mut lines = BufReader::new(open_plain(path).map_err(failed)?);
    let (mut text, mut broken) = (Vec::new(), BrokenLines::default());
    for line in 1.. {
        text.clear();
        if lines.read_until(b'\n', &mut text).map_err(failed)? == 0 {
            break;
        }
        match serde_json::from_slice(&text) {
            Ok(record) => take(record),
            // A writer that was killed leaves half a line, and only at the end.
            Err(_) if !text.ends_with(b"\n") => break,
            Err(_) if text.trim_ascii().is_empty() => {}
            Err(_) => broken.lines.push(line),
        }
    }
    Ok(broken)
}

/// Which events are worth a line: all, but of progress one in a second and the last of a phase. Goes by
/// the times of events alone, so that all who use one keep the same.
#[derive(Default)]
pub struct ProgressThrottle {
    /// When a line of this phase was kept last.
    kept: f64,
    /// Whether its last one was.
    is_done: bool,
}

/// Seconds between two lines of progress. Chosen: as often as anybody looks; an hour of encoding is 3600
/// lines, as many as steps of a training.
const EVERY_SECS: f64 = 1.0;

impl ProgressThrottle {
    /// Whether the next event is worth a line.
    pub fn keeps(&mut self, record: &EventRecord) -> bool {
        let now = record.time.unwrap_or(0.0);
        match &record.event {
            Event::Phase { .. } => *self = Self { kept: now, is_done: false },
            Event::Progress(progress) => {
                let is_last =
                    progress.total > 0 && progress.done >= progress.total && !self.is_done;
                // A clock may be put back.
                if !is_last && (self.kept..self.kept + EVERY_SECS).contains(&now) {
                    return false;
                }
                (self.kept, self.is_done) = (now, self.is_done || is_last);
            }
            _ => {}
        }
        true
    }
}

/// The file, open at its end.
pub struct Journal {
    file: File,
    path: PathBuf,
    throttle: ProgressThrottle,
}

impl Journal {
    /// Goes on where the file ends, or begins one; that of an attempt that came to nothing is forgotten.
    pub fn open(folder: &Path, resume: bool) -> Result<Self> {
        let path = folder.join(FILE_NAME);
        let failed = |source| TrainerError::Io { what: "write", path: path.clone(), source };
        let mut options = OpenOptions::new();
        // For adding: what somebody else adds meanwhile is not written over.
        options.read(true).append(true).create(true);
        let mut file = open_own(&path, &mut options).map_err(failed)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let end = bytes.iter().rposition(|byte| *byte == b'\n').filter(|_| resume);
        let whole = end.map_or(0, |at| at + 1);
        file.set_len(whole as u64).map_err(failed)?;
        Ok(Self { file, path, throttle: ProgressThrottle::default() })
    }

    /// Adds a line, if the event is worth one.
    pub fn write(&mut self, record: &EventRecord) -> Result<()> {
        if !self.throttle.keeps(record) {
            return Ok(());
        }
        let mut line =
            serde_json::to_string(record).expect("an event has nothing but plain values");
        line.push('\n');
        let failed = |source| TrainerError::Io { what: "write", path: self.path.clone(), source };
        self.file.write_all(line.as_bytes()).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::event::lock::tests::pipe;
    use crate::event::{Phase, PhaseProgress, ProgressUnit};

    fn record(time: f64, event: Event) -> EventRecord {
        EventRecord { event, time: Some(time) }
    }

    fn phase(name: &str) -> Event {
        Event::Phase { name: name.into() }
    }

    #[test]
    fn half_a_line_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        fs::write(&path, "{\"event\":\"phase\",\"name\":\"a\"}\n{\"event\":\"pha").unwrap();
        let mut journal = Journal::open(folder.path(), true).unwrap();
        journal.write(&record(1.5, phase("b"))).unwrap();
        let mut records = Vec::new();
        read(&path, |record| records.push(record)).unwrap();
        let before = EventRecord { event: phase("a"), time: None };
        assert_eq!(records, [before, record(1.5, phase("b"))]);
        assert!(is_ours(&path), "a line begins with its kind");
        drop(journal);
        Journal::open(folder.path(), false).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
    }

    #[test]
    fn of_progress_a_line_a_second_is_kept_and_the_last() {
        let mut throttle = ProgressThrottle::default();
        let mut kept = |time: f64, done: u64| {
            let (phase, total, unit) = (Phase::Images, 9, ProgressUnit::Samples);
            throttle
                .keeps(&record(time, Event::Progress(PhaseProgress { phase, done, total, unit })))
        };
        let times = [0.0, 0.5, 1.25, 1.5, 2.0, 2.5, 1.0, 1.5];
        let first: Vec<bool> = times.iter().map(|time| kept(100.0 + time, 1)).collect();
        // Once the clock was put back.
        assert_eq!(first, [true, false, true, false, false, true, true, false]);
        assert!(kept(101.6, 9) && !kept(101.7, 9), "the last one once");
        assert!(throttle.keeps(&record(101.8, phase("next"))), "what is no progress is kept");
    }

    #[test]
    fn what_is_no_plain_file_is_refused_and_nobody_waits_for_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join(FILE_NAME);
        let other = place.path().join("other.jsonl");
        fs::write(&other, "{}\n").unwrap();
        symlink(&other, &path).unwrap();
        for resume in [false, true] {
            let error = Journal::open(place.path(), resume).err().unwrap();
            assert!(format!("{error:?}").contains("a link"), "{error:?}");
        }
        assert_eq!(fs::read_to_string(&other).unwrap(), "{}\n");
        fs::remove_file(&path).unwrap();
        pipe(&path);
        assert!(Journal::open(place.path(), true).is_err());
        assert!(!is_ours(&path) && !has_begun(place.path()) && read(&path, |_| {}).is_err());
    }

    #[test]
    fn what_another_program_adds_meanwhile_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let mut journal = Journal::open(folder.path(), false).unwrap();
        journal.write(&record(1.0, phase("a"))).unwrap();
        let mut other = OpenOptions::new().append(true).open(&path).unwrap();
        other.write_all(b"{\"event\":\"phase\",\"name\":\"theirs\"}\n").unwrap();
        journal.write(&record(2.0, phase("b"))).unwrap();
        let mut names = Vec::new();
        read(&path, |record| names.push(record.event)).unwrap();
        assert_eq!(names, ["a", "theirs", "b"].map(phase));
    }

    #[test]
    fn a_broken_line_is_skipped_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let line = |name: &str| format!("{{\"event\":\"phase\",\"name\":\"{name}\"}}\n");
        let text = [&line("a"), "{\"event\":\"ph\u{0}\u{0}\n", "\n", &line("b"), "[]\n"].concat();
        fs::write(&path, text).unwrap();
        let mut names = Vec::new();
        let broken = read(&path, |record| names.push(record.event)).unwrap();
        assert_eq!(names, ["a", "b"].map(phase));
        assert_eq!(broken.lines, [2, 5]);
    }
}
