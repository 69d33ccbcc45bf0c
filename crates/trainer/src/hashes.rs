//! Checksums of files. Weights of many gigabytes are not read at every start: a checksum is cached with the file's
//! stamp (length, time, inode), and computed again if that differs.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weights::checksum::{FileStamp, Hash, Hasher, checksum};
use weights::plain_file::read_plain;
use weights::write::write_whole;
use weights::{BytesDoneFn, WeightsError};

use crate::archive::{self, DataFile};
use crate::error::{Result, TrainerError};

/// Chosen: the coarsest file systems count time in steps of two seconds. A file younger than that
/// may be written to once more without another stamp, so it is not remembered.
const TOO_YOUNG: Duration = Duration::from_secs(2);

/// Chosen: several images at a time.
const BLOCK_BYTES: usize = 1 << 20;

/// Checksums by path.
pub(crate) struct HashCache {
    path: PathBuf,
    known: BTreeMap<String, KnownHash>,
    is_changed: bool,
}

#[derive(Serialize, Deserialize)]
struct KnownHash {
    stamp: FileStamp,
    checksum: String,
}

impl HashCache {
    /// Those remembered in a file; none if there is no such file, or not one that can be read.
    pub fn open(path: PathBuf) -> Self {
        let read = read_plain(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        Self { path, known: read.unwrap_or_default(), is_changed: false }
    }

    /// The checksum of a file as it is now, and the stamp it has with that.
    pub fn hash_file(&mut self, path: &Path, tick: BytesDoneFn<'_>) -> Result<(Hash, FileStamp)> {
        let stamp = archive::stamp(path)?;
        // Two names that are not UTF-8 may look alike here; their inodes do not.
        let key = path.to_string_lossy().into_owned();
        let known = self.known.get(&key).filter(|known| known.stamp == stamp);
        if let Some(hash) = known.and_then(|known| Hash::from_hex(&known.checksum).ok()) {
            return Ok((hash, stamp));
        }
        let hash = if archive::is_inside(path) {
            part_checksum(path, tick)
        } else {
            Ok(checksum(path, tick)?)
        }?;
        if stamp.age() > TOO_YOUNG {
            self.known.insert(key, KnownHash { stamp, checksum: hash.to_string() });
            self.is_changed = true;
        }
        Ok((hash, stamp))
    }

    /// One checksum for several files, their names included.
    pub fn hash_files(&mut self, paths: &[PathBuf], tick: BytesDoneFn<'_>) -> Result<Hash> {
        let mut hasher = Hasher::new();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            field(&mut hasher, name.as_bytes());
            field(&mut hasher, self.hash_file(path, tick)?.0.as_bytes());
        }
        Ok(hasher.finalize())
    }

    /// Saves new checksums, without files that are gone.
    pub fn save(&mut self) {
        if !std::mem::take(&mut self.is_changed) {
            return;
        }
        self.known.retain(|path, _| Path::new(path).exists() || archive::is_file(Path::new(path)));
        let text = serde_json::to_vec_pretty(&self.known).unwrap_or_default();
        // Only a cache: no reason to fail.
        _ = write_whole(&self.path, &text);
    }
}

/// The checksum of a part of an archive, which is that of a file with the same bytes.
fn part_checksum(path: &Path, tick: BytesDoneFn<'_>) -> Result<Hash> {
    let io = |source| TrainerError::Io { what: "read", path: path.into(), source };
    let mut file = DataFile::open(path).map_err(io)?;
    let (mut hasher, mut block) = (Hasher::new(), vec![0; BLOCK_BYTES]);
    loop {
        let n = file.read(&mut block).map_err(io)?;
        if n == 0 {
            return Ok(hasher.finalize());
        }
        hasher.update(&block[..n]);
        if !tick(n as u64) {
            return Err(WeightsError::Cancelled.into());
        }
    }
}

/// Adds a field with its length, so that no two lists of fields are the same bytes.
pub(crate) fn field(hasher: &mut Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::SystemTime;

    use super::*;

    /// A file written so long ago that it is remembered.
    fn put(path: &Path, text: &str, secs_ago: u64) {
        fs::write(path, text).unwrap();
        let time = SystemTime::now() - Duration::from_secs(secs_ago);
        fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }

    #[test]
    fn a_file_is_read_again_only_if_it_changed() {
        let folder = tempfile::tempdir().unwrap();
        let [file, memo] = ["x", "hashes.json"].map(|name| folder.path().join(name));
        let check = |text: &str, expect_read: bool| {
            let mut hashes = HashCache::open(memo.clone());
            let bytes = std::sync::atomic::AtomicU64::new(0);
            let count = |n| bytes.fetch_add(n, std::sync::atomic::Ordering::Relaxed) < u64::MAX;
            let (hash, _) = hashes.hash_file(&file, &count).unwrap();
            hashes.save();
            let mut expected = Hasher::new();
            expected.update(text.as_bytes());
            assert_eq!(hash, expected.finalize());
            assert_eq!(bytes.into_inner() > 0, expect_read, "{text}");
        };
        put(&file, "one", 100);
        check("one", true);
        check("one", false);
        put(&file, "two", 50);
        check("two", true);
        check("two", false);
        // Just written: it may change once more before its time does.
        put(&file, "six", 0);
        check("six", true);
        check("six", true);
        // A memo that is no memo is no memo.
        put(&file, "ten", 50);
        check("ten", true);
        fs::write(&memo, "{").unwrap();
        check("ten", true);
    }
}
