//! A diffusion model and its dataset: the flow matching loss, and all that a plan needs for a dry run.
//!
//! Shapes: S samples, C channels, H and W of a latent.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use compute::ops::NoisyLatents;
use compute::{Device, DeviceKind, Dtype, Tape, Var};
use weights::BytesDoneFn;

use super::batch::{EncodedSample, SAMPLE_CACHE_BYTES};
use super::dataset;
use super::model::DiffusionModel;
use super::noise::{
    FIXED_TIMESTEPS, NoiseSampler, NoisySample, latent_masks, noisy_latents, reference_latents,
};
use super::samples::SampleImageWriter;
use crate::cache::scaled::{RESOLUTIONS, fewer_frames};
use crate::cache::{CachedLatents, largest_images, plan_images};
use crate::config::adapter::AdapterKind;
use crate::config::data::LearningTarget;
use crate::config::data_sets::DataSets;
use crate::config::sample::SampleConfig;
use crate::config::train::TrainConfig;
use crate::config::{ImageSize, RunConfig};
use crate::cost::Cost;
use crate::data::{Bucket, ReferenceSize, SampleSize};
use crate::error::{Result, TrainerError};
use crate::event::TenthLoss;
use crate::event::timesteps::TimestepSums;
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, TensorSpec};
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::condition::{Condition, Conditions};
use crate::model::diffusion::denoiser::{BatchLoss, DenoiserInput};
use crate::model::diffusion::text::{EncoderAdapter, TrainedTokens};
use crate::model::diffusion::vae::LatentShape;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::sample::encoding::plan_encoding;
use crate::sample::reference::fit_references;
use crate::task::prefetch::PREFETCH_BATCHES;
use crate::task::session::scalar;
use crate::task::traits::{
    DatasetSummary, Preparation, PreparationLimits, SmallerTask, Task, TrainableModel,
};

/// Shares of the longest prompt that a plan looks at. Chosen: a step's memory changes little between two of them.
const SHORTER_PROMPTS: [f64; 8] = [0.875, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.03125];

/// A diffusion model and its dataset.
#[derive(Clone, Copy)]
pub struct DiffusionTask<'a> {
    /// The model with all that belongs to it.
    pub pipeline: &'a Pipeline,
    /// The images.
    pub data: &'a DataSets,
    /// Images drawn while training.
    pub sample: &'a SampleConfig,
    /// Their size.
    pub sample_size: ImageSize,
    /// How is trained.
    pub train: &'a TrainConfig,
    /// Text encoders that are trained too.
    pub text_encoders: &'a [EncoderAdapter],
    /// Where losses are noted by timestep; a dry run has none.
    log: Option<&'a TimestepLog>,
}

/// Losses by timestep since the last reset.
#[derive(Default)]
pub struct TimestepLog(Mutex<TimestepSums>);

impl TimestepLog {
    fn lock(&self) -> MutexGuard<'_, TimestepSums> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Images of one size with their prompts.
pub struct ImageMicroBatch {
    /// At least one.
    pub(super) samples: Vec<NoisySample>,
    /// The tokens of their texts, for text encoders in training.
    pub(super) tokens: TrainedTokens,
}

impl<'a> DiffusionTask<'a> {
    /// The task of a job; an error if it trains on texts, if a training adapter is beside more than a LoRA, or if text encoders
    /// are to be trained that cannot be.
    pub fn new(config: &'a RunConfig, pipeline: &'a Pipeline) -> Result<Self> {
        let (data, sample) = config.data.images()?;
        check_training_adapter(config)?;
        let (sample_size, train) = (sample.size, &config.train);
        let text_encoders = &config.adapter.text_encoders;
        let task = Self { pipeline, data, sample, sample_size, train, text_encoders, log: None };
        pipeline.encoders.check_trained(task.encoder_training())?;
        Ok(task)
    }

