//! How a run will be done, decided before it starts. Every candidate gets a dry run on the meta device, from the
//! headers of files alone, so its memory is known to the byte; the time of a step follows from the work that the
//! dry run counts and the machine's rates. Pure: the same job, images, rates and limit give the same plan.
//!
//! ```text
//! RunConfig + DatasetSummary ──▶ choice.rs    candidates: values for the keys that were not set
//!                                   │
//!                                dry_run.rs   memory and work of each candidate, on the meta device
//!                                   │
//!                                choose()     the best precision that fits, and its fastest candidate that fits
//! ```
//!
//! Left out on purpose: keeping text encoders in memory (their outputs are cached) and slicing attention (no
//! kernel holds all scores at once).

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
use crate::cache::IMAGES_PHASE;
use crate::config::RunConfig;
use crate::config::batch::{BatchSettings, PlanChoice};
use crate::cost;
use crate::data::DecodingNeed;
use crate::data::decoding::SMALL_BYTES;
use crate::error::{Result, TrainerError};
use crate::event::{Phase, PlannedPhase, TimeEstimate};
use crate::model::diffusion::text::EncoderLoading;
use crate::model::offload::Offload;
use crate::model::vae::Tiling;
use crate::task::traits::{DatasetSummary, Preparation, PreparationLimits, Task};

/// The job to plan.
#[derive(Clone, Copy)]
pub struct PlanRequest<'a, T: Task> {
    /// The model and its loss.
    pub task: &'a T,
    /// Its configuration.
    pub config: &'a RunConfig,
    /// Its dataset.
    pub dataset: &'a DatasetSummary<T::Size>,
}

/// The device to plan for.
#[derive(Clone, Copy)]
pub struct DeviceBudget<'a> {
    /// Its kind.
    pub kind: DeviceKind,
    /// The most that may be taken.
    pub limit_bytes: usize,
    /// How fast it is.
    pub rates: &'a Rates,
    /// Main memory for offloaded blocks; none where the device computes in main memory.
    pub host_bytes: Option<usize>,
    /// What the limit may be raised to, if that is known.
    pub raisable: Option<RaisableLimit>,
}

/// What `--limit` may be raised to.
#[derive(Clone, Copy, Debug)]
pub struct RaisableLimit {
    /// The limit where none is typed: more has to be taken from other programs.
    pub default_bytes: usize,
    /// The most that the machine can give.
    pub max_limit_bytes: usize,
}

impl DeviceBudget<'_> {
    /// Whether the device computes in main memory, so that the limit bounds the whole program.
    pub fn shares_memory(&self) -> bool {
        match self.kind {
            DeviceKind::Cpu { .. } | DeviceKind::Gpu { .. } => true,
            DeviceKind::Cuda { .. } => self.host_bytes.is_none(),
        }
    }
}

/// How a run is done, and its memory and time.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The chosen settings.
    pub choice: PlanChoice,
    /// Memory peak of each phase.
    pub phases: Vec<PlannedPhase>,
    /// Bytes of the arena for what lives as long as the run, where its buffers end there.
    pub resident_bytes: usize,
    /// Bytes outside the arena during training.
    pub host_bytes: usize,
    /// Bytes of offloaded blocks in main memory. Where the device shares that memory, they are part of
    /// `host_bytes`.
    pub offloaded_bytes: usize,
    /// Memory peak of the whole program.
    pub total_bytes: usize,
    /// VAE tiling when samples are decoded, if any.
    pub tiling: Option<Tiling>,
    /// How much of a large text encoder is in memory at a time while texts are encoded.
    pub encoder_loading: EncoderLoading,
    /// Main memory for images that are being decoded, as part of `total_bytes` where the device shares it.
    pub decoding_bytes: usize,
    /// Mean seconds of a step over the most frequent sizes.
    pub step_secs: f64,
    /// How long all of it takes.
    pub times: TimeEstimate,
    /// All candidates, in the order they were tried.
    pub candidates: Vec<PlanCandidate>,
}

/// A candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanCandidate {
    /// Its settings.
    pub choice: PlanChoice,
    /// Memory peak of its largest step, or of another phase that does not fit.
    pub peak_bytes: usize,
    /// Seconds of a step.
    pub secs: f64,
    /// Whether that is within the limit.
    pub fits: bool,
}

impl PlanCandidate {
    /// What candidates are compared by. Chosen: offloading has to save a tenth of the time, since main memory and
    /// `PCIe` are shared with other programs, and a plan knows less of them than of the GPU.
    fn cost(&self) -> f64 {
        if self.choice.offload == Offload::None { self.secs } else { 1.1 * self.secs }
    }
}

