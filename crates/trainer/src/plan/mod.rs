//! How a run will be done, decided before it starts. Every candidate is rehearsed on a device without
//! data, from the headers of files alone, so what it takes is known to the byte; how long a step
//! takes follows from the work that the rehearsal counts and the machine's rates. Pure: the same job,
//! pictures, rates and limit give the same plan.
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
mod host;
mod nearest;
pub mod picture;
pub mod rates;
mod rehearsal;
#[cfg(test)]
mod tests;
mod time;

use std::fmt;

use compute::{Kind, Recording, Work};

pub use rates::Rates;

use self::choice::{Precisions, encoder_formats, precisions, streams, ways};
use self::rehearsal::{Rehearsal, Showing};
use crate::config::RunConfig;
use crate::config::how::{Choice, How};
use crate::cost;
use crate::error::{Result, TrainerError};
use crate::event::{Phase, PlannedPhase, Times};
use crate::model::diffusion::text::T5Loading;
use crate::model::stream::Stream;
use crate::model::vae::Tiling;
use crate::task::lesson::{Before, Lesson, Outlook};

/// What is to be planned.
#[derive(Clone, Copy)]
pub struct Job<'a, L: Lesson> {
    /// The model and its loss.
    pub lesson: &'a L,
    /// What was typed.
    pub config: &'a RunConfig,
    /// What it will be fed with.
    pub outlook: &'a Outlook<L::Size>,
}

/// What it is to run on.
#[derive(Clone, Copy)]
pub struct Room<'a> {
    /// The engine.
    pub kind: Kind,
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
    pub choice: Choice,
    /// What each phase takes at its peak.
    pub phases: Vec<PlannedPhase>,
    /// What the program holds beside the arena while it trains.
    pub host_bytes: usize,
    /// What of the model is in main memory and comes to the device block by block. Where they are one
    /// memory, it is a part of `host_bytes`.
    pub streamed_bytes: usize,
    /// What the whole program takes at its peak.
    pub total_bytes: usize,
    /// How latents are cut for decoding samples, if they are.
    pub tiling: Option<Tiling>,
    /// How much of T5 is in memory at a time while texts are encoded.
    pub t5: T5Loading,
    /// Seconds of a step, in the mean over the sizes that are shown most often.
    pub step_secs: f64,
    /// How long all of it takes.
    pub times: Times,
    /// Everything that was looked at, in that order.
    pub considered: Vec<Considered>,
}

/// A candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Considered {
    /// What it would be.
    pub choice: Choice,
    /// What its hardest step, or another phase that does not fit, takes.
    pub peak_bytes: usize,
    /// Seconds of a step.
    pub secs: f64,
    /// Whether that is within the limit.
    pub fits: bool,
}

impl Considered {
    /// By what candidates are compared. Chosen: streaming has to save a tenth of the time, since main memory
    /// and the link are others' too, and a plan knows less of them than of the card.
    fn cost(&self) -> f64 {
        if self.choice.stream == Stream::None { self.secs } else { 1.1 * self.secs }
    }
}

impl Plan {
    /// Bytes of an arena that is enough for every phase.
    pub fn peak_bytes(&self) -> usize {
        peak(&self.phases)
    }

    /// The one that would have been chosen next.
    pub fn runner_up(&self) -> Option<&Considered> {
        let others = self.considered.iter().filter(|it| it.fits && it.choice != self.choice);
        others.min_by(|a, b| a.cost().total_cmp(&b.cost()))
    }

    /// How it was looked at itself.
    pub fn chosen(&self) -> Option<&Considered> {
        self.considered.iter().find(|it| it.choice == self.choice)
    }
}

fn peak(phases: &[PlannedPhase]) -> usize {
    phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
}

/// Finds the best precision that fits, and the fastest way that fits with it. Fails with what is
/// missing if nothing does.
pub fn choose<L: Lesson>(job: Job<'_, L>, room: Room<'_>) -> Result<Plan> {
    let mut search = Search::new(job, room);
    let found = search.encoders().and_then(|encoders| search.training(encoders));
    match found {
        Err(TrainerError::TooLarge { phase, needed, limit, .. }) => {
            let remedy = nearest::remedy(job, room)?;
            Err(TrainerError::TooLarge { phase, needed, limit, remedy })
        }
        found => found,
    }
}

/// What a run takes that is done exactly as the job says; fails if it does not fit.
pub fn rehearse<L: Lesson>(job: Job<'_, L>, room: Room<'_>) -> Result<Plan> {
    let mut search = Search::new(job, room);
    let before = search.before(job.config)?;
    search.complete(Choice::of(job.config), &before)
}

/// A way to compute, among those that a run may be driven to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rung {
    /// The way.
    pub how: How,
    /// What the run's arena must hold.
    pub peak_bytes: usize,
}

