//! Training on several ranks: each computes some samples of a step, gradients are summed over all, and all take the same
//! optimizer step. Which rank computes a sample changes only the order of sums: its share of the loss and its random
//! numbers follow from its place in the batch.
//!
//! The first rank writes the run's folder, evaluates and decides. The others keep a log of their own:
//!
//! ```text
//! RUN/ranks/rank-1/     events.jsonl and config.toml of the second rank, on the machine where it ran
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use cluster::World;
use cluster::mpi::Values;
use cluster::share::{RankSpeed, shares, step_secs};
use serde::{Deserialize, Serialize};
use weights::WeightsError;
use weights::write::AtomicFile;

use super::checkpoint::TrainProgress;
use super::folder::{self, RunFolder};
use super::{TrainOptions, checkpoint, identity, output_folder};
use crate::config::RunConfig;
use crate::error::{Result, TrainerError};
use crate::event::EndReason;
use crate::task::session::Session;
use crate::task::traits::Task;

/// Where ranks but the first write, in the run's folder.
const FOLDER: &str = "ranks";

/// Bytes of a file that travel together.
const PIECE_BYTES: u64 = 16 << 20;
/// New shares must be so much faster. Chosen: measured speeds vary by as much.
const GAIN: f64 = 1.03;
/// How much the last step counts among the measured speeds.
const NEWEST: f64 = 0.3;

/// The ranks that train together, seen from one of them.
pub struct DataParallel<'a> {
    world: &'a World,
    /// Samples of a step by rank.
    shares: Vec<usize>,
    /// Seconds of a sample by rank, as measured.
    sample_secs: Vec<Option<f64>>,
}

/// How a rank's part of a step went.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PartOutcome {
    Done,
    Cancelled,
    Failed,
}

/// What the first rank tells the others after a step.
#[derive(Serialize, Deserialize)]
struct StepVerdict {
    end: Option<EndReason>,
    progress: TrainProgress,
}

/// Whether results are written here: by a process alone, or by the first rank.
pub fn is_first(world: Option<&World>) -> bool {
    world.is_none_or(|world| world.rank() == 0)
}

/// Runs `prepare`, on the first rank before all others: on one machine they find what it has prepared.
pub fn first_rank_first<T>(
    world: Option<&World>,
    prepare: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let Some(world) = world else { return prepare() };
    if world.rank() > 0 {
        world.barrier()?;
    }
    let prepared = prepare()?;
    if world.rank() == 0 {
        world.barrier()?;
    }
    Ok(prepared)
}

/// Takes the folder of a run: the job's, or a rank's own. A run that is resumed has its last checkpoint at the first rank;
/// all others get a copy.
pub fn open_folder(
    world: Option<&World>,
    config: &RunConfig,
    options: TrainOptions,
) -> Result<RunFolder> {
    let run = &config.output.folder;
    if is_first(world) {
        output_folder::check(config, &[])?;
    }
    let Some(world) = world else { return RunFolder::open(run, options) };
    let own = if world.rank() == 0 { run.clone() } else { rank_folder(run, world.rank()) };
    if world.rank() == 0 {
        let folder = RunFolder::open(run, options)?;
        copy_checkpoint(world, run, options.resume)?;
        return Ok(folder);
    }
    clear(&own)?;
    copy_checkpoint(world, &own, options.resume)?;
    RunFolder::open(&own, options)
}

/// Where a rank but the first writes.
fn rank_folder(run: &Path, rank: usize) -> PathBuf {
    run.join(FOLDER).join(format!("rank-{rank}"))
}

/// Removes what an earlier run of a rank has left.
fn clear(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(TrainerError::Io { what: "remove", path: folder.into(), source })
        }
        _ => Ok(()),
    }
}

