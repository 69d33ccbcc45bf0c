//! Compiled CUDA kernels, cached between runs in the user's cache folder. The name is a hash of everything the
//! binary depends on, so an entry never changes; one that cannot be read is compiled again.
//!
//! ```text
//! <cache>/hearth/kernels/
//!   elementwise-5f0c…e1    a binary as the compiler gave it
//! ```

use std::fs;
use std::path::PathBuf;

use compute::KernelCache;
use weights::plain_file::read_plain;
use weights::write::write_whole;

/// The user's cache, unless the system has no cache folder.
pub fn cache() -> Option<Box<dyn KernelCache>> {
    Some(Box::new(KernelFolder(machine::folders::cache_dir()?.join("hearth/kernels"))))
}

struct KernelFolder(PathBuf);

impl KernelCache for KernelFolder {
    fn load(&self, name: &str) -> Option<Vec<u8>> {
        read_plain(&self.0.join(name)).ok()
    }

    fn store(&self, name: &str, kernels: &[u8]) {
        // Only a cache: no reason to fail.
        _ = fs::create_dir_all(&self.0);
        _ = write_whole(&self.0.join(name), kernels);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_found_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelFolder(folder.path().join("kernels"));
        assert_eq!(cache.load("add-1"), None);
        cache.store("add-1", b"binary");
        assert_eq!(cache.load("add-1").as_deref(), Some(&b"binary"[..]));
        assert_eq!(fs::read_dir(&cache.0).unwrap().count(), 1, "nothing unfinished is left");
        // A folder that cannot be made is no reason to fail.
        KernelFolder(folder.path().join("kernels/add-1/below")).store("add-2", b"binary");
    }
}
