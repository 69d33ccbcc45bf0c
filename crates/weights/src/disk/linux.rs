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
    Ok(open(
        path,
        OFlags::WRONLY | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?
    .into())
}

/// Whether all of a stretch lies in the page cache; if that cannot be told, it does not.
///
/// Reads that only take what is cached (`RWF_NOWAIT`) would be simpler, but on a miss they start
/// reading ahead through the cache, and the disk then reads everything twice.
pub fn is_cached(file: &File, offset: u64, bytes: usize) -> bool {
    let page_bytes = rustix::param::page_size();
    let lead = (offset % page_bytes as u64) as usize;
    let mut options = MmapOptions::new();
    options.offset(offset - lead as u64).len(lead + bytes);
    // SAFETY: nothing is read through the mapping; it only names the pages.
    let Ok(mapping) = (unsafe { options.map(file) }) else { return false };
    let mut pages = vec![0; mapping.len().div_ceil(page_bytes)];
    let start = mapping.as_ptr().cast_mut().cast();
    // SAFETY: the range is that of the mapping, which lives until the call is over, and the vector
    // has a byte for each of its pages.
    let code = unsafe { libc::mincore(start, mapping.len(), pages.as_mut_ptr()) };
    code == 0 && pages.iter().all(|page| page & 1 == 1)
}

/// A hint only: what cannot be dropped stays.
pub fn release(file: &File, offset: u64, bytes: u64) {
    if let Some(bytes) = NonZeroU64::new(bytes) {
        _ = fadvise(file, offset, Some(bytes), Advice::DontNeed);
    }
}
