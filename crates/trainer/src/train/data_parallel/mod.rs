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
mod speed;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use cluster::World;
use cluster::heartbeat::Heartbeat;
use serde::{Deserialize, Serialize};
use weights::WeightsError;

pub use self::folder::{open_folder, take_newest};
use self::speed::{RankTimes, StepShares};
use super::checkpoint::TrainProgress;
use super::identity::Identity;
use super::step::LossSums;
use crate::config::batch::BatchSettings;
use crate::config::{RunConfig, Switch};
use crate::error::{Result, TrainerError};
use crate::event::{EndReason, Event};
use crate::task::session::Session;
use crate::task::traits::Task;

/// The step after which speeds are known well enough. Chosen: the first steps warm up.
const GRANULARITY_STEP: u64 = 10;

/// Steps after which shares are told again.
const TOLD_EVERY: u64 = 50;

/// Time after which they are told again however few steps that was. Chosen: what watches a run asks every few seconds.
const TOLD_AFTER: Duration = Duration::from_secs(10);

/// The ranks that train together, seen from one of them.
pub struct DataParallel<'a> {
    world: &'a World,
    /// Node and device by rank.
    names: Vec<[String; 2]>,
    shares: StepShares,
    /// Samples of a unit that is never shared.
    unit: usize,
    /// Whether shares are new.
    is_changed: bool,
    /// When they were told last.
    told: Instant,
    /// Whether ranks take steps of their own, between averages.
    is_local: bool,
    /// Whether every rank holds a part of the optimizer's state.
    is_sharded: bool,
    /// Of this one.
    own: RankTimes,
    /// When it had computed its part of the step.
    computed: Instant,
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

/// Samples that one rank computes together: those of a micro-batch where the same bits are asked for, since a sum within a
/// micro-batch depends on what is in it.
fn unit_samples(config: &RunConfig) -> usize {
    let BatchSettings { micro_batch, .. } = BatchSettings::from_config(config);
    if config.machine.deterministic { micro_batch.min(config.train.batch_size) } else { 1 }
}

/// What local steps are, for people: not what one process does.
pub fn told_local_steps(config: &RunConfig) -> Option<Event> {
    let Switch::On(every) = config.cluster.sync_every else { return None };
    let text = format!(
        "local steps (DiLoCo): ranks average their weights every {every} steps; not the result of one process"
    );
    Some(Event::Note { text })
}

