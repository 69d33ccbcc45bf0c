//! The folder of a run, and its lock.
//!
//! ```text
//! RUN/
//!   .lock              held while a run writes here
//!   config.toml        the job as decided, with the origin of every value
//!   .inputs.json       what the run is trained on and from, see `identity.rs`
//!   events.jsonl       what happened, one JSON object per line
//!   initial/           the randomly initialised model, of a job that trains from scratch
//!   cache/             encoded images and captions, unless the job shares a cache
//!   checkpoints/       see `checkpoint.rs`
//!   samples/           step-000100-1.png: the first prompt after 100 steps
//!   adapter/           the adapter, for every program that was asked for; or
//!   model/             the model, after a full fine-tune
//!   requests/          what people ask of it while it works, see `event/request.rs`
//!   changes.json       keys that were changed that way
//!   tensorboard/       the run for TensorBoard, if it was asked for
//!   ranks/             logs of the other ranks, see `data_parallel/`
//!   README.md          the model card
//!   report.html        how it went, on one page
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use weights::write::{sync_folder, write_whole};

use super::{TrainOptions, checkpoint, data_parallel, requests};
use crate::config::adapter::AdapterKind;
use crate::config::cluster::RankPart;
use crate::config::{self, RawConfig, RunConfig};
use crate::error::{Result, TrainerError};
use crate::event::lock::RunLock;
use crate::event::{EventSink, journal};
use crate::export::model;
use crate::task::seed::{Purpose, seed};

/// The job as decided.
pub const CONFIG: &str = "config.toml";

/// Its first line, which marks it as written by hearth.
pub const CONFIG_HEADER: &str = config::HEADER;

/// The randomly initialised model, of a job that trains from scratch.
pub const INITIAL: &str = "initial";

/// A run's folder, locked as long as this lives.
pub struct RunFolder {
    /// Where it is.
    pub path: PathBuf,
    /// What it was opened for.
    pub options: TrainOptions,
    /// Which rank writes it.
    pub part: RankPart,
    _lock: RunLock,
}

/// Where a run writes its files and its events.
#[derive(Clone, Copy)]
pub(super) struct RunOutput<'a> {
    pub folder: &'a RunFolder,
    pub events: &'a EventSink<'a>,
}

impl RunFolder {
    /// Takes the folder for a run. A run that has saved a checkpoint can only be resumed; one that has not is
    /// started again.
    pub fn open(path: &Path, options: TrainOptions) -> Result<Self> {
        let failed = |source| TrainerError::Io { what: "write", path: path.into(), source };
        let is_saved = || checkpoint::exists_in(path);
        if options.resume && !journal::has_begun(path) && !is_saved() {
            return Err(TrainerError::NoRun { path: path.into() });
        }
        fs::create_dir_all(path).map_err(failed)?;
        let lock = RunLock::take(path).map_err(failed)?;
        let lock = lock.ok_or_else(|| TrainerError::FolderBusy { path: path.into() })?;
        if options.resume {
            data_parallel::take_newest(path)?;
        }
        let was_saved = journal::has_saved(path);
        match (options.resume, is_saved()) {
            (true, false) => Err(TrainerError::NoCheckpoint { was_saved, path: path.into() }),
            (false, true) => Err(TrainerError::FolderTaken { path: path.into() }),
            (false, false) if was_saved => Err(TrainerError::FolderTaken { path: path.into() }),
            _ => Ok(Self { path: path.into(), options, part: RankPart::ALONE, _lock: lock }),
        }
    }

    /// The diffusion model that a job starts from: its base, or a random init of the same shape.
    pub fn base(&self, config: &RunConfig) -> Result<PathBuf> {
        // Checked now and not after training: the result is a folder like that one.
        if config.adapter.kind == AdapterKind::Full && !config.base.path.is_dir() {
            return Err(TrainerError::Request {
                problem: format!(
                    "a full fine-tune needs a model folder, found one file: {}",
                    config.base.path.display()
                ),
                hint: "give base.path a folder as diffusers saves it",
            });
        }
        if !config.base.random_init {
            return Ok(config.base.path.to_path_buf());
        }
        let place = self.path.join(INITIAL);
        if !self.options.resume && place.exists() {
            // Left by an earlier attempt, maybe with another seed or base.
            let failed = |source| TrainerError::Io { what: "remove", path: place.clone(), source };
            fs::remove_dir_all(&place).map_err(failed)?;
        }
        if !place.exists() {
            let staging = self.path.join(".initial.partial");
            let from = seed(config.train.seed, Purpose::Weights);
            model::write_initial(&config.base.path, from, &staging)?;
            let failed = |source| TrainerError::Io { what: "write", path: place.clone(), source };
            fs::rename(&staging, &place).and_then(|()| sync_folder(&place)).map_err(failed)?;
        }
        Ok(place)
    }

