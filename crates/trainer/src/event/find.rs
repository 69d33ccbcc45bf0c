//! The runs in a folder: every folder in it with a history of ours.

use std::fs;
use std::path::{Path, PathBuf};

use super::journal::{FILE_NAME, is_ours};
use crate::error::{Result, TrainerError};

/// Folders below one another that are looked into. Chosen: `experiments/2026/cat` and one more.
const DEPTH: usize = 4;
/// Folders that are looked into at most: nobody keeps that many runs, and a whole disk may be named.
const MOST_FOLDERS: usize = 20_000;

/// The runs in a folder, by name. A run's own folders are not looked into, nor hidden ones, nor links.
pub fn find_runs(folder: &Path) -> Result<Vec<PathBuf>> {
    // What is named has to be there; what is in it may not be readable.
    fs::read_dir(folder).map_err(|source| TrainerError::Io {
        what: "read",
        path: folder.into(),
        source,
    })?;
    let (mut runs, mut left) = (Vec::new(), MOST_FOLDERS);
    look_into(folder, DEPTH, &mut left, &mut runs);
    runs.sort();
    Ok(runs)
}

fn look_into(folder: &Path, depth: usize, left: &mut usize, runs: &mut Vec<PathBuf>) {
    if *left == 0 {
        return;
    }
    *left -= 1;
    let journal = folder.join(FILE_NAME);
    if journal.is_file() && is_ours(&journal) {
        return runs.push(folder.into());
    }
    let Ok(entries) = fs::read_dir(folder) else { return };
    if depth == 0 {
        return;
    }
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
    {
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            look_into(&entry.path(), depth - 1, left, runs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found_in_folders_of_folders_and_not_in_each_other() {
        let place = tempfile::tempdir().unwrap();
        let event = "{\"event\":\"note\",\"text\":\"a\"}\n";
        let write = |path: &str, text: &str| {
            let folder = place.path().join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(FILE_NAME), text).unwrap();
        };
        write("b", event);
        write("a/deep/run", event);
        write("b/ranks/rank-1", event);
        write(".hidden", event);
        write("other", "{\"level\":\"info\"}\n");
        write("1/2/3/4/5", event);
        std::os::unix::fs::symlink(place.path(), place.path().join("loop")).unwrap();
        let runs = find_runs(place.path()).unwrap();
        assert_eq!(runs, ["a/deep/run", "b"].map(|name| place.path().join(name)));
        assert_eq!(find_runs(&place.path().join("b")).unwrap(), [place.path().join("b")]);
        assert!(find_runs(&place.path().join("none")).is_err());
    }
}
