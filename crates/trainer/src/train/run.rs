//! The training loop: take a step (`step.rs`), check its health, validate and write samples when due
//! (`evaluation.rs`), and save or end as [`decide`] says. It prints nothing; it emits events. Its only state between
//! steps is a [`TrainProgress`] and the tensors of a [`Session`], which is what a checkpoint holds.

use std::path::Path;
use std::time::Instant;

use compute::Device;

use super::checkpoint::{Checkpoints, ResumePoint, TrainProgress};
use super::data_parallel::DataParallel;
use super::decision::{LoopDecision, RunStatus, SaveReason, decide};
use super::divergence;
use super::fallback::unless_cancelled;
use super::identity::Identity;
use super::meter::PhaseMeter;
use super::pacing::Pacing;
use crate::config::{RunConfig, Switch};
use crate::error::Result;
use crate::event::{
    EndReason, Event, EventSink, PendingRequest, Phase, RunEnd, Warning, WarningKind,
};
use crate::optim::schedule;
use crate::task::session::Session;
use crate::task::traits::DataLoader;

/// A training run.
pub struct TrainingRun<'a, D: DataLoader> {
    /// The job.
    pub config: &'a RunConfig,
    /// Where it computes.
    pub device: &'a Device,
    /// Micro-batch size, gradient checkpointing and duty cycle.
    pub pacing: Pacing,
    /// The model in training.
    pub session: Session<'a, D::Task>,
    /// The ranks it shares its steps with, if there are any.
    pub parallel: Option<DataParallel<'a>>,
    /// Its batches.
    pub loader: &'a mut D,
    /// Its checkpoints.
    pub checkpoints: Checkpoints,
    /// What checkpoints belong to.
    pub identity: Identity,
    /// The run's folder.
    pub folder: &'a Path,
    /// Steps taken so far, and other state.
    pub progress: TrainProgress,
    /// Steps to take.
    pub total_steps: u64,
    /// Memory of its phases.
    pub meter: &'a mut PhaseMeter,
    /// Where the last checkpoint resumes.
    pub saved: Option<ResumePoint>,
    /// Whether the warning was emitted that there is no memory for samples.
    pub is_sampling_warned: bool,
    /// What people asked for since the last step.
    pub asked: Vec<PendingRequest>,
    /// Where it emits events.
    pub events: &'a EventSink<'a>,
}

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Runs to the end, or until it is asked to stop. Saves a checkpoint either way, and if it fails by a file.
    pub fn train_loop(&mut self) -> Result<RunEnd> {
        let end = self.steps_to_end();
        end.inspect_err(|error| self.save_before_failing(error))
    }

    fn steps_to_end(&mut self) -> Result<RunEnd> {
        let begun = Instant::now();
        let secs_before = self.progress.secs;
        // A run that was interrupted has an evaluation to do, and a finished one that was killed before its
        // export takes no more steps.
        let mut decision = self.decide_with_all(false)?;
        let mut ahead = self.loader.read_from(self.progress.batches);
        let reason = loop {
            if let Some(reason) = decision.end {
                break reason;
            }
            let step = unless_cancelled(self.step(&mut ahead))?;
            self.progress.secs = secs_before + begun.elapsed().as_secs_f64();
            let is_unhealthy = step.map_or(Ok(false), |step| self.emit_step(step))?;
            decision = self.decide_with_all(is_unhealthy)?;
        };
        let (secs, peak_bytes) = (begun.elapsed().as_secs_f64(), self.meter.peak_bytes);
        let (step, energy) = (self.progress.step, self.pacing.energy());
        let best = self.checkpoints.best(&self.progress);
        Ok(RunEnd { step, reason, secs, peak_bytes, energy, loss: None, best })
    }

    /// Validates and writes samples if that is to be done; decides, and saves if that is decided.
    pub(super) fn evaluate_and_decide(
        &mut self,
        is_unhealthy: bool,
        is_other_asked: bool,
    ) -> Result<LoopDecision> {
        self.hear_requests()?;
        unless_cancelled(self.evaluate())?;
        let is_interrupted = is_other_asked || !self.events.should_continue();
        let status = RunStatus { is_unhealthy, is_interrupted, ..self.status() };
        let decision = decide(status, &self.config.output);
        decision.save.map_or(Ok(()), |save| self.save(save))?;
        self.answer_requests()?;
        Ok(decision)
    }

    /// As far as the progress knows it.
    fn status(&self) -> RunStatus {
        let n_without = self.progress.patience.n_without();
        let limit = self.config.train.stop_after_plateau;
        RunStatus {
            step: self.progress.step,
            total_steps: self.total_steps,
            is_plateau: matches!(limit, Switch::On(limit) if n_without >= limit),
            is_best: self.progress.is_best(),
            is_evaluation_due: self.progress.is_evaluation_due,
            is_save_asked: self.is_save_asked(),
            is_change_asked: self.is_change_asked(),
            ..RunStatus::default()
        }
    }

    /// Warns of a diverged result, which is not exported unless forced.
    pub fn check_divergence(&mut self, end: RunEnd, is_forced: bool) -> Result<RunEnd> {
        if !end.reason.is_done() {
            return Ok(end);
        }
        let Self { session, progress, .. } = self;
        let divergence = session
            .with_exported(|it| divergence::find(&progress.health, &it.trained_weights()))?;
        let Some(divergence) = divergence else { return Ok(end) };
        self.warn(WarningKind::Diverged(divergence))?;
        Ok(if is_forced { end } else { RunEnd { reason: EndReason::Diverged, ..end } })
    }

    /// Emits the phases that ended; returns the highest of their peaks.
    pub(super) fn end_phases(&mut self) -> Result<usize> {
        let ended = self.meter.end();
        self.events.emit_all(ended.events)?;
        Ok(ended.peak_bytes)
    }

    pub(super) fn learning_rate(&self, step: u64) -> f64 {
        let settings = &self.config.optimizer;
        let (_, lowered) = self.progress.lr_plateau;
        settings.learning_rate * schedule::lr_factor(settings, step, self.total_steps, lowered)
    }

    pub(super) fn warn(&mut self, kind: WarningKind) -> Result<()> {
        self.events.emit(Event::Warning(Warning { step: self.progress.step, kind }))
    }

    /// Saves a checkpoint, unless the last one is the same: a run that is asked to stop while it saves ends with that.
    pub(super) fn save(&mut self, save: SaveReason) -> Result<()> {
        if self.parallel.as_ref().is_some_and(|parallel| !parallel.is_saver()) {
            return Ok(());
        }
        let Self { progress, checkpoints, saved, meter, .. } = self;
        if saved.is_some() && *saved == progress.resumable_at() {
            // A run that was killed between the two has old ones left.
            return checkpoints.remove_old(progress, None);
        }
        meter.begin(Phase::Save);
        let replaced = progress.record_save(save == SaveReason::Best);
        let path = checkpoints.save(&mut self.session, progress, &self.identity, self.events)?;
        checkpoints.remove_old(progress, replaced)?;
        *saved = progress.resumable_at();
        self.end_phases()?;
        self.events.emit(Event::Checkpoint { step: self.progress.step, path })
    }
}
