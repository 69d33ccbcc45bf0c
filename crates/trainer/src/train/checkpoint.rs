//! Checkpoints: everything that a run needs to resume bit for bit. Written into a folder beside, synced, and
//! renamed: a checkpoint is complete or absent.
//!
//! ```text
//! RUN/checkpoints/
//!   .step-000250.partial/     while it is written
//!   step-000250/
//!     state.safetensors       parameters, the optimizer's state, EMA. Its header has the model's
//!                             name of each parameter; or, above `output.max_shard_size`,
//!     state-00001-of-0000N.safetensors, …, state.safetensors.index.json
//!     progress.json           steps taken, where the data stands, what it belongs to, and checksums:
//!                             of each file of the state, and its own; see `progress_file.rs`
//!     pytorch_lora_weights.safetensors            the adapter of an image model, for diffusers; or
//!     adapter_config.json, adapter_model.safetensors    that of a language model, for PEFT
//! ```
//!
//! The adapter is not read on resume. A full fine-tune has none: `full.rs` exports a model from the state.
//!
//! Random numbers and the order of samples follow from the seed and the step, so there is no generator state to
//! save.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::mem;
use std::path::{Path, PathBuf};

use compute::{Tensor, fill_all};
use serde::{Deserialize, Serialize};
use weights::checksum::checksum;
use weights::load::{LoadOptions, LoadRequest, load};
use weights::write::{WrittenFile, replace_folder};
use weights::{BytesDoneFn, Catalog};

use super::health::Health;
use super::identity::Identity;
use super::loss_scale::LossScale;
use super::progress_file::CheckpointMetadata;
use crate::config::output::OutputConfig;
use crate::error::{Result, TrainerError};
use crate::event::{self, EventSink, Phase, ProgressUnit, WarningKind};
use crate::model::adapter::read::{PROGRESS, STATE_STEM, state_file};
use crate::model::files::{ShardedOutput, UploadTarget, file_dtype, save_tensors};
use crate::optim::Plateau;
use crate::task::session::{Session, find_saved};
use crate::task::traits::Task;

const FOLDER: &str = "checkpoints";

/// From here on saving shows its progress. Chosen: smaller states are written within a second.
const LONG_SAVE_BYTES: u64 = 1_000_000_000;

/// The state of a run, but for its tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainProgress {
    /// Steps taken.
    pub step: u64,
    /// Optimizer steps applied: those with a finite gradient.
    pub applied: u64,
    /// Batches seen.
    pub batches: u64,
    /// Whether validation and samples of the last step are still to be done.
    #[serde(default, alias = "is_look_due")]
    pub is_evaluation_due: bool,
    /// Whether only the samples of these are still to be done.
    #[serde(default)]
    pub is_validated: bool,
    /// Seconds spent.
    pub secs: f64,
    /// In f16.
    pub loss_scale: Option<LossScale>,
    /// The plateau schedule, and how often it lowered the learning rate.
    #[serde(alias = "rate")]
    pub lr_plateau: (Plateau, u32),
    /// Early stopping.
    pub patience: Plateau,
    /// Losses and gradient norms for warnings.
    pub health: Health,
    /// The lowest held-out loss after any step.
    #[serde(default)]
    pub best: Option<BestValidation>,
    /// The checkpoint that was saved for its held-out loss alone; it does not count among the latest.
    #[serde(default, alias = "extra")]
    pub best_only: Option<u64>,
}

/// A held-out loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BestValidation {
    /// Steps taken.
    pub step: u64,
    /// The loss then.
    pub loss: f64,
}

/// How far a run is. All else follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResumePoint {
    step: u64,
    is_evaluation_due: bool,
    is_validated: bool,
}

impl TrainProgress {
    /// Of a new run, which begins with an evaluation.
    pub fn before_first_step() -> Self {
        Self { is_evaluation_due: true, ..Self::default() }
    }

    /// Records the held-out loss after the last step. Before the first there is no checkpoint to keep.
    pub fn record_validation(&mut self, loss: f64) {
        let is_lower = self.best.is_none_or(|best| loss < best.loss) && loss.is_finite();
        if is_lower && self.step > 0 {
            self.best = Some(BestValidation { step: self.step, loss });
        }
    }

    /// Where a run resumes with this progress, unless it was saved for its held-out loss alone.
    pub fn resumable_at(&self) -> Option<ResumePoint> {
        let Self { step, is_evaluation_due, is_validated, .. } = *self;
        let is_counted = self.best_only != Some(step);
        is_counted.then_some(ResumePoint { step, is_evaluation_due, is_validated })
    }

