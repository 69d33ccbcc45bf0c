//! What `--json` prints.

use std::io::{self, Write};

use serde::Serialize;

use crate::failure::Failure;

/// One object, over several lines.
pub fn object<T: Serialize + ?Sized>(out: &mut dyn Write, value: &T) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(io::Error::from)?;
    Ok(writeln!(out)?)
}

/// One object of many, on a line of its own.
pub fn line<T: Serialize + ?Sized>(out: &mut dyn Write, value: &T) -> Result<(), Failure> {
    serde_json::to_writer(&mut *out, value).map_err(io::Error::from)?;
    Ok(writeln!(out)?)
}
