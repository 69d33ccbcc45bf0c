//! Measured rates on disk, one file for each machine, number of threads, engine and version:
//!
//! ```text
//! CACHE/hearth/
//!   rates-NAME-THREADS-ENGINE-VERSION.json   of the CPU or the GPU; threads are 0 for a GPU
//!     owner          whose they are: all that the name is made of, in full
//!     rates
//!       is_measured  true
//!       curves       name of a class → measure, points of [size, seconds]
//! ```
//!
//! CACHE is the user's cache folder. A file that cannot be used gives a warning, and the next
//! calibration overwrites it. Rates of another version are not used: its kernels may differ.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use compute::DeviceKind;
use machine::Machine;
use serde::{Deserialize, Serialize};

use super::{RateCurve, Rates};
use crate::error::{Result, TrainerError};
use crate::report::write_text;

/// Raise the number behind `r` when kernel classes get other names: what was measured before is measured again.
pub(super) const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "-r2");

/// What rates belong to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RatesKey {
    /// The CPU's name, or that of the GPU which computes.
    pub name: String,
    /// Threads that compute.
    pub threads: usize,
    /// What computes: the CPU with its matrix unit, or without one.
    pub engine: String,
    /// Hearth's, and that of the names of kernel classes.
    pub version: String,
}

/// What lies on disk for an owner.
#[derive(Clone, Debug, PartialEq)]
pub enum StoredRates {
    /// Its rates.
    Rates(Rates),
    /// No measurement.
    Missing,
    /// Something that is not its rates.
    Unusable {
        /// What is wrong with it.
        problem: String,
        /// The file.
        path: PathBuf,
    },
}

#[derive(Serialize, Deserialize)]
struct RatesFile {
    owner: RatesKey,
    rates: Rates,
}

/// The folder of stored rates, unless the user has no home.
pub fn folder() -> Option<PathBuf> {
    Some(machine::folders::cache_dir()?.join("hearth"))
}

impl RatesKey {
    /// The device of a machine; of its GPUs the one with this index.
    pub fn of(machine: &Machine, kind: DeviceKind, gpu_index: u32) -> Self {
        let cpu = || machine.cpu.model.known();
        let (name, threads, engine) = match kind {
            DeviceKind::Cpu { threads, has_amx: true } => (cpu(), threads, "cpu-amx"),
            DeviceKind::Cpu { threads, has_amx: false } => (cpu(), threads, "cpu"),
            DeviceKind::Cuda { is_deterministic } => {
                let name = machine.cuda_gpu(gpu_index).and_then(|gpu| gpu.name.known());
                (name, 0, if is_deterministic { "cuda-deterministic" } else { "cuda" })
            }
            DeviceKind::Gpu { .. } => (cpu(), 0, "gpu"),
        };
        Self {
            name: name.map_or("unknown", String::as_str).to_owned(),
            threads,
            engine: engine.to_owned(),
            version: VERSION.to_owned(),
        }
    }

    /// Where its rates are kept.
    pub fn path(&self, folder: &Path) -> PathBuf {
        let Self { name, threads, engine, version } = self;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '.';
        let words = name.split(|c: char| !is_plain(c)).filter(|word| !word.is_empty());
        let name = words.collect::<Vec<_>>().join("-").to_lowercase();
        folder.join(format!("rates-{name}-{threads}-{engine}-{version}.json"))
    }
}

impl Rates {
    /// Looks for the rates of an owner.
    pub fn load(folder: &Path, owner: &RatesKey) -> StoredRates {
        let path = owner.path(folder);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return StoredRates::Missing,
            Err(error) => return StoredRates::Unusable { problem: error.to_string(), path },
        };
        match read(&text, owner) {
            Ok(rates) => StoredRates::Rates(rates),
            Err(problem) => StoredRates::Unusable { problem, path },
        }
    }

    /// Writes them, whole or not at all; returns where.
    pub fn save(&self, folder: &Path, owner: &RatesKey) -> Result<PathBuf> {
        let path = owner.path(folder);
        let io = |source| TrainerError::Io { what: "write", path: path.clone(), source };
        fs::create_dir_all(folder).map_err(io)?;
        let file = RatesFile { owner: owner.clone(), rates: self.clone() };
        let text = serde_json::to_string_pretty(&file).map_err(|error| io(error.into()))?;
        write_text(&path, &text)?;
        Ok(path)
    }
}

fn read(text: &str, owner: &RatesKey) -> std::result::Result<Rates, String> {
    let file: RatesFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if file.owner != *owner {
        return Err(format!("it belongs to {:?}, not to {owner:?}", file.owner));
    }
    if !file.rates.curves.values().all(RateCurve::is_sound) {
        return Err("a curve has no points, or falls".into());
    }
    Ok(file.rates)
}