    /// Whether no held-out loss was lower than that after the last step.
    pub fn is_best(&self) -> bool {
        self.best.is_some_and(|best| best.step == self.step)
    }

    /// Before a checkpoint is saved, for its held-out loss alone if `is_extra`. Returns the one that was
    /// there for that alone until now, and is not the best any more.
    pub fn record_save(&mut self, is_extra: bool) -> Option<u64> {
        if !self.is_best() {
            return None;
        }
        let before = mem::replace(&mut self.best_only, is_extra.then_some(self.step));
        before.filter(|step| *step < self.step)
    }
}

/// The checkpoints of a run's folder.
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
    keeps_best: bool,
    max_shard_bytes: u64,
}

/// A checkpoint's folder, relative to that of its run.
pub fn path(step: u64) -> PathBuf {
    Path::new(FOLDER).join(name(step))
}

/// Whether a run's folder has any.
pub fn exists_in(run: &Path) -> bool {
    !steps(&run.join(FOLDER)).is_empty()
}

/// The step of the last one of a run.
pub(super) fn latest_step(run: &Path) -> Option<u64> {
    steps(&run.join(FOLDER)).first().copied()
}

fn steps(folder: &Path) -> Vec<u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let step = |name: &str| name.strip_prefix("step-")?.parse().ok();
    // A file of such a name is somebody else's.
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut steps: Vec<u64> =
        folders.filter_map(|entry| step(&entry.file_name().to_string_lossy())).collect();
    steps.sort_unstable_by(|a, b| b.cmp(a));
    steps
}

/// What the folder of a checkpoint is called.
pub(super) fn name(step: u64) -> String {
    format!("step-{step:06}")
}

impl Checkpoints {
    /// Those of a run.
    pub fn new(run: &Path, output: &OutputConfig) -> Self {
        let (keep, keeps_best) = (output.keep, output.keep_best);
        let max_shard_bytes = output.max_shard_size.0;
        Self { folder: run.join(FOLDER), keep, keeps_best, max_shard_bytes }
    }

    /// Saves a run; returns the folder. Tensors go from the device to the disk piece by piece.
    pub fn save(
        &self,
        session: &mut Session<'_, impl Task>,
        progress: &TrainProgress,
        identity: &Identity,
        events: &EventSink<'_>,
    ) -> Result<PathBuf> {
        let name = name(progress.step);
        let (staging, place) =
            (self.folder.join(format!(".{name}.partial")), self.folder.join(&name));
        let failed = |source| TrainerError::Io { what: "write", path: place.clone(), source };
        self.begin_staging(&staging).map_err(|error| self.unwritable(error, failed))?;
        session.collect_state()?;
        session.write_adapter(&staging)?;
        let names = session.parameter_names();
        let tensors = session.state_dict()?.into_iter().map(|(name, tensor)| (name, &*tensor));
        let written = self.save_state(&staging, &names, &tensors.collect(), events)?;
        session.drop_collected()?;
        let checksums = written.iter().map(named_checksum).collect();
        CheckpointMetadata::new(progress.clone(), identity.clone(), checksums).write(&staging)?;
        // A run that resumed from an earlier checkpoint reaches this step again.
        replace_folder(&staging, &place).map_err(failed)?;
        Ok(path(progress.step))
    }

    /// Why nothing can be saved.
    fn unwritable(
        &self,
        error: io::Error,
        failed: impl FnOnce(io::Error) -> TrainerError,
    ) -> TrainerError {
        match self.folder.parent() {
            Some(run) if !run.exists() => TrainerError::FolderGone { path: run.into() },
            _ => failed(error),
        }
    }

    /// An empty folder to write into. What saves left behind that were killed is removed. The run's own folder is never
    /// made here: where it was moved or removed, a new one would hold a part of the run.
    fn begin_staging(&self, staging: &Path) -> io::Result<()> {
        match fs::create_dir(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        for entry in fs::read_dir(&self.folder)?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(".step-") && name.ends_with(".partial") {
                remove(&entry.path())?;
            }
        }
        fs::create_dir(staging)
    }

    /// Writes the tensors into a folder, with progress where that takes a while. It is not given up half-way: who asked
    /// the run to stop waits for this.
    fn save_state(
        &self,
        folder: &Path,
        names: &BTreeMap<String, String>,
        tensors: &BTreeMap<String, &Tensor>,
        events: &EventSink<'_>,
    ) -> Result<Vec<WrittenFile>> {
        let bytes = tensors.values().map(|tensor| tensor.bytes() as u64).sum();
        let is_long = bytes >= LONG_SAVE_BYTES;
        if is_long {
            events.begin_phase(Phase::Save, ProgressUnit::Bytes, bytes)?;
        }
        let tick = |bytes| {
            _ = is_long && events.advance(ProgressUnit::Bytes, bytes);
            true
        };
        let max_shard_bytes = self.max_shard_bytes;
        let output = ShardedOutput { folder, stem: STATE_STEM, max_shard_bytes };
        save_tensors(output, names, tensors, &tick)
    }

