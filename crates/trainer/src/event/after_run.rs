//! Files of what was measured of a run after it, beside its history, of which they are no part.

use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use weights::plain_file::read_plain;
use weights::write::write_whole;

use crate::error::{Result, TrainerError};

/// Reads what was measured; none if nothing was. `remedy` is for a file that is damaged.
pub(super) fn read<T: DeserializeOwned>(path: PathBuf, remedy: &'static str) -> Result<Option<T>> {
    let text = match read_plain(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(TrainerError::Io { what: "read", path, source }),
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| TrainerError::Request {
        problem: format!("{} is damaged: {error}", path.display()),
        hint: remedy,
    })
}

/// Writes it, in the place of what was measured before.
pub(super) fn write(path: &Path, measured: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(measured).expect("numbers and strings");
    Ok(write_whole(path, format!("{text}\n").as_bytes())?)
}