/// The ways from a planned job's own on, each with less memory than the one before.
pub fn ladder<L: Lesson>(job: Job<'_, L>, room: Room<'_>) -> Result<Vec<Rung>> {
    let first = How::of(job.config);
    // More at once than there are in a batch is no other way.
    let first = How { micro: first.micro.min(job.config.train.batch), ..first };
    let mut rungs = Vec::new();
    for how in std::iter::successors(Some(first), |how| how.tighter()) {
        let choice =
            Choice { micro_batch: how.micro, recompute: how.recompute, ..Choice::of(job.config) };
        let config = &job.config.with(&choice);
        let Job { lesson, outlook, .. } = job;
        let step = Rehearsal { lesson, config, outlook, kind: room.kind }.step(room.rates)?;
        rungs.push(Rung { how, peak_bytes: step.peak_bytes });
    }
    Ok(rungs)
}

/// What a step of full batches of one size does, counted on a device without data: how often it does
/// each piece of work.
pub fn step_work<L: Lesson>(
    Job { lesson, config, outlook }: Job<'_, L>,
    kind: Kind,
    size: L::Size,
) -> Result<Vec<(usize, Work)>> {
    Rehearsal { lesson, config, outlook, kind }.step_work(size)
}

/// The memory over a step of a plan, in the size that takes the most.
pub fn recorded_step<L: Lesson>(
    Job { lesson, config, outlook }: Job<'_, L>,
    plan: &Plan,
    kind: Kind,
) -> Result<Recording> {
    let config = &config.with(&plan.choice);
    Rehearsal { lesson, config, outlook, kind }.recorded_step()
}

struct Search<'a, L: Lesson> {
    job: Job<'a, L>,
    room: Room<'a>,
    host_bytes: usize,
    /// What the program holds beside the arena while it encodes.
    encoding_bytes: usize,
    considered: Vec<Considered>,
}

impl<'a, L: Lesson> Search<'a, L> {
    fn new(job: Job<'a, L>, room: Room<'a>) -> Self {
        let Job { lesson, config, outlook } = job;
        let (host_bytes, encoding_bytes) = match room.kind {
            Kind::Cpu { threads, .. } => (
                host::program_bytes(threads) + lesson.host_bytes(config, outlook),
                host::encoding_bytes(threads),
            ),
            // A card's memory is its own.
            Kind::Cuda { .. } => (0, 0),
            // Most other GPUs share the processor's. One thread reads batches, and none computes.
            Kind::Gpu { .. } => (
                host::program_bytes(1) + lesson.host_bytes(config, outlook),
                host::encoding_bytes(1),
            ),
        };
        Self { job, room, host_bytes, encoding_bytes, considered: Vec::new() }
    }

    /// The best format of text encoders that fits, and what encoding takes with it.
    fn encoders(&self) -> Result<(Choice, Before)> {
        let mut failed = None;
        for quantise_encoders in encoder_formats(self.job.config) {
            let choice = Choice { quantise_encoders, ..Choice::of(self.job.config) };
            match self.before(&self.job.config.with(&choice)) {
                Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                before => return Ok((choice, before?)),
            }
        }
        Err(failed.expect("there is a format to try"))
    }

    /// What comes before training; fails if a part of it does not fit.
    fn before(&self, config: &RunConfig) -> Result<Before> {
        let limit = self.room.limit_bytes.saturating_sub(self.encoding_bytes);
        let before = self.rehearsal(config).before(limit)?;
        let phases = before.stages.iter().map(|stage| stage.phase);
        match phases.clone().find(|phase| phase.peak_bytes > limit) {
            None => Ok(before),
            Some(phase) => Err(self.too_large(&phase.name, phase.peak_bytes + self.encoding_bytes)),
        }
    }

    /// Bytes that the whole program takes when everything is done in the way that takes the least; where that is
    /// more than `limit`, perhaps only a part of it.
    fn least_bytes(&self, config: &RunConfig, limit: usize) -> Result<usize> {
        let rehearsal = self.rehearsal(config);
        let beside = self.beside(self.streamed_bytes(config)?);
        // What does not fit mostly shows here, and sooner.
        let step = rehearsal.step(self.room.rates)?.peak_bytes + beside;
        if step > limit {
            return Ok(step);
        }
        let before = rehearsal.before(0)?.stages.into_iter();
        let before = before.map(|stage| stage.phase.peak_bytes + self.encoding_bytes).max();
        let (training, _) = rehearsal.training()?;
        let shown = rehearsal.showing(0)?.phase;
        let training = training.iter().chain(&shown).map(|phase| phase.peak_bytes + beside).max();
        Ok(step.max(before.unwrap_or(0)).max(training.unwrap_or(0)))
    }

    /// The best precision that fits, in the fastest way.
    fn training(&mut self, (choice, before): (Choice, Before)) -> Result<Plan> {
        let mut failed = None;
        for Precisions { quantise, optimizer } in precisions(self.job.config) {
            let mut fitting: Vec<Considered> = Vec::new();
            for stream in streams(self.job.config, self.room) {
                // All that it saves is the time of computing blocks twice.
                if fitting.iter().any(|of| !of.choice.recompute.does_any()) {
                    break;
                }
                let choice = Choice { stream, quantise, optimizer, ..choice };
                match self.fitting(choice) {
                    Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                    found => fitting.extend(found?),
                }
            }
            fitting.sort_by(|a, b| a.cost().total_cmp(&b.cost()));
            for Considered { choice, .. } in fitting {
                match self.complete(choice, &before) {
                    Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                    plan => return plan,
                }
            }
        }
        Err(failed.unwrap_or_else(|| self.step_too_large()))
    }

