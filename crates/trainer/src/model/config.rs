//! `config.json` of a component: read, and checked for what is not supported.

use std::path::Path;

use serde::de::DeserializeOwned;
use weights::plain_file::read_plain;

use crate::error::{Result, TrainerError};

/// Settings that hearth does not support, or that contradict each other.
#[derive(Debug)]
pub struct Unsupported(pub String);

impl Unsupported {
    /// Fails with `problem` unless `holds`.
    pub fn unless(holds: bool, problem: String) -> std::result::Result<(), Self> {
        if holds { Ok(()) } else { Err(Self(problem)) }
    }
}

/// Reads a JSON file.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = read_plain(path).map_err(|source| TrainerError::Io {
        what: "read",
        path: path.into(),
        source,
    })?;
    serde_json::from_slice(&text)
        .map_err(|error| TrainerError::Config { problem: error.to_string(), path: path.into() })
}

/// Reads a component's settings and checks them.
pub fn read_checked<T: DeserializeOwned>(
    path: &Path,
    check: impl FnOnce(&T) -> std::result::Result<(), Unsupported>,
) -> Result<T> {
    let config = read(path)?;
    check(&config)
        .map_err(|Unsupported(problem)| TrainerError::Config { problem, path: path.into() })?;
    Ok(config)
}