    /// The same with a place where losses are noted by timestep.
    #[must_use]
    pub fn with_log(self, log: &'a TimestepLog) -> Self {
        Self { log: Some(log), ..self }
    }
}

/// Loss weights of samples with this target, 0 of the others; none if there are only others.
fn of_target(samples: &[NoisySample], target: LearningTarget) -> Option<Vec<f32>> {
    let weight = |sample: &NoisySample| if sample.target == target { sample.weight } else { 0.0 };
    let is_any = samples.iter().any(|sample| sample.target == target);
    is_any.then(|| samples.iter().map(weight).collect())
}

/// Merged weights would be trained in a full fine-tune, and in a `DoRA` their norms.
fn check_training_adapter(config: &RunConfig) -> Result<()> {
    let kind = config.adapter.kind;
    if config.base.training_adapter.is_none() || kind == AdapterKind::Lora {
        return Ok(());
    }
    let kind = if kind == AdapterKind::Full { "full" } else { "dora" };
    Err(TrainerError::Request {
        problem: format!(
            "adapter.kind is {kind}, and base.training_adapter acts beside a LoRA alone"
        ),
        hint: "set adapter.kind to lora, or leave base.training_adapter out",
    })
}

impl Task for DiffusionTask<'_> {
    type Model = DiffusionModel;
    type Size = SampleSize;
    type MicroBatch = ImageMicroBatch;

    fn path(&self) -> &Path {
        &self.pipeline.path
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        self.pipeline.fingerprint()
    }

    fn component(&self) -> Component {
        Component::Transformer
    }

