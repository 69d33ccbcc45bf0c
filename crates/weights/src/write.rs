//! Model files onto the disk: streamed, synced, and under their final name only when whole.
//!
//! ```text
//! folder/.model.safetensors.4711.partial    a random number; while it is written, locked by the writer
//! folder/model.safetensors                  after sync and rename; the folder is synced too
//! ```
//!
//! A writer that was killed leaves its `.partial` behind; the next one of that name removes it,
//! since nobody holds its lock. Where names do not come again, [`remove_partial_files`] removes them.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use crate::catalog::INDEX_SUFFIX;
use crate::checksum::Hash;
use crate::disk::direct_writer::DirectWriter;
use crate::error::{Result, WeightsError};
use crate::plain_file::{open_own, open_plain};
use crate::safetensors::{self, OutputTensor};

/// A file that appears under its name only when [`AtomicFile::commit`] is called.
pub struct AtomicFile {
    file: File,
    writer: DirectWriter,
    staging: PathBuf,
    path: PathBuf,
    hasher: Option<Box<blake3::Hasher>>,
    committed: bool,
}

impl AtomicFile {
    /// Begins a file; what has that name now stays as it is until the commit.
    pub fn create(path: &Path) -> Result<Self> {
        let io = |source| WeightsError::io("write", path, source);
        if path.file_name().is_none() || path.is_dir() {
            return Err(io(io::ErrorKind::IsADirectory.into()));
        }
        remove_stale(path);
        let new_file =
            |staging: &Path| OpenOptions::new().write(true).create_new(true).open(staging);
        let (staging, file) = begin_staging(path, new_file).map_err(io)?;
        let writer = file.try_clone().and_then(|own| DirectWriter::begin(&staging, own));
        let writer = writer.map_err(|error| {
            _ = fs::remove_file(&staging);
            io(error)
        })?;
        Ok(Self { file, writer, staging, path: path.into(), hasher: None, committed: false })
    }

    /// Counts a checksum along the way.
    #[must_use]
    pub fn with_checksum(mut self) -> Self {
        self.hasher = Some(Box::default());
        self
    }

    /// Makes what was written permanent: data first, then the name, then the folder. A file that is replaced hands its
    /// mode on.
    pub fn commit(mut self) -> Result<Option<Hash>> {
        let io = |source| WeightsError::io("write", &self.path, source);
        let before = self.path.symlink_metadata().ok().filter(Metadata::is_file);
        // What was just made may have its mode changed by its owner; where not, the usual one stays.
        _ = before.map(|before| self.file.set_permissions(before.permissions()));
        self.writer.finish().and_then(|()| self.file.sync_all()).map_err(io)?;
        fs::rename(&self.staging, &self.path).map_err(io)?;
        self.committed = true;
        sync_folder(&self.path).map_err(io)?;
        Ok(self.hasher.as_ref().map(|hasher| hasher.finalize()))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.writer.write(bytes)?;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&bytes[..written]);
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            _ = fs::remove_file(&self.staging);
        }
    }
}

/// A name beside `path` for what is not complete yet: random, since processes on two machines that share a disk, or in
/// two containers, may have the same number.
pub fn staging_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // Short: a file's name may be as long as a file system allows, but for a few characters.
    let number = RandomState::new().build_hasher().finish() >> 32;
    path.with_file_name(format!(".{name}.{number}.partial"))
}

/// A new file or folder under such a name, locked.
pub(crate) fn begin_staging(
    path: &Path,
    create_new: impl Fn(&Path) -> io::Result<File>,
) -> io::Result<(PathBuf, File)> {
    /// Chosen: more than there are programs that would take the same name by chance.
    const ATTEMPTS: usize = 9;
    for _ in 0..ATTEMPTS {
        let staging = staging_path(path);
        let file = match create_new(&staging) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            opened => opened?,
        };
        // Who took it for abandoned before it was locked holds the lock until it is removed. A file system without
        // locks only loses the clean-up after a kill.
        _ = file.lock();
        let is_gone = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
        if !staging.symlink_metadata().is_err_and(is_gone) {
            return Ok((staging, file));
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Writes a file of these bytes.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).map_err(|source| WeightsError::io("write", path, source))?;
    file.commit()?;
    Ok(())
}

