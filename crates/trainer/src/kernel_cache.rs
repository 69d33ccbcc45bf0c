//! Compiled CUDA kernels, cached between runs in the user's cache folder. The name is a hash of everything the
//! binary depends on, so an entry never changes; one that cannot be read is compiled again.
//!
//! ```text
//! <cache>/hearth/kernels/
//!   elementwise-5f0c…e1    a binary as the compiler gave it
//! ```

use std::path::PathBuf;
use std::{fs, process};

use compute::KernelCache;

/// The user's cache, unless the system has no cache folder.
pub fn cache() -> Option<Box<dyn KernelCache>> {
    Some(Box::new(KernelFolder(machine::folders::cache_dir()?.join("hearth/kernels"))))
}

struct KernelFolder(PathBuf);

impl KernelCache for KernelFolder {
    fn load(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.0.join(name)).ok()
    }

    fn store(&self, name: &str, kernels: &[u8]) {
        // Under a name of its own first: another program may read while this one writes.
        let unfinished = self.0.join(format!("{name}.{}", process::id()));
        let stored = fs::create_dir_all(&self.0)
            .and_then(|()| fs::write(&unfinished, kernels))
            .and_then(|()| fs::rename(&unfinished, self.0.join(name)));
        if stored.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
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