    fn tensors(&self) -> Result<Vec<TensorSpec>> {
        self.pipeline.transformer.config.tensor_specs()
    }

    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: BytesDoneFn<'_>,
    ) -> Result<DiffusionModel> {
        let Self { pipeline, .. } = self;
        let denoiser = pipeline.load_denoiser(device, precision, adapters, tick)?;
        let (training, dtype) = (self.encoder_training(), precision.dtype);
        let text_encoders =
            pipeline.encoders.load_trained(device, dtype, training, adapters, tick)?;
        Ok(DiffusionModel { denoiser, text_encoders })
    }

    fn loss<'m>(
        &self,
        DiffusionModel { denoiser: model, text_encoders }: &'m DiffusionModel,
        tape: &Tape<'m>,
        ImageMicroBatch { samples, tokens }: &ImageMicroBatch,
        dtype: Dtype,
        recompute: Recompute,
    ) -> Result<Var> {
        let device = tape.device();
        let statistics = self.pipeline.vae.statistics();
        let NoisyLatents { noisy, velocity } = noisy_latents(samples, device, &statistics, dtype)?;
        let guidance = self
            .train
            .guidance_scale
            .and_then(|scale| self.pipeline.family().guidance.embedded(scale, samples.len()));
        let prompts: Vec<&Condition> = samples.iter().map(|sample| &*sample.prompt).collect();
        let references = reference_latents(samples, device, &statistics, dtype)?;
        let timesteps: Vec<_> = samples.iter().map(|sample| sample.timestep).collect();
        let cached = Conditions::upload(device, &prompts, dtype)?;
        let predict = |tape: &Tape<'m>, condition: &Conditions, recompute: Recompute| {
            let input = DenoiserInput {
                latents: &noisy,
                references: &references,
                timesteps: &timesteps,
                condition,
                guidance: guidance.as_deref(),
                time_dtype: dtype,
            };
            model.predict(tape, input, recompute)
        };
        // What the base says is known before anything is kept for backward.
        let of_base = of_target(samples, LearningTarget::Base);
        let said_by_base = of_base
            .as_ref()
            .map(|_| predict(&tape.without_adapters(), &cached, Recompute::None))
            .transpose()?;
        let encoders = &self.pipeline.encoders;
        let condition = encoders.with_trained(tape, text_encoders, tokens, cached, recompute)?;
        let predicted = predict(tape, &condition, recompute)?;
        // In every step of such a job, so that all take the memory that was planned.
        let masks = self.data.has_masks().then(|| latent_masks(samples, device)).transpose()?;
        let factors = masks.map(|masks| model.patchify(tape, masks)).transpose()?;
        let sigmas: Vec<f32> = samples.iter().map(|sample| sample.timestep.sigma).collect();
        let (function, factors) = (self.train.loss, factors.as_ref());
        let loss = BatchLoss { function, sigmas: &sigmas, weights: &[], factors };
        let prior = of_base.zip(said_by_base).map(|(weights, said)| {
            let loss = BatchLoss { weights: &weights, ..loss };
            predicted.loss(tape, &said.tokens.into_tensor(), &loss)
        });
        let learnt = of_target(samples, LearningTarget::Images).map(|weights| {
            let target = model.patchify(tape, velocity)?;
            self.note(samples, |at| predicted.sample_loss(tape, &target, &loss, at))?;
            predicted.loss(tape, &target, &BatchLoss { weights: &weights, ..loss })
        });
        match (learnt.transpose()?, prior.transpose()?) {
            (Some(learnt), Some(prior)) => Ok(tape.add(&learnt, &prior)?),
            (learnt, prior) => Ok(learnt.or(prior).expect("a micro-batch has samples")),
        }
    }

    fn timestep_losses(&self) -> Vec<TenthLoss> {
        self.log.map(|log| log.lock().means()).unwrap_or_default()
    }

    fn reset_metrics(&self) {
        if let Some(log) = self.log {
            *log.lock() = TimestepSums::default();
        }
    }

    fn dummy_micro_batch(&self, size: SampleSize, n: usize) -> Result<ImageMicroBatch> {
        let prompt = self.pipeline.encoders.zero_condition(&size.encoder_images())?;
        Ok(self.dummy_with_prompt(size, n, prompt))
    }

    fn shorter_micro_batches(&self, size: SampleSize, n: usize) -> Result<Vec<ImageMicroBatch>> {
        if self.pipeline.encoders.pads() {
            return Ok(Vec::new());
        }
        let prompt = self.pipeline.encoders.zero_condition(&size.encoder_images())?;
        let shorter = SHORTER_PROMPTS.map(|share| prompt.shortened(share));
        Ok(shorter.map(|prompt| self.dummy_with_prompt(size, n, prompt)).into())
    }

    fn preparation(
        &self,
        config: &RunConfig,
        dataset: &DatasetSummary<SampleSize>,
        kind: DeviceKind,
        limits: PreparationLimits,
    ) -> Result<Preparation> {
        let counts = [dataset.to_encode.clone(), dataset.references_to_encode.clone()];
        let mut stages: Vec<_> =
            plan_images(self.pipeline, &counts, kind, limits.images)?.into_iter().collect();
        if dataset.n_texts == 0 {
            return Ok(Preparation { stages, ..Preparation::default() });
        }
        let base = config.base.quantise_encoders;
        let precision = Precision { base, ..Precision::plain(config.base.dtype) };
        let encoders = &self.pipeline.encoders;
        let n_texts = dataset.n_texts;
        let sizes = dataset.train.keys().chain(dataset.held_out.keys());
        let images = largest_images(encoders, sizes.map(SampleSize::encoder_images))?;
        let (texts, encoder_loading) =
            plan_encoding(encoders, precision, n_texts, &images, kind, limits.texts)?;
        stages.extend(texts);
        Ok(Preparation { stages, encoder_loading, ..Preparation::default() })
    }

    fn file_bytes(&self) -> u64 {
        let encoders = self.pipeline.encoders.trained_file_bytes(self.encoder_training());
        self.pipeline.transformer.file_bytes() + encoders
    }

    fn host_bytes(&self, config: &RunConfig, dataset: &DatasetSummary<SampleSize>) -> usize {
        let pipeline = self.pipeline;
        let latents =
            |size: Bucket, frames| pipeline.latent_shape([size.width, size.height], frames).count();
        let sample = |size: SampleSize| {
            let prompt = pipeline.encoders.zero_condition(&size.encoder_images());
            let prompt = prompt.map_or(0, |prompt| prompt.n_values());
            let references: usize = size.references().map(|it| latents(it.vae, 1)).sum();
            let [width, height] = [size.bucket.width, size.bucket.height];
            let LatentShape { height, width, .. } = pipeline.latent_shape([width, height], 1);
            let mask = if self.data.has_masks() { height * width } else { 0 };
            // A mean and a standard deviation for each latent value of the image.
            let own = 2 * latents(size.bucket, size.frames);
            (own + references + prompt + mask) * Dtype::F32.bytes()
        };
        let sizes = || dataset.train.iter().map(|(size, n)| (sample(*size), n));
        let repeats = self.data.iter().map(|set| set.repeats as usize).min().unwrap_or(1).max(1);
        let all: usize = sizes().map(|(bytes, shown)| bytes * shown.div_ceil(repeats)).sum();
        let largest = sizes().map(|(bytes, _)| bytes).max().unwrap_or(0);
        let batch = config.train.batch_size * largest;
        // Prefetched samples are also cached, as long as the cache has room.
        if all <= SAMPLE_CACHE_BYTES {
            all
        } else {
            SAMPLE_CACHE_BYTES + (PREFETCH_BATCHES + 1) * batch
        }
    }

    fn relative_cost(size: SampleSize) -> usize {
        size.pixels()
    }

    fn makes_samples(&self) -> bool {
        !self.sample.prompts.is_empty()
    }

    fn n_validation_passes(&self) -> usize {
        FIXED_TIMESTEPS.len()
    }

    fn sample_tilings(&self) -> Vec<Tiling> {
        let ImageSize { width, height } = self.sample_size;
        let (frames, _) = self.sample_frames();
        Tiling::candidates(self.pipeline.latent_shape([width, height], frames)).collect()
    }

    fn dry_run_samples(
        &self,
        dataset: &DatasetSummary<SampleSize>,
        device: &Device,
        trainable: TrainableModel<'_, DiffusionModel>,
        tiling: Option<Tiling>,
    ) -> Result<Cost> {
        let references = self.sample_references(dataset)?;
        SampleImageWriter::new(*self, references, trainable.precision, tiling)?
            .dry_run(device, trainable)
    }

    fn smaller(&self, dataset: &DatasetSummary<SampleSize>) -> Vec<SmallerTask<Self>> {
        let samples = smaller_sides(self.sample_size.width.max(self.sample_size.height));
        let samples: Vec<usize> = samples.filter(|_| self.makes_samples()).collect();
        let images: Vec<usize> = smaller_sides(self.data.largest_resolution()).collect();
        let is_editing = self.pipeline.family().editing.is_some();
        let references = smaller_sides(self.data.common().reference_resolution);
        let references: Vec<usize> = references.filter(|_| is_editing).collect();
        let longest = dataset.train.keys().map(|size| size.frames).max().unwrap_or(1);
        let unit = self.pipeline.vae.temporal_scale_factor();
        let frames: Vec<usize> = fewer_frames(longest, unit).collect();
        let none = SmallerSizes::default();
        let of_frames = frames.iter().map(|n| SmallerSizes { frames: Some(*n), ..none });
        let of_samples = samples.iter().map(|side| SmallerSizes { sample: Some(*side), ..none });
        let of_images = images.iter().map(|side| SmallerSizes { image: Some(*side), ..none });
        let of_references =
            references.iter().map(|side| SmallerSizes { reference: Some(*side), ..none });
        let both = RESOLUTIONS.into_iter().filter_map(|side| {
            let of = |sides: &[usize]| sides.contains(&side).then_some(side);
            let (image, sample) = (Some(of(&images)?), Some(of(&samples)?));
            Some(SmallerSizes { image, sample, ..none })
        });
        let least = SmallerSizes {
            frames: frames.last().copied(),
            image: images.last().copied(),
            reference: references.last().copied(),
            sample: samples.last().copied(),
        };
        let all = of_samples.chain(of_references).chain(of_frames).chain(of_images);
        let all = all.chain(both).chain([least]);
        all.map(|sizes| self.with_sizes(sizes, dataset)).collect()
    }
}