/// Copies a file.
pub fn copy_whole(from: &Path, to: &Path) -> Result<()> {
    let io = |source| WeightsError::io("copy", from, source);
    let mut source = open_plain(from).map_err(io)?;
    let mut file = AtomicFile::create(to)?;
    io::copy(&mut source, &mut file).map_err(io)?;
    file.commit()?;
    Ok(())
}

/// Removes what writers that were killed left of a file or folder.
pub(crate) fn remove_stale(path: &Path) {
    let start = format!(".{}.", path.file_name().unwrap_or_default().to_string_lossy());
    remove_abandoned(parent(path), |found, _| found.starts_with(&start));
}

/// Chosen: a file that is just being begun has no lock for a moment, far shorter than this.
const ABANDONED: Duration = Duration::from_secs(60);

/// Removes what writers that were killed left in a folder, whatever its name.
pub fn remove_partial_files(folder: &Path) {
    remove_abandoned(folder, |_, age| age > ABANDONED);
}

/// Removes partial files and folders that nobody has locked, of those that `is_meant` by name and age.
fn remove_abandoned(folder: &Path, is_meant: impl Fn(&str, Duration) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let found = entry.file_name().to_string_lossy().into_owned();
        let pid = found.strip_suffix(".partial").and_then(|rest| rest.rsplit_once('.'));
        let is_partial = found.starts_with('.')
            && pid.is_some_and(|(_, pid)| pid.bytes().all(|byte| byte.is_ascii_digit()));
        let modified = entry.metadata().and_then(|about| about.modified());
        let age = modified.ok().and_then(|at| at.elapsed().ok()).unwrap_or_default();
        if !is_partial || !is_meant(&found, age) {
            continue;
        }
        let path = entry.path();
        // Not through a link.
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let opened = if is_folder {
            File::open(&path)
        } else {
            open_own(&path, OpenOptions::new().read(true))
        };
        // Held until it is removed.
        if let Some(_lock) = opened.ok().filter(|file| file.try_lock().is_ok()) {
            _ = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}

/// Gives a folder the name of another, which is removed: in one step where the system can exchange two names, so that
/// a program that is killed meanwhile leaves the one or the other. A file of that name is set aside.
pub fn replace_folder(new: &Path, old: &Path) -> io::Result<()> {
    match old.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(new, old)?,
        Ok(about) if about.is_dir() => {
            if exchange(new, old).is_ok() {
                fs::remove_dir_all(new)?;
            } else {
                fs::remove_dir_all(old)?;
                fs::rename(new, old)?;
            }
        }
        _ => {
            fs::rename(old, old.with_extension("set-aside"))?;
            fs::rename(new, old)?;
        }
    }
    sync_folder(old)
}

/// Two names change places; not every file system can.
fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
}

/// Makes the name of what lies at `path` permanent.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(parent(path))?.sync_all()
}

pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes one tensor's bytes, exactly as many as it has.
pub type FillTensorFn<'a> = &'a mut dyn FnMut(&OutputTensor, &mut dyn Write) -> Result<()>;

/// A file that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFile {
    /// Where it lies.
    pub path: PathBuf,
    /// Its checksum, if one was asked for.
    pub checksum: Option<Hash>,
}

/// Writes a safetensors file; `fill` is asked for each tensor once, in the file's order.
pub fn write_file(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    mut tensors: Vec<OutputTensor>,
    checksum: bool,
    fill: FillTensorFn<'_>,
) -> Result<WrittenFile> {
    safetensors::order(&mut tensors);
    let malformed =
        |problem| WeightsError::Malformed { format: "safetensors", problem, path: path.into() };
    let header = safetensors::header(metadata, &tensors).map_err(malformed)?;
    let mut file = AtomicFile::create(path)?;
    if checksum {
        file = file.with_checksum();
    }
    file.write_all(&header).map_err(|source| WeightsError::io("write", path, source))?;
    for tensor in &tensors {
        let mut counted = CountingWriter { file: &mut file, bytes: 0 };
        fill(tensor, &mut counted)?;
        let (got, needed) = (counted.bytes, tensor.bytes().expect("the header was made of it"));
        if got != needed {
            return Err(WeightsError::BufferSize { name: tensor.name.clone(), needed, got });
        }
    }
    Ok(WrittenFile { path: path.into(), checksum: file.commit()? })
}

