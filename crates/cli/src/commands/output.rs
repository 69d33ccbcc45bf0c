//! Files that a command will write: whether they can be is checked before the work, not after it.

use std::fs::{self, OpenOptions};
use std::io::{Error, ErrorKind};
use std::path::Path;

use weights::write::staging_path;

use crate::failure::Failure;

/// Whether a path is meant as a folder: it is one, or ends as folders do.
pub fn is_folder(path: &Path) -> bool {
    path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/")
}

/// That a file can be written there; makes the folders above it. What is there already stays as it is.
pub fn check_file(path: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::Write { path: path.into(), error };
    if is_folder(path) || path.file_name().is_none() {
        return Err(failed(Error::new(ErrorKind::IsADirectory, "it is a folder, expected a file")));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(failed)?;
    // Permissions alone do not say it: a file system may be read-only as a whole.
    let probe = staging_path(path);
    OpenOptions::new().write(true).create_new(true).open(&probe).map_err(failed)?;
    fs::remove_file(&probe).map_err(failed)
}
