//! Where a model lies: a path, or the name of one in the Hugging Face cache.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use weights::hub;

use super::error::ConfigError;
use super::source::RawValue;
use super::value::{ConfigValue, lists};

/// A model's file or folder. A name was looked up when it was read; where it is not in the cache, this is where it will
/// be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPath(PathBuf);

impl Deref for ModelPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl From<PathBuf> for ModelPath {
    fn from(path: PathBuf) -> Self {
        Self(path)
    }
}

impl From<&ModelPath> for PathBuf {
    fn from(path: &ModelPath) -> Self {
        path.0.clone()
    }
}

impl ConfigValue for ModelPath {
    fn accepted() -> String {
        "a path, or OWNER/NAME of a model of the Hugging Face hub".into()
    }

    fn read(typed: &RawValue<'_>) -> Result<Self, ConfigError> {
        match typed.value.as_str() {
            Some(text) if hub::is_bad_name(text) => Err(typed.refuse(Self::accepted())),
            Some(text) if text.starts_with(hub::PREFIX) => {
                Ok(Self(hub::locate(text, &typed.folder().join(text))))
            }
            Some(text) => Ok(Self(hub::locate(text, &PathBuf::read(typed)?))),
            None => Err(typed.refuse(Self::accepted())),
        }
    }

    fn write(&self) -> Option<String> {
        self.0.write()
    }
}

lists!(ModelPath: "paths or names");