/// Sends the files that a run resumes from to all ranks, which write them where they belong. A new run has none.
fn copy_checkpoint(world: &World, folder: &Path, is_resumed: bool) -> Result<()> {
    let is_source = world.rank() == 0;
    let names = if is_source && is_resumed { resumed_files(folder) } else { Vec::new() };
    let names = world.gather(names.join("\n").as_bytes())?.swap_remove(0);
    let names = String::from_utf8_lossy(&names).into_owned();
    for name in names.lines() {
        let path = folder.join(name);
        if is_source {
            send_file(world, &path)?;
        } else {
            receive_file(world, &path)?;
        }
    }
    Ok(())
}

/// The last checkpoint and what it is compared with, by their names in the run's folder.
fn resumed_files(run: &Path) -> Vec<String> {
    let kept = [folder::CONFIG, identity::INPUTS].map(str::to_owned);
    let checkpoint = checkpoint::latest(run);
    let files = checkpoint.iter().flat_map(|checkpoint| {
        let listed = fs::read_dir(run.join(checkpoint)).into_iter().flatten().flatten();
        listed.map(|entry| checkpoint.join(entry.file_name()).to_string_lossy().into_owned())
    });
    kept.into_iter().chain(files).filter(|name| run.join(name).is_file()).collect()
}

/// Its length, then its bytes in pieces.
fn send_file(world: &World, path: &Path) -> Result<()> {
    let failed = |source| TrainerError::Io { what: "read", path: path.into(), source };
    let mut file = fs::File::open(path).map_err(failed)?;
    let mut left = file.metadata().map_err(failed)?.len();
    world.broadcast(&mut left.to_le_bytes(), 0)?;
    while left > 0 {
        let mut piece = vec![0; left.min(PIECE_BYTES) as usize];
        file.read_exact(&mut piece).map_err(failed)?;
        world.broadcast(&mut piece, 0)?;
        left -= piece.len() as u64;
    }
    Ok(())
}

fn receive_file(world: &World, path: &Path) -> Result<()> {
    let failed = |source| TrainerError::Io { what: "write", path: path.into(), source };
    let mut left = [0; 8];
    world.broadcast(&mut left, 0)?;
    let mut left = u64::from_le_bytes(left);
    fs::create_dir_all(path.parent().unwrap_or(path)).map_err(failed)?;
    let mut file = AtomicFile::create(path)?;
    while left > 0 {
        let mut piece = vec![0; left.min(PIECE_BYTES) as usize];
        world.broadcast(&mut piece, 0)?;
        file.write_all(&piece).map_err(failed)?;
        left -= piece.len() as u64;
    }
    file.commit()?;
    Ok(())
}

impl<'a> DataParallel<'a> {
    /// All ranks begin with as many samples of a step.
    pub fn new(world: &'a World, samples_per_step: usize) -> Self {
        let equal = vec![RankSpeed { fixed_secs: 0.0, unit_secs: 1.0 }; world.size()];
        let sample_secs = vec![None; world.size()];
        Self { world, shares: shares(&equal, samples_per_step), sample_secs }
    }

    /// Whether this one writes the run's folder, evaluates and decides.
    pub fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// This rank's samples of a step.
    pub fn samples(&self) -> Range<usize> {
        let rank = self.world.rank();
        let start = self.shares[..rank].iter().sum();
        start..start + self.shares[rank]
    }

    /// Fails unless all ranks say the same of each thing.
    pub fn check_equal(&self, job: &BTreeMap<String, String>) -> Result<()> {
        let text = serde_json::to_vec(job).expect("it is plain JSON");
        let jobs: Vec<BTreeMap<String, String>> = self
            .world
            .gather(&text)?
            .iter()
            .map(|job| serde_json::from_slice(job).unwrap_or_default())
            .collect();
        let said = |job: &BTreeMap<String, String>, what: &String| {
            job.get(what).cloned().unwrap_or_else(|| "not set".into())
        };
        for (rank, job) in jobs.iter().enumerate() {
            let mut keys = jobs[0].keys().chain(job.keys());
            if let Some(what) = keys.find(|key| jobs[0].get(*key) != job.get(*key)) {
                let (theirs, ours) = (said(job, what), said(&jobs[0], what));
                return Err(TrainerError::RanksDiffer { rank, what: what.clone(), theirs, ours });
            }
        }
        Ok(())
    }

