//! Everything that a run needs to go on as if it had never stopped. Written beside, synced, and put
//! in its place by one rename: a checkpoint is there whole or not at all.
//!
//! ```text
//! RUN/checkpoints/
//!   .step-000250.partial/     while it is written
//!   step-000250/
//!     state.safetensors       parameters, the optimizer's state, running means; with a checksum
//!     progress.json           steps taken, where the data stands, what it belongs to, that checksum
//! ```
//!
//! Random numbers and the order of pictures follow from the seed and the number of the step, so that
//! there is nothing of them to save.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use compute::{Tensor, fill_all};
use serde::{Deserialize, Serialize};
use weights::load::{Options, Wanted, load};
use weights::safetensors::Entering;
use weights::write::{AtomicFile, write_file};
use weights::{Catalog, WeightsError};

use super::health::Health;
use super::identity::Identity;
use super::lesson::Lesson;
use super::scale::LossScale;
use super::session::Session;
use crate::error::{Result, TrainerError};
use crate::model::files::{Landing, stored};
use crate::optim::Plateau;

const STATE: &str = "state.safetensors";
const PROGRESS: &str = "progress.json";
/// Grows when a checkpoint of before cannot be read any more.
const VERSION: u32 = 1;

/// How far a run is, but for its tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps taken.
    pub step: u64,
    /// Steps that changed something: those whose gradient was finite.
    pub applied: u64,
    /// Batches seen.
    pub batches: u64,
    /// Whether what is measured and drawn after the last step is still to be done.
    #[serde(default)]
    pub is_look_due: bool,
    /// Seconds spent.
    pub secs: f64,
    /// In f16.
    pub loss_scale: Option<LossScale>,
    /// What the learning rate is lowered by, and how often it was.
    pub rate: (Plateau, u32),
    /// What ends a run early.
    pub patience: Plateau,
    /// Is it learning?
    pub health: Health,
}

/// What `progress.json` holds.
#[derive(Serialize, Deserialize)]
struct Page {
    version: u32,
    progress: Progress,
    identity: Identity,
    /// Of the file of tensors.
    checksum: String,
}

/// The checkpoints of a run's folder.
pub struct Checkpoints {
    folder: PathBuf,
    keep: usize,
}

impl Checkpoints {
    /// Those of a run, of which the latest `keep` stay.
    pub fn new(run: &Path, keep: usize) -> Self {
        Self { folder: run.join("checkpoints"), keep }
    }

    /// Saves a run, and removes what is older than the ones that stay. Returns the folder's name.
    pub fn save(
        &self,
        session: &mut Session<'_, impl Lesson>,
        progress: &Progress,
        identity: &Identity,
    ) -> Result<PathBuf> {
        let name = format!("step-{:06}", progress.step);
        let (staging, place) =
            (self.folder.join(format!(".{name}.partial")), self.folder.join(&name));
        let failed = |source| TrainerError::Io { what: "write", path: place.clone(), source };
        remove(&staging).map_err(failed)?;
        fs::create_dir_all(&staging).map_err(failed)?;
        let page = Page {
            version: VERSION,
            checksum: write_tensors(&staging.join(STATE), session.tensors()?)?,
            progress: progress.clone(),
            identity: identity.clone(),
        };
        let mut file = AtomicFile::create(&staging.join(PROGRESS))?;
        serde_json::to_writer_pretty(&mut file, &page).map_err(|e| failed(e.into()))?;
        file.commit()?;
        // A run that went back to an earlier checkpoint passes this step again.
        remove(&place).map_err(failed)?;
        fs::rename(&staging, &place).map_err(failed)?;
        File::open(&self.folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        self.remove_old(progress.step).map_err(failed)?;
        Ok(Path::new("checkpoints").join(name))
    }

    /// Steps that there are checkpoints of, the latest first.
    pub fn steps(&self) -> Vec<u64> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let step = |name: &str| name.strip_prefix("step-")?.parse().ok();
        let mut steps: Vec<u64> =
            entries.filter_map(|entry| step(&entry.file_name().to_string_lossy())).collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        steps
    }

