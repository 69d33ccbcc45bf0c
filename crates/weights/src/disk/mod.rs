//! Reading parts of files and writing whole ones. What is in the page cache is read from there, the
//! rest past it, straight from the disk into memory: so a cold file comes at the disk's speed, a warm
//! one at memory's, and neither pushes anything else out of the cache, which on unified machines is
//! memory the GPU needs.

pub mod direct_writer;

#[cfg(target_os = "linux")]
#[path = "linux.rs"]
mod system;
#[cfg(not(target_os = "linux"))]
#[path = "elsewhere.rs"]
mod system;

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::{Result, WeightsError};

/// Chosen: what direct reads must be aligned to on every disk we know of; larger than most need.
pub const ALIGNMENT: usize = 4096;

/// What to do with the system's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PageCache {
    /// Take from it what is there and leave it as it is.
    #[default]
    Spare,
    /// Read through it and leave the file in it, for files that are soon read again.
    Fill,
    /// Read through it and drop the file from it afterwards.
    Release,
}

/// A file being read.
pub struct DirectReader {
    path: PathBuf,
    file: File,
    direct: Option<File>,
    before: Metadata,
    cache: PageCache,
}

impl DirectReader {
    /// Opens a file for reading.
    pub fn open(path: &Path, cache: PageCache) -> Result<Self> {
        let io = |source| WeightsError::io("open", path, source);
        let file = File::open(path).map_err(io)?;
        let before = file.metadata().map_err(io)?;
        // File systems without direct reads are read through the cache.
        let direct = if cache == PageCache::Spare { system::open_direct(path).ok() } else { None };
        Ok(Self { path: path.into(), file, direct, before, cache })
    }

    /// Bytes it had when it was opened.
    pub fn len(&self) -> u64 {
        self.before.len()
    }

    /// Fills a buffer from an offset on.
    pub fn read(&self, offset: u64, into: &mut [u8], scratch: &mut AlignedBuffer) -> Result<()> {
        let read = match &self.direct {
            Some(direct) if !system::is_cached(&self.file, offset, into.len()) => {
                self.read_past_cache(direct, offset, into, scratch)
            }
            _ => self.file.read_exact_at(into, offset),
        };
        read.map_err(|source| self.failed(source, offset, into.len()))?;
        if self.cache == PageCache::Release {
            system::release(&self.file, offset, into.len() as u64);
        }
        Ok(())
    }

    /// Drops all of it from the page cache.
    pub fn release(&self) {
        system::release(&self.file, 0, self.len());
    }

    /// Whether the file is still the one that was opened.
    pub fn check_unchanged(&self) -> Result<()> {
        let now =
            self.file.metadata().map_err(|source| WeightsError::io("read", &self.path, source))?;
        let stamp = |about: &Metadata| (about.len(), about.mtime(), about.mtime_nsec());
        if stamp(&now) == stamp(&self.before) {
            return Ok(());
        }
        Err(WeightsError::Changed { path: self.path.clone() })
    }

    fn read_past_cache(
        &self,
        direct: &File,
        offset: u64,
        into: &mut [u8],
        scratch: &mut AlignedBuffer,
    ) -> io::Result<()> {
        match read_direct(direct, offset, into, scratch) {
            // Some memory, as a GPU's that is mapped, the CPU reaches and the disk does not.
            Err(error) if error.raw_os_error() == Some(FAULT) => {
                read_through(direct, offset, into, scratch)
            }
            // Some file systems accept the open and refuse the read.
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                self.file.read_exact_at(into, offset)
            }
            read => read,
        }
    }

    fn failed(&self, source: io::Error, offset: u64, bytes: usize) -> WeightsError {
        if source.kind() == ErrorKind::UnexpectedEof {
            return WeightsError::Truncated {
                what: "a tensor".into(),
                needed: offset + bytes as u64,
                has: self.file.metadata().map_or(0, |about| about.len()),
                path: self.path.clone(),
            };
        }
        WeightsError::io("read", &self.path, source)
    }
}

/// What a read into such memory fails with.
const FAULT: i32 = rustix::io::Errno::FAULT.raw_os_error();

/// Reads past the cache. Where buffer and file are aligned alike, the disk writes straight into the
/// buffer, but for the ragged ends; elsewhere everything goes through the scratch.
fn read_direct(
    file: &File,
    offset: u64,
    into: &mut [u8],
    scratch: &mut AlignedBuffer,
) -> io::Result<()> {
    let head = offset.next_multiple_of(ALIGNMENT as u64) - offset;
    let same_phase = into.as_ptr().align_offset(ALIGNMENT) as u64 == head;
    if !same_phase || into.len() < 2 * ALIGNMENT {
        return read_through(file, offset, into, scratch);
    }
    let (head, rest) = into.split_at_mut(head as usize);
    let (middle, tail) = rest.split_at_mut(rest.len() / ALIGNMENT * ALIGNMENT);
    let middle_at = offset + head.len() as u64;
    let tail_at = middle_at + middle.len() as u64;
    file.read_exact_at(middle, middle_at)?;
    read_through(file, offset, head, scratch)?;
    read_through(file, tail_at, tail, scratch)
}

/// Reads the aligned span around the wanted bytes and copies those out: tensors start anywhere,
/// direct reads may not.
fn read_through(
    file: &File,
    offset: u64,
    into: &mut [u8],
    scratch: &mut AlignedBuffer,
) -> io::Result<()> {
    let scratch = scratch.aligned();
    let (mut offset, mut into) = (offset, into);
    while !into.is_empty() {
        let lead = (offset % ALIGNMENT as u64) as usize;
        let span = (lead + into.len()).next_multiple_of(ALIGNMENT).min(scratch.len());
        let got = match file.read_at(&mut scratch[..span], offset - lead as u64) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            got => got?,
        };
        let useful = got.saturating_sub(lead).min(into.len());
        if useful == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let (now, later) = into.split_at_mut(useful);
        now.copy_from_slice(&scratch[lead..lead + useful]);
        (into, offset) = (later, offset + useful as u64);
    }
    Ok(())
}

/// A buffer for direct reads and writes.
pub struct AlignedBuffer(Vec<u8>);

impl AlignedBuffer {
    /// For reads of up to so many bytes at a time.
    pub fn new(bytes: usize) -> Self {
        Self(vec![0; bytes.next_multiple_of(ALIGNMENT) + 2 * ALIGNMENT])
    }

    fn aligned(&mut self) -> &mut [u8] {
        let skip = self.0.as_ptr().align_offset(ALIGNMENT);
        let usable = (self.0.len() - skip) / ALIGNMENT * ALIGNMENT;
        &mut self.0[skip..skip + usable]
    }
}