impl Plan {
    /// Bytes of an arena that is enough for every phase.
    pub fn peak_bytes(&self) -> usize {
        peak(&self.phases)
    }

    /// Bytes of the arena from loading on, without what prepares the data.
    pub fn training_bytes(&self) -> usize {
        let is_training = |phase: &&PlannedPhase| {
            matches!(phase.name, Phase::Load | Phase::Train(_) | Phase::Validate(_) | Phase::Sample)
        };
        self.phases.iter().filter(is_training).map(|phase| phase.peak_bytes).max().unwrap_or(0)
    }

    /// The next best candidate.
    pub fn runner_up(&self) -> Option<&PlanCandidate> {
        let others = self.candidates.iter().filter(|it| it.fits && it.choice != self.choice);
        others.min_by(|a, b| a.cost().total_cmp(&b.cost()))
    }

    /// The candidate that was chosen.
    pub fn chosen(&self) -> Option<&PlanCandidate> {
        self.candidates.iter().find(|it| it.choice == self.choice)
    }
}

fn peak(phases: &[PlannedPhase]) -> usize {
    phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
}

/// Finds the best precision that fits, and its fastest candidate that fits. If nothing fits, the error says how
/// much is missing and what would help.
pub fn choose<T: Task>(job: PlanRequest<'_, T>, budget: DeviceBudget<'_>) -> Result<Plan> {
    let mut search = PlanSearch::new(job, budget);
    let found = search.encoders().and_then(|(choice, before)| search.training(choice, &before));
    match found {
        Err(TrainerError::TooLarge { phase, needed, limit, .. }) => {
            let remedy = remedy::remedy(job, budget)?;
            Err(TrainerError::TooLarge { phase, needed, limit, remedy })
        }
        found => found,
    }
}

/// The plan of a run exactly as configured; fails if it does not fit.
pub fn dry_run<T: Task>(job: PlanRequest<'_, T>, budget: DeviceBudget<'_>) -> Result<Plan> {
    let mut search = PlanSearch::new(job, budget);
    let before = search.preparation(job.config)?;
    search.complete(PlanChoice::from_config(job.config), &before)
}

/// A memory level: batch settings that a run may fall back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLevel {
    /// Micro-batch size and gradient checkpointing.
    pub settings: BatchSettings,
    /// Bytes of the arena that a step and a validation need with them.
    pub peak_bytes: usize,
}

/// The memory levels from a planned job's own down, each with less memory than the one before. A fused backward pass
/// leaves the batch in one piece, and holds so little that recomputing may take more: such levels are left out.
pub fn memory_levels<T: Task>(
    job: PlanRequest<'_, T>,
    budget: DeviceBudget<'_>,
) -> Result<Vec<MemoryLevel>> {
    let first = BatchSettings::from_config(job.config);
    // A micro-batch is not larger than the batch.
    let first =
        BatchSettings { micro_batch: first.micro_batch.min(job.config.train.batch_size), ..first };
    let mut levels: Vec<MemoryLevel> = Vec::new();
    let is_fused = job.config.train.fused_backward_pass;
    let next = |settings: &BatchSettings| {
        if is_fused { settings.with_more_recompute() } else { settings.with_less_memory() }
    };
    for settings in std::iter::successors(Some(first), next) {
        let choice = PlanChoice {
            micro_batch: settings.micro_batch,
            recompute: settings.recompute,
            ..PlanChoice::from_config(job.config)
        };
        let config = &job.config.with_choice(&choice);
        let PlanRequest { task, dataset, .. } = job;
        let dry_run = DryRun { task, config, dataset, kind: budget.kind };
        let step = dry_run.step(budget.rates)?.peak_bytes;
        let level = MemoryLevel { settings, peak_bytes: step.max(dry_run.validation_peak()?) };
        if !is_fused || levels.last().is_none_or(|last| level.peak_bytes < last.peak_bytes) {
            levels.push(level);
        }
    }
    Ok(levels)
}

/// The kernel work of a step of full batches of one size, counted on the meta device, each with how often it
/// is done.
pub fn step_work<T: Task>(
    PlanRequest { task, config, dataset }: PlanRequest<'_, T>,
    kind: DeviceKind,
    size: T::Size,
) -> Result<Vec<(usize, WorkStats)>> {
    DryRun { task, config, dataset, kind }.step_work(size)
}

/// The memory over a step of a plan, for the largest size.
pub fn recorded_step<T: Task>(
    PlanRequest { task, config, dataset }: PlanRequest<'_, T>,
    plan: &Plan,
    kind: DeviceKind,
) -> Result<MemoryRecording> {
    let config = &config.with_choice(&plan.choice);
    DryRun { task, config, dataset, kind }.recorded_step()
}

