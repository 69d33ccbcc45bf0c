//! A training step, in three parts:
//!
//! ```text
//! accumulate   gradients of the step's batches, in micro-batches. Out of memory starts again with smaller ones
//! reduce       the step's mean loss and gradient norm. Never repeated
//! apply        the optimizer step. All or nothing
//! ```
//!
//! Somebody who asks to stop is heard at every allocation of `accumulate`: the gradients are dropped and the step does
//! not count. What is reduced is applied.
//!
//! With a fused backward pass the optimizer steps are part of `accumulate`, parameter by parameter. From the first on the
//! step cannot be repeated: out of memory ends the run (`fallback.rs`), and a request to stop waits for the step's end.
//!
//! Ranks that train together (`data_parallel.rs`) differ in `accumulate`, where each has its samples, sum in `reduce`, and
//! do the same in `apply`. The samples of a step and its random numbers follow from its number alone.

use std::ops::Range;
use std::time::Instant;

use compute::Dtype;

use super::loss_scale::LossScale;
use super::run::TrainingRun;
use crate::error::Result;
use crate::event::{self, Phase};
use crate::task::session::{BatchPosition, GradientNorm, MicroBatchStep, UpdateSettings};
use crate::task::traits::{DataLoader, PrefetchedBatches, Task, TrainBatch};

/// What was accumulated for a step, besides the gradients, which are in the session.
struct AccumulatedBatches {
    sums: LossSums,
    /// Expected loss weight of all samples of the step.
    expected: f64,
    /// Loss scale, in f16.
    loss_scale: Option<f64>,
    /// Seconds spent waiting for batches.
    wait_secs: f64,
}

/// Sums over micro-batches.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LossSums {
    /// Mean losses, each times its share of the expected weight.
    pub loss: f64,
    /// Loss weight of the samples.
    pub weight: f64,
}

