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
//! CACHE is the user's cache folder. A file that cannot be used is left alone and told of: the next
//! calibration writes over it. Nothing is carried over from another version, whose kernels may be
//! others.

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
    /// Nobody measured.
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

/// The folder of kept rates on this computer, unless the user has no home.
pub fn folder() -> Option<PathBuf> {
    Some(machine::folders::cache_dir()?.join("hearth"))
}

impl RatesKey {
    /// What computes on a machine; on a GPU, the one of this number.
    pub fn of(machine: &Machine, kind: DeviceKind, card: u32) -> Self {
        let processor = || machine.cpu.model.known();
        let (name, threads, engine) = match kind {
            DeviceKind::Cpu { threads, has_amx: true } => (processor(), threads, "cpu-amx"),
            DeviceKind::Cpu { threads, has_amx: false } => (processor(), threads, "cpu"),
            DeviceKind::Cuda { is_deterministic } => {
                let name = machine.cuda_gpu(card).and_then(|card| card.name.known());
                (name, 0, if is_deterministic { "cuda-deterministic" } else { "cuda" })
            }
            DeviceKind::Gpu { .. } => (processor(), 0, "gpu"),
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
        let kept = RatesFile { owner: owner.clone(), rates: self.clone() };
        let text = serde_json::to_string_pretty(&kept).map_err(|error| io(error.into()))?;
        write_text(&path, &text)?;
        Ok(path)
    }
}

fn read(text: &str, owner: &RatesKey) -> std::result::Result<Rates, String> {
    let kept: RatesFile = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if kept.owner != *owner {
        return Err(format!("it belongs to {:?}, not to {owner:?}", kept.owner));
    }
    if !kept.rates.curves.values().all(RateCurve::is_sound) {
        return Err("a curve has no points, or falls".into());
    }
    Ok(kept.rates)
}
