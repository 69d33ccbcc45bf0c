//! How a run will be done, decided before it starts. Every candidate is rehearsed on a device without
//! data, from the headers of files alone, so what it takes is known to the byte; how long a step
//! takes follows from the work that the rehearsal counts and the machine's rates. Pure: the same job,
//! images, rates and limit give the same plan.
//!
//! ```text
//! RunConfig + Outlook ──▶ choice.rs      what may be chosen: what nobody typed
//!                            │
//!                         rehearsal.rs   bytes and work of each candidate, on the meta engine
//!                            │
//!                         choose()       the best precision that fits, in the fastest way that fits
//! ```
//!
//! Left out on purpose: keeping encoders in memory (their answers are cached, a step never asks them)
//! and cutting attention into slices (no engine holds all its scores at once).

mod choice;
mod dry_run;
mod host;
pub mod memory_plot;
pub mod rates;
mod remedy;
#[cfg(test)]
mod tests;
mod time;

use std::fmt;

use compute::{DeviceKind, MemoryRecording, WorkStats};

pub use rates::Rates;

use self::choice::{Precisions, batch_options, encoder_formats, offloads, precisions};
use self::dry_run::{DryRun, SampleEstimate};
use crate::config::RunConfig;
use crate::config::batch::{BatchSettings, PlanChoice};
use crate::cost;
use crate::error::{Result, TrainerError};
use crate::event::{Phase, PlannedPhase, TimeEstimate};
use crate::model::diffusion::text::T5Loading;
use crate::model::offload::Offload;
use crate::model::vae::Tiling;
use crate::task::traits::{DatasetSummary, Preparation, Task};

/// What is to be planned.
#[derive(Clone, Copy)]
pub struct PlanRequest<'a, L: Task> {
    /// The model and its loss.
    pub task: &'a L,
    /// What was typed.
    pub config: &'a RunConfig,
    /// What it will be fed with.
    pub dataset: &'a DatasetSummary<L::Size>,
}

/// What it is to run on.
#[derive(Clone, Copy)]
pub struct DeviceBudget<'a> {
    /// The engine.
    pub kind: DeviceKind,
    /// The most that may be taken.
    pub limit_bytes: usize,
    /// How fast it is.
    pub rates: &'a Rates,
    /// Main memory that blocks may stream from; nothing where the engine computes in main memory.
    pub host_bytes: Option<usize>,
}

/// How a run is done, and what it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What was decided.
    pub choice: PlanChoice,
    /// What each phase takes at its peak.
    pub phases: Vec<PlannedPhase>,
    /// What the program holds beside the arena while it trains.
    pub host_bytes: usize,
    /// What of the model is in main memory and comes to the device block by block. Where they are one
    /// memory, it is a part of `host_bytes`.
    pub offloaded_bytes: usize,
    /// What the whole program takes at its peak.
    pub total_bytes: usize,
    /// How latents are cut for decoding samples, if they are.
    pub tiling: Option<Tiling>,
    /// How much of T5 is in memory at a time while texts are encoded.
    pub t5: T5Loading,
    /// Seconds of a step, in the mean over the sizes that are shown most often.
    pub step_secs: f64,
    /// How long all of it takes.
    pub times: TimeEstimate,
    /// Everything that was looked at, in that order.
    pub candidates: Vec<PlanCandidate>,
}

/// A candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanCandidate {
    /// What it would be.
    pub choice: PlanChoice,
    /// What its hardest step, or another phase that does not fit, takes.
    pub peak_bytes: usize,
    /// Seconds of a step.
    pub secs: f64,
    /// Whether that is within the limit.
    pub fits: bool,
}

impl PlanCandidate {
    /// By what candidates are compared. Chosen: streaming has to save a tenth of the time, since main memory
    /// and the link are others' too, and a plan knows less of them than of the GPU.
    fn cost(&self) -> f64 {
        if self.choice.offload == Offload::None { self.secs } else { 1.1 * self.secs }
    }
}

impl Plan {
    /// Bytes of an arena that is enough for every phase.
    pub fn peak_bytes(&self) -> usize {
        peak(&self.phases)
    }

    /// The one that would have been chosen next.
    pub fn runner_up(&self) -> Option<&PlanCandidate> {
        let others = self.candidates.iter().filter(|it| it.fits && it.choice != self.choice);
        others.min_by(|a, b| a.cost().total_cmp(&b.cost()))
    }

