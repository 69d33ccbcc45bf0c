//! `events.jsonl`: what happened in a run, one JSON object per line, in the order in which it
//! happened. Lines are only ever added. A run that was killed may leave half a line behind, which is
//! cut off when the run goes on.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::Event;
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

fn has(folder: &Path, is_it: impl Fn(&Event) -> bool) -> bool {
    let text = fs::read_to_string(folder.join(FILE_NAME)).unwrap_or_default();
    text.lines().any(|line| serde_json::from_str(line).is_ok_and(|event| is_it(&event)))
}

/// Whether a file is such a history, by its first line, of which a kill may have left a half.
pub fn is_ours(path: &Path) -> bool {
    let mut line = String::new();
    let read = File::open(path).and_then(|file| BufReader::new(file).read_line(&mut line));
    if line.ends_with('\n') {
        return serde_json::from_str::<Event>(&line).is_ok();
    }
    read.is_ok() && (line.starts_with(START) || START.starts_with(&line))
}

/// How every line begins.
const START: &str = "{\"event\":";

/// The file, open at its end.
pub struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    /// Goes on where the file ends, or begins one; that of an attempt that came to nothing is forgotten.
    pub fn open(folder: &Path, resume: bool) -> Result<Self> {
        let path = folder.join(FILE_NAME);
        let failed = |source| TrainerError::Io { what: "write", path: path.clone(), source };
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let end = bytes.iter().rposition(|byte| *byte == b'\n').filter(|_| resume);
        let whole = end.map_or(0, |at| at + 1);
        file.set_len(whole as u64).map_err(failed)?;
        file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(Self { file, path })
    }

    /// Adds a line.
    pub fn write(&mut self, event: &Event) -> Result<()> {
        let mut line = serde_json::to_string(event).expect("an event has nothing but plain values");
        line.push('\n');
        let failed = |source| TrainerError::Io { what: "write", path: self.path.clone(), source };
        self.file.write_all(line.as_bytes()).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_line_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        fs::write(&path, "{\"event\":\"phase\",\"name\":\"a\"}\n{\"event\":\"pha").unwrap();
        let mut journal = Journal::open(folder.path(), true).unwrap();
        journal.write(&Event::Phase { name: "b".into() }).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<Event> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let phase = |name: &str| Event::Phase { name: name.into() };
        assert_eq!(lines, [phase("a"), phase("b")]);
        drop(journal);
        Journal::open(folder.path(), false).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
    }
}