    /// The same for a rank of several.
    pub fn of_rank(self, part: RankPart) -> Self {
        Self { part, ..self }
    }

    /// The job of this rank; of a run that resumes, with the precision that the plan chose when it started, since a
    /// checkpoint cannot be resumed in another one, and with what was asked of it.
    pub fn resumed_job(&self, config: &RunConfig) -> RunConfig {
        let mut of_rank = config.clone();
        of_rank.part = self.part;
        let config = &of_rank;
        if !self.options.resume {
            return config.clone();
        }
        let before = RawConfig::from_file(&self.path.join(CONFIG)).and_then(RawConfig::resolve);
        // A config that cannot be read shows when the checkpoint's settings are compared.
        let job =
            before.map_or_else(|_| config.clone(), |before| config.with_precision_of(&before));
        requests::with_changes_of_before(&job, &self.path)
    }

    /// Writes a text, whole or not at all.
    pub fn write(&self, name: &str, text: &str) -> Result<()> {
        Ok(write_whole(&self.path.join(name), text.as_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events of a run that has started, and more.
    fn journal(more: &str) -> String {
        let begun = r#"{"event":"begin","version":"","base":"","engine":"","from_step":0,"steps":1,
            "samples":1,"held_out":0,"layers":1,"parameters":1,"samples_per_step":1,"phases":[],
            "limit_bytes":1,"time":0}"#;
        format!("{}\n{more}\n", begun.replace('\n', ""))
    }

    #[test]
    fn a_folder_is_taken_by_what_was_saved_and_not_by_an_attempt() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("run");
        let open = |resume| RunFolder::open(&path, TrainOptions { resume, force: false });
        assert!(matches!(open(true), Err(TrainerError::NoRun { .. })));
        assert!(!path.exists(), "a folder was made for a run that is not there");
        let attempt = open(false).unwrap();
        assert!(matches!(open(false), Err(TrainerError::FolderBusy { .. })));
        drop(attempt);
        assert!(matches!(open(true), Err(TrainerError::NoRun { .. })));

        let run = open(false).unwrap();
        run.write("events.jsonl", &journal("")).unwrap();
        assert!(matches!(open(true), Err(TrainerError::FolderBusy { .. })));
        drop(run);
        assert!(matches!(open(true), Err(TrainerError::NoCheckpoint { was_saved: false, .. })));
        let run = open(false).unwrap();
        let saved = r#"{"event":"checkpoint","step":1,"path":"checkpoints/step-000001"}"#;
        run.write("events.jsonl", &journal(saved)).unwrap();
        drop(run);
        assert!(matches!(open(true), Err(TrainerError::NoCheckpoint { was_saved: true, .. })));
        assert!(matches!(open(false), Err(TrainerError::FolderTaken { .. })));
        fs::create_dir_all(path.join("checkpoints/step-000001")).unwrap();
        assert!(matches!(open(false), Err(TrainerError::FolderTaken { .. })));
        assert!(open(true).is_ok());
        // Its history may be lost.
        fs::remove_file(path.join("events.jsonl")).unwrap();
        assert!(open(true).is_ok());
    }

    #[test]
    fn a_lock_that_is_a_link_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let other = place.path().join("diary");
        fs::write(&other, "dear diary").unwrap();
        std::os::unix::fs::symlink(&other, place.path().join(".lock")).unwrap();
        assert!(RunFolder::open(place.path(), TrainOptions::default()).is_err());
        assert_eq!(fs::read_to_string(other).unwrap(), "dear diary");
    }
}
