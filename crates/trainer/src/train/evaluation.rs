//! Between steps: the held-out loss, and samples. Neither changes the training, but for the learning rate of a
//! job with the plateau schedule.

use std::time::Instant;

use compute::ComputeError;

use super::decision::is_due;
use super::pacing::{PacedProgress, Pacer};
use super::run::TrainingRun;
use crate::config::Switch;
use crate::config::optimizer::LrSchedule;
use crate::error::{Result, TrainerError};
use crate::event::{Event, Phase, RewardMetrics, WarningKind};
use crate::optim::schedule;
use crate::task::traits::{DataLoader, HeldOutPass};

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Validates and writes samples when due. If somebody asks to stop, what is not complete is done again by the run
    /// that resumes.
    pub(super) fn evaluate(&mut self) -> Result<()> {
        if !self.progress.is_evaluation_due {
            if !self.is_sample_asked() {
                return Ok(());
            }
            // Its loss is known. Of a run that goes on with another prompt there are no samples of that yet.
            (self.progress.is_evaluation_due, self.progress.is_validated) = (true, true);
        }
        let (step, config) = (self.progress.step, self.config);
        let is_last = step == self.total_steps;
        let every = Switch::On(config.train.validate_every);
        let is_validation_due = is_due(every, step) || is_last;
        if self.loader.n_held_out() > 0 && is_validation_due && !self.progress.is_validated {
            self.validate()?;
        }
        self.progress.is_validated = true;
        let is_sample_due = is_due(config.data.sample_every(), step) || is_last || step == 0;
        if is_sample_due || self.is_sample_asked() {
            self.write_samples()?;
        }
        (self.progress.is_evaluation_due, self.progress.is_validated) = (false, false);
        Ok(())
    }

    /// The loss on samples that are not trained on.
    fn validate(&mut self) -> Result<()> {
        let loss = self.with_fallback(|run| {
            run.session.reset_metrics();
            run.validation_loss()
        })?;
        self.end_phases()?;
        let step = self.progress.step;
        self.events.emit(Event::Validation { step, loss })?;
        if let Some(metrics) = self.session.reward_metrics() {
            let metrics = metrics.into_iter().map(|(name, value)| (format!("eval_{name}"), value));
            self.events.emit(Event::Rewards(RewardMetrics { step, metrics: metrics.collect() }))?;
        }
        self.emit_timesteps(true)?;
        self.progress.record_validation(loss);
        self.lower_rate(loss)?;
        self.progress.patience.observe(loss);
        Ok(())
    }

    /// Of averaged parameters, if there are any.
    fn validation_loss(&mut self) -> Result<f64> {
        let (device, stop) = (self.device, self.events.cancel_token());
        self.session.swap_averaged()?;
        let loss = device.cancellable(stop, || self.held_out_loss());
        self.session.swap_averaged()?;
        loss
    }

    /// The mean over all held-out samples, in micro-batches of one size that are as large as those of a step.
    fn held_out_loss(&mut self) -> Result<f64> {
        let (mut sum, mut weight) = (0.0, 0.0);
        for (size, mut left) in self.loader.held_out_passes() {
            self.meter.begin(Phase::validate(size));
            while !left.is_empty() {
                self.wait_while_paused()?;
                let begun = Instant::now();
                let n = self.pacing.batch_settings().micro_batch.min(left.len());
                let passes: Vec<_> = left.drain(..n).collect();
                let (added, loss) = self.loss_of(&passes)?;
                sum += added * loss;
                weight += added;
                self.pacer().rest_after(begun.elapsed());
            }
        }
        Ok(sum / weight)
    }

    /// The weight of some held-out samples, and their mean loss.
    fn loss_of(&self, passes: &[HeldOutPass]) -> Result<(f64, f64)> {
        let trainable = self.session.trainable_model();
        if let Some(validated) = self.loader.validate(self.device, trainable, passes)? {
            return Ok(validated);
        }
        let (weight, micro_batch) = self.loader.held_out(passes)?;
        // No token counts, as in a prompt without its answer.
        if weight == 0.0 {
            return Ok((0.0, 0.0));
        }
        Ok((weight, self.session.eval_loss(&micro_batch)?))
    }

    /// Lowers the learning rate where the loss has stopped falling, if the schedule asks for it.
    fn lower_rate(&mut self, loss: f64) -> Result<()> {
        let (plateau, lowered) = &mut self.progress.lr_plateau;
        if self.config.optimizer.lr_scheduler != LrSchedule::Plateau
            || plateau.observe(loss) < schedule::PATIENCE
        {
            return Ok(());
        }
        plateau.restart();
        *lowered += 1;
        let learning_rate = self.learning_rate(self.progress.step + 1);
        self.warn(WarningKind::RateLowered { learning_rate })
    }

    fn write_samples(&mut self) -> Result<()> {
        self.meter.begin(Phase::Sample);
        let Self { session, device, loader, folder, progress, events, pacing, .. } = self;
        let step = progress.step;
        let pace = PacedProgress::new(Pacer { pacing, device, events, step });
        let should_continue = || pace.should_continue();
        let written = session.with_averaged(|session| {
            let trainable = session.trainable_model();
            device.cancellable(events.cancel_token(), || {
                loader.write_samples(device, trainable, folder, step, &should_continue)
            })
        });
        self.end_phases()?;
        match written {
            Ok(events) => self.events.emit_all(events),
            Err(TrainerError::Compute(ComputeError::OutOfMemory {
                asked: asked_bytes,
                in_use: in_use_bytes,
                limit: limit_bytes,
                ..
            })) => {
                let kind =
                    WarningKind::NoMemoryForSamples { asked_bytes, in_use_bytes, limit_bytes };
                self.warn_sampling(kind)
            }
            Err(error) if error.is_of_files() => {
                let problem = error.with_cause();
                self.warn_sampling(WarningKind::SamplesNotWritten { problem })
            }
            Err(error) => Err(error),
        }
    }

    /// Training continues without samples.
    fn warn_sampling(&mut self, kind: WarningKind) -> Result<()> {
        self.refuse_samples(&kind.to_string())?;
        if std::mem::replace(&mut self.is_sampling_warned, true) {
            return Ok(());
        }
        self.warn(kind)
    }
}