    /// How it was looked at itself.
    pub fn chosen(&self) -> Option<&PlanCandidate> {
        self.candidates.iter().find(|it| it.choice == self.choice)
    }
}

fn peak(phases: &[PlannedPhase]) -> usize {
    phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
}

/// Finds the best precision that fits, and the fastest way that fits with it. Fails with what is
/// missing if nothing does.
pub fn choose<L: Task>(job: PlanRequest<'_, L>, room: DeviceBudget<'_>) -> Result<Plan> {
    let mut search = PlanSearch::new(job, room);
    let found = search.encoders().and_then(|encoders| search.training(encoders));
    match found {
        Err(TrainerError::TooLarge { phase, needed, limit, .. }) => {
            let remedy = remedy::remedy(job, room)?;
            Err(TrainerError::TooLarge { phase, needed, limit, remedy })
        }
        found => found,
    }
}

/// What a run takes that is done exactly as the job says; fails if it does not fit.
pub fn dry_run<L: Task>(job: PlanRequest<'_, L>, room: DeviceBudget<'_>) -> Result<Plan> {
    let mut search = PlanSearch::new(job, room);
    let before = search.preparation(job.config)?;
    search.complete(PlanChoice::from_config(job.config), &before)
}

/// A way to compute, among those that a run may be driven to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLevel {
    /// The way.
    pub how: BatchSettings,
    /// What the run's arena must hold.
    pub peak_bytes: usize,
}

/// The ways from a planned job's own on, each with less memory than the one before.
pub fn memory_levels<L: Task>(
    job: PlanRequest<'_, L>,
    room: DeviceBudget<'_>,
) -> Result<Vec<MemoryLevel>> {
    let first = BatchSettings::from_config(job.config);
    // More at once than there are in a batch is no other way.
    let first = BatchSettings { micro: first.micro.min(job.config.train.batch_size), ..first };
    let mut levels = Vec::new();
    for how in std::iter::successors(Some(first), |how| how.with_less_memory()) {
        let choice = PlanChoice {
            micro_batch: how.micro,
            recompute: how.recompute,
            ..PlanChoice::from_config(job.config)
        };
        let config = &job.config.with_choice(&choice);
        let PlanRequest { task: task, dataset: dataset, .. } = job;
        let step =
            DryRun { task: task, config, dataset: dataset, kind: room.kind }.step(room.rates)?;
        levels.push(MemoryLevel { how, peak_bytes: step.peak_bytes });
    }
    Ok(levels)
}

/// What a step of full batches of one size does, counted on a device without data: how often it does
/// each piece of work.
pub fn step_work<L: Task>(
    PlanRequest { task: task, config, dataset: dataset }: PlanRequest<'_, L>,
    kind: DeviceKind,
    size: L::Size,
) -> Result<Vec<(usize, WorkStats)>> {
    DryRun { task: task, config, dataset: dataset, kind }.step_work(size)
}

/// The memory over a step of a plan, in the size that takes the most.
pub fn recorded_step<L: Task>(
    PlanRequest { task: task, config, dataset: dataset }: PlanRequest<'_, L>,
    plan: &Plan,
    kind: DeviceKind,
) -> Result<MemoryRecording> {
    let config = &config.with_choice(&plan.choice);
    DryRun { task: task, config, dataset: dataset, kind }.recorded_step()
}

struct PlanSearch<'a, L: Task> {
    job: PlanRequest<'a, L>,
    budget: DeviceBudget<'a>,
    host_bytes: usize,
    /// What the program holds beside the arena while it encodes.
    encoding_bytes: usize,
    candidates: Vec<PlanCandidate>,
}

impl<'a, L: Task> PlanSearch<'a, L> {
    fn new(job: PlanRequest<'a, L>, room: DeviceBudget<'a>) -> Self {
        let PlanRequest { task: task, config, dataset: dataset } = job;
        let (host_bytes, encoding_bytes) = match room.kind {
            DeviceKind::Cpu { threads, .. } => (
                host::program_bytes(threads) + task.host_bytes(config, dataset),
                host::encoding_bytes(threads),
            ),
            // A GPU's memory is its own.
            DeviceKind::Cuda { .. } => (0, 0),
            // Most other GPUs share the CPU's. One thread reads batches, and none computes.
            DeviceKind::Gpu { .. } => {
                (host::program_bytes(1) + task.host_bytes(config, dataset), host::encoding_bytes(1))
            }
        };
        Self { job, budget: room, host_bytes, encoding_bytes, candidates: Vec::new() }
    }

