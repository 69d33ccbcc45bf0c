//! A step of the loop, in three verbs:
//!
//! ```text
//! gather     batches to gradients, on this machine, in micro-batches that fit. Where memory does not suffice
//!            nothing stays of what was tried, and it is done again in less
//! exchange   what was gathered to what the whole step came to: its sums, and the norm of its gradients.
//!            Never done again
//! apply      gradients to an update of what is trained. All or nothing
//! ```
//!
//! Machines that train together would differ in `gather`, agree after `exchange`, and do the same in
//! `apply`. What a step sees, and with which random numbers, follows from its number alone.

use std::time::Instant;

use compute::Dtype;

use super::loss_scale::LossScale;
use super::run::TrainingRun;
use crate::config::batch::BatchSettings;
use crate::error::Result;
use crate::event::{self, Phase};
use crate::task::session::GradientNorm;
use crate::task::traits::{DataLoader, PrefetchedBatches, Task, TrainBatch};

/// What this machine gathered for a step, besides gradients, which lie in the session.
struct AccumulatedBatches {
    sums: LossSums,
    /// What all samples of the step were expected to count.
    expected: f64,
    /// What the loss was multiplied by, in f16.
    loss_scale: Option<f64>,
    /// Seconds that batches were waited for.
    wait_secs: f64,
}

/// What is summed over micro-batches, as gradients are.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LossSums {
    /// Mean losses, each times its share of what was expected to count.
    loss: f64,
    /// What the samples counted.
    weight: f64,
}

/// What the whole step came to.
struct ReducedStep {
    /// The mean loss.
    loss: f64,
    /// Of the mean gradient.
    norm: GradientNorm,
}

impl<F: DataLoader> TrainingRun<'_, F> {
    /// Takes the next step. What is remembered changes only when all of it is done.
    pub(super) fn step(&mut self, ahead: &mut PrefetchedBatches<F>) -> Result<event::StepMetrics> {
        let (begun, launches) = (Instant::now(), self.device.launches());
        let gathered = self.accumulate(ahead)?;
        let ReducedStep { loss, norm } = self.reduce(&gathered)?;
        self.check_layers()?;
        let learning_rate = self.apply(&norm)?;
        let peak_bytes = self.end_phases()?;
        let rest_secs = self.pacing.rest_secs();
        Ok(event::StepMetrics {
            step: self.progress.step,
            loss,
            gradient_norm: Some(norm.value).filter(|norm| norm.is_finite()),
            learning_rate,
            loss_scale: gathered.loss_scale,
            is_skipped: !norm.is_finite(),
            secs: begun.elapsed().as_secs_f64() - rest_secs,
            rest_secs,
            wait_secs: gathered.wait_secs,
            peak_bytes,
            launches: self.device.launches_since(launches),
        })
    }

    /// The step's batches to gradients. What is tried again begins at the step's first batch, which gives
    /// the same random numbers.
    fn accumulate(&mut self, ahead: &mut PrefetchedBatches<F>) -> Result<AccumulatedBatches> {
        self.with_fallback(|run| {
            let gathered = run.accumulate_once(ahead);
            if gathered.is_err() {
                *ahead = run.loader.read_from(run.progress.batches);
            }
            gathered
        })
    }

    fn accumulate_once(&mut self, ahead: &mut PrefetchedBatches<F>) -> Result<AccumulatedBatches> {
        self.session.zero_grad();
        let (first, n) = (self.progress.batches, self.config.train.gradient_accumulation as u64);
        let expected = self.loader.expected_weight(first..first + n);
        let (loss_scale, mut wait_secs) = (self.loss_scale(), 0.0);
        let mut sums = LossSums::default();
        for _ in 0..n {
            let (ready, waited) = ahead.next_batch()?;
            wait_secs += waited.as_secs_f64();
            self.meter.begin(Phase::train(ready.size));
            let batch = self.begin_batch(ready.size, ready.samples.len())?;
            sums.add(self.forward_backward(&ready, expected, loss_scale.unwrap_or(1.0))?);
            self.end_batch(batch)?;
        }
        Ok(AccumulatedBatches { sums, expected, loss_scale, wait_secs })
    }

    /// What the loss is multiplied by, in f16.
    fn loss_scale(&mut self) -> Option<f64> {
        let is_scaled = self.config.base.dtype == Dtype::F16;
        let scale = is_scaled.then(|| self.progress.loss_scale.get_or_insert_with(LossScale::new));
        scale.map(|scale| scale.factor())
    }

    /// A batch in micro-batches, forward and backward: adds to the gradients. `expected` is what all
    /// samples of the step are expected to count.
    pub(super) fn forward_backward(
        &mut self,
        ready: &TrainBatch<<F::Task as Task>::Size, F::Sample>,
        expected: f64,
        loss_scale: f64,
    ) -> Result<LossSums> {
        let BatchSettings { micro, recompute } = self.pacing.how();
        let mut sums = LossSums::default();
        for (first, samples) in (0..).step_by(micro).zip(ready.samples.chunks(micro)) {
            let (weight, micro_batch) = self.loader.micro_batch(samples)?;
            // Nothing of it is to be learnt, such as a question without its answer.
            if weight == 0.0 {
                continue;
            }
            let (share, place) = (weight / expected, (ready.number, first));
            let loss =
                self.session.accumulate(&micro_batch, place, share * loss_scale, recompute)?;
            sums.add(LossSums { loss: share * loss, weight });
        }
        Ok(sums)
    }

    /// Brings together what was gathered: the one place where several machines would add up their sums and,
    /// buffer by buffer, their gradients (`Gradients::read` and `write`), before each of them finds the norm.
    fn reduce(&mut self, gathered: &AccumulatedBatches) -> Result<ReducedStep> {
        let LossSums { loss, weight } = gathered.sums;
        // What was expected may count more than what came: not every token of a text does.
        let came = if weight > 0.0 { weight / gathered.expected } else { 1.0 };
        let scale = gathered.loss_scale.unwrap_or(1.0) * came;
        let norm = self.with_fallback(|run| run.session.gradient_norm(scale))?;
        Ok(ReducedStep { loss: loss / came, norm })
    }

    /// Changes what is trained, unless the norm is not finite, and only then what is remembered. Where memory
    /// does not suffice nothing has changed, so it can be tried again as it is. Gives the learning rate.
    fn apply(&mut self, norm: &GradientNorm) -> Result<f64> {
        let learning_rate = self.learning_rate(self.progress.step + 1);
        self.with_fallback(|run| run.session.apply(norm, learning_rate, run.progress.applied))?;
        let (progress, is_applied) = (&mut self.progress, norm.is_finite());
        progress.step += 1;
        progress.is_look_due = true;
        progress.applied += u64::from(is_applied);
        progress.batches += self.config.train.gradient_accumulation as u64;
        if let Some(loss_scale) = &mut progress.loss_scale {
            loss_scale.update(is_applied);
        }
        Ok(learning_rate)
    }
}

impl LossSums {
    fn add(&mut self, other: Self) {
        self.loss += other.loss;
        self.weight += other.weight;
    }
}