    /// The checkpoint of the lowest held-out loss, if it is there.
    pub fn best(&self, progress: &TrainProgress) -> Option<event::BestCheckpoint> {
        let BestValidation { step, loss } = progress.best.filter(|_| self.keeps_best)?;
        let is_there = self.folder.join(name(step)).exists();
        is_there.then(|| event::BestCheckpoint { step, loss, path: path(step) })
    }

    /// Steps that there are checkpoints of, the latest first.
    fn steps(&self) -> Vec<u64> {
        steps(&self.folder)
    }

    /// Restores the latest complete checkpoint into a session. Damaged ones are skipped with a warning, unless
    /// no other is left; one of another job is an error.
    pub fn restore(
        &self,
        session: &mut Session<'_, impl Task>,
        identity: &Identity,
        tick: BytesDoneFn<'_>,
        mut warn: impl FnMut(WarningKind),
    ) -> Result<Option<TrainProgress>> {
        let mut latest_error = None;
        for step in self.steps() {
            let folder = self.folder.join(name(step));
            match read_metadata(&folder, tick) {
                Ok(metadata) => {
                    let changed = metadata.identity.check(identity, &folder)?;
                    read_tensors(&state_file(&folder), session.state_dict()?, tick)?;
                    changed.into_iter().map(WarningKind::SettingChanged).for_each(&mut warn);
                    return Ok(Some(metadata.progress));
                }
                Err(error) if error.is_cancelled() => return Err(error),
                Err(error) => {
                    warn(WarningKind::CheckpointSkipped { problem: error.to_string() });
                    latest_error.get_or_insert(error);
                }
            }
        }
        latest_error.map_or(Ok(None), Err)
    }