struct PlanSearch<'a, T: Task> {
    job: PlanRequest<'a, T>,
    budget: DeviceBudget<'a>,
    host_bytes: usize,
    /// Bytes outside the arena while it encodes.
    encoding_bytes: usize,
    candidates: Vec<PlanCandidate>,
}

impl<'a, T: Task> PlanSearch<'a, T> {
    fn new(job: PlanRequest<'a, T>, budget: DeviceBudget<'a>) -> Self {
        let PlanRequest { task, config, dataset } = job;
        let (host_bytes, encoding_bytes) = match budget.kind {
            DeviceKind::Cpu { threads, .. } => (
                host::program_bytes(threads) + task.host_bytes(config, dataset),
                host::encoding_bytes(threads),
            ),
            DeviceKind::Cuda { .. } if !budget.shares_memory() => (0, 0),
            // One thread reads batches, and none computes.
            kind @ (DeviceKind::Cuda { .. } | DeviceKind::Gpu { .. }) => {
                let driver = host::driver_bytes(kind);
                let training = host::program_bytes(1) + task.host_bytes(config, dataset);
                (driver + training, driver + host::encoding_bytes(1))
            }
        };
        Self { job, budget, host_bytes, encoding_bytes, candidates: Vec::new() }
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
        let images = limit.saturating_sub(self.decoding_beside(0));
        let limits = PreparationLimits { images, texts: limit };
        let mut before = self.dry_run(config).preparation(limits)?;
        let phases = before.stages.iter().map(|stage| stage.memory);
        if let Some(phase) = phases.clone().find(|phase| phase.peak_bytes > limit) {
            return Err(self.too_large(&phase.name, phase.peak_bytes + self.encoding_bytes));
        }
        before.decoding_bytes = self.decoding(&before)?;
        Ok(before)
    }

    /// Bytes for decoding images: for as many at once as there is room for beside the arena.
    fn decoding(&self, before: &Preparation) -> Result<usize> {
        let need = &self.job.dataset.decoding;
        let arena = self.images_peak(before) + self.encoding_bytes;
        // Some images are counted with the program.
        let (limit, beside) = match self.budget.host_bytes {
            Some(limit) if !self.budget.shares_memory() => (limit, 0),
            _ if !self.budget.shares_memory() => (usize::MAX, 0),
            _ => (self.budget.limit_bytes, arena.saturating_sub(SMALL_BYTES)),
        };
        need.fit(limit.saturating_sub(beside)).ok_or_else(|| TrainerError::DecodingTooLarge {
            path: need.largest.clone(),
            needed: beside.saturating_add(need.least_bytes()),
            limit,
        })
    }

    /// Bytes beside the arena and the program for images, with so many for decoders, or with enough for one.
    fn decoding_beside(&self, decoding_bytes: usize) -> usize {
        let DecodingNeed { largest_bytes, waiting_bytes, .. } = &self.job.dataset.decoding;
        let bytes = waiting_bytes.saturating_add(decoding_bytes.max(*largest_bytes));
        if self.budget.shares_memory() { bytes.saturating_sub(SMALL_BYTES) } else { 0 }
    }

    /// The peak of the arena while images are decoded: those of prompts while texts are encoded.
    fn images_peak(&self, before: &Preparation) -> usize {
        let has_references = !self.job.dataset.references_to_encode.is_empty();
        let is_decoding =
            |stage: &&cost::Stage| stage.memory.name == IMAGES_PHASE || has_references;
        let peaks = before.stages.iter().filter(is_decoding).map(|stage| stage.memory.peak_bytes);
        peaks.max().unwrap_or(0)
    }

    /// The least memory that the whole program can take; beyond `limit` it may be an underestimate.
    fn least_bytes(&self, config: &RunConfig, limit: usize) -> Result<usize> {
        let dry_run = self.dry_run(config);
        let beside = self.beside_arena_bytes(self.offloaded_bytes(config)?);
        // Checked first: most jobs that do not fit fail here.
        let step = dry_run.step(self.budget.rates)?.peak_bytes + beside;
        if step > limit {
            return Ok(step);
        }
        let before = dry_run.preparation(PreparationLimits::default())?;
        let decoding = self.images_peak(&before) + self.decoding_beside(0);
        let before = before.stages.iter().map(|stage| stage.memory.peak_bytes).max();
        let before = before.map(|peak| peak.max(decoding) + self.encoding_bytes);
        let (training, _) = dry_run.training()?;
        let shown = dry_run.samples(0)?.phase;
        let training = training.iter().chain(&shown).map(|phase| phase.peak_bytes + beside).max();
        Ok(step.max(before.unwrap_or(0)).max(training.unwrap_or(0)))
    }

