//! What `hearth fetch` learned of a model, for those who plan without a network: the files that it needs, with sizes.
//! It lies in hearth's own cache folder, since the hub's has a layout of its own.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::HubName;
use crate::error::Result;
use crate::plain_file::read_plain;
use crate::write::write_whole;

/// How the names of files end that `hearth fetch` has not finished. Python's end in `.incomplete`, and are whole up to
/// their length; ours have gaps, so Python must not take them for its own.
pub const PARTIAL: &str = ".hearth-partial";

/// The files of a model that hearth needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubListing {
    /// The commit that they are of.
    pub commit: String,
    /// The files.
    pub files: Vec<HubListingFile>,
}

/// A file of the hub.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubListingFile {
    /// In the snapshot.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

impl HubListing {
    fn file(folder: &Path, name: &HubName) -> PathBuf {
        folder.join("hub").join(format!("{}--{}@{}.json", name.owner, name.name, name.revision()))
    }

    /// What is known of a model; `folder` is hearth's cache folder.
    pub fn read(folder: &Path, name: &HubName) -> Option<Self> {
        serde_json::from_slice(&read_plain(&Self::file(folder, name)).ok()?).ok()
    }

    /// Keeps it.
    pub fn write(&self, folder: &Path, name: &HubName) -> Result<()> {
        let path = Self::file(folder, name);
        let text = serde_json::to_string_pretty(self).expect("it is plain JSON");
        std::fs::create_dir_all(path.parent().unwrap_or(folder))
            .map_err(|source| crate::WeightsError::io("create", &path, source))?;
        write_whole(&path, text.as_bytes())
    }

    /// Size of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_learned_is_found_again() {
        let place = tempfile::tempdir().unwrap();
        let name = HubName::parse("a/b").unwrap();
        assert_eq!(HubListing::read(place.path(), &name), None);
        let file = |path: &str, bytes| HubListingFile { path: path.into(), bytes };
        let listing =
            HubListing { commit: "c".into(), files: vec![file("x", 3), file("y", u64::MAX)] };
        listing.write(place.path(), &name).unwrap();
        assert_eq!(HubListing::read(place.path(), &name).as_ref(), Some(&listing));
        assert_eq!(listing.bytes(), u64::MAX);
    }
}
