//! Training a diffusion model on images: the flow matching loss, samples drawn during training, and what comes
//! before and after the loop.
//!
//! Shapes: S samples, C channels, H and W of a latent.

pub(crate) mod batch;
pub(crate) mod dataset;
mod loader;
mod noise;
mod samples;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use compute::ops::NoisyLatents;
use compute::{Device, DeviceKind, Dtype, Tape, Var};
use weights::BytesDoneFn;

use self::batch::EncodedSample;
pub(crate) use self::loader::ImageLoader;
use self::noise::{
    FIXED_TIMESTEPS, NoiseSampler, NoisySample, latent_masks, noisy_latents, reference_latents,
};
use self::samples::SampleImageWriter;
use super::data_parallel::{first_rank_first, is_first};
use super::device::{DeviceSetup, MeteredDevice, PlannedRun, RunSetup};
use super::folder::{RunFolder, RunOutput};
use super::pacing::{PacedProgress, Pacer, Pacing};
use super::preparation::{emit_findings, emit_progress};
use super::{checkpoint, full, run_training};
use crate::cache::scaled::{RESOLUTIONS, fewer_frames};
use crate::cache::{
    CacheBuilder, CacheIndex, CacheRequest, CachedLatents, largest_images, plan_images,
};
use crate::config::adapter::AdapterKind;
use crate::config::data::LearningTarget;
use crate::config::data_sets::DataSets;
use crate::config::sample::SampleConfig;
use crate::config::train::TrainConfig;
use crate::config::{ImageSize, RunConfig};
use crate::cost::Cost;
use crate::data::{Bucket, ReferenceSize, SampleSize};
use crate::error::{Result, TrainerError};
use crate::event::timesteps::TimestepSums;
use crate::event::{Event, EventSink, Phase, RunEnd, TenthLoss, Warning, WarningKind};
use crate::export::check_form;
use crate::export::fuse::{check_dora, check_lokr};
use crate::export::{ExportedFile, export};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::read::{AdapterFile, Component};
use crate::model::adapter::{AdapterForm, AdapterFormat, Adapters};
use crate::model::build::{Precision, TensorSpec};
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::condition::{Condition, Conditions};
use crate::model::diffusion::denoiser::{BatchLoss, Denoiser, DenoiserInput};
use crate::model::diffusion::vae::LatentShape;
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::plan::{Plan, PlanRequest, choose, dry_run, memory_levels};
use crate::progress;
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
    samples: Vec<NoisySample>,
}

impl<'a> DiffusionTask<'a> {
    /// The task of a job; an error if it trains on texts, or if a training adapter is beside more than a LoRA.
    pub fn new(config: &'a RunConfig, pipeline: &'a Pipeline) -> Result<Self> {
        let (data, sample) = config.data.images()?;
        check_training_adapter(config)?;
        let (sample_size, train) = (sample.size, &config.train);
        Ok(Self { pipeline, data, sample, sample_size, train, log: None })
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
    type Model = Denoiser;
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
    ) -> Result<Denoiser> {
        self.pipeline.load_denoiser(device, precision, adapters, tick)
    }