/// The whole step's loss and gradient norm.
struct ReducedStep {
    /// The mean loss.
    loss: f64,
    /// Of the mean gradient.
    norm: GradientNorm,
}

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Takes the next step. The progress changes only when all of it is done.
    pub(super) fn step(&mut self, ahead: &mut PrefetchedBatches<D>) -> Result<event::StepMetrics> {
        let (begun, launches) = (Instant::now(), self.device.launches());
        let copy_wait = self.device.copy_wait_secs();
        let mut accumulated = self.accumulate(ahead)?;
        let has_gradients = self.exchange(&mut accumulated.sums)?;
        let ReducedStep { loss, norm } = self.reduce(&accumulated)?;
        self.check_layers(has_gradients)?;
        let learning_rate = self.apply(&norm)?;
        let peak_bytes = self.end_phases()?;
        let rest_secs = self.pacing.rest_secs();
        Ok(event::StepMetrics {
            step: self.progress.step,
            loss,
            grad_norm: Some(norm.value).filter(|norm| norm.is_finite()),
            learning_rate,
            loss_scale: accumulated.loss_scale,
            is_skipped: !norm.is_finite(),
            secs: begun.elapsed().as_secs_f64() - rest_secs,
            rest_secs,
            wait_secs: accumulated.wait_secs,
            peak_bytes,
            launches: self.device.launches_since(launches),
            copy_wait_secs: self.device.copy_wait_secs_since(copy_wait),
        })
    }

    /// Accumulates gradients of the step's batches. A retry begins at the step's first batch, with the same
    /// random numbers.
    fn accumulate(&mut self, ahead: &mut PrefetchedBatches<D>) -> Result<AccumulatedBatches> {
        let (device, stop, begun) = (self.device, self.events.cancel_token(), Instant::now());
        let accumulated = self.with_fallback(|run| {
            let accumulated = device.cancellable(stop, || run.accumulate_once(ahead));
            if accumulated.is_err() {
                *ahead = run.loader.read_from(run.progress.batches);
            }
            accumulated
        });
        self.agree_with_all(accumulated, ahead, begun)
    }

    fn accumulate_once(&mut self, ahead: &mut PrefetchedBatches<D>) -> Result<AccumulatedBatches> {
        self.session.zero_grad()?;
        let (first, n) = (self.progress.batches, self.config.train.gradient_accumulation as u64);
        let expected = self.loader.expected_weight(first..first + n);
        let (loss_scale, mut wait_secs) = (self.loss_scale(), 0.0);
        let mut sums = LossSums::default();
        for index in 0..n as usize {
            let (mut batch, waited) = ahead.next_batch()?;
            wait_secs += waited.as_secs_f64();
            let own = self.own_samples(index, batch.samples.len());
            if !own.is_empty() {
                self.meter.begin(Phase::train(batch.size));
                let (trainable, begun) = (self.session.trainable_model(), Instant::now());
                self.loader.complete_batch(self.device, trainable, &mut batch)?;
                self.pacer().rest_after(begun.elapsed());
            }
            let loss_scale = loss_scale.unwrap_or(1.0);
            sums.add(self.forward_backward(&batch, own, expected, loss_scale)?);
        }
        Ok(AccumulatedBatches { sums, expected, loss_scale, wait_secs })
    }

    /// The loss scale, in f16.
    fn loss_scale(&mut self) -> Option<f64> {
        let is_scaled = self.config.base.dtype == Dtype::F16;
        let scale = is_scaled.then(|| self.progress.loss_scale.get_or_insert_with(LossScale::new));
        scale.map(|scale| scale.factor())
    }

    /// Forward and backward of samples of a batch in micro-batches; accumulates the gradients. `expected` is the expected
    /// loss weight of all samples of the step. The pace may change between two micro-batches: the rest of the batch
    /// is then computed at another memory level, and every sample keeps its share and its random numbers.
    pub(super) fn forward_backward(
        &mut self,
        batch: &TrainBatch<<D::Task as Task>::Size, D::Sample>,
        samples: Range<usize>,
        expected: f64,
        loss_scale: f64,
    ) -> Result<LossSums> {
        let (mut sums, mut first) = (LossSums::default(), samples.start);
        while first < samples.end {
            self.wait_while_paused()?;
            let end = samples.end.min(first + self.pacing.batch_settings().micro_batch);
            sums.add(self.micro_batch(batch, first..end, expected, loss_scale)?);
            first = end;
        }
        Ok(sums)
    }

    /// Forward and backward of some samples of a batch together.
    pub(super) fn micro_batch(
        &mut self,
        batch: &TrainBatch<<D::Task as Task>::Size, D::Sample>,
        samples: Range<usize>,
        expected: f64,
        loss_scale: f64,
    ) -> Result<LossSums> {
        let (first_sample, n) = (samples.start, samples.len());
        let (weight, micro_batch) = self.loader.micro_batch(&batch.samples[samples])?;
        // No token counts, as in a prompt without its answer.
        if weight == 0.0 {
            return Ok(LossSums::default());
        }
        let timer = self.begin_micro_batch(batch.size, n);
        let (share, scaled) = (weight / expected, weight / expected * loss_scale);
        let step = MicroBatchStep {
            micro_batch: &micro_batch,
            position: BatchPosition { batch: batch.number, first_sample },
            share: scaled,
            recompute: self.pacing.batch_settings().recompute,
        };
        let loss = if self.config.train.fused_backward_pass {
            // It is the only one of the step, so that its share is that of the whole step.
            self.session.fused_backward(step, self.update_settings(scaled))?
        } else if self.is_last_part(batch.number, batch.samples.len(), first_sample + n) {
            self.session.accumulate_last(step)?
        } else {
            self.session.accumulate(step)?
        };
        self.end_micro_batch(timer)?;
        Ok(LossSums { loss: self.session.rounded(share * loss), weight })
    }

    /// How the optimizer takes the next step, by gradients that are `scale` times the true ones.
    fn update_settings(&self, scale: f64) -> UpdateSettings {
        let learning_rate = self.learning_rate(self.progress.step + 1);
        UpdateSettings { learning_rate, applied: self.progress.applied, scale }
    }

    /// The mean loss and the gradient norm.
    fn reduce(&mut self, accumulated: &AccumulatedBatches) -> Result<ReducedStep> {
        let LossSums { loss, weight } = accumulated.sums;
        // The weight may be less than expected: not every token of a text counts.
        let actual = if weight > 0.0 { weight / accumulated.expected } else { 1.0 };
        let scale = accumulated.loss_scale.unwrap_or(1.0) * actual;
        let norm = self.with_fallback(|run| run.session.grad_norm(scale))?;
        Ok(ReducedStep { loss: loss / actual, norm })
    }

    /// The optimizer step, skipped if the norm is not finite; then updates the progress. Out of memory changes
    /// nothing, so that it can be retried. Returns the learning rate.
    fn apply(&mut self, norm: &GradientNorm) -> Result<f64> {
        let learning_rate = self.learning_rate(self.progress.step + 1);
        self.with_fallback(|run| run.session.apply(norm, learning_rate, run.progress.applied))?;
        let (progress, is_applied) = (&mut self.progress, norm.is_finite());
        progress.step += 1;
        progress.is_evaluation_due = true;
        progress.applied += u64::from(is_applied);
        progress.batches += self.config.train.gradient_accumulation as u64;
        if let Some(loss_scale) = &mut progress.loss_scale {
            loss_scale.update(is_applied);
        }
        self.session.effective_rate(learning_rate)
    }
}

impl LossSums {
    fn add(&mut self, other: Self) {
        self.loss += other.loss;
        self.weight += other.weight;
    }
}