    /// The best format of text encoders that fits, and what encoding takes with it.
    fn encoders(&self) -> Result<(PlanChoice, Preparation)> {
        let mut failed = None;
        for quantise_encoders in encoder_formats(self.job.config) {
            let choice =
                PlanChoice { quantise_encoders, ..PlanChoice::from_config(self.job.config) };
            match self.preparation(&self.job.config.with_choice(&choice)) {
                Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                before => return Ok((choice, before?)),
            }
        }
        Err(failed.expect("there is a format to try"))
    }

    /// What comes before training; fails if a part of it does not fit.
    fn preparation(&self, config: &RunConfig) -> Result<Preparation> {
        let limit = self.budget.limit_bytes.saturating_sub(self.encoding_bytes);
        let before = self.dry_run(config).preparation(limit)?;
        let phases = before.stages.iter().map(|stage| stage.memory);
        match phases.clone().find(|phase| phase.peak_bytes > limit) {
            None => Ok(before),
            Some(phase) => Err(self.too_large(&phase.name, phase.peak_bytes + self.encoding_bytes)),
        }
    }

    /// Bytes that the whole program takes when everything is done in the way that takes the least; where that is
    /// more than `limit`, perhaps only a part of it.
    fn least_bytes(&self, config: &RunConfig, limit: usize) -> Result<usize> {
        let rehearsal = self.dry_run(config);
        let beside = self.beside_arena_bytes(self.offloaded_bytes(config)?);
        // What does not fit mostly shows here, and sooner.
        let step = rehearsal.step(self.budget.rates)?.peak_bytes + beside;
        if step > limit {
            return Ok(step);
        }
        let before = rehearsal.preparation(0)?.stages.into_iter();
        let before = before.map(|stage| stage.memory.peak_bytes + self.encoding_bytes).max();
        let (training, _) = rehearsal.training()?;
        let shown = rehearsal.samples(0)?.phase;
        let training = training.iter().chain(&shown).map(|phase| phase.peak_bytes + beside).max();
        Ok(step.max(before.unwrap_or(0)).max(training.unwrap_or(0)))
    }

    /// The best precision that fits, in the fastest way.
    fn training(&mut self, (choice, before): (PlanChoice, Preparation)) -> Result<Plan> {
        let mut failed = None;
        for Precisions { quantise, optimizer } in precisions(self.job.config) {
            let mut fitting: Vec<PlanCandidate> = Vec::new();
            for stream in offloads(self.job.config, self.budget) {
                // All that it saves is the time of computing blocks twice.
                if fitting.iter().any(|of| !of.choice.recompute.recomputes_any()) {
                    break;
                }
                let choice = PlanChoice { offload: stream, quantise, optimizer, ..choice };
                match self.fitting_candidates(choice) {
                    Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                    found => fitting.extend(found?),
                }
            }
            fitting.sort_by(|a, b| a.cost().total_cmp(&b.cost()));
            for PlanCandidate { choice, .. } in fitting {
                match self.complete(choice, &before) {
                    Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                    plan => return plan,
                }
            }
        }
        Err(failed.unwrap_or_else(|| self.step_too_large()))
    }

    /// What of the model streams; fails if main memory has no room for it.
    fn offloaded_bytes(&self, config: &RunConfig) -> Result<usize> {
        let streamed = self.dry_run(config).offloaded_bytes()?;
        match self.budget.host_bytes {
            Some(limit) if streamed > limit => {
                let (phase, needed) = ("the model's blocks in main memory".into(), streamed);
                Err(TrainerError::TooLarge { phase, needed, limit, remedy: None })
            }
            _ => Ok(streamed),
        }
    }

    /// What is held beside the arena in the same memory.
    fn beside_arena_bytes(&self, streamed: usize) -> usize {
        match self.budget.kind {
            DeviceKind::Cuda { .. } => self.host_bytes,
            DeviceKind::Cpu { .. } | DeviceKind::Gpu { .. } => self.host_bytes + streamed,
        }
    }

