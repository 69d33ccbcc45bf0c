//! What a run does together with its other ranks. Alone, it does nothing here.

use std::ops::Range;
use std::time::Instant;

use super::super::decision::{LoopDecision, SaveReason};
use super::super::run::TrainingRun;
use super::super::step::LossSums;
use super::DataParallel;
use crate::config::Switch;
use crate::config::train::TrainConfig;
use crate::error::Result;
use crate::event::EndReason;
use crate::task::traits::{DataLoader, PrefetchedBatches};

impl<'a, D: DataLoader> TrainingRun<'a, D> {
    /// Which samples of a step's batch are computed here.
    pub(in super::super) fn own_samples(&self, index: usize, n: usize) -> Range<usize> {
        let Some(parallel) = &self.parallel else { return 0..n };
        parallel.samples(index, n, self.config.train.batch_size)
    }

    /// Whether the samples of a batch up to `end` are the last of the step that are computed here, so that other ranks can have
    /// their gradients. The batch has `n` samples.
    pub(in super::super) fn is_last_part(&self, batch: u64, n: usize, end: usize) -> bool {
        let Some(parallel) = &self.parallel else { return false };
        let TrainConfig { batch_size, gradient_accumulation, .. } = self.config.train;
        let index = (batch - self.progress.batches) as usize;
        end == parallel.samples(index, n, batch_size).end
            && (index + 1..gradient_accumulation)
                .all(|later| parallel.samples(later, batch_size, batch_size).is_empty())
    }

    /// What was accumulated since `begun`, if no rank gave the step up. Gradients are on their way to the other ranks then.
    pub(in super::super) fn agree_with_all<T>(
        &mut self,
        accumulated: Result<T>,
        ahead: &mut PrefetchedBatches<D>,
        begun: Instant,
    ) -> Result<T> {
        let Some(parallel) = &mut self.parallel else { return accumulated };
        self.device.synchronise()?;
        let is_done_here = accumulated.is_ok();
        parallel.end_part(begun);
        self.session.send_gradients(is_done_here)?;
        let agreed = parallel.agree(accumulated);
        if agreed.is_err() {
            self.session.forget_sums();
        }
        if let (true, Err(error)) = (is_done_here, &agreed) {
            // Another rank gave it up: what this one has is as before the step.
            *ahead = self.loader.read_from(self.progress.batches);
            if !error.is_cancelled() {
                self.save(SaveReason::Latest)?;
            }
        }
        agreed
    }

    /// Sums what every rank accumulated. Says whether there are gradients here: in a step without a token that counts
    /// there are none, nor where a rank takes local steps and had no sample.
    pub(in super::super) fn exchange(&mut self, sums: &mut LossSums) -> Result<bool> {
        let Some(parallel) = &mut self.parallel else { return Ok(sums.weight > 0.0) };
        let own_weight = sums.weight;
        *sums = parallel.sum(*sums, self.pacing.celsius(), &mut self.session)?;
        let step = self.progress.step + 1;
        let told = parallel.told_shares(step, step == self.total_steps);
        let told = told.into_iter().chain(parallel.told_granularity(step));
        self.events.emit_all(told)?;
        Ok(if parallel.is_local() { own_weight } else { sums.weight } > 0.0)
    }

    /// Evaluates and decides; of several ranks the first does, and the others follow.
    pub(in super::super) fn decide_with_all(&mut self, is_unhealthy: bool) -> Result<LoopDecision> {
        self.end_round()?;
        let Some(parallel) = self.parallel.take() else {
            return self.evaluate_and_decide(is_unhealthy, false);
        };
        let decided = self.decide_together(&parallel, is_unhealthy);
        self.parallel = Some(parallel);
        decided
    }

    /// Averages the weights over ranks where local steps are due to.
    fn end_round(&mut self) -> Result<()> {
        let Switch::On(every) = self.config.cluster.sync_every else { return Ok(()) };
        let step = self.progress.step;
        if step == 0 || (!step.is_multiple_of(every) && step != self.total_steps) {
            return Ok(());
        }
        // A run that is resumed here has averaged already, unless a rank was lost just then.
        let (has_moved, parallel) = (self.session.has_moved()?, self.parallel.as_ref());
        let is_due = parallel.map_or(Ok(has_moved), |parallel| parallel.is_any(has_moved))?;
        if !is_due {
            return Ok(());
        }
        self.session.outer_step(
            parallel.map(DataParallel::world),
            parallel.map_or(1.0, DataParallel::part),
        )?;
        let Some(parallel) = &mut self.parallel else { return Ok(()) };
        parallel.begin_round();
        parallel.check_weights(&self.session)
    }

    fn decide_together(
        &mut self,
        parallel: &DataParallel<'a>,
        is_unhealthy: bool,
    ) -> Result<LoopDecision> {
        self.session.gather_weights(parallel.world())?;
        let is_interrupted = parallel.is_any(!self.events.should_continue())?;
        let end = if parallel.is_first() {
            self.session.begin_collecting(parallel.world());
            let LoopDecision { end, save } =
                self.evaluate_and_decide(is_unhealthy, is_interrupted)?;
            self.session.end_collecting()?;
            // Who joins starts from the checkpoint that was just saved.
            let is_joined = save == Some(SaveReason::Latest) && parallel.is_join_asked();
            end.or(is_joined.then_some(EndReason::Interrupted))
        } else {
            self.session.send_state(parallel.world())?;
            None
        };
        let end = parallel.follow(end, &mut self.progress)?;
        Ok(LoopDecision { end, save: None })
    }
}