/// The mean loss over all ranks, as if it were that of this rank's weight: by which its own gradients are divided.
fn own_of(all: LossSums, weight: f64) -> LossSums {
    if weight == 0.0 {
        return all;
    }
    LossSums { loss: all.loss / all.weight * weight, weight }
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

/// The machine and the device of every rank.
fn gather_names(world: &World, device: &str) -> Result<Vec<[String; 2]>> {
    let own = format!("{}\n{device}", cluster::host_name());
    let names = world.gather(own.as_bytes())?;
    let split = |name: &Vec<u8>| {
        let name = String::from_utf8_lossy(name);
        let (node, device) = name.split_once('\n').unwrap_or((&name, ""));
        [node.to_owned(), device.to_owned()]
    };
    Ok(names.iter().map(split).collect())
}

impl<'a> DataParallel<'a> {
    /// Joins the other ranks of a job, if all were given the same. They begin with as many samples of a step each.
    pub fn join(
        world: &'a World,
        config: &RunConfig,
        identity: &Identity,
        device: &str,
        step: u64,
    ) -> Result<Self> {
        check_fused(config)?;
        let names = gather_names(world, device)?;
        let unit = unit_samples(config);
        let units = config.train.batch_size.div_ceil(unit) * config.train.gradient_accumulation;
        let shares = StepShares::equal(world.size(), units);
        let own = RankTimes::default();
        let is_local = config.cluster.sync_every != Switch::Off;
        let is_sharded = config.cluster.shard_optimizer && world.size() > 1;
        let (is_changed, told, computed) = (false, Instant::now(), Instant::now());
        let joined = Self {
            world,
            names,
            shares,
            unit,
            is_changed,
            told,
            is_local,
            is_sharded,
            own,
            computed,
        };
        let version = ("the version of hearth".into(), env!("CARGO_PKG_VERSION").into());
        let step = ("the step to resume at".into(), step.to_string());
        let unit = ("the micro-batch".into(), unit.to_string());
        let sharded =
            ("cluster.shard_optimizer".into(), config.cluster.shard_optimizer.to_string());
        joined
            .check_equal(&identity.described().chain([version, step, unit, sharded]).collect())?;
        Ok(joined)
    }

    /// Whether this one writes the run's folder, evaluates and decides.
    pub fn is_first(&self) -> bool {
        self.world.rank() == 0
    }

    /// Whether this one saves what all have in common: the first that is not lost. Nobody has all of a sharded optimizer when
    /// a rank is lost.
    pub fn is_saver(&self) -> bool {
        if self.is_sharded {
            return false;
        }
        self.world.heartbeat().map_or(self.is_first(), Heartbeat::is_saver)
    }

    /// This rank's samples of a batch, which has so many and is the `index`th of a step of batches of `batch_size`.
    pub fn samples(&self, index: usize, n: usize, batch_size: usize) -> Range<usize> {
        let (own, per_batch) = (self.shares.of(self.world.rank()), batch_size.div_ceil(self.unit));
        let sample = |unit: usize| (unit.saturating_sub(index * per_batch) * self.unit).min(n);
        sample(own.start)..sample(own.end)
    }

    /// Before the first step: all take the first rank's weights, if any has others. Random numbers of different devices differ
    /// in their last bits.
    pub fn share_weights<T: Task>(&self, session: &mut Session<'_, T>) -> Result<()> {
        let checksums = self.checksums(session)?;
        if checksums.iter().any(|checksum| *checksum != checksums[0]) {
            session.take_weights(self.world)?;
        }
        Ok(())
    }

    /// Those of all ranks' weights.
    fn checksums<T: Task>(&self, session: &Session<'_, T>) -> Result<Vec<i64>> {
        let mut checksums = vec![0; self.world.size()];
        checksums[self.world.rank()] = session.checksum()?;
        Ok(self.world.sum(checksums)?)
    }

    /// Fails unless all ranks have the same weights.
    pub fn check_weights<T: Task>(&self, session: &Session<'_, T>) -> Result<()> {
        let checksums = self.checksums(session)?;
        let other = checksums.iter().position(|checksum| *checksum != checksums[0]);
        let Some(rank) = other else { return Ok(()) };
        let [theirs, ours] = [checksums[rank], checksums[0]].map(|sum| format!("{sum:016x}"));
        Err(TrainerError::RanksDiffer {
            rank,
            what: "the checksum of its weights".into(),
            theirs,
            ours,
        })
    }

    /// Whether ranks take steps of their own, between averages.
    pub fn is_local(&self) -> bool {
        self.is_local
    }

    /// The part of this rank in the average after local steps: that of the samples it computed in them.
    pub fn part(&self) -> f64 {
        self.shares.part(self.world.rank())
    }

    /// The weights were averaged.
    pub fn begin_round(&mut self) {
        self.shares.begin_round();
    }

    /// The ranks.
    pub fn world(&self) -> &'a World {
        self.world
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

    /// This rank's part of a step, which began then, is computed or given up.
    pub fn end_part(&mut self, begun: Instant) {
        self.computed = Instant::now();
        self.own.compute_secs = self.computed.duration_since(begun).as_secs_f64();
    }

    /// A rank's part of a step, if all ranks have done theirs. Nobody waits for one that has failed.
    pub fn agree<T>(&self, part: Result<T>) -> Result<T> {
        let outcome = match &part {
            Ok(_) => PartOutcome::Done,
            Err(error) if error.is_cancelled() => PartOutcome::Cancelled,
            Err(_) => PartOutcome::Failed,
        };
        let worst = self.world.max(vec![outcome as i64])?;
        if worst == [PartOutcome::Failed as i64] {
            return self.fail(part);
        }
        if worst == [PartOutcome::Cancelled as i64] {
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

    /// Has the sums of the losses and gradients of a step over all ranks, or of the losses alone where ranks take local steps, and learns
    /// how long every rank took for its part. The next steps are shared accordingly.
    pub(super) fn sum<T: Task>(
        &mut self,
        sums: LossSums,
        celsius: Option<f64>,
        session: &mut Session<'_, T>,
    ) -> Result<LossSums> {
        self.own.celsius = celsius.unwrap_or_default();
        let mut numbers = self.own.spread(self.world.rank(), self.world.size());
        numbers.extend([sums.loss, sums.weight]);
        let numbers = self.world.sum(numbers)?;
        let (times, losses) = numbers.split_at(numbers.len() - 2);
        self.is_changed = self.shares.learn(times);
        let all = LossSums { loss: losses[0], weight: losses[1] };
        self.own.wait_secs = self.shares.wait_secs(self.world.rank());
        if self.is_local {
            session.take_exact_sums()?;
            return Ok(own_of(all, sums.weight));
        }
        session.take_sums()?;
        let since = self.computed.elapsed().as_secs_f64();
        self.own.exchange_secs = (since - self.own.wait_secs).max(0.0);
        Ok(all)
    }

    /// A word on a job whose steps cannot be shared well, once, when speeds are known.
    pub fn told_granularity(&self, step: u64) -> Option<Event> {
        let text = self.shares.too_few_samples().filter(|_| step == GRANULARITY_STEP)?;
        Some(Event::Note { text })
    }

    /// How the ranks share their steps, for people; now and then, when it changes, and in the last step.
    pub fn told_shares(&mut self, step: u64, is_last: bool) -> Option<Event> {
        let is_due = step % TOLD_EVERY == 1 || self.told.elapsed() >= TOLD_AFTER;
        if !(std::mem::take(&mut self.is_changed) || is_due || is_last) {
            return None;
        }
        self.told = Instant::now();
        Some(Event::Ranks { step, ranks: self.shares.describe(&self.names) })
    }

    /// Whether any rank is asked to stop.
    pub fn is_any(&self, asked: bool) -> Result<bool> {
        Ok(self.world.max(vec![i64::from(asked)])? != [0])
    }

    /// Whether somebody wants to join at the next checkpoint.
    pub fn is_join_asked(&self) -> bool {
        self.world.heartbeat().is_some_and(Heartbeat::is_join_asked)
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
