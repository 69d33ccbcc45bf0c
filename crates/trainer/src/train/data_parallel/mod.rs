//! Training on several ranks: each computes some samples of a step, gradients are summed over all, and all take the same
//! optimizer step. Which rank computes a sample changes only the order of sums: its share of the loss and its random
//! numbers follow from its place in the batch.
//!
//! The first rank writes the run's folder, evaluates and decides. The others keep a log of their own:
//!
//! ```text
//! RUN/ranks/rank-1/     events.jsonl and config.toml of the second rank, on the machine where it ran
//! ```

mod folder;
mod run;

use std::collections::BTreeMap;
use std::ops::Range;

use cluster::World;
use cluster::mpi::Values;
use cluster::share::{shares, step_secs};
use serde::{Deserialize, Serialize};
use weights::WeightsError;

pub use self::folder::open_folder;
use super::checkpoint::TrainProgress;
use super::identity::Identity;
use crate::config::RunConfig;
use crate::error::{Result, TrainerError};
use crate::event::EndReason;
use crate::task::session::Session;
use crate::task::traits::Task;

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
    /// Of this one's part of the step, without waiting for others.
    own_secs: f64,
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

/// A fused backward pass has no gradients that could be summed.
fn check_fused(config: &RunConfig) -> Result<()> {
    if !config.train.fused_backward_pass {
        return Ok(());
    }
    Err(TrainerError::Request {
        problem: "a fused backward pass updates weights before ranks could sum their gradients"
            .into(),
        hint: "set train.fused_backward_pass = false, which takes more memory",
    })
}

impl<'a> DataParallel<'a> {
    /// Joins the other ranks of a job, if all were given the same. They begin with as many samples of a step each.
    pub fn join(
        world: &'a World,
        config: &RunConfig,
        identity: &Identity,
        step: u64,
    ) -> Result<Self> {
        check_fused(config)?;
        let equal = shares(&vec![1.0; world.size()], config.train.samples_per_step());
        let sample_secs = vec![None; world.size()];
        let joined = Self { world, shares: equal, sample_secs, own_secs: 0.0 };
        let version = ("the version of hearth".into(), env!("CARGO_PKG_VERSION").into());
        let step = ("the step to resume at".into(), step.to_string());
        joined.check_equal(&identity.described().chain([version, step]).collect())?;
        Ok(joined)
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
    fn check_equal(&self, job: &BTreeMap<String, String>) -> Result<()> {
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

    /// How long this one took for its part of the step.
    pub fn set_own_secs(&mut self, secs: f64) {
        self.own_secs = secs;
    }

    /// Learns how long every rank took for its part, and shares the next steps accordingly.
    pub fn share_by_speed(&mut self) -> Result<()> {
        let mut taken = vec![0.0; self.world.size()];
        taken[self.world.rank()] = self.own_secs;
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
        let Some(secs) = self.sample_secs.iter().copied().collect::<Option<Vec<f64>>>() else {
            return;
        };
        let better = shares(&secs, self.shares.iter().sum());
        if step_secs(&secs, &self.shares) > GAIN * step_secs(&secs, &better) {
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