struct CountingWriter<'a> {
    file: &'a mut AtomicFile,
    bytes: u64,
}

impl Write for CountingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Taken from the usual default of Hugging Face's writers.
pub const SHARD_BYTES: u64 = 10_000_000_000;

/// A file of a sharded model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardFile {
    /// Its name, e.g. `model-00001-of-00003.safetensors`.
    pub name: String,
    /// What it holds.
    pub tensors: Vec<OutputTensor>,
}

/// Deals tensors out in their order, no shard above the limit unless one tensor alone is.
pub fn split_shards(stem: &str, tensors: Vec<OutputTensor>, limit: u64) -> Vec<ShardFile> {
    let mut groups: Vec<Vec<OutputTensor>> = vec![Vec::new()];
    let mut filled = 0_u64;
    for tensor in tensors {
        let bytes = tensor.bytes().unwrap_or(u64::MAX);
        if filled.saturating_add(bytes) > limit && filled > 0 {
            groups.push(Vec::new());
            filled = 0;
        }
        filled = filled.saturating_add(bytes);
        groups.last_mut().expect("there is always a group").push(tensor);
    }
    let count = groups.len();
    let name = |index: usize| match count {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{:05}-of-{count:05}.safetensors", index + 1),
    };
    groups
        .into_iter()
        .enumerate()
        .map(|(index, tensors)| ShardFile { name: name(index), tensors })
        .collect()
}

/// Writes all shards into a folder and the index last, so that an index always has its shards.
/// Gives all files, the one that opens the model last.
pub fn write_shards(
    folder: &Path,
    stem: &str,
    metadata: &BTreeMap<String, String>,
    shards: Vec<ShardFile>,
    checksum: bool,
    fill: FillTensorFn<'_>,
) -> Result<Vec<WrittenFile>> {
    let index = (shards.len() > 1).then(|| index_of(&shards));
    let mut written = Vec::new();
    for ShardFile { name, tensors } in shards {
        written.push(write_file(&folder.join(name), metadata, tensors, checksum, fill)?);
    }
    if let Some(index) = index {
        let path = folder.join(format!("{stem}.safetensors{INDEX_SUFFIX}"));
        let mut file = AtomicFile::create(&path)?;
        if checksum {
            file = file.with_checksum();
        }
        let text = format!("{index:#}\n");
        file.write_all(text.as_bytes())
            .map_err(|source| WeightsError::io("write", &path, source))?;
        let checksum = file.commit()?;
        written.push(WrittenFile { path, checksum });
    }
    Ok(written)
}