impl DiffusionTask<'_> {
    /// Notes the loss of each sample that is learnt from, before it is weighted. A dry run computes it too, so that a
    /// plan counts what it takes. All are computed before the first is waited for.
    fn note(&self, samples: &[NoisySample], loss_of: impl Fn(usize) -> Result<Var>) -> Result<()> {
        let is_learnt = |(_, it): &(usize, &NoisySample)| it.target == LearningTarget::Images;
        let learnt = samples.iter().enumerate().filter(is_learnt);
        let losses = learnt.map(|(at, sample)| Ok((sample.timestep.sigma, loss_of(at)?)));
        let losses: Vec<(f32, Var)> = losses.collect::<Result<_>>()?;
        let Some(log) = self.log else { return Ok(()) };
        losses.iter().try_for_each(|(sigma, loss)| {
            log.lock().add(*sigma, scalar(loss.tensor())?);
            Ok(())
        })
    }

    /// `n` samples of zeros with this prompt.
    pub(crate) fn dummy_with_prompt(
        &self,
        size: SampleSize,
        n: usize,
        prompt: Condition,
    ) -> ImageMicroBatch {
        let noise = self.noise_sampler();
        let latents = |Bucket { width, height }, frames| {
            let shape = self.pipeline.latent_shape([width, height], frames);
            let zeros = || vec![0.0; shape.count()];
            Arc::new(CachedLatents { mean: zeros(), std: zeros(), shape })
        };
        let sample = EncodedSample {
            latents: latents(size.bucket, size.frames),
            references: size.references().map(|reference| latents(reference.vae, 1)).collect(),
            text: String::new(),
            prompt: Arc::new(prompt),
            loss_weight: 1.0,
            target: LearningTarget::Images,
            mask: None,
            draw: 0,
        };
        let mut samples: Vec<_> = (0..n).map(|_| noise.draw(&sample)).collect();
        // One of them, and others beside it: what takes the most.
        if let Some(first) = samples.first_mut().filter(|_| self.data.has_base_target()) {
            first.target = LearningTarget::Base;
        }
        self.micro_batch(samples, &vec![""; n])
    }

    /// Sizes of the references of sample images, the largest of them: those that the job names, else those of the data.
    fn sample_references(
        &self,
        dataset: &DatasetSummary<SampleSize>,
    ) -> Result<Vec<ReferenceSize>> {
        let resolution = self.data.common().reference_resolution;
        let named = self.sample.references.0.iter().map(|paths| {
            let sized = fit_references(self.pipeline, paths, resolution)?;
            Ok(sized.into_iter().map(|(_, size)| size).collect())
        });
        let mut lists: Vec<Vec<ReferenceSize>> = named.collect::<Result<_>>()?;
        if lists.is_empty() {
            let sizes = dataset.train.keys().chain(dataset.held_out.keys());
            lists = sizes.map(|size| size.references().collect()).collect();
        }
        let pixels = |list: &Vec<ReferenceSize>| -> usize {
            list.iter().map(|size| size.vae.width * size.vae.height).sum()
        };
        Ok(lists.into_iter().max_by_key(pixels).unwrap_or_default())
    }

    pub(super) fn noise_sampler(&self) -> NoiseSampler {
        NoiseSampler {
            timesteps: self.pipeline.schedule.train_timesteps(self.train.timestep_shift),
            range: self.train.timestep_range,
            scheme: self.train.weighting_scheme,
            bias: self.train.timestep_bias,
            weighting: self.train.loss_weighting,
            patch_size: self.pipeline.transformer.config.latent_spec().patch_size,
            seed: self.train.seed,
        }
    }
}

