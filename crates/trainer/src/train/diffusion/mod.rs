//! Learning from images: a model that draws, the loss of flow matching, and images drawn to see
//! what it does; what such a job does before and after the loop.
//!
//! Shapes: S samples, C channels, H and W of a latent.

pub(crate) mod batch;
pub(crate) mod dataset;
mod loader;
mod noise;
mod samples;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use compute::ops::NoisyLatents;
use compute::{Device, DeviceKind, Dtype, Tape, Var};
use weights::BytesDoneFn;

use self::batch::EncodedSample;
pub(crate) use self::loader::ImageLoader;
use self::noise::{FIXED_TIMESTEPS, NoiseSampler, NoisySample, noisy_latents};
use self::samples::SampleImageWriter;
use super::device::{DeviceSetup, MeteredDevice, PlannedRun, RunSetup};
use super::folder::RunFolder;
use super::preparation::{emit_findings, emit_progress};
use crate::cache::scaled::RESOLUTIONS;
use crate::cache::{CacheBuilder, CacheIndex, CacheRequest, CachedLatents, plan_images};
use crate::config::data::DataConfig;
use crate::config::sample::SampleConfig;
use crate::config::{ImageSize, RunConfig};
use crate::cost::Cost;
use crate::data::Bucket;
use crate::error::Result;
use crate::event::{Event, EventSink};
use crate::export::{ExportedFile, export, model};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, TensorSpec};
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::condition::{Condition, Conditions};
use crate::model::diffusion::denoiser::{Denoiser, DenoiserInput};
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::objective::flow::WeightingScheme;
use crate::plan::{Plan, PlanRequest, choose, dry_run, memory_levels};
use crate::progress;
use crate::sample::encoding::plan_encoding;
use crate::task::prefetch::PREFETCH_BATCHES;
use crate::task::session::TrainedWeights;
use crate::task::traits::{DatasetSummary, Preparation, SmallerTask, Task, TrainableModel};

/// A model that draws, and what it is to draw.
#[derive(Clone, Copy)]
pub struct DiffusionTask<'a> {
    /// The model with all that belongs to it.
    pub pipeline: &'a Pipeline,
    /// The images.
    pub data: &'a DataConfig,
    /// Images drawn while training.
    pub sample: &'a SampleConfig,
    /// Their size.
    pub sample_size: ImageSize,
}

/// Images of one size with their prompts.
pub struct ImageMicroBatch {
    /// At least one.
    samples: Vec<NoisySample>,
}

impl<'a> DiffusionTask<'a> {
    /// What a job is about; an error if it is about something else.
    pub fn new(config: &'a RunConfig, pipeline: &'a Pipeline) -> Result<Self> {
        let (data, sample) = config.data.images()?;
        Ok(Self { pipeline, data, sample, sample_size: sample.size })
    }
}

