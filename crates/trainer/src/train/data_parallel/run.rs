//! What a run does together with its other ranks. Alone, it does nothing here.

use std::ops::Range;
use std::time::Instant;

use super::super::decision::{LoopDecision, SaveReason};
use super::super::run::TrainingRun;
use super::super::step::LossSums;
use super::DataParallel;
use crate::error::Result;
use crate::event::EndReason;
use crate::task::traits::{DataLoader, PrefetchedBatches};

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Which samples of a step's batch are computed here.
    pub(in super::super) fn own_samples(&self, index: usize, n: usize) -> Range<usize> {
        let Some(parallel) = &self.parallel else { return 0..n };
        let (first, own) = (index * self.config.train.batch_size, parallel.samples());
        own.start.saturating_sub(first).min(n)..own.end.saturating_sub(first).min(n)
    }

    /// What was accumulated since `begun`, if no rank gave the step up.
    pub(in super::super) fn agree_with_all<T>(
        &mut self,
        accumulated: Result<T>,
        ahead: &mut PrefetchedBatches<D>,
        begun: Instant,
    ) -> Result<T> {
        let Some(parallel) = &mut self.parallel else { return accumulated };
        self.device.synchronise()?;
        let is_done_here = accumulated.is_ok();
        let agreed = parallel.agree(accumulated, begun.elapsed().as_secs_f64());
        if let (true, Err(error)) = (is_done_here, &agreed) {
            // Another rank gave it up: what this one has is as before the step.
            *ahead = self.loader.read_from(self.progress.batches);
            if !error.is_cancelled() {
                self.save(SaveReason::Latest)?;
            }
        }
        agreed
    }

    /// Sums what every rank accumulated.
    pub(in super::super) fn exchange(&mut self, sums: &mut LossSums) -> Result<()> {
        let Some(parallel) = &mut self.parallel else { return Ok(()) };
        *sums = parallel.sum(*sums, self.pacing.celsius(), &mut self.session)?;
        let step = self.progress.step + 1;
        let told = parallel.told_shares(step).into_iter().chain(parallel.told_granularity(step));
        self.events.emit_all(told)
    }

    /// Evaluates and decides; of several ranks the first does, and the others follow.
    pub(in super::super) fn decide_with_all(&mut self, is_unhealthy: bool) -> Result<LoopDecision> {
        let Some(parallel) = self.parallel.take() else {
            return self.evaluate_and_decide(is_unhealthy, false);
        };
        let decided = self.decide_together(&parallel, is_unhealthy);
        self.parallel = Some(parallel);
        decided
    }

    fn decide_together(
        &mut self,
        parallel: &DataParallel<'_>,
        is_unhealthy: bool,
    ) -> Result<LoopDecision> {
        let is_interrupted = parallel.is_any(!self.events.should_continue())?;
        let end = if parallel.is_first() {
            let LoopDecision { end, save } =
                self.evaluate_and_decide(is_unhealthy, is_interrupted)?;
            // Who joins starts from the checkpoint that was just saved.
            let is_joined = save == Some(SaveReason::Latest) && parallel.is_join_asked();
            end.or(is_joined.then_some(EndReason::Interrupted))
        } else {
            None
        };
        let end = parallel.follow(end, &mut self.progress)?;
        Ok(LoopDecision { end, save: None })
    }
}