/// Sides of images and lengths of clips that a job could ask for instead.
#[derive(Clone, Copy, Default)]
struct SmallerSizes {
    frames: Option<usize>,
    image: Option<usize>,
    reference: Option<usize>,
    sample: Option<usize>,
}

/// Sides of images that people use, smaller than this.
fn smaller_sides(than: usize) -> impl Iterator<Item = usize> {
    RESOLUTIONS.into_iter().filter(move |side| *side < than)
}

impl DiffusionTask<'_> {
    /// The same with images, references and samples of these sides, and clips of this length.
    fn with_sizes(
        &self,
        SmallerSizes { frames, image, reference, sample }: SmallerSizes,
        dataset: &DatasetSummary<SampleSize>,
    ) -> SmallerTask<Self> {
        let change = |key: &str, side: Option<usize>| Some(format!("{key} = {}", side?));
        let changes = [
            change("data.frames", frames),
            image.map(|side| self.data.resolution_change(side)),
            change("data.reference_resolution", reference),
            change("sample.size", sample),
        ];
        let changes: Vec<String> = changes.into_iter().flatten().collect();
        let sample_size =
            sample.map_or(self.sample_size, |side| ImageSize { width: side, height: side });
        let mut dataset = match image {
            Some(resolution) => dataset::scaled(dataset, self.data, resolution),
            None => dataset.clone(),
        };
        if let Some(frames) = frames {
            dataset = dataset::shortened(&dataset, frames);
        }
        if let (Some(editing), Some(resolution)) = (self.pipeline.family().editing, reference) {
            dataset = dataset::with_smaller_references(&dataset, editing, resolution);
        }
        SmallerTask { change: changes.join(" and "), task: Self { sample_size, ..*self }, dataset }
    }
}