    /// A rank's part of a step, if all ranks have done theirs. Nobody waits for one that has failed.
    pub fn agree<T>(&self, part: Result<T>) -> Result<T> {
        let outcome = match &part {
            Ok(_) => PartOutcome::Done,
            Err(error) if error.is_cancelled() => PartOutcome::Cancelled,
            Err(_) => PartOutcome::Failed,
        };
        let mut worst = [outcome as i64];
        self.world.max(&mut worst)?;
        if worst[0] == PartOutcome::Failed as i64 {
            return self.fail(part);
        }
        if worst[0] == PartOutcome::Cancelled as i64 {
            return Err(part.err().unwrap_or_else(|| WeightsError::Cancelled.into()));
        }
        part
    }

    /// The error of a part that some rank has failed in.
    fn fail<T>(&self, part: Result<T>) -> Result<T> {
        let problem = part.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let problems = self.world.gather(problem.as_bytes())?;
        let problems = problems.iter().map(|problem| String::from_utf8_lossy(problem));
        let first = problems.enumerate().find(|(_, problem)| !problem.is_empty());
        let (rank, problem) = first.unwrap_or_default();
        Err(part.err().unwrap_or(TrainerError::OtherRank { rank, problem: problem.into() }))
    }

    /// Sums the losses and gradients of a step over all ranks, in place.
    pub fn sum<T: Task>(&self, losses: &mut [f64], session: &mut Session<'_, T>) -> Result<()> {
        self.world.sum(Values::F64(losses))?;
        session.exchange_gradients(&|values| Ok(self.world.sum(values)?))
    }

    /// Learns how long every rank took for its part, and shares the next steps accordingly.
    pub fn observe(&mut self, secs: f64) -> Result<()> {
        let mut taken = vec![0.0; self.world.size()];
        taken[self.world.rank()] = secs;
        self.world.sum(Values::F64(&mut taken))?;
        for ((known, secs), n) in self.sample_secs.iter_mut().zip(&taken).zip(&self.shares) {
            if *n > 0 {
                let now = secs / *n as f64;
                *known = Some(known.map_or(now, |before| before + NEWEST * (now - before)));
            }
        }
        self.share_anew();
        Ok(())
    }

    /// All ranks do so from the same numbers.
    fn share_anew(&mut self) {
        let speed =
            |secs: &Option<f64>| secs.map(|unit_secs| RankSpeed { fixed_secs: 0.0, unit_secs });
        let Some(speeds) = self.sample_secs.iter().map(speed).collect::<Option<Vec<_>>>() else {
            return;
        };
        let better = shares(&speeds, self.shares.iter().sum());
        if step_secs(&speeds, &self.shares) > GAIN * step_secs(&speeds, &better) {
            self.shares = better;
        }
    }

    /// Whether any rank is asked to stop.
    pub fn is_any(&self, asked: bool) -> Result<bool> {
        let mut any = [i64::from(asked)];
        self.world.max(&mut any)?;
        Ok(any[0] != 0)
    }

    /// What the first rank has decided, and its progress, to all.
    pub fn follow(
        &self,
        end: Option<EndReason>,
        progress: &mut TrainProgress,
    ) -> Result<Option<EndReason>> {
        let verdict = StepVerdict { end, progress: progress.clone() };
        let text = if self.is_first() {
            serde_json::to_vec(&verdict).expect("it is plain JSON")
        } else {
            Vec::new()
        };
        let text = self.world.gather(&text)?.swap_remove(0);
        let verdict: StepVerdict =
            serde_json::from_slice(&text).map_err(|error| TrainerError::OtherRank {
                rank: 0,
                problem: format!("its progress is unreadable: {error}"),
            })?;
        *progress = verdict.progress;
        Ok(verdict.end)
    }
}
