//! `progress.json` of a checkpoint: how far the run is, what it belongs to, and the checksums of the state's files. It
//! has a checksum of its own: a bit that a disk lost in it would give another adapter without a word.
//!
//! ```text
//! { "version": 4, "own_checksum": "1f0c…", … }    of this text with 64 zeros in its place
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use weights::checksum::Hasher;
use weights::plain_file::read_plain;
use weights::write::write_whole;

use super::checkpoint::{TrainProgress, name};
use super::identity::Identity;
use crate::error::{Result, TrainerError};
use crate::model::adapter::read::PROGRESS;

/// Of what is written. Version 1 had other names, up to version 2 there was one file with one checksum, and up to
/// version 3 none of this file; all are still read. Any other is refused.
const VERSION: u32 = 4;
const LAST_WITHOUT_OWN: u32 = 3;

/// Stands for the checksum while it is computed.
const ZEROS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// What the file holds.
#[derive(Serialize, Deserialize)]
pub(super) struct CheckpointMetadata {
    version: u32,
    /// Before all else that could have as many zeros.
    #[serde(default)]
    own_checksum: Option<String>,
    pub progress: TrainProgress,
    pub identity: Identity,
    /// Of each file of tensors, by its name.
    #[serde(default)]
    pub checksums: BTreeMap<String, String>,
    /// Of the only file, up to version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<String>,
}

impl CheckpointMetadata {
    /// Of a checkpoint whose state has these checksums.
    pub fn new(
        progress: TrainProgress,
        identity: Identity,
        checksums: BTreeMap<String, String>,
    ) -> Self {
        let own_checksum = Some(ZEROS.into());
        Self { version: VERSION, own_checksum, progress, identity, checksums, checksum: None }
    }

    /// Writes the file into a checkpoint's folder.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("it is plain JSON");
        let text = text.replacen(ZEROS, &checksum(&text), 1);
        Ok(write_whole(&folder.join(PROGRESS), text.as_bytes())?)
    }

    /// Reads that of a checkpoint's folder, and checks it.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(PROGRESS);
        let text =
            read_plain(&path).map_err(|source| TrainerError::Io { what: "read", path, source })?;
        let metadata = Self::parse(&text).and_then(|metadata| {
            let step = metadata.progress.step;
            let is_named = folder.file_name().is_some_and(|found| found == name(step).as_str());
            let problem = || format!("{PROGRESS} is of step {step}, its folder of another");
            is_named.then_some(metadata).ok_or_else(problem)
        });
        metadata.map_err(|problem| TrainerError::Checkpoint { problem, path: folder.into() })
    }

    fn parse(text: &[u8]) -> std::result::Result<Self, String> {
        let text = str::from_utf8(text).map_err(|error| format!("{PROGRESS}: {error}"))?;
        let read: Self = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let version = read.version;
        if !(1..=VERSION).contains(&version) {
            return Err(format!("it has version {version}, expected 1 to {VERSION}"));
        }
        let Some(expected) = &read.own_checksum else {
            let problem = || format!("{PROGRESS} has no checksum of its own");
            return (version <= LAST_WITHOUT_OWN).then_some(read).ok_or_else(problem);
        };
        let found = checksum(&text.replacen(expected.as_str(), ZEROS, 1));
        if found != *expected {
            return Err(format!("{PROGRESS} has checksum {found}, expected {expected}"));
        }
        Ok(read)
    }
}

fn checksum(text: &str) -> String {
    Hasher::new().update(text.as_bytes()).finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn identity() -> Value {
        json!({ "settings": { "adapter.rank": "4" }, "base": "b1", "samples": "5a" })
    }

    /// A checkpoint's folder with its file.
    fn written(place: &Path, step: u64) -> std::path::PathBuf {
        let folder = place.join(name(step));
        std::fs::create_dir(&folder).unwrap();
        let progress = TrainProgress { step, applied: step, ..TrainProgress::default() };
        let identity = serde_json::from_value(identity()).unwrap();
        let checksums = BTreeMap::from([("state.safetensors".to_owned(), "0".repeat(64))]);
        CheckpointMetadata::new(progress, identity, checksums).write(&folder).unwrap();
        folder
    }

    #[test]
    fn a_bit_that_flips_anywhere_is_seen() {
        let place = tempfile::tempdir().unwrap();
        let folder = written(place.path(), 4);
        assert_eq!(CheckpointMetadata::read(&folder).unwrap().progress.applied, 4);
        let whole = std::fs::read(folder.join(PROGRESS)).unwrap();
        let mut text = whole.clone();
        for bit in 0..8 * whole.len() {
            text[bit / 8] ^= 1 << (bit % 8);
            assert!(CheckpointMetadata::parse(&text).is_err(), "bit {bit}");
            text[bit / 8] = whole[bit / 8];
        }
        for cut in [0, 1, whole.len() / 2, whole.len() - 1] {
            assert!(CheckpointMetadata::parse(&whole[..cut]).is_err(), "{cut} bytes");
        }
    }

    #[test]
    fn the_step_is_that_of_the_folder() {
        let place = tempfile::tempdir().unwrap();
        let folder = written(place.path(), 4);
        let other = place.path().join(name(6));
        std::fs::rename(folder, &other).unwrap();
        let error = CheckpointMetadata::read(&other).err().unwrap();
        assert!(error.to_string().contains("is of step 4"), "{error}");
    }

    #[test]
    fn files_of_before_have_no_checksum_and_are_read() {
        let progress = serde_json::to_value(TrainProgress::default()).unwrap();
        let mut file = json!({ "version": 3, "progress": progress, "identity": identity() });
        let read = |file: &Value| CheckpointMetadata::parse(file.to_string().as_bytes());
        assert!(read(&file).is_ok());
        for version in [0, 4, 5] {
            file["version"] = version.into();
            assert!(read(&file).is_err(), "{version}");
        }
    }
}
