//! What is measured and shown between steps: the held-out loss, and samples. It changes nothing of what is
//! learnt, but for the learning rate of a job whose schedule follows the loss.

use compute::ComputeError;
use weights::WeightsError;

use super::decision::is_due;
use super::run::Run;
use crate::config::Switch;
use crate::config::optimizer::Schedule;
use crate::error::{Result, TrainerError};
use crate::event::{Event, Phase, WarningKind};
use crate::optim::schedule;
use crate::task::lesson::Feed;

impl<F: Feed> Run<'_, F> {
    /// Measures and shows what is due.
    pub(super) fn look(&mut self) -> Result<()> {
        let (step, config) = (self.progress.step, self.config);
        let is_last = step == self.total_steps;
        let every = Switch::On(config.train.validate_every);
        if self.feed.n_held_out() > 0 && (is_due(every, step) || is_last) {
            self.validate()?;
        }
        if is_due(config.material.shown_every(), step) || (is_last || step == 0) {
            self.show()?;
        }
        self.progress.is_look_due = false;
        Ok(())
    }

    /// The loss on samples that are not trained on.
    fn validate(&mut self) -> Result<()> {
        let loss = self.fitting(Self::measure)?;
        self.end_phases()?;
        self.events.emit(Event::Validation { step: self.progress.step, loss })?;
        self.progress.measured(loss);
        self.lower_rate(loss)?;
        self.progress.patience.observe(loss);
        Ok(())
    }

    /// One sample at a time.
    fn measure(&mut self) -> Result<f64> {
        let Self { session, feed, meter, .. } = self;
        session.averaged(|session| {
            let (mut sum, mut weight) = (0.0, 0.0);
            for index in 0..feed.n_held_out() {
                let (size, portions) = feed.held_out(index)?;
                meter.begin(Phase::validate(size));
                for (counts, portion) in portions {
                    sum += counts * session.measure(&portion)?;
                    weight += counts;
                }
            }
            Ok(sum / weight)
        })
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
        let learning_rate = self.learning_rate(self.progress.step + 1);
        self.warn(WarningKind::RateLowered { learning_rate })
    }

    fn show(&mut self) -> Result<()> {
        self.meter.begin(Phase::Show);
        let Self { session, device, feed, folder, progress, events, .. } = self;
        let at = (*folder, progress.step);
        let goes_on = || events.goes_on();
        let shown = session.averaged(|session| feed.show(device, session.learner(), at, &goes_on));
        self.end_phases()?;
        match shown {
            Ok(events) => self.events.emit_all(events),
            // The run ends in order, with what it has learnt.
            Err(TrainerError::Weights(WeightsError::Cancelled)) => Ok(()),
            Err(TrainerError::Compute(ComputeError::OutOfMemory {
                asked, in_use, limit, ..
            })) => self.go_on_unseen([asked, in_use, limit]),
            Err(error) => Err(error),
        }
    }

    /// What is learnt does not depend on what is shown.
    fn go_on_unseen(&mut self, [asked_bytes, in_use_bytes, limit_bytes]: [usize; 3]) -> Result<()> {
        if std::mem::replace(&mut self.is_showing_warned, true) {
            return Ok(());
        }
        self.warn(WarningKind::NoRoomForSamples { asked_bytes, in_use_bytes, limit_bytes })
    }
}