    /// What of the model streams; fails if main memory has no room for it.
    fn streamed_bytes(&self, config: &RunConfig) -> Result<usize> {
        let streamed = self.rehearsal(config).streamed_bytes()?;
        match self.room.host_bytes {
            Some(limit) if streamed > limit => {
                let (phase, needed) = ("the model's blocks in main memory".into(), streamed);
                Err(TrainerError::TooLarge { phase, needed, limit, remedy: None })
            }
            _ => Ok(streamed),
        }
    }

    /// What is held beside the arena in the same memory.
    fn beside(&self, streamed: usize) -> usize {
        match self.room.kind {
            Kind::Cuda { .. } => self.host_bytes,
            Kind::Cpu { .. } | Kind::Gpu { .. } => self.host_bytes + streamed,
        }
    }

    /// The ways whose hardest step fits; fails if main memory has no room for what streams.
    fn fitting(&mut self, choice: Choice) -> Result<Vec<Considered>> {
        let mut fitting: Vec<Considered> = Vec::new();
        let streamed = self.streamed_bytes(&self.job.config.with(&choice))?;
        let limit = self.room.limit_bytes.saturating_sub(self.beside(streamed));
        // From the tightest on: where that does not fit, nothing does.
        for how in ways(self.job.config).into_iter().rev() {
            let choice = Choice { micro_batch: how.micro, recompute: how.recompute, ..choice };
            let step = self.rehearsal(&self.job.config.with(&choice)).step(self.room.rates)?;
            let fits = step.peak_bytes <= limit;
            let (peak_bytes, secs) = (step.peak_bytes, step.secs);
            self.considered.push(Considered { choice, peak_bytes, secs, fits });
            if !fits && fitting.is_empty() {
                break;
            }
            fitting.extend(self.considered.last().filter(|_| fits));
        }
        Ok(fitting)
    }

    /// All phases of a choice; fails if one does not fit.
    fn complete(&mut self, choice: Choice, before: &Before) -> Result<Plan> {
        let config = self.job.config.with(&choice);
        let streamed_bytes = self.streamed_bytes(&config)?;
        let host_bytes = self.beside(streamed_bytes);
        let limit = self.room.limit_bytes.saturating_sub(host_bytes);
        let rehearsal = self.rehearsal(&config);
        let known = self.considered.iter().find(|of| of.choice == choice).map(|of| of.secs);
        let step_secs = match known {
            Some(secs) => secs,
            None => rehearsal.step(self.room.rates)?.secs,
        };
        let (training, measuring) = rehearsal.training()?;
        let Showing { tiling, phase, cost } = rehearsal.showing(limit)?;
        let times = rehearsal.times(step_secs, before, (&measuring, &cost), self.room.rates)?;
        let training: Vec<PlannedPhase> = training.into_iter().chain(phase).collect();
        if let Some(PlannedPhase { name, peak_bytes }) =
            training.iter().find(|it| it.peak_bytes > limit)
        {
            if let Some(of) = self.considered.iter_mut().find(|of| of.choice == choice) {
                (of.fits, of.peak_bytes) = (false, *peak_bytes);
            }
            return Err(self.too_large(name, *peak_bytes + host_bytes));
        }
        let encoding = before.stages.iter().map(|stage| {
            let cost::Phase { name, peak_bytes } = stage.phase;
            PlannedPhase { name: name.into(), peak_bytes }
        });
        let encoding: Vec<PlannedPhase> = encoding.collect();
        let total_bytes = (peak(&encoding) + self.encoding_bytes).max(peak(&training) + host_bytes);
        Ok(Plan {
            choice,
            phases: [encoding, training].concat(),
            host_bytes,
            streamed_bytes,
            total_bytes,
            tiling,
            t5: before.t5,
            step_secs,
            times,
            considered: std::mem::take(&mut self.considered),
        })
    }

    fn rehearsal<'r>(&'r self, config: &'r RunConfig) -> Rehearsal<'r, L> {
        let Job { lesson, outlook, .. } = self.job;
        Rehearsal { lesson, config, outlook, kind: self.room.kind }
    }

    /// What the tightest candidate takes too much.
    fn step_too_large(&self) -> TrainerError {
        let hardest = self.rehearsal(self.job.config).hardest();
        let phase =
            hardest.map_or_else(|| "a step".into(), |(size, _)| Phase::train(size).to_string());
        let least = self.considered.iter().min_by_key(|of| of.peak_bytes);
        let beside = least.map_or(0, |of| {
            self.streamed_bytes(&self.job.config.with(&of.choice)).map_or(0, |of| self.beside(of))
        });
        self.too_large(&phase, least.map_or(0, |of| of.peak_bytes) + beside)
    }

    fn too_large(&self, phase: &dyn fmt::Display, needed: usize) -> TrainerError {
        let limit = self.room.limit_bytes;
        TrainerError::TooLarge { phase: phase.to_string(), needed, limit, remedy: None }
    }
}