    fn loss<'m>(
        &self,
        model: &'m Denoiser,
        tape: &Tape<'m>,
        ImageMicroBatch { samples }: &ImageMicroBatch,
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
        let input = DenoiserInput {
            latents: &noisy,
            references: &reference_latents(samples, device, &statistics, dtype)?,
            timesteps: &samples.iter().map(|sample| sample.timestep).collect::<Vec<_>>(),
            condition: &Conditions::upload(device, &prompts, dtype)?,
            guidance: guidance.as_deref(),
            time_dtype: dtype,
        };
        // What the base says is known before anything is kept for backward.
        let of_base = of_target(samples, LearningTarget::Base);
        let said_by_base = of_base
            .as_ref()
            .map(|_| model.predict(&tape.without_adapters(), input, Recompute::None))
            .transpose()?;
        let predicted = model.predict(tape, input, recompute)?;
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
        self.pipeline.transformer.file_bytes()
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
        if all <= batch::SAMPLE_CACHE_BYTES {
            all
        } else {
            batch::SAMPLE_CACHE_BYTES + (PREFETCH_BATCHES + 1) * batch
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
        trainable: TrainableModel<'_, Denoiser>,
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
        ImageMicroBatch { samples }
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

    fn noise_sampler(&self) -> NoiseSampler {
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

/// Trains a diffusion model on images: the stages that come before and after the loop.
pub(super) fn train(
    config: &RunConfig,
    device_setup: &DeviceSetup<'_>,
    output: RunOutput<'_>,
) -> Result<RunEnd> {
    let RunOutput { folder, events } = output;
    let mut pipeline = Pipeline::open(&folder.base(config)?, &config.base.parts())?;
    let prepared = || prepare(config, &pipeline, device_setup, events);
    let (planned, index, device) = first_rank_first(device_setup.world, prepared)?;
    let log = TimestepLog::default();
    let task = DiffusionTask::new(&planned.config, &pipeline)?.with_log(&log);
    let loader = ImageLoader::new(task, &planned.config, index, planned.plan.tiling)?;
    let setup = planned.setup(device_setup);
    let end = run_training(&planned.config, &task, loader, setup, device, output)?;
    if end.reason.is_done() && is_first(device_setup.world) {
        write_result(&planned.config, &mut pipeline, end.step, folder, events)?;
    }
    Ok(end)
}

/// Finds the images, plans the run, and encodes what is not in the cache.
fn prepare(
    config: &RunConfig,
    pipeline: &Pipeline,
    device_setup: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, Arc<CacheIndex>, MeteredDevice)> {
    check_formats(config, pipeline)?;
    warn_of_distillation(config, pipeline, events)?;
    let (planned, caching) = plan(config, pipeline, device_setup, events)?;
    let n_known = caching.index().problems.len();
    emit_findings(events, caching.index().findings(0))?;
    let setup = planned.setup(device_setup);
    let (index, device) = encode(&planned.config, caching, setup, events)?;
    // Problems that only show when an image is decoded.
    emit_findings(events, index.findings(n_known))?;
    Ok((planned, index, device))
}

/// Training a distilled model as it is undoes what it was distilled for.
fn warn_of_distillation(
    config: &RunConfig,
    pipeline: &Pipeline,
    events: &EventSink<'_>,
) -> Result<()> {
    let family = pipeline.family();
    let Some(advice) = family.distilled.filter(|_| config.base.training_adapter.is_none()) else {
        return Ok(());
    };
    let kind = WarningKind::Distilled { model: family.title.into(), advice: advice.into() };
    events.emit(Event::Warning(Warning { step: 0, kind }))
}

/// Checks that every format of the job can hold the adapter.
fn check_formats(config: &RunConfig, pipeline: &Pipeline) -> Result<()> {
    let (formats, Some(target)) = (&config.output.formats, config.adapter.targets.first()) else {
        return Ok(());
    };
    for format in formats {
        check_form(target.form, *format)?;
    }
    let has = |wanted: &[AdapterFormat]| formats.iter().any(|format| wanted.contains(format));
    let base = &pipeline.transformer.config;
    let specs = base.tensor_specs()?;
    let modules = specs.iter().filter_map(|spec| spec.name.strip_suffix(".weight"));
    let adapted = modules.filter(|module| config.adapter.names(module));
    let original = |module: &str| base.original_module(module);
    match target.form {
        AdapterForm::Dora if has(&[AdapterFormat::Kohya, AdapterFormat::Comfyui]) => {
            check_dora(adapted, original)
        }
        AdapterForm::Lokr(_) if has(&[AdapterFormat::Kohya]) => check_lokr(adapted, original),
        _ => Ok(()),
    }
}

/// Finds the images and plans the run.
fn plan<'p>(
    config: &'p RunConfig,
    pipeline: &'p Pipeline,
    device_setup: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, CacheBuilder<'p>)> {
    let budget = device_setup.budget();
    let task = &DiffusionTask::new(config, pipeline)?;
    let find_images = |encoders| {
        let precision = Precision { base: encoders, ..Precision::plain(config.base.dtype) };
        let request = CacheRequest { precision, ..CacheRequest::from_config(config)? };
        CacheBuilder::new(pipeline, request, &|done| emit_progress(events, done))
    };
    let caching = find_images(config.base.quantise_encoders)?;
    let dataset = DatasetSummary::from_caching(&caching);
    let plan = choose(PlanRequest { task, config, dataset: &dataset }, budget)?;
    let planned = config.with_choice(&plan.choice);
    let levels = memory_levels(PlanRequest { task, config: &planned, dataset: &dataset }, budget)?;
    if planned.base.quantise_encoders == config.base.quantise_encoders {
        return Ok((PlannedRun { config: planned, plan, levels }, caching));
    }
    // Encoders in another format have other cache entries.
    let caching = find_images(planned.base.quantise_encoders)?;
    let dataset = DatasetSummary::from_caching(&caching);
    let again = dry_run(PlanRequest { task, config: &planned, dataset: &dataset }, budget)?;
    let plan = Plan { candidates: plan.candidates, ..again };
    Ok((PlannedRun { config: planned, plan, levels }, caching))
}

/// Encodes what is not in the cache, and measures each encoder. What is encoded stays when a GPU is lost.
fn encode(
    config: &RunConfig,
    mut caching: CacheBuilder<'_>,
    setup: RunSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(Arc<CacheIndex>, MeteredDevice)> {
    let device = MeteredDevice::open(config, setup.device_setup, setup.plan)?;
    let ((), device) =
        device.retry_on_gpu_loss(setup, events, |MeteredDevice { device, meter }, _| {
            let meter = Mutex::new(meter);
            let mut pacing = Pacing::of_encoding(config, device, setup);
            let pace = PacedProgress::new(Pacer { pacing: &mut pacing, device, events, step: 0 });
            let on_progress = |event| {
                if let progress::ProgressEvent::Phase { name, .. } = event {
                    meter.lock().unwrap_or_else(PoisonError::into_inner).begin(name.into());
                }
                let is_wanted = emit_progress(events, event);
                let is_done = matches!(event, progress::ProgressEvent::Done);
                is_wanted && (!is_done || pace.should_continue())
            };
            let Plan { encoder_loading, decoding_bytes, .. } = *setup.plan;
            device.cancellable(events.cancel_token(), || {
                caching.encode(device, encoder_loading, decoding_bytes, &on_progress)
            })
        })?;
    Ok((Arc::new(caching.finish()?), device))
}

/// Exports what was trained from the checkpoint of the last step, in every format of the job.
fn write_result(
    config: &RunConfig,
    pipeline: &mut Pipeline,
    step: u64,
    folder: &RunFolder,
    events: &EventSink<'_>,
) -> Result<()> {
    let checkpoint = folder.path.join(checkpoint::path(step));
    if config.adapter.kind == AdapterKind::Full {
        return full::export_result(config, &checkpoint, events, |full, tick| {
            full.write_image_model(pipeline, &folder.path.join(full::MODEL), tick)
        });
    }
    events.emit(Event::Phase { name: Phase::Export })?;
    // Whether its values can be used was judged before.
    pipeline.take_adapter(AdapterFile::open(&checkpoint)?.with_any_values(true))?;
    for format in &config.output.formats {
        let (name, into) = (config.output.name.as_str(), folder.path.join("adapter"));
        let ExportedFile { path, n_layers, .. } = export(pipeline, *format, &into, name)?;
        let path = path.strip_prefix(&folder.path).unwrap_or(&path).into();
        let format = format!("{format:?}").to_lowercase();
        events.emit(Event::Exported { format, path, layers: n_layers })?;
    }
    Ok(())
}
