//! MPICH's launcher kills all ranks when one dies, before they could save. What it started, and kills, is therefore only
//! the parent of the rank: the rank itself has a group of processes of its own.

use std::env;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::is_supervised;
use crate::launch::{Launched, Launcher};

/// Set for a process that is a rank, and no parent of one.
const SHIELDED: &str = "HEARTH_SHIELDED";

/// Runs this program again as a child where that is needed, and returns its exit code; none where this process is a rank,
/// or alone. The child finds MPICH as this process would: by its variables and open files.
pub fn run_shielded() -> io::Result<Option<u8>> {
    let is_killed = Launched::detect().is_some_and(|it| it.launcher == Launcher::Hydra);
    if !is_killed || !is_supervised() || env::var_os(SHIELDED).is_some() {
        return Ok(None);
    }
    let mut command = Command::new(env::current_exe()?);
    command.args(env::args_os().skip(1)).env(SHIELDED, "1").process_group(0);
    let status = command.status()?;
    // Killed: as a shell has it.
    Ok(Some(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(137)))
}
