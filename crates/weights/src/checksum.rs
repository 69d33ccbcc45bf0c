//! Checksums of files as they lie on disk. BLAKE3: faster than any disk, and `b3sum` checks it.
//! And stamps, by which a file that was read before is known again without reading it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, UNIX_EPOCH};

pub use blake3::{Hash, Hasher};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::{Deserialize, Serialize};

use crate::BytesDoneFn;
use crate::disk::{AlignedBuffer, DirectReader, PageCache};
use crate::error::{Result, WeightsError};

/// Chosen: as much as a disk likes to give at once.
const BLOCK_BYTES: usize = 8 << 20;

/// Reads a whole file, sparing the page cache.
pub fn checksum(path: &Path, tick: BytesDoneFn<'_>) -> Result<Hash> {
    let disk = DirectReader::open(path, PageCache::Spare)?;
    let mut hasher = Hasher::new();
    let (mut buffer, mut scratch) = (vec![0; BLOCK_BYTES], AlignedBuffer::new(BLOCK_BYTES));
    let mut offset = 0;
    while offset < disk.len() {
        let block = &mut buffer[..(disk.len() - offset).min(BLOCK_BYTES as u64) as usize];
        disk.read(offset, block, &mut scratch)?;
        update(&mut hasher, block);
        offset += block.len() as u64;
        if !tick(block.len() as u64) {
            return Err(WeightsError::Cancelled);
        }
    }
    disk.check_unchanged()?;
    Ok(hasher.finalize())
}

/// By several threads, or by this one where the system gives no more: rayon's own pool would panic then.
fn update(hasher: &mut Hasher, block: &[u8]) {
    static POOL: LazyLock<Option<ThreadPool>> =
        LazyLock::new(|| ThreadPoolBuilder::new().build().ok());
    match &*POOL {
        Some(pool) => pool.install(|| _ = hasher.update_rayon(block)),
        None => _ = hasher.update(block),
    }
}

/// What changes when a file is written to or replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    bytes: u64,
    /// Seconds since 1970 and nanoseconds.
    modified: (i64, i64),
    /// The same; nobody can set it back, as programs that copy files do with the other.
    changed: (i64, i64),
    device: u64,
    inode: u64,
}

impl FileStamp {
    /// That of a file, or of what a link leads to.
    pub fn read(path: &Path) -> Result<Self> {
        let about = fs::metadata(path).map_err(|source| WeightsError::io("read", path, source))?;
        Ok(Self {
            bytes: about.len(),
            modified: (about.mtime(), about.mtime_nsec()),
            changed: (about.ctime(), about.ctime_nsec()),
            device: about.dev(),
            inode: about.ino(),
        })
    }

    /// How long ago the file was last written to; nothing if that is to come.
    pub fn age(&self) -> Duration {
        let (secs, nanos) = self.modified;
        let since_1970 = Duration::new(secs.max(0).cast_unsigned(), nanos as u32);
        (UNIX_EPOCH + since_1970).elapsed().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_tells_a_file_from_its_replacement() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["x", "y"].map(|name| folder.path().join(name));
        fs::write(&path, "one").unwrap();
        let before = FileStamp::read(&path).unwrap();
        assert_eq!(FileStamp::read(&path).unwrap(), before);
        // As long, and as old.
        fs::write(&other, "two").unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        fs::File::options().write(true).open(&other).unwrap().set_modified(modified).unwrap();
        fs::rename(&other, &path).unwrap();
        assert_ne!(FileStamp::read(&path).unwrap(), before);
        assert!(FileStamp::read(&other).is_err());
    }

    #[test]
    fn a_checksum_is_that_of_all_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        for length in [0, 1, BLOCK_BYTES, BLOCK_BYTES + 5] {
            let bytes: Vec<u8> = (0..length).map(|at| at as u8).collect();
            fs::write(&path, &bytes).unwrap();
            assert_eq!(checksum(&path, &|_| true).unwrap(), blake3::hash(&bytes), "{length}");
        }
        assert!(matches!(checksum(&path, &|_| false), Err(WeightsError::Cancelled)));
    }
}
