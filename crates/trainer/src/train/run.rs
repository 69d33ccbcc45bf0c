//! The loop: take a step (`step.rs`), look at what it came to, now and then measure and show (`look.rs`), and do what
//! [`decide`] says. It prints nothing; what happens is emitted as events. All that it remembers between steps is a
//! [`Progress`] and the tensors of a [`Session`], which is what a checkpoint holds.

use std::path::Path;
use std::time::Instant;

use compute::Device;

use super::checkpoint::{Checkpoints, Progress};
use super::decision::{Save, Standing, decide};
use super::divergence;
use super::health;
use super::identity::Identity;
use super::meter::Meter;
use super::pacing::Pacing;
use crate::config::{RunConfig, Switch};
use crate::error::Result;
use crate::event::{End, Event, Sink, Step, Warning, WarningKind, Why};
use crate::optim::schedule;
use crate::task::lesson::Feed;
use crate::task::session::{Session, Trained};

/// A run with all that it works with.
pub struct Run<'a, F: Feed> {
    /// The job.
    pub config: &'a RunConfig,
    /// Where it computes.
    pub device: &'a Device,
    /// In what portions, and how fast.
    pub pacing: Pacing,
    /// What is trained.
    pub session: Session<'a, F::Lesson>,
    /// What it is trained on.
    pub feed: &'a mut F,
    /// Where it is saved.
    pub checkpoints: Checkpoints,
    /// What checkpoints belong to.
    pub identity: Identity,
    /// The run's folder.
    pub folder: &'a Path,
    /// How far it is.
    pub progress: Progress,
    /// How far it goes.
    pub total_steps: u64,
    /// What its phases take.
    pub meter: &'a mut Meter,
    /// Whether it was said that there is no room to show anything in.
    pub is_showing_warned: bool,
    /// Where it says what happens.
    pub events: &'a Sink<'a>,
}

impl<F: Feed> Run<'_, F> {
    /// Goes on to the end, or until it is asked to stop. What was done is saved either way.
    pub fn go(&mut self) -> Result<End> {
        let begun = Instant::now();
        let secs_before = self.progress.secs;
        if self.progress.step == 0 || self.progress.is_look_due {
            self.look()?;
        }
        let mut ahead = self.feed.read_from(self.progress.batches);
        // One that was over, and was killed before its result was written, is not trained further.
        let mut decision = decide(self.standing(), &self.config.output);
        let why = loop {
            if let Some(why) = decision.end {
                break why;
            }
            let step = self.step(&mut ahead)?;
            self.events.emit(Event::Step(step.clone()))?;
            self.progress.secs = secs_before + begun.elapsed().as_secs_f64();
            let is_unhealthy = self.judge(&step)?;
            self.look()?;
            let is_interrupted = !self.events.goes_on();
            let standing = Standing { is_unhealthy, is_interrupted, ..self.standing() };
            decision = decide(standing, &self.config.output);
            decision.save.map_or(Ok(()), |save| self.save(save))?;
        };
        let (secs, peak_bytes) = (begun.elapsed().as_secs_f64(), self.meter.peak_bytes);
        let (step, energy) = (self.progress.step, self.pacing.energy());
        let best = self.checkpoints.best(&self.progress);
        Ok(End { step, why, secs, peak_bytes, energy, loss: None, best })
    }

    /// As far as it is remembered.
    fn standing(&self) -> Standing {
        let n_without = self.progress.patience.n_without();
        let most = self.config.train.stop_after_plateau;
        Standing {
            step: self.progress.step,
            total_steps: self.total_steps,
            is_plateau: matches!(most, Switch::On(most) if n_without >= most),
            is_best: self.progress.is_best(),
            ..Standing::default()
        }
    }

    /// Warns of what is wrong; whether that is reason enough to end.
    fn judge(&mut self, step: &Step) -> Result<bool> {
        let found = self.progress.health.observe(step);
        if self.progress.step.is_multiple_of(health::WINDOW as u64) {
            self.tell_health()?;
        }
        let is_fatal = found.iter().any(health::is_fatal);
        found.into_iter().try_for_each(|kind| self.warn(kind))?;
        Ok(is_fatal)
    }

    fn tell_health(&mut self) -> Result<()> {
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
    pub fn judge_result(&mut self, end: End, trained: &Trained, is_forced: bool) -> Result<End> {
        let divergence = divergence::of(&self.progress.health, trained);
        let Some(divergence) = divergence.filter(|_| end.why.is_done()) else { return Ok(end) };
        self.warn(WarningKind::Diverged(divergence))?;
        Ok(if is_forced { end } else { End { why: Why::Diverged, ..end } })
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
        settings.learning_rate * schedule::factor(settings, step, self.total_steps, lowered)
    }

    pub(super) fn warn(&mut self, kind: WarningKind) -> Result<()> {
        self.events.emit(Event::Warning(Warning { step: self.progress.step, kind }))
    }

    pub(super) fn save(&mut self, save: Save) -> Result<()> {
        let Self { progress, checkpoints, .. } = self;
        let replaced = progress.saves(save == Save::Best);
        let path = checkpoints.save(&mut self.session, progress, &self.identity)?;
        checkpoints.remove_old(progress, replaced)?;
        self.events.emit(Event::Checkpoint { step: self.progress.step, path })
    }
}