impl Task for DiffusionTask<'_> {
    type Model = Denoiser;
    type Size = Bucket;
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
        (dtype, recompute): (Dtype, Recompute),
    ) -> Result<Var> {
        let device = tape.device();
        let NoisyLatents { noisy, velocity } =
            noisy_latents(samples, device, &self.pipeline.vae.statistics(), dtype)?;
        let told = self.pipeline.family().guidance.training_scale(samples.len());
        let prompts: Vec<&Condition> = samples.iter().map(|sample| &*sample.prompt).collect();
        let input = DenoiserInput {
            latents: &noisy,
            timesteps: &samples.iter().map(|sample| sample.level).collect::<Vec<_>>(),
            condition: &Conditions::upload(device, &prompts, dtype)?,
            guidance: told.as_deref(),
        };
        let predicted = model.predict(tape, input, recompute)?;
        let target = model.patchify(tape, velocity)?;
        let weights: Vec<f32> = samples.iter().map(|sample| sample.weight).collect();
        predicted.loss(tape, &target, &weights)
    }

    fn dummy_micro_batch(&self, size: Bucket, n: usize) -> Result<ImageMicroBatch> {
        let levels = self.pipeline.schedule.train_timesteps();
        let noise = NoiseSampler { levels, scheme: WeightingScheme::Uniform, seed: 0 };
        let shape = self.pipeline.latent_shape([size.width, size.height]);
        let zeros = || vec![0.0; shape.count()];
        let latents = Arc::new(CachedLatents { mean: zeros(), std: zeros(), shape });
        let prompt = Arc::new(self.pipeline.encoders.zero_condition());
        let sample = EncodedSample { latents, prompt, draw: 0 };
        Ok(ImageMicroBatch { samples: (0..n).map(|_| noise.draw(&sample)).collect() })
    }

    fn preparation(
        &self,
        config: &RunConfig,
        dataset: &DatasetSummary<Bucket>,
        kind: DeviceKind,
        limit: usize,
    ) -> Result<Preparation> {
        let mut stages: Vec<_> =
            plan_images(self.pipeline, &dataset.to_encode, kind)?.into_iter().collect();
        if dataset.n_texts == 0 {
            return Ok(Preparation { stages, ..Preparation::default() });
        }
        let base = config.base.quantise_encoders;
        let precision = Precision { base, ..Precision::plain(config.base.dtype) };
        let encoders = &self.pipeline.encoders;
        let (texts, t5) = plan_encoding(encoders, precision, dataset.n_texts, kind, limit)?;
        stages.extend(texts);
        Ok(Preparation { stages, t5 })
    }

    fn file_bytes(&self) -> u64 {
        self.pipeline.transformer.file_bytes()
    }

    fn host_bytes(&self, config: &RunConfig, dataset: &DatasetSummary<Bucket>) -> usize {
        let pipeline = self.pipeline;
        let prompt = pipeline.encoders.zero_condition().n_values();
        let latents = |size: Bucket| pipeline.latent_shape([size.width, size.height]).count();
        // A mean and a deviation for each number of a latent.
        let sample = |size| (2 * latents(size) + prompt) * Dtype::F32.bytes();
        let sizes = || dataset.train.iter().map(|(size, n)| (sample(*size), n));
        let repeats = (self.data.repeats as usize).max(1);
        let all: usize = sizes().map(|(bytes, shown)| bytes * shown.div_ceil(repeats)).sum();
        let largest = sizes().map(|(bytes, _)| bytes).max().unwrap_or(0);
        let batch = config.train.batch_size * largest;
        // What is read ahead is also kept, as long as there is room for it.
        if all <= batch::SAMPLE_CACHE_BYTES {
            all
        } else {
            batch::SAMPLE_CACHE_BYTES + (PREFETCH_BATCHES + 1) * batch
        }
    }

    fn relative_cost(Bucket { width, height }: Bucket) -> usize {
        width * height
    }

    fn makes_samples(&self) -> bool {
        !self.sample.prompts.is_empty()
    }

    fn n_validation_passes(&self) -> usize {
        FIXED_TIMESTEPS.len()
    }

    fn dry_run_samples(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Denoiser>,
        tiling: Option<Tiling>,
    ) -> Result<Cost> {
        SampleImageWriter::new(*self, trainable.precision, tiling)?.dry_run(device, trainable)
    }

    fn smaller(&self, dataset: &DatasetSummary<Bucket>) -> Vec<SmallerTask<Self>> {
        let samples = smaller_sides(self.sample_size.width.max(self.sample_size.height));
        let samples: Vec<usize> = samples.filter(|_| self.makes_samples()).collect();
        let resolutions: Vec<usize> = smaller_sides(self.data.resolution).collect();
        let of_samples = samples.iter().map(|side| (None, Some(*side)));
        let of_images = resolutions.iter().map(|side| (Some(*side), None));
        let both = RESOLUTIONS.into_iter().filter_map(|side| {
            let of = |sides: &[usize]| sides.contains(&side).then_some(side);
            Some((Some(of(&resolutions)?), Some(of(&samples)?)))
        });
        let least = (resolutions.last().copied(), samples.last().copied());
        let all = of_samples.chain(of_images).chain(both).chain([least]);
        all.map(|asked| self.with_sizes(asked, dataset)).collect()
    }
}

/// Sides of images that people use, smaller than this.
fn smaller_sides(than: usize) -> impl Iterator<Item = usize> {
    RESOLUTIONS.into_iter().filter(move |side| *side < than)
}

impl DiffusionTask<'_> {
    /// The same with images of this resolution, and samples of this side.
    fn with_sizes(
        &self,
        (resolution, side): (Option<usize>, Option<usize>),
        dataset: &DatasetSummary<Bucket>,
    ) -> SmallerTask<Self> {
        let images = resolution.map(|side| format!("data.resolution = {side}"));
        let samples = side.map(|side| format!("sample.size = {side}"));
        let changes: Vec<String> = images.into_iter().chain(samples).collect();
        let sample_size =
            side.map_or(self.sample_size, |side| ImageSize { width: side, height: side });
        let dataset = match resolution {
            Some(resolution) => dataset::scaled(dataset, self.data, resolution),
            None => dataset.clone(),
        };
        SmallerTask {
            change: changes.join(" and "),
            task: Self { sample_size, ..*self },
            dataset: dataset,
        }
    }
}

