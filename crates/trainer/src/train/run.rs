//! The loop: take a step (`step.rs`), look at it, now and then measure, draw and save. It prints nothing;
//! what happens is told as events. All that it remembers between steps is a [`Progress`] and the tensors
//! of a [`Session`], which is what a checkpoint holds.

use std::path::Path;
use std::time::Instant;

use compute::{ComputeError, Device};
use weights::WeightsError;

use super::Teller;
use super::checkpoint::{Checkpoints, Progress};
use super::divergence::{self, Divergence};
use super::health::{self, Finding};
use super::identity::Identity;
use super::lesson::Feed;
use super::meter::{self, Meter, SHOW};
use super::pacing::Pacing;
use super::session::{Session, Trained};
use crate::config::optimizer::Schedule;
use crate::config::{RunConfig, Switch};
use crate::error::{Result, TrainerError};
use crate::event::{End, Event, Step, Why};
use crate::optim::schedule;

/// A run with all that it works with.
pub struct Run<'a, 't, F: Feed> {
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
    /// Who is told.
    pub teller: &'a mut Teller<'t>,
}

impl<F: Feed> Run<'_, '_, F> {
    /// Goes on to the end, or until it is asked to stop. What was done is saved either way.
    pub fn go(&mut self) -> Result<End> {
        let begun = Instant::now();
        let secs_before = self.progress.secs;
        if self.progress.step == 0 || self.progress.is_look_due {
            self.look()?;
        }
        let mut ahead = self.feed.read_from(self.progress.batches);
        // One that was over, and was killed before its result was written, is not trained further.
        let mut why = self.plateau();
        why = why.or((self.progress.step >= self.total_steps).then_some(Why::Finished));
        while why.is_none() {
            let step = self.step(&mut ahead)?;
            self.teller.tell(&Event::Step(step.clone()))?;
            self.progress.secs = secs_before + begun.elapsed().as_secs_f64();
            why = self.judge(&step)?;
            why = why.or(self.look()?);
            why = why.or((self.progress.step == self.total_steps).then_some(Why::Finished));
            why = why.or((!self.teller.goes_on()).then_some(Why::Interrupted));
            if why.is_some() || is_due(self.config.output.save_every, self.progress.step) {
                self.save()?;
            } else if self.config.output.keep_best && self.progress.is_best() {
                self.save_as(true)?;
            }
        }
        let (secs, peak_bytes) = (begun.elapsed().as_secs_f64(), self.meter.peak_bytes);
        let energy = self.pacing.energy();
        let (step, why) = (self.progress.step, why.unwrap_or(Why::Finished));
        let best = self.checkpoints.best(&self.progress);
        Ok(End { step, why, secs, peak_bytes, energy, loss: None, best })
    }

    /// Warns of a result that is of no use, which then is none unless that is forced.
    pub fn judge_result(&mut self, end: End, trained: &Trained, is_forced: bool) -> Result<End> {
        let divergence = Divergence::of(&self.progress.health, trained);
        let Some(divergence) = divergence.filter(|_| end.why.is_done()) else { return Ok(end) };
        self.warn(divergence.to_string(), divergence::HINT)?;
        Ok(if is_forced { end } else { End { why: Why::Diverged, ..end } })
    }

    /// Tells of the phases that ended; returns the most that one of them took.
    pub(super) fn end_phases(&mut self) -> Result<usize> {
        let ended = self.meter.end();
        self.teller.tell_each(&ended.events)?;
        Ok(ended.peak_bytes)
    }

    pub(super) fn learning_rate(&self, step: u64) -> f64 {
        let settings = &self.config.optimizer;
        let (_, lowered) = self.progress.rate;
        settings.learning_rate * schedule::factor(settings, step, self.total_steps, lowered)
    }

    /// Whether the run is learning.
    fn judge(&mut self, step: &Step) -> Result<Option<Why>> {
        let found = self.progress.health.observe(step);
        if self.progress.step.is_multiple_of(health::WINDOW as u64) {
            self.tell_health()?;
        }
        for finding in &found {
            self.warn(finding.to_string(), finding.hint())?;
        }
        Ok(found.iter().any(Finding::is_fatal).then_some(Why::Unhealthy))
    }

    fn tell_health(&mut self) -> Result<()> {
        let health = &self.progress.health;
        let Some((before, now)) = health.windows() else { return Ok(()) };
        self.teller.tell(&Event::Health {
            step: self.progress.step,
            loss: now.mean,
            spread: now.spread,
            trend: now.mean / before.mean - 1.0,
            gradient_norm: health.gradient_norm(),
            skipped: health.n_skipped(),
        })
    }

