//! A file while it is downloaded, in pieces that come in any order and go on after a kill.
//!
//! ```text
//! blobs/CHECKSUM.hearth-partial
//!   0 … size            the file, with gaps
//!   size …              MARK, then for each piece how many of its bytes are there, as little-endian u64
//! blobs/CHECKSUM        after the checksum was compared: cut to its size, synced, renamed
//! ```
//!
//! A count is written after the bytes that it counts, so after a kill nothing is counted that is not there. A power cut
//! may undo that; the checksum finds it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use weights::plain_file::open_own;

use crate::error::{HubError, Result};
use crate::model::{FileChecksum, RemoteFile};

/// Chosen: some seconds of a fast connection, so that asking for each costs little, and a large file has many.
pub const PIECE_BYTES: u64 = 64 << 20;

const MARK: [u8; 8] = *b"hearth-1";
const COUNT_BYTES: u64 = 8;

/// A file that is not whole yet.
pub struct StagingFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    done: Vec<AtomicU64>,
}

/// Pieces of a file of this size; an empty one has one that is empty.
pub fn n_pieces(bytes: u64) -> usize {
    bytes.div_ceil(PIECE_BYTES).max(1) as usize
}

impl StagingFile {
    /// Opens what an earlier download left, or begins a new one.
    pub fn open(path: &Path, bytes: u64) -> Result<Self> {
        let io = || HubError::io("write", path);
        let file =
            open_own(path, OpenOptions::new().read(true).write(true).create(true)).map_err(io())?;
        let length = file.metadata().map_err(io())?.len();
        let counts = n_pieces(bytes) as u64 * COUNT_BYTES;
        let whole = bytes + MARK.len() as u64 + counts;
        let done = if length == whole { read_counts(&file, bytes).ok().flatten() } else { None };
        let done = match done {
            Some(done) => done,
            // Killed between the cut and the rename.
            None if length == bytes && bytes > 0 => {
                (0..n_pieces(bytes)).map(|at| piece_bytes(bytes, at)).collect()
            }
            None => {
                begin(&file, bytes, whole).map_err(io())?;
                vec![0; n_pieces(bytes)]
            }
        };
        let done = done.into_iter().map(AtomicU64::new).collect();
        Ok(Self { file, path: path.into(), bytes, done })
    }

    /// Bytes that an earlier download left; looks without touching them, since another program may be at work.
    pub fn begun_bytes(path: &Path, bytes: u64) -> u64 {
        let counts = open_own(path, OpenOptions::new().read(true))
            .and_then(|file| read_counts(&file, bytes));
        counts.ok().flatten().map_or(0, |done| done.iter().sum())
    }

    /// Bytes of a piece that are there.
    pub fn done(&self, piece: usize) -> u64 {
        self.done[piece].load(Ordering::Relaxed)
    }

    /// Where the next bytes of a piece begin and end in the file; nothing if it is whole.
    pub fn rest(&self, piece: usize) -> Option<[u64; 2]> {
        let (start, done) = (piece as u64 * PIECE_BYTES, self.done(piece));
        let left = piece_bytes(self.bytes, piece) - done;
        (left > 0).then_some([start + done, start + done + left])
    }

    /// Writes the next bytes of a piece. Only one thread at a time has it.
    pub fn write(&self, piece: usize, bytes: &[u8]) -> Result<()> {
        let done = self.done(piece);
        let at = piece as u64 * PIECE_BYTES + done;
        let done = done + bytes.len() as u64;
        let count_at = self.bytes + MARK.len() as u64 + piece as u64 * COUNT_BYTES;
        let written = self.file.write_all_at(bytes, at);
        let counted = written.and_then(|()| self.file.write_all_at(&done.to_le_bytes(), count_at));
        counted.map_err(HubError::io("write", &self.path))?;
        self.done[piece].store(done, Ordering::Relaxed);
        Ok(())
    }

    /// Compares the checksum and gives the file its name; a damaged one is removed.
    pub fn commit(&self, remote: &RemoteFile, to: &Path) -> Result<()> {
        let found = checksum(&self.file, self.bytes, &remote.checksum)
            .map_err(HubError::io("read", &self.path))?;
        let expected = remote.checksum.hex();
        if found != expected {
            _ = fs::remove_file(&self.path);
            return Err(HubError::Checksum {
                file: remote.path.clone(),
                found,
                expected: expected.into(),
            });
        }
        let cut = self.file.set_len(self.bytes).and_then(|()| self.file.sync_all());
        cut.and_then(|()| fs::rename(&self.path, to)).map_err(HubError::io("write", to))
    }
}

fn begin(file: &File, bytes: u64, whole: u64) -> io::Result<()> {
    file.set_len(0)?;
    file.set_len(whole)?;
    file.write_all_at(&MARK, bytes)
}

