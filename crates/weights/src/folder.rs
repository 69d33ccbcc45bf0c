//! Folders of files that belong together: under their name when all files are in them, or removed again.
//!
//! ```text
//! beside/.model.4711.partial/    while it is filled, locked by the writer; as of files, see `write.rs`
//! beside/model/                  after the rename
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::write::{begin_staging, parent, remove_stale, replace_folder};

/// A folder that appears under its name only when [`AtomicFolder::commit`] is called.
pub struct AtomicFolder {
    staging: PathBuf,
    target: PathBuf,
    is_committed: bool,
    /// Tells others that somebody is still at work.
    _lock: File,
}

impl AtomicFolder {
    /// Begins a folder; what has that name now stays as it is until the commit.
    pub fn create(target: &Path) -> io::Result<Self> {
        fs::create_dir_all(parent(target))?;
        remove_stale(target);
        let (staging, lock) = begin_staging(target, |staging| {
            fs::create_dir(staging)?;
            File::open(staging).inspect_err(|_| _ = fs::remove_dir(staging))
        })?;
        Ok(Self { staging, target: target.into(), is_committed: false, _lock: lock })
    }

    /// Where its files go meanwhile.
    pub fn path(&self) -> &Path {
        &self.staging
    }

    /// Gives it its name; a folder that has it is removed.
    pub fn commit(mut self) -> io::Result<()> {
        replace_folder(&self.staging, &self.target)?;
        self.is_committed = true;
        Ok(())
    }
}

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        if !self.is_committed {
            _ = fs::remove_dir_all(&self.staging);
        }
    }
}

/// Fills a folder, which is made with all above it. If that fails, and the folder was not there before, it is removed.
pub fn fill_folder<T, E>(
    folder: &Path,
    failed: impl FnOnce(io::Error) -> E,
    fill: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let is_new = folder.symlink_metadata().is_err();
    fs::create_dir_all(folder).map_err(failed)?;
    fill().inspect_err(|_| {
        if is_new {
            _ = fs::remove_dir_all(folder);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn a_folder_appears_whole_or_not_at_all() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("above/model");
        let folder = AtomicFolder::create(&target).unwrap();
        fs::write(folder.path().join("a"), "new").unwrap();
        assert!(!target.exists());
        folder.commit().unwrap();
        let given_up = AtomicFolder::create(&target).unwrap();
        fs::write(given_up.path().join("a"), "half").unwrap();
        drop(given_up);
        assert_eq!(fs::read(target.join("a")).unwrap(), b"new");
        assert_eq!(names(target.parent().unwrap()), ["model"]);
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_what_a_living_one_fills_is_not() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("model");
        for name in [".model.1.partial", "model.partial", ".model.mine.partial"] {
            fs::create_dir(place.path().join(name)).unwrap();
            fs::write(place.path().join(name).join("a"), "a").unwrap();
        }
        let living = AtomicFolder::create(&target).unwrap();
        let kept = living.path().file_name().unwrap().to_string_lossy().into_owned();
        AtomicFolder::create(&target).unwrap().commit().unwrap();
        let mut expected =
            vec![kept, ".model.mine.partial".into(), "model".into(), "model.partial".into()];
        expected.sort_unstable();
        assert_eq!(names(place.path()), expected);
    }

    #[test]
    fn a_new_folder_that_cannot_be_filled_is_removed_an_old_one_is_not() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("peft");
        let fail = || {
            fill_folder(
                &folder,
                |error| error,
                || {
                    fs::write(folder.join("a"), "a")?;
                    Err::<(), _>(io::ErrorKind::StorageFull.into())
                },
            )
        };
        assert_eq!(fail().unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(!folder.exists());
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("mine"), "mine").unwrap();
        fail().unwrap_err();
        assert_eq!(names(&folder), ["a", "mine"]);
    }
}
