//! A step of the loop: batches to gradients to an update, in portions that fit. Where memory does not
//! suffice, nothing stays of what was tried: the same batches are read again, which gives the same
//! random numbers, and go through the model in a tighter way. When to go back is the governor's to say.

use std::time::Instant;

use compute::{ComputeError, Dtype};

use super::lesson::{Ahead, Feed, Lesson, Ready};
use super::meter;
use super::run::Run;
use super::scale::LossScale;
use super::session::Updated;
use crate::config::adapter::AdapterKind;
use crate::config::how::How;
use crate::error::{Result, TrainerError};
use crate::event::{self, Event, Tightened};

/// The step at which every layer must have learnt something. In the second, gradients reach both
/// halves of an adapter; in the third, all of a model whose blocks add nothing at first.
const LOOK_AT: u64 = 4;

/// What a step came to.
struct Taken {
    loss: f64,
    wait_secs: f64,
    learning_rate: f64,
    updated: Updated,
    /// Layers without a gradient, if it was looked at.
    still: Vec<String>,
}

impl<F: Feed> Run<'_, '_, F> {
    /// Takes the next step. What it remembers changes only when all of it is done.
    pub(super) fn step(&mut self, ahead: &mut Ahead<F>) -> Result<event::Step> {
        let (begun, launches) = (Instant::now(), self.device.launches());
        let loss_scale = match self.config.base.dtype {
            Dtype::F16 => Some(*self.progress.loss_scale.get_or_insert_with(LossScale::new)),
            _ => None,
        };
        let scale = loss_scale.map_or(1.0, LossScale::factor);
        let taken = self.fitting(|run| {
            let taken = run.attempt(ahead, scale);
            if taken.is_err() {
                // Begins again at the step's first batch.
                *ahead = run.feed.read_from(run.progress.batches);
            }
            taken
        })?;
        self.check_layers(&taken.still)?;
        let progress = &mut self.progress;
        progress.step += 1;
        progress.is_look_due = true;
        progress.applied += u64::from(taken.updated.is_applied);
        progress.batches += self.config.train.accumulation as u64;
        if let Some(loss_scale) = &mut progress.loss_scale {
            loss_scale.update(taken.updated.is_applied);
        }
        let peak_bytes = self.end_phases()?;
        let rest_secs = self.pacing.rest_secs();
        Ok(event::Step {
            step: self.progress.step,
            loss: taken.loss,
            gradient_norm: Some(taken.updated.norm).filter(|norm| norm.is_finite()),
            learning_rate: taken.learning_rate,
            loss_scale: loss_scale.map(LossScale::factor),
            is_skipped: !taken.updated.is_applied,
            secs: begun.elapsed().as_secs_f64() - rest_secs,
            rest_secs,
            wait_secs: taken.wait_secs,
            peak_bytes,
            launches: self.device.launches_since(launches),
        })
    }

    /// Does `work`, again in a tighter way as often as memory does not suffice for it.
    pub(super) fn fitting<T>(&mut self, mut work: impl FnMut(&mut Self) -> Result<T>) -> Result<T> {
        loop {
            match work(self) {
                Err(TrainerError::Compute(ComputeError::OutOfMemory {
                    asked,
                    in_use,
                    limit,
                    ..
                })) => self.tighten(asked, in_use, limit)?,
                done => return done,
            }
        }
    }

    /// Goes over to the next tighter way, and says so; if there is none, what was learnt is saved.
    fn tighten(&mut self, asked: usize, in_use: usize, limit: usize) -> Result<()> {
        let (step, from) = (self.progress.step, self.pacing.how());
        let Some(to) = self.pacing.tighten() else {
            self.save()?;
            return Err(TrainerError::NoRoom { step, asked, in_use, limit });
        };
        let [asked_bytes, in_use_bytes, limit_bytes] = [asked, in_use, limit];
        let tightened = Tightened { step, from, to, asked_bytes, in_use_bytes, limit_bytes };
        self.teller.tell(&Event::Tightened(tightened))
    }

    /// Batches to gradients to an update, from the first of the step's batches on.
    fn attempt(&mut self, ahead: &mut Ahead<F>, scale: f64) -> Result<Taken> {
        self.session.forget();
        let (first, n) = (self.progress.batches, self.config.train.accumulation as u64);
        let expected = self.feed.expected(first..first + n);
        let (mut sum, mut weight, mut wait_secs) = (0.0, 0.0, 0.0);
        for _ in 0..n {
            let (ready, waited) = ahead.next_batch()?;
            wait_secs += waited.as_secs_f64();
            self.meter.begin(meter::train(ready.size));
            let batch = self.begin_batch(ready.size, ready.samples.len())?;
            let (loss, counted) = self.accumulate(&ready, expected, scale)?;
            (sum, weight) = (sum + loss, weight + counted);
            self.end_batch(batch)?;
        }
        let step = self.progress.step + 1;
        let still = if step == LOOK_AT { self.session.still_layers()? } else { Vec::new() };
        let learning_rate = self.learning_rate(step);
        // What was expected may count more than what came: not every token of a text does.
        let came = if weight > 0.0 { weight / expected } else { 1.0 };
        let updated = self.session.update(learning_rate, self.progress.applied, scale * came)?;
        Ok(Taken { loss: sum / came, wait_secs, learning_rate, updated, still })
    }

    /// A batch of a step whose samples are expected to count so much, in portions. Returns its part of
    /// the step's loss, and what it counts.
    pub(super) fn accumulate(
        &mut self,
        ready: &Ready<<F::Lesson as Lesson>::Size, F::Sample>,
        expected: f64,
        scale: f64,
    ) -> Result<(f64, f64)> {
        let How { micro, recompute } = self.pacing.how();
        let (mut sum, mut weight) = (0.0, 0.0);
        for (first, samples) in (0..).step_by(micro).zip(ready.samples.chunks(micro)) {
            let (counts, portion) = self.feed.portion(samples)?;
            // Nothing of it is to be learnt, such as a question without its answer.
            if counts == 0.0 {
                continue;
            }
            let (share, place) = (counts / expected, (ready.number, first));
            sum += share * self.session.accumulate(&portion, place, share * scale, recompute)?;
            weight += counts;
        }
        Ok((sum, weight))
    }

    /// That gradients reach what is trained. A layer may be out of reach, if its name was typed (the
    /// prompt's queries in the last block of SD3 are); all of them may not.
    fn check_layers(&mut self, still: &[String]) -> Result<()> {
        let all = self.session.n_layers();
        match still.first() {
            None => Ok(()),
            Some(_) if still.len() == all => {
                Err(TrainerError::Dead { layers: all, steps: LOOK_AT })
            }
            Some(_) => {
                let (n, shown) = (still.len(), still.len().min(SHOWN));
                let more = if n > shown { ", …" } else { "" };
                let names = still[..shown].join(", ");
                let text = format!("{n} of {all} layers have no gradient: {names}{more}");
                let hint = match self.config.adapter.kind {
                    AdapterKind::None => "they stay as they are; the others learn".into(),
                    _ => format!(
                        "adapter.exclude = {still:?} leaves them out; the others learn the same"
                    ),
                };
                self.warn(text, &hint)
            }
        }
    }
}

/// Layers that a warning names; its hint has all of them.
const SHOWN: usize = 3;
