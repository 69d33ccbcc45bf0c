//! A model on the command line: a path, or the name of one in the Hugging Face cache.

use std::ffi::OsString;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use trainer::TrainerError;
use trainer::model::hub;

/// Where it lies, or would if it were downloaded.
#[derive(Clone, Debug)]
pub struct ModelArg(PathBuf);

impl From<OsString> for ModelArg {
    fn from(typed: OsString) -> Self {
        let local = PathBuf::from(typed);
        Self(local.to_str().map_or(local.clone(), |text| weights::hub::locate(text, &local)))
    }
}

impl Deref for ModelArg {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl ModelArg {
    /// Its path, for those who open it by themselves; a model of the hub has to be there.
    pub fn checked(&self) -> Result<&Path, TrainerError> {
        hub::check_exists(&self.0)?;
        Ok(&self.0)
    }

    pub fn to_owned_path(&self) -> PathBuf {
        self.0.clone()
    }
}
