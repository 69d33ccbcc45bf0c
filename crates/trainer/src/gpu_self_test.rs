//! Results of the GPU self-test, kept in the user's cache folder, so that no run trains on a GPU that computes
//! an op wrongly:
//!
//! ```text
//! CACHE/hearth/
//!   self-test-HASH.json   one for each adapter, driver and version of hearth
//!     owner               whose it is: all that the hash is made of
//!     wrong               the checks that failed, as they are printed; none if all agree
//! ```
//!
//! A GPU that was never tested is not refused: the test is the user's to run. Nothing is carried over from
//! another driver or version, whose kernels may be others.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use compute::gpu::GpuAdapter;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainerError};
pub use crate::plan::rates::folder;
use crate::report::write_text;

/// What a self-test belongs to.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SelfTestKey {
    name: String,
    driver: String,
    interface: String,
    /// Hearth's.
    version: String,
}

#[derive(Serialize, Deserialize)]
struct SelfTestFile {
    owner: SelfTestKey,
    wrong: Vec<String>,
}

impl SelfTestKey {
    fn of(adapter: &GpuAdapter) -> Self {
        Self {
            name: adapter.name.clone(),
            driver: adapter.driver.clone(),
            interface: adapter.interface.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    fn path(&self, folder: &Path) -> PathBuf {
        let Self { name, driver, interface, version } = self;
        let all = [name, driver, interface, version].map(String::as_str).join("\n");
        let hash = blake3::hash(all.as_bytes()).to_hex();
        folder.join(format!("self-test-{}.json", &hash[..16]))
    }
}

/// Writes what a self-test of an adapter found wrong; returns the file.
pub fn save(folder: &Path, adapter: &GpuAdapter, wrong: Vec<String>) -> Result<PathBuf> {
    let owner = SelfTestKey::of(adapter);
    let path = owner.path(folder);
    let io = |source| TrainerError::Io { what: "write", path: path.clone(), source };
    fs::create_dir_all(folder).map_err(io)?;
    let text =
        serde_json::to_string_pretty(&SelfTestFile { owner, wrong }).map_err(|e| io(e.into()))?;
    write_text(&path, &text)?;
    Ok(path)
}

/// Fails if the last self-test of an adapter found something wrong.
pub fn check(folder: &Path, adapter: &GpuAdapter) -> Result<()> {
    let owner = SelfTestKey::of(adapter);
    let path = owner.path(folder);
    let text = match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        read => {
            read.map_err(|source| TrainerError::Io { what: "read", path: path.clone(), source })
        }
    }?;
    // One that cannot be read says nothing, as if there had been no test.
    let stored: Option<SelfTestFile> =
        serde_json::from_str(&text).ok().filter(|stored: &SelfTestFile| stored.owner == owner);
    match stored.as_ref().and_then(|stored| stored.wrong.split_first()) {
        None => Ok(()),
        Some((first, others)) => Err(TrainerError::FailedSelfTest {
            name: adapter.name.clone(),
            first: first.clone(),
            others: others.len(),
            path,
        }),
    }
}

#[cfg(test)]
mod tests {
    use compute::gpu::{GpuAdapterKind, GpuFeatures};

    use super::*;

    fn adapter(driver: &str) -> GpuAdapter {
        GpuAdapter {
            name: "Apple M9".into(),
            driver: driver.into(),
            interface: "Metal",
            kind: GpuAdapterKind::Integrated,
            buffer_bytes: 0,
            tensor_bytes: 0,
            group_bytes: 0,
            shares_memory: true,
            features: GpuFeatures {
                shader_f16: true,
                subgroups: true,
                matrix_units: None,
                mappable_buffers: true,
                timestamps: true,
            },
            missing: None,
        }
    }

    #[test]
    fn a_gpu_that_failed_its_test_is_refused_until_it_passes() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("hearth");
        let gpu = adapter("1");
        assert!(check(&folder, &gpu).is_ok(), "nobody tested it");
        let wrong = ["attention in bf16 is wrong: off", "norm in f32 is wrong: off"];
        let path = save(&folder, &gpu, wrong.map(String::from).to_vec()).unwrap();
        let error = check(&folder, &gpu).unwrap_err().to_string();
        let said =
            "the self-test found Apple M9 wrong: attention in bf16 is wrong: off, and 1 more: ";
        assert_eq!(error, format!("{said}{}", path.display()));
        assert!(check(&folder, &adapter("2")).is_ok(), "another driver");
        save(&folder, &gpu, Vec::new()).unwrap();
        assert!(check(&folder, &gpu).is_ok());
        fs::write(&path, "{").unwrap();
        assert!(check(&folder, &gpu).is_ok());
    }
}
