//! `config.json` of a component: read, and checked for what is not supported.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;
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
    let wrong = |problem| TrainerError::Config { problem, path: path.into() };
    let settings = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    check_numbers(&settings, "it").map_err(|Unsupported(problem)| wrong(problem))?;
    serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))
}

/// Refuses whole numbers beyond 32 bits, so that two of them can be multiplied.
fn check_numbers(value: &Value, name: &str) -> std::result::Result<(), Unsupported> {
    match value {
        Value::Number(number) => Unsupported::unless(
            number.as_u64().is_none_or(|number| u32::try_from(number).is_ok()),
            format!("{name} is {number}, most is {}", u32::MAX),
        ),
        Value::Array(values) => values.iter().try_for_each(|value| check_numbers(value, name)),
        Value::Object(fields) => {
            fields.iter().try_for_each(|(name, value)| check_numbers(value, name))
        }
        _ => Ok(()),
    }
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
