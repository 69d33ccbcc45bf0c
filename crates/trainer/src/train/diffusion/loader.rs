//! The data loader of images: encoded images in an order that follows from the seed, with noise added.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::Device;

use super::batch::{BatchReader, EncodedSample};
use super::model::DiffusionModel;
use super::noise::{FIXED_TIMESTEPS, NoiseSampler};
use super::samples::SampleImageWriter;
use super::task::{DiffusionTask, ImageMicroBatch};
use crate::cache::CacheIndex;
use crate::config::RunConfig;
use crate::config::data::LearningTarget;
use crate::data::{BatchSampler, SampleSize};
use crate::error::Result;
use crate::event::Event;
use crate::fingerprint::Fingerprint;
use crate::model::vae::Tiling;
use crate::task::prefetch::Prefetch;
use crate::task::traits::{self, HeldOutPass, PrefetchedBatches, TrainableModel};

/// Encoded images, their order and their noise.
pub(crate) struct ImageLoader<'a> {
    task: DiffusionTask<'a>,
    index: Arc<CacheIndex>,
    order: BatchSampler,
    noise: NoiseSampler,
    /// The images' folders, by set.
    folders: Vec<PathBuf>,
    /// Samples drawn during training.
    samples: Option<SampleImageWriter<'a>>,
}

impl<'a> ImageLoader<'a> {
    /// Of images that are all encoded.
    pub fn new(
        task: DiffusionTask<'a>,
        config: &RunConfig,
        index: Arc<CacheIndex>,
        tiling: Option<Tiling>,
    ) -> Result<Self> {
        let seed = config.train.seed;
        let precision = config.base.precision();
        let makes_samples = traits::Task::makes_samples(&task);
        // What the images are made from comes from the cache.
        let writer = || SampleImageWriter::new(task, Vec::new(), precision, tiling);
        let samples = makes_samples.then(writer).transpose()?;
        let noise = task.noise_sampler();
        let order = index.batch_sampler(config.train.batch_size, seed);
        let folders = task.data.iter().map(|set| set.images.clone()).collect();
        Ok(Self { task, index, order, noise, folders, samples })
    }
}

impl<'a> traits::DataLoader for ImageLoader<'a> {
    type Task = DiffusionTask<'a>;
    type Sample = EncodedSample;

    fn fingerprint(&self) -> Fingerprint {
        self.index.fingerprint(&self.folders)
    }

    fn n_train(&self) -> usize {
        self.index.train.len()
    }

    fn n_held_out(&self) -> usize {
        self.index.held_out.len()
    }

    fn batches_per_epoch(&self) -> u64 {
        self.order.batches_per_epoch()
    }

    fn read_from(&self, number: u64) -> PrefetchedBatches<Self> {
        let mut reader =
            BatchReader::new(Arc::clone(&self.index), self.order.clone(), self.noise.seed);
        Prefetch::begin(number, move |number| reader.read(number))
    }

    fn expected_weight(&mut self, numbers: Range<u64>) -> f64 {
        numbers.map(|number| self.order.batch(number).len()).sum::<usize>() as f64
    }

    fn micro_batch(&self, samples: &[EncodedSample]) -> Result<(f64, ImageMicroBatch)> {
        let noisy: Vec<_> = samples.iter().map(|sample| self.noise.draw(sample)).collect();
        let texts: Vec<&str> = samples.iter().map(|sample| &*sample.text).collect();
        Ok((noisy.len() as f64, self.task.micro_batch(noisy, &texts)))
    }

    fn held_out_passes(&self) -> BTreeMap<SampleSize, Vec<HeldOutPass>> {
        let mut passes = BTreeMap::<_, Vec<_>>::new();
        for (index, sample) in self.index.held_out.iter().enumerate() {
            let all = HeldOutPass::all(index, FIXED_TIMESTEPS.len());
            passes.entry(sample.size()).or_default().extend(all);
        }
        passes
    }

    /// At fixed timesteps.
    fn held_out(&self, passes: &[HeldOutPass]) -> Result<(f64, ImageMicroBatch)> {
        let (mut samples, mut texts) = (Vec::with_capacity(passes.len()), Vec::new());
        // The passes of a sample are neighbours: it is read once.
        for same in passes.chunk_by(|a, b| a.sample == b.sample) {
            let index = same[0].sample;
            let sample = &self.index.held_out[index];
            let prompt = sample.prompt(self.index.plain_text(sample), false);
            let references = sample.references.iter();
            let references = references.map(|it| self.index.reference(it, false).map(Arc::new));
            let sample = EncodedSample {
                text: prompt.text.clone(),
                latents: Arc::new(self.index.latents(sample, false)?),
                references: references.collect::<Result<_>>()?,
                prompt: Arc::new(self.index.condition(&prompt)?),
                loss_weight: 1.0,
                target: LearningTarget::Images,
                mask: self.index.mask(sample, false)?.map(Arc::new),
                draw: index as u64,
            };
            let noisy = |it: &HeldOutPass| self.noise.fixed(&sample, FIXED_TIMESTEPS[it.pass]);
            samples.extend(same.iter().map(noisy));
            texts.extend(same.iter().map(|_| sample.text.clone()));
        }
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        Ok((samples.len() as f64, self.task.micro_batch(samples, &texts)))
    }

    fn write_samples(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, DiffusionModel>,
        folder: &Path,
        step: u64,
        should_continue: &(dyn Fn() -> bool + Sync),
    ) -> Result<Vec<Event>> {
        match &self.samples {
            Some(samples) => {
                let on_event = &|_| should_continue();
                samples.write(device, trainable, &self.index, folder, step, on_event)
            }
            None => Ok(Vec::new()),
        }
    }
}
