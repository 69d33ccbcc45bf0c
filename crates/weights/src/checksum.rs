//! Checksums of files as they lie on disk. BLAKE3: faster than any disk, and `b3sum` checks it.

use std::path::Path;

pub use blake3::Hash;

use crate::Tick;
use crate::disk::{Cache, Disk, Scratch};
use crate::error::{Result, WeightsError};

/// Chosen: as much as a disk likes to give at once.
const BLOCK_BYTES: usize = 8 << 20;

/// Reads a whole file, sparing the page cache.
pub fn checksum(path: &Path, tick: Tick<'_>) -> Result<Hash> {
    let disk = Disk::open(path, Cache::Spare)?;
    let mut hasher = blake3::Hasher::new();
    let (mut buffer, mut scratch) = (vec![0; BLOCK_BYTES], Scratch::new(BLOCK_BYTES));
    let mut offset = 0;
    while offset < disk.len() {
        let block = &mut buffer[..(disk.len() - offset).min(BLOCK_BYTES as u64) as usize];
        disk.read(offset, block, &mut scratch)?;
        hasher.update(block);
        offset += block.len() as u64;
        if !tick(block.len() as u64) {
            return Err(WeightsError::Cancelled);
        }
    }
    disk.unchanged()?;
    Ok(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_that_of_all_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        for length in [0, 1, BLOCK_BYTES, BLOCK_BYTES + 5] {
            let bytes: Vec<u8> = (0..length).map(|at| at as u8).collect();
            std::fs::write(&path, &bytes).unwrap();
            assert_eq!(checksum(&path, &|_| true).unwrap(), blake3::hash(&bytes), "{length}");
        }
        assert!(matches!(checksum(&path, &|_| false), Err(WeightsError::Cancelled)));
    }
}
