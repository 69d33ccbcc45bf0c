//! Which library belongs to the launcher that started this process.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::Mpi;
use crate::error::{ClusterError, Result};
use crate::launch::{Launched, Launcher};

/// Names a library directly.
const VARIABLE: &str = "HEARTH_MPI";

#[cfg(target_os = "macos")]
const NAMES: [(Launcher, &[&str]); 2] = [
    (Launcher::OpenMpi, &["libmpi.40.dylib", "libmpi.dylib"]),
    (Launcher::Hydra, &["libmpi.12.dylib", "libmpi_abi.dylib", "libmpi.dylib"]),
];
#[cfg(not(target_os = "macos"))]
const NAMES: [(Launcher, &[&str]); 2] = [
    (Launcher::OpenMpi, &["libmpi.so.40", "libmpi.so"]),
    (Launcher::Hydra, &["libmpich.so.12", "libmpi.so.12", "libmpi_abi.so.1", "libmpi_abi.so.0"]),
];

/// Loads the library of the launcher.
pub fn find(launched: Launched) -> Result<Mpi> {
    if let Some(path) = env::var_os(VARIABLE) {
        return Mpi::open(Path::new(&path));
    }
    let tried = candidates(launched.launcher);
    let found = tried.iter().find_map(|path| Mpi::open(path).ok());
    found.ok_or_else(|| {
        let names: Vec<String> = tried.iter().map(|path| path.display().to_string()).collect();
        ClusterError::NoLibrary {
            launcher: launched.launcher.name(),
            size: launched.size,
            tried: names.join(", "),
        }
    })
}

/// Where it may be: beside the launcher, then where the system looks.
fn candidates(launcher: Launcher) -> Vec<PathBuf> {
    let names = NAMES.iter().filter(|(of, _)| *of == launcher).flat_map(|(_, names)| *names);
    let beside = libraries_of_parents();
    let beside = names.clone().flat_map(|name| beside.iter().map(move |folder| folder.join(name)));
    let beside = beside.filter(|path| path.is_file());
    beside.chain(names.clone().map(PathBuf::from)).collect()
}

/// The folders `lib` beside the `bin` of the programs that started this one: a launcher, or its daemon.
fn libraries_of_parents() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let mut process = String::from("self");
    // Chosen: the launcher, a daemon, a shell between.
    for _ in 0..4 {
        let Some(parent) = parent_of(&process) else { break };
        let program = fs::read_link(format!("/proc/{parent}/exe")).unwrap_or_default();
        let prefix = program.parent().and_then(Path::parent).unwrap_or(Path::new(""));
        // The system's own are found by name.
        if !prefix.as_os_str().is_empty() && prefix != Path::new("/usr") && prefix != Path::new("/")
        {
            folders.push(prefix.join("lib"));
            folders.push(prefix.join("lib64"));
        }
        process = parent;
    }
    folders.dedup();
    folders
}

/// The parent of a process, where the system has `/proc`.
fn parent_of(process: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim();
    (parent != "0" && parent != "1").then(|| parent.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_refused() {
        let error = Mpi::open(Path::new("/nonexistent/libmpi.so")).err().unwrap().to_string();
        assert!(error.starts_with("MPI library cannot be used: "), "{error}");
        let names: Vec<std::ffi::OsString> = candidates(Launcher::OpenMpi)
            .iter()
            .filter_map(|path| Some(path.file_name()?.into()))
            .collect();
        assert!(names.iter().any(|name| name.to_string_lossy().starts_with("libmpi")));
    }
}
