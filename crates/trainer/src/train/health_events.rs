//! A step's event, and those about its health, which `health.rs` judges.

use super::health;
use super::run::TrainingRun;
use crate::error::Result;
use crate::event::{Event, RewardMetrics, StepMetrics, TimestepLosses};
use crate::task::traits::DataLoader;

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Emits a step and warnings about it; returns whether the run has to end.
    pub(super) fn emit_step(&mut self, step: StepMetrics) -> Result<bool> {
        let judges_loss = !self.session.is_policy_gradient();
        let mut found = self.progress.health.observe(&step, judges_loss);
        let policy = self.session.policy_metrics(step.step);
        self.events.emit(Event::Step(step))?;
        if let Some(policy) = policy {
            found.extend(self.progress.health.observe_policy(&policy));
            self.events.emit(Event::Policy(policy))?;
        }
        if let Some(metrics) = self.session.reward_metrics() {
            let step = self.progress.step;
            found.extend(self.progress.health.observe_rewards(&metrics));
            self.events.emit(Event::Rewards(RewardMetrics { step, metrics }))?;
        }
        self.emit_timesteps(false)?;
        if self.progress.step.is_multiple_of(health::WINDOW as u64) {
            self.emit_health()?;
        }
        let is_fatal = found.iter().any(health::is_fatal);
        found.into_iter().try_for_each(|kind| self.warn(kind))?;
        Ok(is_fatal)
    }

    /// Emits losses by timestep that were noted since the last reset, if the task has timesteps.
    pub(super) fn emit_timesteps(&mut self, is_held_out: bool) -> Result<()> {
        let (step, tenths) = (self.progress.step, self.session.timestep_losses());
        if tenths.is_empty() {
            return Ok(());
        }
        self.events.emit(Event::Timesteps(TimestepLosses { step, is_held_out, tenths }))
    }

    fn emit_health(&mut self) -> Result<()> {
        let health = &self.progress.health;
        let Some((before, now)) = health.windows() else { return Ok(()) };
        self.events.emit(Event::Health {
            step: self.progress.step,
            loss: now.mean,
            spread: now.spread,
            trend: now.mean / before.mean - 1.0,
            grad_norm: health.grad_norm(),
            skipped: health.n_skipped(),
        })
    }
}
