//! A dry run on the meta device: the phases of a run in their order, by the functions that will run. An arena
//! of the size found here is enough.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use compute::{Device, DeviceKind, MemoryRecording, WorkStats};

use super::DatasetSummary;
use super::rates::Rates;
use super::time;
use crate::config::adapter::AdapterKind;
use crate::config::batch::BatchSettings;
use crate::config::{RunConfig, Switch};
use crate::cost::Cost;
use crate::error::Result;
use crate::event::{Phase, PlannedPhase, RepeatedTime, TimeEstimate};
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::task::session::{BatchPosition, MicroBatchStep, Session};
use crate::task::traits::{Preparation, PreparationLimits, Task};

/// A job with every value decided, and its device.
pub(super) struct DryRun<'a, T: Task> {
    pub task: &'a T,
    pub config: &'a RunConfig,
    pub dataset: &'a DatasetSummary<T::Size>,
    pub kind: DeviceKind,
}

/// Memory and time of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepEstimate {
    pub peak_bytes: usize,
    pub secs: f64,
}

/// Memory and time of samples during training.
#[derive(Clone, Debug, Default)]
pub(super) struct SampleEstimate {
    pub tiling: Option<Tiling>,
    /// None if there are no samples.
    pub phase: Option<PlannedPhase>,
    pub cost: Cost,
}

