//! Systems where nobody tells what is cached: everything is read through the page cache, which
//! macOS is told not to keep where the caller wants it spared.

use std::fs::File;
use std::io;
use std::path::Path;

use crate::plain_file::open_own;

pub fn open_direct(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    #[cfg(target_vendor = "apple")]
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

/// A second handle to a file that exists, whose data the system need not keep.
pub fn create_direct(path: &Path) -> io::Result<File> {
    let file = open_own(path, File::options().write(true))?;
    #[cfg(target_vendor = "apple")]
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(file)
}

/// Nobody tells; the direct handle reads it all.
pub fn is_cached(_: &File, _: u64, _: usize) -> bool {
    false
}

/// No hint exists; a file that was opened to be spared is not kept anyway.
pub fn release(_: &File, _: u64, _: u64) {}