/// Which tensor lies in which shard, as transformers and diffusers read it.
fn index_of(shards: &[ShardFile]) -> serde_json::Value {
    let entries = shards
        .iter()
        .flat_map(|shard| shard.tensors.iter().map(move |tensor| (tensor, &shard.name)));
    let total_size: u64 = entries.clone().map(|(tensor, _)| tensor.bytes().unwrap_or(0)).sum();
    let weight_map: BTreeMap<_, _> = entries.map(|(tensor, shard)| (&tensor.name, shard)).collect();
    json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }

    fn tensor(name: &str, bytes: u64) -> OutputTensor {
        OutputTensor { name: name.into(), dtype: crate::FileDtype::U8, shape: vec![bytes] }
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.bin");
        fs::write(&path, "old").unwrap();
        let mut file = AtomicFile::create(&path).unwrap().with_checksum();
        file.write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let hash = file.commit().unwrap().unwrap();
        assert_eq!(hash, blake3::hash(b"new"));
        assert_eq!(fs::read(&path).unwrap(), b"new");

        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["x.bin"]);
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_what_a_living_one_writes_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.bin");
        fs::write(folder.path().join(".x.bin.1.partial"), "dead").unwrap();
        fs::write(folder.path().join(".x.bin.notes.partial"), "not ours").unwrap();
        let living = File::create(folder.path().join(".x.bin.2.partial")).unwrap();
        living.lock().unwrap();
        AtomicFile::create(&path).unwrap().commit().unwrap();
        assert_eq!(names(folder.path()), [".x.bin.2.partial", ".x.bin.notes.partial", "x.bin"]);
    }

    #[test]
    fn a_writer_of_the_same_number_elsewhere_and_a_pipe_are_in_nobodys_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.bin");
        // Another PID namespace on the same disk has the same numbers.
        let same = folder.path().join(format!(".x.bin.{}.partial", std::process::id()));
        let living = File::create(&same).unwrap();
        living.lock().unwrap();
        let pipe = folder.path().join(".x.bin.7.partial");
        assert!(std::process::Command::new("mkfifo").arg(pipe).status().unwrap().success());
        let mut file = AtomicFile::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        file.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(same.exists());
    }

    #[test]
    fn a_file_keeps_its_mode_and_a_link_is_replaced() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("README.md"), folder.path().join("link"));
        write_whole(&path, b"old").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        write_whole(&path, b"new").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        symlink(&path, &link).unwrap();
        write_whole(&link, b"other").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(link.symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn a_folder_takes_the_place_of_another() {
        let place = tempfile::tempdir().unwrap();
        let [new, old] = ["new", "old"].map(|name| place.path().join(name));
        for before in ["nothing", "a folder", "a file"] {
            fs::create_dir(&new).unwrap();
            fs::write(new.join("a"), before).unwrap();
            match before {
                "a folder" => fs::write(old.join("b"), "").unwrap(),
                "a file" => {
                    fs::remove_dir_all(&old).unwrap();
                    fs::write(&old, "mine").unwrap();
                }
                _ => {}
            }
            replace_folder(&new, &old).unwrap();
            assert_eq!(fs::read_to_string(old.join("a")).unwrap(), before);
            assert_eq!(names(&old), ["a"]);
        }
        assert_eq!(names(place.path()), ["old", "old.set-aside"]);
        assert_eq!(fs::read_to_string(place.path().join("old.set-aside")).unwrap(), "mine");
    }

    #[test]
    fn a_sweep_removes_what_is_old_and_nobodys() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let begun = [".a.1.partial", ".b.2.partial", ".c.3.partial", "d.4.partial"];
        let files = begun.map(|name| File::create(path(name)).unwrap());
        for file in [&files[0], &files[1], &files[3]] {
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
        }
        files[1].lock().unwrap();
        remove_partial_files(folder.path());
        assert_eq!(names(folder.path()), [".b.2.partial", ".c.3.partial", "d.4.partial"]);
    }

    #[test]
    fn a_folder_in_the_way_or_none_at_all_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("no/such/x.bin")] {
            assert!(
                matches!(AtomicFile::create(&path), Err(WeightsError::Io { .. })),
                "{}",
                path.display()
            );
        }
    }

    #[test]
    fn tensors_of_the_wrong_length_leave_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        for written in [3, 5] {
            let fill: FillTensorFn<'_> = &mut |_, out| {
                out.write_all(&vec![0; written]).unwrap();
                Ok(())
            };
            let error =
                write_file(&path, &BTreeMap::new(), vec![tensor("a", 4)], false, fill).unwrap_err();
            assert!(matches!(error, WeightsError::BufferSize { needed: 4, .. }), "{error}");
        }
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn shards_stay_below_the_limit_unless_one_tensor_is_above() {
        let sizes = |limit, bytes: &[u64]| -> Vec<usize> {
            let tensors =
                bytes.iter().enumerate().map(|(i, b)| tensor(&i.to_string(), *b)).collect();
            split_shards("m", tensors, limit).iter().map(|shard| shard.tensors.len()).collect()
        };
        assert_eq!(sizes(10, &[4, 4, 4]), [2, 1]);
        assert_eq!(sizes(10, &[40, 4, 4]), [1, 2]);
        assert_eq!(sizes(10, &[4, 40, 4]), [1, 1, 1]);
        assert_eq!(sizes(10, &[]), [0]);
        assert_eq!(split_shards("m", vec![tensor("a", 1)], 10)[0].name, "m.safetensors");
        assert_eq!(
            split_shards("m", vec![tensor("a", 9), tensor("b", 9)], 10)[1].name,
            "m-00002-of-00002.safetensors"
        );
    }
}