/// How much of each piece is there; `None` if this is no file of ours.
fn read_counts(file: &File, bytes: u64) -> io::Result<Option<Vec<u64>>> {
    let mut mark = [0; MARK.len()];
    file.read_exact_at(&mut mark, bytes)?;
    let mut counts = vec![0; n_pieces(bytes) * COUNT_BYTES as usize];
    file.read_exact_at(&mut counts, bytes + MARK.len() as u64)?;
    let counts: Vec<u64> =
        counts.as_chunks().0.iter().map(|count| u64::from_le_bytes(*count)).collect();
    let is_sound = counts.iter().enumerate().all(|(at, done)| *done <= piece_bytes(bytes, at));
    Ok((mark == MARK && is_sound).then_some(counts))
}

fn piece_bytes(bytes: u64, piece: usize) -> u64 {
    (bytes - (piece as u64 * PIECE_BYTES).min(bytes)).min(PIECE_BYTES)
}

/// Counts the checksum of the first bytes of a file.
fn checksum(mut file: &File, bytes: u64, kind: &FileChecksum) -> io::Result<String> {
    let mut context = match kind {
        FileChecksum::Sha256(_) => Context::new(&SHA256),
        FileChecksum::GitSha1(_) => {
            let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            context.update(format!("blob {bytes}\0").as_bytes());
            context
        }
    };
    file.seek(SeekFrom::Start(0))?;
    let (mut buffer, mut left) = (vec![0; 1 << 20], bytes);
    while left > 0 {
        let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = file.read(&mut buffer[..most])?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        context.update(&buffer[..n]);
        left -= n as u64;
    }
    let digest = context.finish();
    let digits = digest.as_ref().iter().flat_map(|byte| [byte >> 4, byte & 15]);
    Ok(digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `hello\n`, by `sha256sum` and `git hash-object`.
    const SHA: &str = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
    const GIT: &str = "ce013625030ba8dba906f756967f9e9ca394464a";

    fn remote(checksum: FileChecksum, bytes: u64) -> RemoteFile {
        RemoteFile { path: "x".into(), bytes, checksum }
    }

    #[test]
    fn a_file_goes_on_where_it_stopped_and_is_checked() {
        let place = tempfile::tempdir().unwrap();
        let [partial, whole] = ["partial", "whole"].map(|name| place.path().join(name));
        for checksum in [FileChecksum::Sha256(SHA.into()), FileChecksum::GitSha1(GIT.into())] {
            let staging = StagingFile::open(&partial, 6).unwrap();
            assert_eq!(staging.rest(0), Some([0, 6]));
            staging.write(0, b"hel").unwrap();
            drop(staging);
            let staging = StagingFile::open(&partial, 6).unwrap();
            assert_eq!(staging.rest(0), Some([3, 6]));
            staging.write(0, b"lo\n").unwrap();
            assert_eq!(staging.rest(0), None);
            staging.commit(&remote(checksum, 6), &whole).unwrap();
            assert_eq!(fs::read(&whole).unwrap(), b"hello\n");
            assert!(!partial.exists());
        }
    }

    #[test]
    fn a_damaged_file_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let [partial, whole] = ["partial", "whole"].map(|name| place.path().join(name));
        let staging = StagingFile::open(&partial, 6).unwrap();
        staging.write(0, b"hullo\n").unwrap();
        let error =
            staging.commit(&remote(FileChecksum::Sha256(SHA.into()), 6), &whole).unwrap_err();
        assert!(error.to_string().contains("was damaged"), "{error}");
        assert!(!partial.exists() && !whole.exists());
    }

    #[test]
    fn what_is_no_file_of_ours_begins_anew() {
        let place = tempfile::tempdir().unwrap();
        let partial = place.path().join("partial");
        let rest = |bytes: u64| StagingFile::open(&partial, bytes).unwrap().rest(0);
        for found in [
            &b"x"[..],
            b"",
            b"hello\nhearth-0\0\0\0\0\0\0\0\0",
            b"hello\nhearth-1\xff\0\0\0\0\0\0\0",
        ] {
            fs::write(&partial, found).unwrap();
            assert_eq!(rest(6), Some([0, 6]), "{found:?}");
        }
        fs::write(&partial, b"hello\n").unwrap();
        assert_eq!(rest(6), None, "cut, and not renamed yet");
        fs::remove_file(&partial).unwrap();
        assert_eq!(rest(0), None);
        assert_eq!((n_pieces(0), n_pieces(PIECE_BYTES), n_pieces(PIECE_BYTES + 1)), (1, 1, 2));
        assert_eq!(piece_bytes(PIECE_BYTES + 1, 1), 1);
    }

    #[test]
    fn a_link_is_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let [partial, diary] = ["partial", "diary"].map(|name| place.path().join(name));
        fs::write(&diary, "mine").unwrap();
        std::os::unix::fs::symlink(&diary, &partial).unwrap();
        assert!(StagingFile::open(&partial, 6).is_err());
        assert_eq!(fs::read(&diary).unwrap(), b"mine");
    }
}