    /// The ways whose hardest step fits; fails if main memory has no room for what streams.
    fn fitting_candidates(&mut self, choice: PlanChoice) -> Result<Vec<PlanCandidate>> {
        let mut fitting: Vec<PlanCandidate> = Vec::new();
        let streamed = self.offloaded_bytes(&self.job.config.with_choice(&choice))?;
        let limit = self.budget.limit_bytes.saturating_sub(self.beside_arena_bytes(streamed));
        // From the tightest on: where that does not fit, nothing does.
        for how in batch_options(self.job.config).into_iter().rev() {
            let choice = PlanChoice { micro_batch: how.micro, recompute: how.recompute, ..choice };
            let step =
                self.dry_run(&self.job.config.with_choice(&choice)).step(self.budget.rates)?;
            let fits = step.peak_bytes <= limit;
            let (peak_bytes, secs) = (step.peak_bytes, step.secs);
            self.candidates.push(PlanCandidate { choice, peak_bytes, secs, fits });
            if !fits && fitting.is_empty() {
                break;
            }
            fitting.extend(self.candidates.last().filter(|_| fits));
        }
        Ok(fitting)
    }

    /// All phases of a choice; fails if one does not fit.
    fn complete(&mut self, choice: PlanChoice, before: &Preparation) -> Result<Plan> {
        let config = self.job.config.with_choice(&choice);
        let streamed_bytes = self.offloaded_bytes(&config)?;
        let host_bytes = self.beside_arena_bytes(streamed_bytes);
        let limit = self.budget.limit_bytes.saturating_sub(host_bytes);
        let rehearsal = self.dry_run(&config);
        let known = self.candidates.iter().find(|of| of.choice == choice).map(|of| of.secs);
        let step_secs = match known {
            Some(secs) => secs,
            None => rehearsal.step(self.budget.rates)?.secs,
        };
        let (training, measuring) = rehearsal.training()?;
        let SampleEstimate { tiling, phase, cost } = rehearsal.samples(limit)?;
        let times = rehearsal.times(step_secs, before, (&measuring, &cost), self.budget.rates)?;
        let training: Vec<PlannedPhase> = training.into_iter().chain(phase).collect();
        if let Some(PlannedPhase { name, peak_bytes }) =
            training.iter().find(|it| it.peak_bytes > limit)
        {
            if let Some(of) = self.candidates.iter_mut().find(|of| of.choice == choice) {
                (of.fits, of.peak_bytes) = (false, *peak_bytes);
            }
            return Err(self.too_large(name, *peak_bytes + host_bytes));
        }
        let encoding = before.stages.iter().map(|stage| {
            let cost::StageMemory { name, peak_bytes } = stage.memory;
            PlannedPhase { name: name.into(), peak_bytes }
        });
        let encoding: Vec<PlannedPhase> = encoding.collect();
        let total_bytes = (peak(&encoding) + self.encoding_bytes).max(peak(&training) + host_bytes);
        Ok(Plan {
            choice,
            phases: [encoding, training].concat(),
            host_bytes,
            offloaded_bytes: streamed_bytes,
            total_bytes,
            tiling,
            t5: before.t5,
            step_secs,
            times,
            candidates: std::mem::take(&mut self.candidates),
        })
    }

    fn dry_run<'r>(&'r self, config: &'r RunConfig) -> DryRun<'r, L> {
        let PlanRequest { task: task, dataset: dataset, .. } = self.job;
        DryRun { task: task, config, dataset: dataset, kind: self.budget.kind }
    }

    /// What the tightest candidate takes too much.
    fn step_too_large(&self) -> TrainerError {
        let hardest = self.dry_run(self.job.config).largest_size();
        let phase =
            hardest.map_or_else(|| "a step".into(), |(size, _)| Phase::train(size).to_string());
        let least = self.candidates.iter().min_by_key(|of| of.peak_bytes);
        let beside = least.map_or(0, |of| {
            self.offloaded_bytes(&self.job.config.with_choice(&of.choice))
                .map_or(0, |of| self.beside_arena_bytes(of))
        });
        self.too_large(&phase, least.map_or(0, |of| of.peak_bytes) + beside)
    }

    fn too_large(&self, phase: &dyn fmt::Display, needed: usize) -> TrainerError {
        let limit = self.budget.limit_bytes;
        TrainerError::TooLarge { phase: phase.to_string(), needed, limit, remedy: None }
    }
}
