//! A model of a pipeline: its config, its files, and the layout of its tensor names.

use std::path::{Path, PathBuf};

use weights::{Catalog, FileDtype};

use crate::error::Result;
use crate::model::build::TensorSpec;
use crate::model::component;

/// Taken: all parts of the published folders are stored in 16 bits. Memory of a run does not depend on it:
/// values are converted when they are read.
const PUBLISHED_DTYPE: FileDtype = FileDtype::F16;

/// A model of a pipeline.
pub struct PipelinePart<C> {
    /// Its config.
    pub config: C,
    pub(crate) catalog: Catalog,
    /// Prefix of names, if the file is of the original layout.
    pub(super) original: Option<&'static str>,
    /// The config file, unless the config was inferred from shapes.
    config_path: Option<PathBuf>,
}

impl<C> PipelinePart<C> {
    /// A component's folder, whose config `read` reads.
    pub fn open(folder: &Path, read: impl FnOnce(&Path) -> Result<C>) -> Result<Self> {
        let settings = folder.join("config.json");
        let config = read(&settings)?;
        let catalog = component::weights(folder)?;
        Ok(Self { config, catalog, original: None, config_path: Some(settings) })
    }

    /// A checkpoint of the original layout, whose config was inferred from shapes.
    pub fn original(config: C, catalog: Catalog, prefix: &'static str) -> Self {
        Self { config, catalog, original: Some(prefix), config_path: None }
    }

    /// Weights from elsewhere, whose config is that of `config_path`, or what `infer` finds by their shapes.
    pub fn of_weights(
        catalog: Catalog,
        config_path: Option<PathBuf>,
        read: impl FnOnce(&Path) -> Result<C>,
        infer: impl FnOnce(&Catalog) -> Result<C>,
    ) -> Result<Self> {
        let config = config_path.as_deref().map_or_else(|| infer(&catalog), read)?;
        Ok(Self { config, catalog, original: None, config_path })
    }

    /// The same, in the original layout if names have a prefix there.
    #[must_use]
    pub fn in_layout(self, original: Option<&'static str>) -> Self {
        Self { original, ..self }
    }

    /// A meta part: it would lie in `folder` and hold these tensors.
    pub fn meta(folder: &Path, config: C, tensors: Vec<TensorSpec>) -> Self {
        let sizes =
            |want: &TensorSpec| want.shape.sizes().iter().map(|size| *size as u64).collect();
        let tensors = tensors.into_iter().map(|want| (want.name.clone(), sizes(&want)));
        let catalog = Catalog::meta(folder, PUBLISHED_DTYPE, tensors);
        Self { config, catalog, original: None, config_path: Some(folder.join("config.json")) }
    }

    /// Bytes of its files.
    pub fn file_bytes(&self) -> u64 {
        self.catalog.bytes()
    }

    /// The files that its output depends on.
    pub fn sources(&self) -> Vec<PathBuf> {
        self.config_path.iter().chain(&self.catalog.files).cloned().collect()
    }
}
