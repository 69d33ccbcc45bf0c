//! The cache while it is filled: locks, links and refs as Python's `huggingface_hub` has them.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use weights::hub::listing::PARTIAL;
use weights::plain_file::open_own;
use weights::write::{staging_path, write_whole};

use crate::error::{HubError, Result};
use crate::model::{HubModel, RemoteFile};

/// Chosen: how often a lock that another program holds is tried.
const LOCK_PAUSE: Duration = Duration::from_millis(200);

/// Where a model's files go.
pub struct SnapshotFolder {
    folder: PathBuf,
    locks: PathBuf,
    commit: String,
    revision: String,
}

impl SnapshotFolder {
    /// Of a model, in a cache.
    pub fn new(cache: &Path, model: &HubModel) -> Self {
        Self {
            folder: model.name.folder(cache),
            locks: cache.join(".locks").join(model.name.folder_name()),
            commit: model.commit.clone(),
            revision: model.name.revision().into(),
        }
    }

    /// Makes the folders.
    pub fn create(&self) -> Result<()> {
        for folder in
            [self.folder.join("blobs"), self.folder.join("refs"), self.path(), self.locks.clone()]
        {
            fs::create_dir_all(&folder).map_err(HubError::io("create", &folder))?;
        }
        Ok(())
    }

    /// The snapshot.
    pub fn path(&self) -> PathBuf {
        self.folder.join("snapshots").join(&self.commit)
    }

    /// The file itself.
    pub fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.folder.join("blobs").join(file.checksum.hex())
    }

    /// The file while it is downloaded.
    pub fn partial(&self, file: &RemoteFile) -> PathBuf {
        self.folder.join("blobs").join(format!("{}{PARTIAL}", file.checksum.hex()))
    }

    /// Whether a file is there: its blob, of the right size.
    pub fn has_blob(&self, file: &RemoteFile) -> bool {
        fs::metadata(self.blob(file))
            .is_ok_and(|about| about.is_file() && about.len() == file.bytes)
    }

    /// Whether the snapshot has it.
    pub fn has_link(&self, file: &RemoteFile) -> bool {
        fs::metadata(self.path().join(&file.path))
            .is_ok_and(|about| about.is_file() && about.len() == file.bytes)
    }

    /// Waits until no other program downloads this file. The lock is held until the returned file is dropped.
    pub fn lock(&self, file: &RemoteFile, is_stopped: &dyn Fn() -> bool) -> Result<File> {
        let path = self.locks.join(format!("{}.lock", file.checksum.hex()));
        let io = || HubError::io("lock", &path);
        let lock = open_own(&path, OpenOptions::new().write(true).create(true)).map_err(io())?;
        loop {
            match lock.try_lock() {
                Err(TryLockError::WouldBlock) if is_stopped() => return Err(HubError::Cancelled),
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_PAUSE),
                // A file system without locks: two downloads then write the same bytes to the same place.
                Ok(()) | Err(TryLockError::Error(_)) => return Ok(lock),
            }
        }
    }

    /// Puts a file that is whole into the snapshot, as a relative link.
    pub fn link(&self, file: &RemoteFile) -> Result<()> {
        let path = self.path().join(&file.path);
        let io = || HubError::io("link", &path);
        let up = "../".repeat(file.path.split('/').count() + 1);
        let staging = staging_path(&path);
        fs::create_dir_all(path.parent().unwrap_or(&path)).map_err(io())?;
        symlink(format!("{up}blobs/{}", file.checksum.hex()), &staging).map_err(io())?;
        fs::rename(&staging, &path).inspect_err(|_| _ = fs::remove_file(&staging)).map_err(io())
    }

    /// Says which commit the branch or tag is at; when all files are there, so that whoever asks for it meanwhile gets
    /// what was there before.
    pub fn write_ref(&self) -> Result<()> {
        if self.revision == self.commit {
            return Ok(());
        }
        let path = self.folder.join("refs").join(&self.revision);
        // Python reads it without cutting a line's end off.
        write_whole(&path, self.commit.as_bytes())
            .map_err(|error| HubError::io("write", &path)(std::io::Error::other(error)))
    }
}
