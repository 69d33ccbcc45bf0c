//! Files of a data set, which may lie in a tar archive (`WebDataset`'s shards). An archive is a folder: `fox.tar/01.jpg` is a
//! path like any other, and its bytes are read where they lie. Nothing is unpacked.
//!
//! ```text
//! images/01.jpg             a file
//! shards/fox-000.tar        a folder with the files that `tar.rs` finds in it
//! shards/fox-000.tar/01.jpg bytes of that file, from an offset on
//! ```
//!
//! Leaves out compressed archives, in which nothing can be found without reading all before it.

mod tar;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use weights::checksum::FileStamp;

use self::tar::TarIndex;

/// A path in an archive: the archive, and the name within, empty for all of it.
struct PathInArchive<'a> {
    archive: &'a Path,
    name: &'a Path,
}

impl<'a> PathInArchive<'a> {
    /// Nothing for a path that leads through no archive. Folders may be called `x.tar` too.
    fn of(path: &'a Path) -> Option<Self> {
        let archive = path.ancestors().filter(|path| is_named(path)).find(|path| path.is_file())?;
        let name = path.strip_prefix(archive).unwrap_or(Path::new(""));
        Some(Self { archive, name })
    }

    fn index(&self) -> io::Result<Arc<TarIndex>> {
        index(self.archive)
    }

    fn is_file(&self) -> bool {
        self.index().is_ok_and(|index| index.members.contains_key(self.name))
    }
}

fn is_named(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("tar"))
}

/// Archives that were looked through, as long as they stay as they are: every image is opened by its path alone.
type KnownArchives = BTreeMap<PathBuf, (FileStamp, Arc<TarIndex>)>;

fn index(archive: &Path) -> io::Result<Arc<TarIndex>> {
    static KNOWN: LazyLock<Mutex<KnownArchives>> = LazyLock::new(Mutex::default);
    let stamp = FileStamp::read(archive).map_err(io::Error::other)?;
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, index)) = known().get(archive).filter(|(known, _)| *known == stamp) {
        return Ok(Arc::clone(index));
    }
    let index = Arc::new(TarIndex::read(&File::open(archive)?)?);
    known().insert(archive.into(), (stamp, Arc::clone(&index)));
    Ok(index)
}

/// Whether a path leads into an archive.
pub(crate) fn is_inside(path: &Path) -> bool {
    PathInArchive::of(path).is_some_and(|inside| inside.name != Path::new(""))
}

/// Whether it is an archive itself.
pub(crate) fn is_archive(path: &Path) -> bool {
    is_named(path) && path.is_file()
}

/// Whether it is a file; an archive is a folder.
pub(crate) fn is_file(path: &Path) -> bool {
    match PathInArchive::of(path) {
        Some(inside) => inside.is_file(),
        None => path.is_file(),
    }
}

/// Whether it is a folder or an archive, or a folder in one.
pub(crate) fn is_dir(path: &Path) -> bool {
    match PathInArchive::of(path) {
        Some(PathInArchive { name, .. }) if name == Path::new("") => true,
        Some(inside) => inside.index().is_ok_and(|index| index.below(inside.name).next().is_some()),
        None => path.is_dir(),
    }
}

/// What is in a folder.
pub(crate) fn children(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let Some(inside) = PathInArchive::of(folder) else {
        return fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect();
    };
    let index = inside.index()?;
    let below = index.below(inside.name).filter_map(|name| name.components().next());
    let names: BTreeSet<&Path> = below.map(|name| Path::new(name.as_os_str())).collect();
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}

/// What an archive has that is not used, and why.
pub(crate) fn refused(archive: &Path) -> Vec<(PathBuf, String)> {
    let Ok(index) = index(archive) else { return Vec::new() };
    index.refused.iter().map(|(name, why)| (archive.join(name), (*why).to_owned())).collect()
}

/// The path without links.
pub(crate) fn real_path(path: &Path) -> io::Result<PathBuf> {
    match PathInArchive::of(path) {
        Some(PathInArchive { archive, name }) => {
            let real = fs::canonicalize(archive)?;
            Ok(if name == Path::new("") { real } else { real.join(name) })
        }
        None => fs::canonicalize(path),
    }
}

/// What changes when a file, or the archive that it is in, is written to.
pub(crate) fn stamp(path: &Path) -> weights::Result<FileStamp> {
    FileStamp::read(PathInArchive::of(path).map_or(path, |inside| inside.archive))
}

/// All bytes of a file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = DataFile::open(path)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file, or a part of an archive that is one.
#[derive(Debug)]
pub(crate) struct DataFile {
    file: File,
    start: u64,
    bytes: u64,
    /// Where the next byte is read, from the start.
    at: u64,
}

impl DataFile {
    /// What is neither is refused by name: opening a pipe would wait for its writer.
    pub fn open(path: &Path) -> io::Result<Self> {
        let Some(inside) = PathInArchive::of(path) else {
            if !fs::metadata(path)?.is_file() {
                return Err(io::Error::other("is not a file"));
            }
            let file = File::open(path)?;
            let bytes = file.metadata()?.len();
            return Ok(Self { file, start: 0, bytes, at: 0 });
        };
        let index = inside.index()?;
        let member = index.members.get(inside.name);
        let member = member.ok_or_else(|| io::Error::other("is not a file"))?;
        let file = File::open(inside.archive)?;
        Ok(Self { file, start: member.start, bytes: member.bytes, at: 0 })
    }

    /// How long it is.
    pub fn length(&self) -> u64 {
        self.bytes
    }

    /// The same, read from a place of its own.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, ..*self })
    }
}

impl Read for DataFile {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.bytes.saturating_sub(self.at);
        let n = left.min(to.len() as u64) as usize;
        let n = self.file.read_at(&mut to[..n], self.start + self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for DataFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::End(by) => self.bytes.checked_add_signed(by),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::other("a place before its start"))?;
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests;