    /// Puts the latest checkpoint that is whole back into a session. What is broken is told and
    /// passed over, unless nothing else is left; what belongs to another job is an error.
    pub fn restore(
        &self,
        session: &mut Session<'_, impl Lesson>,
        identity: &Identity,
        mut warn: impl FnMut(String),
    ) -> Result<Option<Progress>> {
        let mut latest_error = None;
        for step in self.steps() {
            let folder = self.folder.join(format!("step-{step:06}"));
            match read_page(&folder) {
                Ok(page) => {
                    let changed = page.identity.check(identity, &folder)?;
                    read_tensors(&folder.join(STATE), session.tensors()?)?;
                    for text in changed {
                        warn(format!("{text} from here on"));
                    }
                    return Ok(Some(page.progress));
                }
                Err(error) => {
                    warn(format!("checkpoint passed over: {error}"));
                    latest_error.get_or_insert(error);
                }
            }
        }
        latest_error.map_or(Ok(None), Err)
    }

    /// Keeps the latest up to `step`. Later ones were passed over, or the run would be there; kept,
    /// they would take the places of those that can be read.
    fn remove_old(&self, step: u64) -> io::Result<()> {
        let (later, kept): (Vec<_>, Vec<_>) = self.steps().into_iter().partition(|at| *at > step);
        let old = later.into_iter().chain(kept.into_iter().skip(self.keep));
        old.map(|step| self.folder.join(format!("step-{step:06}"))).try_for_each(|old| remove(&old))
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the file's checksum.
fn write_tensors(path: &Path, tensors: Vec<(String, &mut Tensor)>) -> Result<String> {
    let tensors: BTreeMap<String, &mut Tensor> = tensors.into_iter().collect();
    let entering = tensors.iter().map(|(name, tensor)| Entering {
        name: name.clone(),
        dtype: stored(tensor.dtype()),
        shape: tensor.shape().sizes().iter().map(|size| *size as u64).collect(),
    });
    let written =
        write_file(path, &BTreeMap::new(), entering.collect(), true, &mut |tensor, out| {
            let bytes = tensors[&tensor.name].read_bytes();
            let bytes = bytes.map_err(|error| io::Error::other(error.to_string()));
            let bytes = bytes.map_err(|source| WeightsError::io("copy", path, source))?;
            out.write_all(&bytes).map_err(|source| WeightsError::io("write", path, source))
        })?;
    Ok(written.checksum.expect("it was asked for").to_hex().to_string())
}

/// The page of a checkpoint whose tensors are what was written.
fn read_page(folder: &Path) -> Result<Page> {
    let path = folder.join(PROGRESS);
    let text = fs::read_to_string(&path).map_err(|source| TrainerError::Io {
        what: "read",
        path: path.clone(),
        source,
    })?;
    let wrong = |problem: String| TrainerError::Checkpoint { problem, path: folder.into() };
    let page: Page = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if page.version != VERSION {
        return Err(wrong(format!("it has version {}, expected {VERSION}", page.version)));
    }
    let found = weights::checksum::checksum(&folder.join(STATE), &|_| true)?.to_hex().to_string();
    if found != page.checksum {
        return Err(wrong(format!("{STATE} has checksum {found}, expected {}", page.checksum)));
    }
    Ok(page)
}

fn read_tensors(path: &Path, tensors: Vec<(String, &mut Tensor)>) -> Result<()> {
    let catalog = Catalog::open(path)?;
    let (mut found_all, mut into_all) = (Vec::new(), Vec::new());
    for (name, tensor) in tensors {
        let (dtype, bytes) = (stored(tensor.dtype()), tensor.bytes() as u64);
        let found = catalog.find(&name)?;
        if found.count() * dtype.bytes() != bytes {
            let problem = format!("{name} has {} numbers, expected {bytes} bytes", found.count());
            return Err(TrainerError::Checkpoint { problem, path: path.into() });
        }
        found_all.push((found, dtype));
        into_all.push(tensor);
    }
    fill_all(into_all, |range, parts| {
        let wanted = found_all[range].iter().zip(parts);
        let wanted =
            wanted.map(|((found, dtype), part)| Wanted::whole(found, *dtype, Landing(part)));
        Ok(load(&catalog, wanted.collect(), Options::default(), &|_| true)?)
    })
}
