//! `.lock` of a run's folder: held by the program that works on the run, and free when that is gone,
//! however it went. The system keeps it, so nothing has to be tidied up after a crash.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use weights::plain_file::open_own;

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
        options.write(true).create(true).truncate(false);
        let file = open_own(&folder.join(FILE_NAME), &mut options)?;
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
    let opened = open_own(&folder.join(FILE_NAME), OpenOptions::new().read(true));
    let Ok(file) = opened else { return false };
    // Shared, so that two who look do not take each other for a run.
    file.try_lock_shared().is_err()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    /// A pipe that nobody reads from or writes to: who opens it as a plain file waits for ever.
    pub fn pipe(path: &Path) {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }

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

    #[test]
    fn what_is_no_plain_file_is_refused_and_nobody_waits_for_it() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join(FILE_NAME);
        let diary = place.path().join("diary");
        fs::write(&diary, "dear diary").unwrap();
        for (make, part) in [
            (&(|| symlink(&diary, &path).unwrap()) as &dyn Fn(), "a link"),
            (&|| symlink(place.path().join("new"), &path).unwrap(), "a link"),
            (&|| pipe(&path), "a pipe"),
        ] {
            make();
            let error = RunLock::take(place.path()).err().unwrap();
            assert!(error.to_string().contains(part), "{error}");
            assert!(!is_held(place.path()));
            fs::remove_file(&path).unwrap();
        }
        fs::create_dir(&path).unwrap();
        assert!(RunLock::take(place.path()).is_err());
        assert_eq!(fs::read_to_string(&diary).unwrap(), "dear diary");
        assert!(!place.path().join("new").exists());
    }
}
