//! Copies all files of a model's folder that are not merged.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use weights::write::AtomicFile;
use weights::{BytesDoneFn, WeightsError};

use super::failed;
use crate::error::{Result, TrainerError};
use crate::model::adapter::AdaptedComponent;

/// Depth of nested folders. Chosen: published models have one; cyclic links have no end.
const DEPTH: usize = 4;
/// Bytes copied at a time.
const CHUNK: usize = 8 << 20;
/// How files of weights end.
const WEIGHTS: [&str; 8] =
    ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "msgpack", "onnx_data"];

/// What of a folder is copied, and what is not.
#[derive(Default)]
pub struct OtherFiles {
    /// Files that are copied, relative to the base.
    pub files: Vec<PathBuf>,
    /// Weights that are not.
    pub left_out: Vec<PathBuf>,
    /// Bytes of all that is copied.
    pub bytes: u64,
}

impl OtherFiles {
    /// Looks through a model's folder.
    pub fn of(base: &Path, merged: &[AdaptedComponent<'_>]) -> Result<Self> {
        let mut rest = Self::default();
        rest.scan(base, Path::new(""), merged)?;
        rest.left_out.sort();
        Ok(rest)
    }

    fn scan(
        &mut self,
        base: &Path,
        relative: &Path,
        merged: &[AdaptedComponent<'_>],
    ) -> Result<()> {
        let folder = base.join(relative);
        if relative.components().count() > DEPTH {
            return Err(TrainerError::Folder {
                what: "model folder",
                problem: format!("has more than {DEPTH} levels of folders"),
                path: folder,
            });
        }
        let unread = |source| failed("read", &folder, source);
        for entry in fs::read_dir(&folder).map_err(unread)? {
            let name = entry.map_err(unread)?.file_name();
            // Caches of other programs, `.git`.
            if name.to_string_lossy().starts_with('.') {
                continue;
            }
            let inner = relative.join(&name);
            if base.join(&inner).is_dir() {
                self.scan(base, &inner, merged)?;
            } else {
                self.add_file(base, inner, merged)?;
            }
        }
        Ok(())
    }

    fn add_file(
        &mut self,
        base: &Path,
        file: PathBuf,
        merged: &[AdaptedComponent<'_>],
    ) -> Result<()> {
        let folder = file.parent().unwrap_or(Path::new(""));
        let part = merged.iter().find(|part| Path::new(&part.component.folder()) == folder);
        let is_own = |part: &&AdaptedComponent<'_>| {
            part.catalog.files.iter().any(|own| own.file_name() == file.file_name())
        };
        if part.is_some_and(|part| is_own(&part)) {
            return Ok(());
        }
        let could_mislead = part.is_some() || folder.as_os_str().is_empty();
        if could_mislead && is_weights(&file, part) {
            self.left_out.push(file);
            return Ok(());
        }
        let whole = base.join(&file);
        self.bytes += fs::metadata(&whole).map_err(|source| failed("read", &whole, source))?.len();
        self.files.push(file);
        Ok(())
    }

    /// Copies.
    pub fn copy(&self, base: &Path, target: &Path, tick: BytesDoneFn<'_>) -> Result<()> {
        self.files.iter().try_for_each(|file| copy(&base.join(file), &target.join(file), tick))
    }
}

fn copy(from: &Path, to: &Path, tick: BytesDoneFn<'_>) -> Result<()> {
    let folder = to.parent().unwrap_or(to);
    fs::create_dir_all(folder).map_err(|source| failed("create", folder, source))?;
    let unread = |source| failed("read", from, source);
    let mut file = File::open(from).map_err(unread)?;
    let mut copied = AtomicFile::create(to)?;
    let mut chunk = vec![0; CHUNK];
    loop {
        let n = file.read(&mut chunk).map_err(unread)?;
        if n == 0 {
            break;
        }
        copied.write_all(&chunk[..n]).map_err(|source| WeightsError::io("write", to, source))?;
        if !tick(n as u64) {
            return Err(WeightsError::Cancelled.into());
        }
    }
    copied.commit()?;
    Ok(())
}

/// Weights, or the index of shards that are not merged.
fn is_weights(path: &Path, part: Option<&AdaptedComponent<'_>>) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let ends = path.extension().is_some_and(|kind| WEIGHTS.iter().any(|ending| kind == *ending));
    if ends || !name.contains(".index.") {
        return ends;
    }
    part.is_none_or(|part| {
        let own = &part.catalog.path;
        !own.is_dir() && own.file_name() != path.file_name()
    })
}
