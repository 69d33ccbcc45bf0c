//! `events.jsonl` as it grows: whoever watches a run reads what was added since the last look. Works on a run of this
//! program, of another one, one that is over, and one that was copied from elsewhere.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use weights::plain_file::open_plain;

use super::EventRecord;
use super::journal::FILE_NAME;
use crate::error::{Result, TrainerError};

/// Bytes that are read at a time. Chosen: a long history is read in pieces, not held twice.
const PIECE: usize = 1 << 20;
/// Bytes whose events are handed on together. Chosen: a long run takes a few MB more then, not twice its memory.
const BATCH: u64 = 2 << 20;
/// The longest line that is waited for. Chosen: far above any event; what is longer is no history.
const LONGEST_LINE: usize = 16 << 20;

/// Reads a run's events as they are added.
pub struct EventTail {
    path: PathBuf,
    /// Which file it was, by device and number: a run that begins anew may put another in its place.
    file: Option<(u64, u64)>,
    /// Bytes that were read.
    offset: u64,
    /// What of them is not a whole line yet.
    rest: Vec<u8>,
    /// Lines that were read.
    line: u64,
}

/// What was added since the last look.
#[derive(Debug, Default)]
pub struct TailedEvents {
    /// The file is another one, or was cut: these are its events from the first on.
    pub is_restarted: bool,
    /// There is more, for the next look.
    pub has_more: bool,
    /// In their order. Lines that are no events are left out.
    pub events: Vec<TailedEvent>,
}

/// An event and its line.
#[derive(Clone, Debug, PartialEq)]
pub struct TailedEvent {
    /// From 1.
    pub line: u64,
    /// The event.
    pub record: EventRecord,
}

impl EventTail {
    /// Of the run in a folder, before its first line. The file need not exist yet.
    pub fn new(run_folder: &Path) -> Self {
        let path = run_folder.join(FILE_NAME);
        Self { path, file: None, offset: 0, rest: Vec::new(), line: 0 }
    }

    /// What was added since the last call; of much, the first part.
    pub fn poll(&mut self) -> Result<TailedEvents> {
        let failed =
            |path: &Path, source| TrainerError::Io { what: "read", path: path.into(), source };
        let mut file = match open_plain(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let is_restarted = self.restart(None);
                return Ok(TailedEvents { is_restarted, ..TailedEvents::default() });
            }
            Err(error) => return Err(failed(&self.path, error)),
        };
        let about = file.metadata().map_err(|error| failed(&self.path, error))?;
        let identity = (about.dev(), about.ino());
        let is_other = self.file.is_some_and(|before| before != identity);
        let is_restarted = (is_other || about.len() < self.offset) && self.restart(Some(identity));
        self.file = Some(identity);
        let events = self.added(&mut file).map_err(|error| failed(&self.path, error))?;
        Ok(TailedEvents { is_restarted, has_more: self.offset < about.len(), events })
    }

    /// Begins again; whether anything had been read.
    fn restart(&mut self, file: Option<(u64, u64)>) -> bool {
        let was_read = self.offset > 0;
        let path = std::mem::take(&mut self.path);
        *self = Self { path, file, offset: 0, rest: Vec::new(), line: 0 };
        was_read
    }

    fn added(&mut self, file: &mut File) -> io::Result<Vec<TailedEvent>> {
        file.seek(SeekFrom::Start(self.offset))?;
        let (mut events, mut piece) = (Vec::new(), vec![0; PIECE]);
        let end = self.offset + BATCH;
        while self.offset < end {
            let n = file.read(&mut piece)?;
            if n == 0 {
                break;
            }
            self.offset += n as u64;
            self.take(&piece[..n], &mut events);
        }
        Ok(events)
    }

    /// Takes the whole lines out of what was read, and keeps the rest.
    fn take(&mut self, piece: &[u8], events: &mut Vec<TailedEvent>) {
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            if self.rest.len() + part.len() <= LONGEST_LINE {
                self.rest.extend_from_slice(part);
            }
            if part.ends_with(b"\n") {
                self.line += 1;
                let read = serde_json::from_slice(&self.rest);
                events.extend(read.ok().map(|record| TailedEvent { line: self.line, record }));
                self.rest.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    use super::*;
    use crate::event::Event;

    fn note(text: &str) -> String {
        format!("{{\"event\":\"note\",\"text\":\"{text}\"}}")
    }

    /// The lines and texts of what is new.
    fn new(tail: &mut EventTail) -> (bool, Vec<(u64, String)>) {
        let TailedEvents { is_restarted, mut events, mut has_more } = tail.poll().unwrap();
        while has_more {
            let more = tail.poll().unwrap();
            events.extend(more.events);
            has_more = more.has_more;
        }
        let text = |event: TailedEvent| match event.record.event {
            Event::Note { text } => (event.line, text),
            other => panic!("{other:?}"),
        };
        (is_restarted, events.into_iter().map(text).collect())
    }

    #[test]
    fn what_is_added_is_read_once_and_half_a_line_waits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let add = |text: &str| {
            let file = OpenOptions::new().append(true).create(true).open(&path);
            file.unwrap().write_all(text.as_bytes()).unwrap();
        };
        let tail = &mut EventTail::new(folder.path());
        let of = |lines: &[(u64, &str)]| {
            lines.iter().map(|(line, text)| (*line, (*text).to_owned())).collect::<Vec<_>>()
        };
        assert_eq!(new(tail), (false, vec![]), "there is no file yet");
        let half = note("b");
        add(&format!("{}\n{}", note("a"), &half[..9]));
        assert_eq!(new(tail), (false, of(&[(1, "a")])));
        assert_eq!(new(tail), (false, vec![]));
        add(&format!("{}\nno event\n{}\n", &half[9..], note("c")));
        assert_eq!(new(tail), (false, of(&[(2, "b"), (4, "c")])));
        // A line of many pieces.
        let long = "x".repeat(3 * PIECE);
        add(&format!("{}\n", note(&long)));
        assert_eq!(new(tail), (false, of(&[(5, &long)])));
    }

    #[test]
    fn a_long_history_comes_in_parts() {
        let folder = tempfile::tempdir().unwrap();
        let line = format!("{}\n", note(&"x".repeat(PIECE)));
        fs::write(folder.path().join(FILE_NAME), line.repeat(20)).unwrap();
        let (mut tail, mut lines, mut n_parts) = (EventTail::new(folder.path()), Vec::new(), 0);
        loop {
            let part = tail.poll().unwrap();
            assert!(!part.is_restarted && part.events.len() < 4);
            lines.extend(part.events.iter().map(|event| event.line));
            n_parts += 1;
            if !part.has_more {
                break;
            }
        }
        assert_eq!((lines, n_parts), ((1..=20).collect(), 11));
    }

    #[test]
    fn a_run_that_begins_anew_is_read_from_its_first_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        let tail = &mut EventTail::new(folder.path());
        fs::write(&path, format!("{}\n{}\n", note("a"), note("b"))).unwrap();
        assert_eq!(new(tail).1.len(), 2);
        // Cut, as by a run that takes the place of an attempt.
        fs::write(&path, format!("{}\n", note("c"))).unwrap();
        assert_eq!(new(tail), (true, vec![(1, "c".into())]));
        // Replaced by a longer one.
        let other = folder.path().join("other");
        fs::write(&other, format!("{}\n{}\n", note("d"), note("e"))).unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(new(tail), (true, vec![(1, "d".into()), (2, "e".into())]));
        fs::remove_file(&path).unwrap();
        assert_eq!(new(tail), (true, vec![]));
        assert_eq!(new(tail), (false, vec![]));
    }
}