    /// The best precision that fits, and its fastest candidate.
    fn training(&mut self, choice: PlanChoice, before: &Preparation) -> Result<Plan> {
        let mut failed = None;
        for Precisions { is_fused, quantise, optimizer } in precisions(self.job.config) {
            let mut fitting: Vec<PlanCandidate> = Vec::new();
            for offload in offloads(self.job.config, self.budget) {
                // Offloading only pays where it avoids gradient checkpointing.
                if fitting.iter().any(|of| !of.choice.recompute.recomputes_any()) {
                    break;
                }
                let fused_backward_pass = is_fused;
                let choice =
                    PlanChoice { fused_backward_pass, offload, quantise, optimizer, ..choice };
                match self.fitting_candidates(choice) {
                    Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                    found => fitting.extend(found?),
                }
            }
            fitting.sort_by(|a, b| a.cost().total_cmp(&b.cost()));
            for PlanCandidate { choice, .. } in fitting {
                match self.complete(choice, before) {
                    Err(error @ TrainerError::TooLarge { .. }) => failed = Some(error),
                    plan => return plan,
                }
            }
        }
        Err(failed.unwrap_or_else(|| self.step_too_large()))
    }

    /// Bytes of offloaded blocks; fails if they do not fit into main memory.
    fn offloaded_bytes(&self, config: &RunConfig) -> Result<usize> {
        let offloaded = self.dry_run(config).offloaded_bytes()?;
        match self.budget.host_bytes {
            Some(limit) if offloaded > limit => {
                let (phase, needed) = ("the model's blocks in main memory".into(), offloaded);
                Err(TrainerError::TooLarge { phase, needed, limit, remedy: None })
            }
            _ => Ok(offloaded),
        }
    }

    /// Bytes outside the arena in the same memory.
    fn beside_arena_bytes(&self, offloaded: usize) -> usize {
        if self.budget.shares_memory() { self.host_bytes + offloaded } else { self.host_bytes }
    }

    /// The candidates whose largest step fits; fails if the offloaded blocks do not fit into main memory.
    fn fitting_candidates(&mut self, choice: PlanChoice) -> Result<Vec<PlanCandidate>> {
        let mut fitting: Vec<PlanCandidate> = Vec::new();
        let offloaded = self.offloaded_bytes(&self.job.config.with_choice(&choice))?;
        let limit = self.budget.limit_bytes.saturating_sub(self.beside_arena_bytes(offloaded));
        // From the smallest up: where that does not fit, nothing does.
        for BatchSettings { micro_batch: micro, recompute } in
            batch_options(self.job.config, choice.fused_backward_pass).into_iter().rev()
        {
            let choice = PlanChoice { micro_batch: micro, recompute, ..choice };
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
        let offloaded_bytes = self.offloaded_bytes(&config)?;
        let host_bytes = self.beside_arena_bytes(offloaded_bytes);
        let limit = self.budget.limit_bytes.saturating_sub(host_bytes);
        let dry_run = self.dry_run(&config);
        let known = self.candidates.iter().find(|of| of.choice == choice).map(|of| of.secs);
        let step_secs = match known {
            Some(secs) => secs,
            None => dry_run.step(self.budget.rates)?.secs,
        };
        let (training, validation) = dry_run.training()?;
        let SampleEstimate { tiling, phase, cost } = dry_run.samples(limit)?;
        let times = dry_run.times(step_secs, before, &validation, &cost, self.budget.rates)?;
        let save = dry_run.saving()?;
        let training: Vec<PlannedPhase> = training.into_iter().chain(phase).chain([save]).collect();
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
        let decoding = self.images_peak(before) + self.decoding_beside(before.decoding_bytes);
        let encoding_peak = peak(&encoding).max(decoding) + self.encoding_bytes;
        let total_bytes = encoding_peak.max(peak(&training) + host_bytes);
        Ok(Plan {
            choice,
            phases: [encoding, training].concat(),
            resident_bytes: dry_run.resident_bytes()?,
            host_bytes,
            offloaded_bytes,
            total_bytes,
            tiling,
            encoder_loading: before.encoder_loading,
            decoding_bytes: before.decoding_bytes,
            step_secs,
            times,
            candidates: std::mem::take(&mut self.candidates),
        })
    }

    fn dry_run<'r>(&'r self, config: &'r RunConfig) -> DryRun<'r, T> {
        let PlanRequest { task, dataset, .. } = self.job;
        DryRun { task, config, dataset, kind: self.budget.kind }
    }

    /// The error that the smallest candidate does not fit.
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