    /// Keeps the latest up to this step, and the best; not the previous best if it was saved for its loss
    /// alone. Later checkpoints are damaged, or the run would have resumed there; they are removed.
    pub fn remove_old(&self, progress: &TrainProgress, replaced: Option<u64>) -> Result<()> {
        let best = progress.best.filter(|_| self.keeps_best).map(|best| best.step);
        let extra = progress.best_only.filter(|_| self.keeps_best);
        let is_counted =
            |step: u64| step <= progress.step && ![extra, replaced].contains(&Some(step));
        let steps = self.steps();
        let latest: Vec<u64> =
            steps.iter().copied().filter(|step| is_counted(*step)).take(self.keep).collect();
        for step in steps.into_iter().filter(|step| !latest.contains(step) && best != Some(*step)) {
            let path = self.folder.join(name(step));
            remove(&path).map_err(|source| TrainerError::Io { what: "remove", path, source })?;
        }
        Ok(())
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// How far the run is that a checkpoint is of, if every checksum matches.
pub fn read_progress(folder: &Path) -> Result<TrainProgress> {
    Ok(read_metadata(folder, &|_| true)?.progress)
}

/// The metadata of a checkpoint whose checksums match.
fn read_metadata(folder: &Path, tick: BytesDoneFn<'_>) -> Result<CheckpointMetadata> {
    let wrong = |problem: String| TrainerError::Checkpoint { problem, path: folder.into() };
    let metadata = CheckpointMetadata::read(folder)?;
    let state = state_file(folder);
    let only = metadata.checksum.as_ref().map(|checksum| (file_name(&state), checksum.clone()));
    let checksums: Vec<_> = only.into_iter().chain(metadata.checksums.clone()).collect();
    // A file that is not in the list would not be checked.
    let catalog = Catalog::open(&state)?;
    let mut files = [&state].into_iter().chain(&catalog.files).map(|file| file_name(file));
    if let Some(file) = files.find(|file| checksums.iter().all(|(of, _)| of != file)) {
        return Err(wrong(format!("{file} has no checksum in {PROGRESS}")));
    }
    for (file, expected) in checksums {
        let found = checksum(&folder.join(&file), tick)?.to_hex().to_string();
        if found != expected {
            return Err(wrong(format!("{file} has checksum {found}, expected {expected}")));
        }
    }
    Ok(metadata)
}

/// A file of the state, and its checksum.
fn named_checksum(file: &WrittenFile) -> (String, String) {
    let checksum = file.checksum.expect("it was asked for");
    (file_name(&file.path), checksum.to_hex().to_string())
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn read_tensors(
    path: &Path,
    tensors: Vec<(String, &mut Tensor)>,
    tick: BytesDoneFn<'_>,
) -> Result<()> {
    let catalog = Catalog::open(path)?;
    let (mut found_all, mut into_all) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors {
        let (dtype, bytes) = (file_dtype(tensor.dtype()), tensor.bytes() as u64);
        let found = find_saved(&catalog, &name)?;
        if found.numel() * dtype.bytes() != bytes {
            let n_expected = bytes / dtype.bytes();
            let problem = format!("{name} has {} values, expected {n_expected}", found.numel());
            return Err(TrainerError::Checkpoint { problem, path: path.into() });
        }
        found_all.push((found, dtype));
        into_all.push(tensor);
    }
    fill_all(into_all, |range, parts| {
        let wanted = found_all[range].iter().zip(parts);
        let wanted = wanted
            .map(|((found, dtype), part)| LoadRequest::whole(found, *dtype, UploadTarget(part)));
        Ok(load(&catalog, wanted.collect(), LoadOptions::default(), tick)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checkpoints that are there after each step of a run that measures every step, saves every second
    /// one and keeps two.
    fn kept(keeps_best: bool, losses: &[f64]) -> Vec<Vec<u64>> {
        let place = tempfile::tempdir().unwrap();
        let checkpoints =
            Checkpoints { folder: place.path().into(), keep: 2, keeps_best, max_shard_bytes: 1 };
        let mut progress = TrainProgress::default();
        progress.record_validation(0.1);
        let mut after = |loss: &f64| {
            progress.step += 1;
            progress.record_validation(*loss);
            let is_due = progress.step.is_multiple_of(2);
            if is_due || (keeps_best && progress.is_best()) {
                let replaced = progress.record_save(!is_due);
                fs::create_dir(place.path().join(name(progress.step))).unwrap();
                checkpoints.remove_old(&progress, replaced).unwrap();
                // As a resumed run reads it.
                let text = serde_json::to_string(&progress).unwrap();
                progress = serde_json::from_str(&text).unwrap();
            }
            let mut steps = checkpoints.steps();
            steps.reverse();
            steps
        };
        losses.iter().map(&mut after).collect()
    }

    #[test]
    fn the_best_checkpoint_stays_beside_the_latest() {
        // Falling: a best between two that are due does not count among the latest, and is removed with the next
        // best.
        let falling = kept(true, &[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]);
        let expected: [&[u64]; 6] = [&[1], &[2], &[2, 3], &[2, 4], &[2, 4, 5], &[4, 6]];
        assert_eq!(falling, expected);
        // Rising after the third step.
        let rising = kept(true, &[0.9, 0.8, 0.7, 0.8, f64::NAN, 0.9, 1.0, 1.1]);
        let expected: [&[u64]; 8] =
            [&[1], &[2], &[2, 3], &[2, 3, 4], &[2, 3, 4], &[3, 4, 6], &[3, 4, 6], &[3, 6, 8]];
        assert_eq!(rising, expected);
        // One that was due anyway.
        assert_eq!(kept(true, &[0.9, 0.1, 0.7, 0.8, 0.9, 0.9]).last().unwrap(), &[2, 4, 6]);
        let without = kept(false, &[0.9, 0.1, 0.7, 0.8, 0.9, 0.9]);
        assert_eq!(without.last().unwrap(), &[4, 6]);
    }

    #[test]
    fn progress_without_newer_fields_is_read() {
        let mut page = serde_json::to_value(TrainProgress::default()).unwrap();
        for key in ["best", "best_only", "is_validated"] {
            page.as_object_mut().unwrap().remove(key).unwrap();
        }
        let progress: TrainProgress = serde_json::from_value(page).unwrap();
        assert_eq!(progress, TrainProgress::default());
        let today = TrainProgress {
            is_evaluation_due: true,
            lr_plateau: (Plateau::default(), 3),
            best_only: Some(5),
            ..TrainProgress::default()
        };
        let mut text = serde_json::to_string(&today).unwrap();
        for (now, before) in [
            ("is_evaluation_due", "is_look_due"),
            ("lr_plateau", "rate"),
            ("n_bad", "n_without"),
            ("best_only", "extra"),
            ("warned", "told"),
        ] {
            assert!(text.contains(&format!("\"{now}\":")), "{now} is not in {text}");
            text = text.replace(&format!("\"{now}\":"), &format!("\"{before}\":"));
        }
        assert_eq!(serde_json::from_str::<TrainProgress>(&text).unwrap(), today);
    }
}
