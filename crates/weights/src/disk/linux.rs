//! Linux: `O_DIRECT`, what of a file is in the page cache, and dropping it from there.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;

use memmap2::MmapOptions;
use rustix::fs::{Advice, Mode, OFlags, fadvise, open};

pub fn open_direct(path: &Path) -> io::Result<File> {
    Ok(open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// A second handle to a file that exists, for writing past the cache.
pub fn create_direct(path: &Path) -> io::Result<File> {
    Ok(open(path, OFlags::WRONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// Which pages of a file lie in the page cache.
///
/// Reads that only take what is cached (`RWF_NOWAIT`) would be simpler, but on a miss they start
/// reading ahead through the cache, and the disk then reads everything twice.
pub struct Cached {
    pages: Vec<u8>,
    page_bytes: u64,
}

impl Cached {
    /// Asks for the whole file; a file that cannot be asked about counts as not cached.
    pub fn of(file: &File, bytes: u64) -> Self {
        let page_bytes = rustix::param::page_size() as u64;
        let mut pages = vec![0; bytes.div_ceil(page_bytes) as usize];
        // SAFETY: nothing is read through the mapping; it only names the pages.
        let mapping = unsafe { MmapOptions::new().len(bytes as usize).map(file) };
        let asked = mapping.map(|mapping| {
            let start = mapping.as_ptr().cast_mut().cast();
            // SAFETY: the range is that of the mapping, which lives until the call is over, and the
            // vector has a byte for each of its pages.
            unsafe { libc::mincore(start, mapping.len(), pages.as_mut_ptr()) }
        });
        if !matches!(asked, Ok(0)) {
            pages.fill(0);
        }
        Self { pages, page_bytes }
    }

    /// Whether all of a stretch is there.
    pub fn holds(&self, offset: u64, bytes: u64) -> bool {
        let first = (offset / self.page_bytes) as usize;
        let end = (offset + bytes).div_ceil(self.page_bytes) as usize;
        self.pages.get(first..end).is_some_and(|pages| pages.iter().all(|page| page & 1 == 1))
    }
}

/// A hint only: what cannot be dropped stays.
pub fn release(file: &File, offset: u64, bytes: u64) {
    if let Some(bytes) = NonZeroU64::new(bytes) {
        _ = fadvise(file, offset, Some(bytes), Advice::DontNeed);
    }
}
