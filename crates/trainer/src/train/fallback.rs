//! What becomes of work that memory does not suffice for: the same work in smaller micro-batches, or with more
//! gradient checkpointing, as the plan's memory levels says. When to go back is the governor's to say.

use compute::ComputeError;

use super::decision::SaveReason;
use super::run::TrainingRun;
use crate::error::{Result, TrainerError};
use crate::event::{Event, MemoryFallback};
use crate::task::traits::DataLoader;

impl<F: DataLoader> TrainingRun<'_, F> {
    /// Does `work`, again in less memory as often as that does not suffice. Nothing of what was tried may
    /// stay, and nothing in it may wait for another machine, which would wait in vain.
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
                })) => self.fall_back(asked, in_use, limit)?,
                done => return done,
            }
        }
    }

    /// Goes over to the next tighter way, and says so; if there is none, what was learnt is saved.
    fn fall_back(&mut self, asked: usize, in_use: usize, limit: usize) -> Result<()> {
        let (step, from) = (self.progress.step, self.pacing.how());
        let Some(to) = self.pacing.fall_back() else {
            self.save(SaveReason::Latest)?;
            return Err(TrainerError::OutOfMemory { step, asked, in_use, limit });
        };
        let [asked_bytes, in_use_bytes, limit_bytes] = [asked, in_use, limit];
        let tightened = MemoryFallback { step, from, to, asked_bytes, in_use_bytes, limit_bytes };
        self.events.emit(Event::Tightened(tightened))
    }
}