impl<T: Task> DryRun<'_, T> {
    /// What comes before training, the fastest way within `limit` bytes.
    pub fn preparation(&self, limits: PreparationLimits) -> Result<Preparation> {
        self.task.preparation(self.config, self.dataset, self.kind, limits)
    }

    /// The peak of a step in the largest size, and the mean time over the most frequent sizes.
    pub fn step(&self, rates: &Rates) -> Result<StepEstimate> {
        let (device, mut session) = self.session()?;
        if let Some((size, shown)) = self.largest_size() {
            self.epoch(&device, &mut session, size, shown)?;
        }
        let update = work_of(&device, || session.update(0.0, 0, 1.0))?;
        let peak_bytes = device.usage().extent;
        let (mut secs, mut n_batches) = (0.0, 0);
        for (size, shown) in self.typical() {
            secs += seconds(rates, &self.epoch(&device, &mut session, size, shown)?);
            n_batches += shown.div_ceil(self.config.train.batch_size);
        }
        let per_batch = secs / n_batches.max(1) as f64;
        let secs =
            per_batch * self.config.train.gradient_accumulation as f64 + rates.seconds(&update);
        Ok(StepEstimate { peak_bytes, secs })
    }

    /// A step and a validation in every size; and what a validation costs.
    pub fn training(&self) -> Result<(Vec<PlannedPhase>, Cost)> {
        let (device, mut session) = self.session()?;
        let phase = |name: Phase| {
            let peak_bytes = device.usage().extent;
            device.reset_peak();
            PlannedPhase { name, peak_bytes }
        };
        let mut phases = vec![phase(Phase::Load)];
        let largest = self.largest_size().map(|(size, _)| size);
        for (size, shown) in &self.dataset.train {
            self.epoch(&device, &mut session, *size, *shown)?;
            if Some(*size) == largest {
                self.shorter_prompts(&mut session, *size, *shown)?;
            }
            session.update(0.0, 0, 1.0)?;
            phases.push(phase(Phase::train(*size)));
        }
        let mut works = Vec::new();
        for (size, n) in &self.dataset.held_out {
            let validated = |session: &_| self.validation(&device, session, *size, *n);
            works.extend(session.with_averaged(validated)?);
            phases.push(phase(Phase::validate(*size)));
        }
        Ok((phases, Cost { works, read_bytes: 0 }))
    }

    /// The peak of a validation in the largest size.
    pub fn validation_peak(&self) -> Result<usize> {
        let (device, mut session) = self.session()?;
        let largest = self.dataset.held_out.iter().max_by_key(|(size, _)| T::relative_cost(**size));
        if let Some((size, n)) = largest {
            session.with_averaged(|session| self.validation(&device, session, *size, *n))?;
        }
        Ok(device.usage().extent)
    }

    /// Validation on `n` samples of a size: the work of each micro-batch size, and how often it occurs.
    fn validation(
        &self,
        device: &Device,
        session: &Session<'_, T>,
        size: T::Size,
        n: usize,
    ) -> Result<Vec<(f64, WorkStats)>> {
        let micro = BatchSettings::from_config(self.config).micro_batch;
        let trainable = session.trainable_model();
        if let Some(works) = self.task.dry_run_validation(device, trainable, size, n)? {
            return Ok(works.into_iter().map(|(times, work)| (times as f64, work)).collect());
        }
        let (micro, n) =
            (micro.min(self.config.train.batch_size), n * self.task.n_validation_passes());
        let works = micro_batches(micro, micro, n).into_iter().map(|(n, times)| {
            let once = || session.eval_loss(&self.task.dummy_micro_batch(size, n)?);
            Ok((times as f64, work_of(device, once)?))
        });
        works.collect()
    }

    /// A checkpoint: tensors go to the disk piece by piece, which adds nothing to what lives as long as the run but
    /// averaged parameters where they are computed for it.
    pub fn saving(&self) -> Result<PlannedPhase> {
        let (device, mut session) = self.session()?;
        device.reset_peak();
        // A full fine-tune is averaged when it is exported, on the host.
        if self.config.adapter.kind != AdapterKind::Full {
            session.with_averaged(|_| Ok(()))?;
        }
        Ok(PlannedPhase { name: Phase::Save, peak_bytes: device.usage().extent })
    }

    /// Samples during training; images are decoded without tiling if that fits into `limit` bytes.
    pub fn samples(&self, limit: usize) -> Result<SampleEstimate> {
        let mut estimate = SampleEstimate::default();
        if !self.task.makes_samples() {
            return Ok(estimate);
        }
        let tilings = self.task.sample_tilings().into_iter().map(Some);
        for tiling in std::iter::once(None).chain(tilings) {
            let (device, mut session) = self.session()?;
            let cost = session.with_averaged(|session| {
                let model = session.trainable_model();
                self.task.dry_run_samples(self.dataset, &device, model, tiling)
            })?;
            let phase = PlannedPhase { name: Phase::Sample, peak_bytes: device.usage().extent };
            let fits = phase.peak_bytes <= limit;
            estimate = SampleEstimate { tiling, phase: Some(phase), cost };
            if fits {
                break;
            }
        }
        Ok(estimate)
    }

    /// How long the run takes, with steps of `step_secs`.
    pub fn times(
        &self,
        step_secs: f64,
        before: &Preparation,
        validation: &Cost,
        samples: &Cost,
        rates: &Rates,
    ) -> Result<TimeEstimate> {
        let (device, mut session) = self.session()?;
        let loading =
            Cost { works: vec![(1.0, device.work())], read_bytes: self.task.file_bytes() };
        let tensors = session.state_dict()?;
        let saved_bytes = tensors.iter().map(|(_, tensor)| tensor.bytes()).sum();
        let steps = time::n_steps(self.config, self.dataset).unwrap_or(0);
        let times = |has_any: bool, n: u64| if has_any && steps > 0 { n } else { 0 };
        let validate_every = Switch::On(self.config.train.validate_every);
        let sample_every = self.config.data.sample_every();
        Ok(TimeEstimate {
            // An empty sum would be -0.
            encode_secs: before.stages.iter().fold(0.0, |sum, stage| sum + stage.cost.secs(rates)),
            load_secs: loading.secs(rates),
            steps: RepeatedTime { secs: step_secs, times: steps },
            validation: RepeatedTime {
                secs: validation.secs(rates),
                times: times(
                    !validation.works.is_empty(),
                    time::n_evaluations(validate_every, steps),
                ),
            },
            samples: RepeatedTime {
                secs: samples.secs(rates),
                times: times(self.task.makes_samples(), time::n_evaluations(sample_every, steps)),
            },
            saving: RepeatedTime {
                secs: time::save_secs(saved_bytes),
                times: time::n_saves(self.config.output.save_every, steps),
            },
            basis: time::basis(rates),
        })
    }

    /// Bytes of offloaded blocks.
    pub fn offloaded_bytes(&self) -> Result<usize> {
        if self.config.machine.offload == Offload::None {
            return Ok(0);
        }
        let (device, _session) = self.session()?;
        Ok(device.host_bytes())
    }

    /// Bytes of the arena up to the end of what lives as long as the run, on devices whose buffers end there. Found
    /// by loading once: what only loading needs lies elsewhere.
    pub fn resident_bytes(&self) -> Result<usize> {
        let DeviceKind::Gpu { .. } = self.kind else { return Ok(0) };
        let device = Device::meta(self.kind, usize::MAX / 2);
        let _session = Session::new(&device, self.task, self.config, &|_| true)?;
        Ok(device.top())
    }

    fn session(&self) -> Result<(Device, Session<'_, T>)> {
        let device = Device::meta(self.kind, usize::MAX / 2);
        device.set_resident(self.resident_bytes()?);
        let session = Session::new(&device, self.task, self.config, &|_| true)?;
        Ok((device, session))
    }

    /// The work of a step of full batches of one size.
    pub fn step_work(&self, size: T::Size) -> Result<Vec<(usize, WorkStats)>> {
        let (device, mut session) = self.session()?;
        let shown = self.config.train.batch_size;
        let mut works = self.epoch(&device, &mut session, size, shown)?;
        for (times, _) in &mut works {
            *times *= self.config.train.gradient_accumulation;
        }
        works.push((1, work_of(&device, || session.update(0.0, 0, 1.0))?));
        Ok(works)
    }

    /// The memory over a step in the largest size.
    pub fn recorded_step(&self) -> Result<MemoryRecording> {
        let (device, mut session) = self.session()?;
        let BatchSettings { micro_batch: micro, recompute } =
            BatchSettings::from_config(self.config);
        device.reset_peak();
        device.start_recording();
        if let Some((size, shown)) = self.largest_size() {
            self.task.dry_run_batches(&device, session.trainable_model(), size, shown)?;
            let n = self.config.train.batch_size.min(shown).min(micro);
            let micro_batch = self.task.dummy_micro_batch(size, n)?;
            session.dry_run_step(dummy_step(&micro_batch, recompute))?;
        }
        session.update(0.0, 0, 1.0)?;
        Ok(device.stop_recording())
    }

    /// The size that takes the most work, and how often an epoch has it.
    pub fn largest_size(&self) -> Option<(T::Size, usize)> {
        let batch = self.config.train.batch_size;
        let weight =
            |(size, shown): &(&T::Size, &usize)| T::relative_cost(**size) * batch.min(**shown);
        let largest = self.dataset.train.iter().max_by_key(weight);
        largest.map(|(size, shown)| (*size, *shown))
    }

    /// The most frequent sizes, and how often an epoch has them. Chosen: a few are enough for a mean, and many
    /// sizes take no longer to plan.
    fn typical(&self) -> Vec<(T::Size, usize)> {
        let mut all: Vec<_> = self.dataset.train.iter().map(|(size, n)| (*size, *n)).collect();
        all.sort_by_key(|(_, shown)| Reverse(*shown));
        all.truncate(3);
        all
    }

    /// An epoch's samples of a size: the work of each micro-batch size, and how often it occurs.
    fn epoch(
        &self,
        device: &Device,
        session: &mut Session<'_, T>,
        size: T::Size,
        shown: usize,
    ) -> Result<Vec<(usize, WorkStats)>> {
        let BatchSettings { micro_batch: micro, recompute } =
            BatchSettings::from_config(self.config);
        let trainable = session.trainable_model();
        let mut works = self.task.dry_run_batches(device, trainable, size, shown)?;
        for (n, times) in micro_batches(self.config.train.batch_size, micro, shown) {
            let once = || self.micro_batch(session, size, n, recompute);
            works.push((times, work_of(device, once)?));
        }
        Ok(works)
    }

    /// A full micro-batch of a size with each of several lengths of prompts.
    fn shorter_prompts(
        &self,
        session: &mut Session<'_, T>,
        size: T::Size,
        shown: usize,
    ) -> Result<()> {
        let BatchSettings { micro_batch, recompute } = BatchSettings::from_config(self.config);
        let n = micro_batch.min(self.config.train.batch_size).min(shown);
        for micro_batch in self.task.shorter_micro_batches(size, n)? {
            session.dry_run_step(dummy_step(&micro_batch, recompute))?;
        }
        Ok(())
    }

    /// Forward and backward of `n` samples.
    fn micro_batch(
        &self,
        session: &mut Session<'_, T>,
        size: T::Size,
        n: usize,
        recompute: Recompute,
    ) -> Result<()> {
        let micro_batch = self.task.dummy_micro_batch(size, n)?;
        session.dry_run_step(dummy_step(&micro_batch, recompute)).map(drop)
    }
}