/// Finds the images, decides how the run is done, and encodes what is not in the cache.
pub(super) fn prepare(
    config: &RunConfig,
    pipeline: &Pipeline,
    on: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, Arc<CacheIndex>, MeteredDevice)> {
    let (planned, caching) = plan(config, pipeline, on, events)?;
    let n_known = caching.index().problems.len();
    emit_findings(events, caching.index().findings(0))?;
    let (index, place) = encode(caching, planned.setup(on), events)?;
    // Those that only showed when an image was decoded.
    emit_findings(events, index.findings(n_known))?;
    Ok((planned, index, place))
}

/// Looks through the images and decides how the run is done.
fn plan<'p>(
    config: &'p RunConfig,
    pipeline: &'p Pipeline,
    on: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, CacheBuilder<'p>)> {
    let room = on.budget();
    let task = &DiffusionTask::new(config, pipeline)?;
    let look = |encoders| {
        let precision = Precision { base: encoders, ..Precision::plain(config.base.dtype) };
        let request = CacheRequest { precision, ..CacheRequest::from_config(config)? };
        CacheBuilder::new(pipeline, request, &|done| emit_progress(events, done))
    };
    let caching = look(config.base.quantise_encoders)?;
    let dataset = DatasetSummary::from_caching(&caching);
    let plan = choose(PlanRequest { task: task, config, dataset: &dataset }, room)?;
    let planned = config.with_choice(&plan.choice);
    let levels =
        memory_levels(PlanRequest { task: task, config: &planned, dataset: &dataset }, room)?;
    if planned.base.quantise_encoders == config.base.quantise_encoders {
        return Ok((PlannedRun { config: planned, plan, levels: levels }, caching));
    }
    // Other encoders make other prompts, which may be in the cache or not.
    let caching = look(planned.base.quantise_encoders)?;
    let dataset = DatasetSummary::from_caching(&caching);
    let again = dry_run(PlanRequest { task: task, config: &planned, dataset: &dataset }, room)?;
    let plan = Plan { candidates: plan.candidates, ..again };
    Ok((PlannedRun { config: planned, plan, levels: levels }, caching))
}

/// Encodes what is not in the cache, and measures each encoder. What is encoded when a GPU is lost stays.
fn encode(
    mut caching: CacheBuilder<'_>,
    setup: RunSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(Arc<CacheIndex>, MeteredDevice)> {
    let place = MeteredDevice::open(setup.device_setup, setup.plan)?;
    let ((), place) =
        place.retry_on_gpu_loss(setup, events, |MeteredDevice { device, meter }, events, _| {
            let meter = Mutex::new(meter);
            caching.encode(device, setup.plan.t5, &|event| {
                if let progress::ProgressEvent::Phase { name, .. } = event {
                    meter.lock().unwrap_or_else(PoisonError::into_inner).begin(name.into());
                }
                emit_progress(events, event)
            })
        })?;
    Ok((Arc::new(caching.finish()?), place))
}

/// Writes what was trained for every program that was asked for.
pub(super) fn write_result(
    config: &RunConfig,
    pipeline: &mut Pipeline,
    trained: TrainedWeights,
    folder: &RunFolder,
    events: &EventSink<'_>,
) -> Result<()> {
    let layers = match trained {
        TrainedWeights::Adapter(layers) => layers,
        TrainedWeights::Full(own) => {
            let trained = |name: &str| Ok(own.get(name).cloned());
            model::write(pipeline, &trained, config.base.dtype, &folder.path.join("model"))?;
            let (format, path) = ("model".into(), "model".into());
            return events.emit(Event::Exported { format, path, layers: own.len() });
        }
    };
    pipeline.set_adapter(vec![(Component::Transformer, layers)]);
    for format in &config.output.formats {
        let (name, into) = (config.output.name.as_str(), folder.path.join("adapter"));
        let ExportedFile { path, n_layers, .. } = export(pipeline, *format, &into, name)?;
        let path = path.strip_prefix(&folder.path).unwrap_or(&path).into();
        let format = format!("{format:?}").to_lowercase();
        events.emit(Event::Exported { format, path, layers: n_layers })?;
    }
    Ok(())
}
