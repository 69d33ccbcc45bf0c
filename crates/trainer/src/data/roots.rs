//! Which files belong to a folder of training data. A folder from strangers may hold links, and metadata may name paths,
//! to anywhere: into the home folder of whoever trains on it. They are used only if the job says so.

use std::path::{Path, PathBuf};

use super::problem::ProblemKind;
use crate::archive;

/// The folders that a job names; they themselves may be links.
#[derive(Clone, Debug, Default)]
pub(crate) struct DataRoots {
    /// Real paths; none if files may lie anywhere.
    real: Option<Vec<PathBuf>>,
}

impl DataRoots {
    /// Files may lie in these folders, or anywhere.
    pub fn new<'a>(folders: impl IntoIterator<Item = &'a Path>, follow_links: bool) -> Self {
        let real =
            folders.into_iter().filter_map(|folder| archive::real_path(folder).ok()).collect();
        Self { real: (!follow_links).then_some(real) }
    }

    /// That a file is in one of them. One that is not there is told when it is opened.
    pub fn check(&self, path: &Path) -> Result<(), ProblemKind> {
        let (Some(roots), Ok(real)) = (&self.real, archive::real_path(path)) else { return Ok(()) };
        if roots.iter().any(|root| real.starts_with(root)) {
            return Ok(());
        }
        Err(ProblemKind::OutsideFolder { target: real })
    }
}