/// A step whose numbers do not matter.
fn dummy_step<T: Task>(micro_batch: &T::MicroBatch, recompute: Recompute) -> MicroBatchStep<'_, T> {
    MicroBatchStep { micro_batch, position: BatchPosition::default(), share: 1.0, recompute }
}

/// The kernel work of `work`.
fn work_of<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<WorkStats> {
    let before = device.work();
    work()?;
    Ok(device.work().since(&before))
}

fn seconds(rates: &Rates, works: &[(usize, WorkStats)]) -> f64 {
    works.iter().map(|(times, work)| *times as f64 * rates.seconds(work)).sum()
}

/// Sizes of micro-batches, and how often each occurs in an epoch with `shown` samples: all batches but the last
/// are full, and so are all micro-batches of a batch but the last. A smaller micro-batch may fragment memory
/// differently than a full one.
fn micro_batches(batch: usize, micro: usize, shown: usize) -> BTreeMap<usize, usize> {
    let mut micro_batches = BTreeMap::new();
    for (samples, times) in [(batch, shown / batch), (shown % batch, 1)] {
        *micro_batches.entry(micro).or_default() += samples / micro * times;
        *micro_batches.entry(samples % micro).or_default() += times;
    }
    micro_batches.retain(|samples, times| *samples > 0 && *times > 0);
    micro_batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_have_every_image_once() {
        assert_eq!(micro_batches(4, 4, 8), [(4, 2)].into());
        assert_eq!(micro_batches(6, 4, 15), [(4, 2), (2, 2), (3, 1)].into());
        for (batch, micro, shown) in
            (1..7).flat_map(|b| (1..=b).flat_map(move |m| (1..20).map(move |s| (b, m, s))))
        {
            let all = micro_batches(batch, micro, shown);
            let total: usize = all.iter().map(|(samples, times)| samples * times).sum();
            assert_eq!(total, shown, "{batch} {micro} {shown}");
            assert!(all.keys().all(|samples| *samples <= micro.min(shown)), "{all:?}");
        }
    }
}
