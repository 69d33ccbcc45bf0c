//! The folder of a run, and who may write into it.
//!
//! ```text
//! RUN/
//!   .lock              held while a run writes here
//!   config.toml        the job as decided, with the origin of every value
//!   events.jsonl       what happened, one JSON object per line
//!   initial/           the model that a job begins with that begins with random weights
//!   cache/             encoded pictures and captions, unless the job shares a cache
//!   checkpoints/       see `checkpoint.rs`
//!   samples/           step-000100-1.png: the first prompt after 100 steps
//!   adapter/           the adapter, for every program that was asked for; or
//!   model/             the model, if its own weights were trained
//!   README.md          the model card
//!   report.html        how it went, on one page
//! ```

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use weights::write::AtomicFile;

use super::draws::{Purpose, seed};
use super::journal;
use crate::config::adapter::AdapterKind;
use crate::config::{RawConfig, RunConfig};
use crate::error::{Result, TrainerError};
use crate::export::model;

/// The job as decided.
pub const CONFIG: &str = "config.toml";

/// A run's folder, locked as long as this lives.
pub struct Folder {
    /// Where it is.
    pub path: PathBuf,
    _lock: File,
}

impl Folder {
    /// Takes the folder for a run; one that holds a run already only to go on with it.
    pub fn open(path: &Path, resume: bool) -> Result<Self> {
        let failed = |source| TrainerError::Io { what: "write", path: path.into(), source };
        fs::create_dir_all(path).map_err(failed)?;
        let lock = File::create(path.join(".lock")).map_err(failed)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(TrainerError::Busy { path: path.into() });
            }
            // A file system without locks only loses the guard.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        if !resume && journal::has_begun(path) {
            return Err(TrainerError::Taken { path: path.into() });
        }
        Ok(Self { path: path.into(), _lock: lock })
    }

    /// The model that draws and that a job begins with: its base, or one like it that has learnt nothing
    /// yet.
    pub fn base(&self, config: &RunConfig) -> Result<PathBuf> {
        // Said now and not when all is trained: what comes of it is a folder like that one.
        if config.adapter.kind == AdapterKind::None && !config.base.path.is_dir() {
            return Err(TrainerError::Request {
                problem: format!(
                    "a model's own weights can be trained in a folder, not in one file: {}",
                    config.base.path.display()
                ),
                hint: "give base.path a folder as diffusers saves it",
            });
        }
        if !config.base.fresh {
            return Ok(config.base.path.clone());
        }
        let place = self.path.join("initial");
        if !place.exists() {
            let staging = self.path.join(".initial.partial");
            let from = seed(config.train.seed, Purpose::Weights);
            model::write_initial(&config.base.path, from, &staging)?;
            fs::rename(&staging, &place).map_err(|source| TrainerError::Io {
                what: "write",
                path: place.clone(),
                source,
            })?;
        }
        Ok(place)
    }

    /// The job with what a plan chose when the run began and what cannot change since: a checkpoint in
    /// one precision does not go on in another.
    pub fn pinned(&self, config: &RunConfig, resume: bool) -> RunConfig {
        if !resume {
            return config.clone();
        }
        let before = RawConfig::from_file(&self.path.join(CONFIG)).and_then(RawConfig::resolve);
        // What cannot be read is found by comparing the checkpoint's settings.
        before.map_or_else(|_| config.clone(), |before| config.with_precision_of(&before))
    }

    /// Writes a text, whole or not at all.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path.join(name);
        let mut file = AtomicFile::create(&path)?;
        file.write_all(text.as_bytes()).map_err(|source| TrainerError::Io {
            what: "write",
            path,
            source,
        })?;
        file.commit()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_taken_by_a_run_and_not_by_an_attempt() {
        let place = tempfile::tempdir().unwrap();
        let open = |resume| Folder::open(place.path(), resume);
        let attempt = open(false).unwrap();
        fs::write(place.path().join("events.jsonl"), "").unwrap();
        assert!(matches!(open(true), Err(TrainerError::Busy { .. })));
        drop(attempt);
        let run = open(false).unwrap();
        let begun = r#"{"event":"begin","version":"","base":"","engine":"","from_step":0,"steps":1,
            "pictures":1,"held_out":0,"layers":1,"parameters":1,"samples_per_step":1,"phases":[],
            "limit_bytes":1,"time":0}"#;
        run.write("events.jsonl", &format!("{}\n", begun.replace('\n', ""))).unwrap();
        drop(run);
        assert!(matches!(open(false), Err(TrainerError::Taken { .. })));
        assert!(open(true).is_ok());
    }
}
