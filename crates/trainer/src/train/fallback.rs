//! Out of memory: the same work again in smaller micro-batches, or with more gradient checkpointing, at the
//! next of the plan's memory levels. The governor decides when to return to a higher level. And a request to stop: the
//! work at hand is abandoned. And files that cannot be written: the run is saved before it ends.

use compute::ComputeError;

use super::decision::SaveReason;
use super::run::TrainingRun;
use crate::error::{Result, TrainerError};
use crate::event::{Event, MemoryFallback};
use crate::task::traits::DataLoader;

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Runs `work`, and again at the next memory level each time it is out of memory. A failed attempt must leave
    /// no effects, and `work` must not wait for another machine. Within a fused backward pass an attempt has effects:
    /// the model is then between two steps, and is neither trained on nor saved.
    pub(super) fn with_fallback<T>(
        &mut self,
        mut work: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<T> {
        loop {
            match work(self) {
                Err(TrainerError::Compute(ComputeError::OutOfMemory {
                    asked,
                    in_use,
                    limit,
                    ..
                })) if self.session.is_half_updated() => {
                    let step = self.progress.step;
                    return Err(TrainerError::HalfUpdated { step, asked, in_use, limit });
                }
                Err(TrainerError::Compute(ComputeError::OutOfMemory {
                    asked,
                    in_use,
                    limit,
                    ..
                })) => self.fall_back(asked, in_use, limit)?,
                done => return done,
            }
        }
    }

    /// Falls back to the next memory level, and emits it; without one, saves a checkpoint and fails.
    fn fall_back(&mut self, asked: usize, in_use: usize, limit: usize) -> Result<()> {
        let (step, from) = (self.progress.step, self.pacing.batch_settings());
        let Some(to) = self.pacing.fall_back() else {
            self.save(SaveReason::Latest)?;
            return Err(TrainerError::OutOfMemory { step, asked, in_use, limit });
        };
        let [asked_bytes, in_use_bytes, limit_bytes] = [asked, in_use, limit];
        let fallback = MemoryFallback { step, from, to, asked_bytes, in_use_bytes, limit_bytes };
        self.events.emit(Event::MemoryFallback(fallback))
    }
}

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Saves what was trained before an error of files ends the run: where events cannot be written, a checkpoint
    /// often can. Such an error leaves the model as it was before the step, or as it is after it.
    pub(super) fn save_before_failing(&mut self, error: &TrainerError) {
        let is_outside = error.is_of_files() || error.is_rank_lost() || error.is_of_rewards();
        if is_outside && !self.session.is_half_updated() {
            // The first error is the one to tell.
            _ = self.save(SaveReason::Latest);
        }
    }
}

/// The result of work of which nothing stays if it fails; none if it was abandoned because somebody asked to stop.
pub(super) fn unless_cancelled<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Err(error) if error.is_cancelled() => Ok(None),
        done => done.map(Some),
    }
}
