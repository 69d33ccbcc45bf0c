//! `.lock` of a run's folder: held by the program that works on the run, and free when that is gone,
//! however it went. The system keeps it, so nothing has to be tidied up after a crash.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// What the file is called.
pub const FILE_NAME: &str = ".lock";

/// Whoever looks whether it is held has it for a moment. Chosen: far longer than that takes.
const PATIENCE: Duration = Duration::from_millis(10);
const ATTEMPTS: usize = 5;

/// A folder that nobody else works in, as long as this lives.
pub struct RunLock {
    _file: File,
}

impl RunLock {
    /// Takes it; nothing if another program has it. A file system without locks only loses the guard.
    pub fn take(folder: &Path) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        // Not truncated: it may be a link to something else.
        let file = options.write(true).create(true).truncate(false).open(folder.join(FILE_NAME))?;
        for attempt in 1.. {
            match file.try_lock() {
                Err(TryLockError::WouldBlock) if attempt < ATTEMPTS => sleep(PATIENCE),
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(_)) | Ok(()) => break,
            }
        }
        Ok(Some(Self { _file: file }))
    }
}

/// Whether a program works in a folder. Where the file system has no locks nobody can say, and it counts
/// as held.
pub fn is_held(folder: &Path) -> bool {
    let Ok(file) = File::open(folder.join(FILE_NAME)) else { return false };
    // Shared, so that two who look do not take each other for a run.
    file.try_lock_shared().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_by_one_and_seen_by_all() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_held(folder.path()), "there is not even a file");
        let lock = RunLock::take(folder.path()).unwrap();
        assert!(lock.is_some() && is_held(folder.path()));
        assert!(RunLock::take(folder.path()).unwrap().is_none());
        drop(lock);
        assert!(!is_held(folder.path()));
        // Who only looks is in nobody's way.
        let looking = File::open(folder.path().join(FILE_NAME)).unwrap();
        looking.try_lock_shared().unwrap();
        assert!(!is_held(folder.path()));
        drop(looking);
        assert!(RunLock::take(folder.path()).unwrap().is_some());
    }
}
