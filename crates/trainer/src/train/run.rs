//! The loop: take a step (`step.rs`), look at what it came to, now and then measure and show (`look.rs`), and do what
//! [`decide`] says. It prints nothing; what happens is emitted as events. All that it remembers between steps is a
//! [`TrainProgress`] and the tensors of a [`Session`], which is what a checkpoint holds.

use std::path::Path;
use std::time::Instant;

use compute::Device;

use super::checkpoint::{Checkpoints, TrainProgress};
use super::decision::{RunStatus, SaveReason, decide};
use super::divergence;
use super::health;
use super::identity::Identity;
use super::meter::PhaseMeter;
use super::pacing::Pacing;
use crate::config::{RunConfig, Switch};
use crate::error::Result;
use crate::event::{EndReason, Event, EventSink, RunEnd, StepMetrics, Warning, WarningKind};
use crate::optim::schedule;
use crate::task::session::{Session, TrainedWeights};
use crate::task::traits::DataLoader;

/// A run with all that it works with.
pub struct TrainingRun<'a, F: DataLoader> {
    /// The job.
    pub config: &'a RunConfig,
    /// Where it computes.
    pub device: &'a Device,
    /// In what micro-batches, and how fast.
    pub pacing: Pacing,
    /// What is trained.
    pub session: Session<'a, F::Task>,
    /// What it is trained on.
    pub loader: &'a mut F,
    /// Where it is saved.
    pub checkpoints: Checkpoints,
    /// What checkpoints belong to.
    pub identity: Identity,
    /// The run's folder.
    pub folder: &'a Path,
    /// How far it is.
    pub progress: TrainProgress,
    /// How far it goes.
    pub total_steps: u64,
    /// What its phases take.
    pub meter: &'a mut PhaseMeter,
    /// Whether it was said that there is no room to show anything in.
    pub is_sampling_warned: bool,
    /// Where it says what happens.
    pub events: &'a EventSink<'a>,
}

impl<F: DataLoader> TrainingRun<'_, F> {
    /// Goes on to the end, or until it is asked to stop. What was done is saved either way.
    pub fn train_loop(&mut self) -> Result<RunEnd> {
        let begun = Instant::now();
        let secs_before = self.progress.secs;
        if self.progress.step == 0 || self.progress.is_look_due {
            self.evaluate()?;
        }
        let mut ahead = self.loader.read_from(self.progress.batches);
        // One that was over, and was killed before its result was written, is not trained further.
        let mut decision = decide(self.status(), &self.config.output);
        let why = loop {
            if let Some(why) = decision.end {
                break why;
            }
            let step = self.step(&mut ahead)?;
            self.events.emit(Event::Step(step.clone()))?;
            self.progress.secs = secs_before + begun.elapsed().as_secs_f64();
            let is_unhealthy = self.check_health(&step)?;
            self.evaluate()?;
            let is_interrupted = !self.events.should_continue();
            let standing = RunStatus { is_unhealthy, is_interrupted, ..self.status() };
            decision = decide(standing, &self.config.output);
            decision.save.map_or(Ok(()), |save| self.save(save))?;
        };
        let (secs, peak_bytes) = (begun.elapsed().as_secs_f64(), self.meter.peak_bytes);
        let (step, energy) = (self.progress.step, self.pacing.energy());
        let best = self.checkpoints.best(&self.progress);
        Ok(RunEnd { step, why, secs, peak_bytes, energy, loss: None, best })
    }

    /// As far as it is remembered.
    fn status(&self) -> RunStatus {
        let n_without = self.progress.patience.n_without();
        let most = self.config.train.stop_after_plateau;
        RunStatus {
            step: self.progress.step,
            total_steps: self.total_steps,
            is_plateau: matches!(most, Switch::On(most) if n_without >= most),
            is_best: self.progress.is_best(),
            ..RunStatus::default()
        }
    }

    /// Warns of what is wrong; whether that is reason enough to end.
    fn check_health(&mut self, step: &StepMetrics) -> Result<bool> {
        let found = self.progress.health.observe(step);
        if self.progress.step.is_multiple_of(health::WINDOW as u64) {
            self.emit_health()?;
        }
        let is_fatal = found.iter().any(health::is_fatal);
        found.into_iter().try_for_each(|kind| self.warn(kind))?;
        Ok(is_fatal)
    }

    fn emit_health(&mut self) -> Result<()> {
        let health = &self.progress.health;
        let Some((before, now)) = health.windows() else { return Ok(()) };
        self.events.emit(Event::Health {
            step: self.progress.step,
            loss: now.mean,
            spread: now.spread,
            trend: now.mean / before.mean - 1.0,
            gradient_norm: health.gradient_norm(),
            skipped: health.n_skipped(),
        })
    }

    /// Warns of a result that is of no use, which then is none unless that is forced.
    pub fn check_divergence(
        &mut self,
        end: RunEnd,
        trained: &TrainedWeights,
        is_forced: bool,
    ) -> Result<RunEnd> {
        let divergence = divergence::find(&self.progress.health, trained);
        let Some(divergence) = divergence.filter(|_| end.why.is_done()) else { return Ok(end) };
        self.warn(WarningKind::Diverged(divergence))?;
        Ok(if is_forced { end } else { RunEnd { why: EndReason::Diverged, ..end } })
    }

    /// Tells of the phases that ended; returns the most that one of them took.
    pub(super) fn end_phases(&mut self) -> Result<usize> {
        let ended = self.meter.end();
        self.events.emit_all(ended.events)?;
        Ok(ended.peak_bytes)
    }

    pub(super) fn learning_rate(&self, step: u64) -> f64 {
        let settings = &self.config.optimizer;
        let (_, lowered) = self.progress.rate;
        settings.learning_rate * schedule::lr_factor(settings, step, self.total_steps, lowered)
    }

    pub(super) fn warn(&mut self, kind: WarningKind) -> Result<()> {
        self.events.emit(Event::Warning(Warning { step: self.progress.step, kind }))
    }

    pub(super) fn save(&mut self, save: SaveReason) -> Result<()> {
        let Self { progress, checkpoints, .. } = self;
        let replaced = progress.record_save(save == SaveReason::Best);
        let path = checkpoints.save(&mut self.session, progress, &self.identity)?;
        checkpoints.remove_old(progress, replaced)?;
        self.events.emit(Event::Checkpoint { step: self.progress.step, path })
    }
}