    pub(super) fn warn(&mut self, text: String, hint: &str) -> Result<()> {
        let (step, hint) = (self.progress.step, Some(hint.into()));
        self.teller.tell(&Event::Warning { step, text, hint })
    }

    /// Measures and shows what is due.
    fn look(&mut self) -> Result<Option<Why>> {
        let (step, config) = (self.progress.step, self.config);
        let is_last = step == self.total_steps;
        let mut why = None;
        let every = Switch::On(config.train.validate_every);
        if self.feed.n_held_out() > 0 && (is_due(every, step) || is_last) {
            why = self.validate()?;
        }
        if is_due(config.material.shown_every(), step) || (is_last || step == 0) {
            self.show()?;
        }
        self.progress.is_look_due = false;
        Ok(why)
    }

    /// The loss on samples that are not trained on.
    fn validate(&mut self) -> Result<Option<Why>> {
        let loss = self.fitting(Self::measure)?;
        self.end_phases()?;
        self.teller.tell(&Event::Validation { step: self.progress.step, loss })?;
        self.progress.measured(loss);
        self.lower_rate(loss)?;
        self.progress.patience.observe(loss);
        Ok(self.plateau())
    }

    /// One sample at a time.
    fn measure(&mut self) -> Result<f64> {
        let Self { session, feed, meter, .. } = self;
        session.averaged(|session| {
            let (mut sum, mut weight) = (0.0, 0.0);
            for index in 0..feed.n_held_out() {
                let (size, portions) = feed.held_out(index)?;
                meter.begin(meter::validate(size));
                for (counts, portion) in portions {
                    sum += counts * session.measure(&portion)?;
                    weight += counts;
                }
            }
            Ok(sum / weight)
        })
    }

    /// Whether the loss has not fallen for as long as a run may last without.
    fn plateau(&self) -> Option<Why> {
        let n_without = self.progress.patience.n_without();
        let is_over =
            matches!(self.config.train.stop_after_plateau, Switch::On(most) if n_without >= most);
        is_over.then_some(Why::Plateau)
    }

    /// Lowers the learning rate where the loss does not fall, if it is to be.
    fn lower_rate(&mut self, loss: f64) -> Result<()> {
        let (plateau, lowered) = &mut self.progress.rate;
        if self.config.optimizer.schedule != Schedule::Plateau
            || plateau.observe(loss) < schedule::PATIENCE
        {
            return Ok(());
        }
        plateau.restart();
        *lowered += 1;
        let rate = self.learning_rate(self.progress.step + 1);
        let text = format!("the loss does not fall: the learning rate is {rate:.2e} from here");
        self.warn(text, "train.stop_after_plateau ends a run that learns no more")
    }

    fn show(&mut self) -> Result<()> {
        self.meter.begin(SHOW);
        let Self { session, device, feed, folder, progress, teller, .. } = self;
        let at = (*folder, progress.step);
        let goes_on = || teller.goes_on();
        let shown = session.averaged(|session| feed.show(device, session.learner(), at, &goes_on));
        self.end_phases()?;
        match shown {
            Ok(events) => self.teller.tell_each(&events),
            // The run ends in order, with what it has learnt.
            Err(TrainerError::Weights(WeightsError::Cancelled)) => Ok(()),
            Err(TrainerError::Compute(error @ ComputeError::OutOfMemory { .. })) => {
                self.go_on_unseen(&error)
            }
            Err(error) => Err(error),
        }
    }

    /// What is learnt does not depend on what is shown.
    fn go_on_unseen(&mut self, error: &ComputeError) -> Result<()> {
        if std::mem::replace(&mut self.is_showing_warned, true) {
            return Ok(());
        }
        let text = format!("no sample is shown where there is no room: {error}");
        self.warn(text, "a smaller sample, or a higher --limit; what is learnt is the same")
    }

    pub(super) fn save(&mut self) -> Result<()> {
        self.save_as(false)
    }

    /// Saves; only for the held-out loss if `is_extra`.
    fn save_as(&mut self, is_extra: bool) -> Result<()> {
        let Self { progress, checkpoints, .. } = self;
        let replaced = progress.saves(is_extra);
        let path = checkpoints.save(&mut self.session, progress, &self.identity)?;
        checkpoints.remove_old(progress, replaced)?;
        self.teller.tell(&Event::Checkpoint { step: self.progress.step, path })
    }
}

/// Whether something that is done every so many steps is due.
fn is_due(every: Switch<u64>, step: u64) -> bool {
    match every {
        Switch::On(every) => step.is_multiple_of(every),
        Switch::Off => false,
    }
}
