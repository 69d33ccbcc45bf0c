//! Images and clips from prompts: encode, denoise, decode. The same functions run first on the meta device, which
//! gives the peak memory of each phase; then an arena of that size is enough. `text` generates text, `chat` answers.

pub mod chat;
pub mod clip;
mod compressed;
pub(crate) mod encoding;
mod exif;
pub mod group;
mod guided;
pub mod image_file;
pub mod reference;
pub mod text;
pub mod token_sampler;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::{Device, DeviceKind, Dtype, Params, Quantisation, RandomSequence, Tape};
use weights::Catalog;
use weights::load::load_f32;

use self::clip::Clip;
use self::encoding::plan_encoding;
use self::guided::GuidedDenoiser;
use self::reference::{
    ReferenceLatents, decoding_need, encode_references, fit_references, prompt_image,
};
use crate::cost::{
    StageMemory, UNLIMITED, check_cancelled, first_fitting, nearest_fitting, too_large,
};
use crate::data::{Bucket, DecodingMemory, DecodingNeed, ReferenceSize, to_chw};
use crate::error::{Remedy, Result, TrainerError};
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::condition::Condition;
use crate::model::diffusion::denoiser::Denoiser;
use crate::model::diffusion::guidance::GuidanceScales;
use crate::model::diffusion::scheduler;
use crate::model::diffusion::text::{EncodeCallbacks, EncoderLoading, EncodingOptions, Prompt};
use crate::model::diffusion::vae::LatentShape;
use crate::model::host::to_vec;
use crate::model::vae::{LatentView, Tiling, decode_tiled};
use crate::pixels::Pixels;

/// What to sample.
#[derive(Clone, Debug)]
pub struct ImageRequest {
    /// An image for each.
    pub prompts: Vec<String>,
    /// Negative prompt.
    pub negative: String,
    /// Width and height in pixels.
    pub size: [usize; 2],
    /// Frames of a clip; 1 of an image.
    pub frames: usize,
    /// Frames per second.
    pub fps: usize,
    /// Denoising steps.
    pub steps: usize,
    /// Guidance scales.
    pub guidance: GuidanceScales,
    /// The first image's seed; each next image has the next.
    pub seed: u64,
    /// Initial noise instead of the seed: a file with a tensor `latents` [images,
    /// channels, height, width], or [clips, channels, frames, height, width].
    pub latents: Option<PathBuf>,
    /// Reference images of all, for an editing model.
    pub references: Vec<PathBuf>,
    /// The side of a square with the area that references are scaled to.
    pub reference_resolution: usize,
    /// In which dtypes the model is held.
    pub precision: Precision,
}

/// What an image is made from, encoded.
#[derive(Clone, Debug)]
pub struct SampleCondition {
    /// The prompt.
    pub prompt: Arc<Condition>,
    /// The negative prompt.
    pub negative: Arc<Condition>,
    /// The reference images of an editing model.
    pub references: Vec<ReferenceLatents>,
}

/// An image: three colours, 0 to 1, [3, height, width].
#[derive(Clone, Debug)]
pub struct Image {
    /// Its values.
    pub values: Vec<f32>,
    /// Width and height.
    pub size: [usize; 2],
}

impl From<&Pixels> for Image {
    fn from(pixels: &Pixels) -> Self {
        let values = to_chw(pixels, false).into_iter().map(|value| value / 2.0 + 0.5).collect();
        Self { values, size: [pixels.width as usize, pixels.height as usize] }
    }
}

/// Events while images are sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleEvent {
    /// A phase begins.
    Phase(&'static str),
    /// Bytes were read.
    Loaded(u64),
    /// A step of an image was taken.
    Step,
    /// An image is finished.
    ImageDone,
}

/// Called with each event; returns whether to go on. Called from several threads.
pub type SampleEventFn<'a> = &'a (dyn Fn(SampleEvent) -> bool + Sync);

/// How images are sampled, and the memory it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SamplePlan {
    /// What each phase takes at its peak.
    pub phases: Vec<StageMemory>,
    /// Whether the predictions with and without the prompt, where both are needed, are one batch.
    pub is_cfg_batched: bool,
    /// How latents are tiled for decoding, if they are.
    pub tiling: Option<Tiling>,
    /// How much of a large text encoder is in memory at a time.
    pub encoder_loading: EncoderLoading,
    /// Main memory for decoding reference images.
    pub decoding_bytes: usize,
}

impl SamplePlan {
    /// Bytes that are enough for every phase.
    pub fn peak_bytes(&self) -> usize {
        self.phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
    }
}

const REFERENCES: &str = "references";
const DENOISE: &str = "denoise";
const DECODE: &str = "decode";

/// Images to sample with a model.
pub struct SampleJob<'a> {
    pipeline: &'a Pipeline,
    request: ImageRequest,
    /// Files of references, where the request names them, and the sizes in which the model sees them.
    references: Vec<(PathBuf, ReferenceSize)>,
}

impl<'a> SampleJob<'a> {
    /// Checks the request against the model.
    pub fn new(pipeline: &'a Pipeline, request: ImageRequest) -> Result<Self> {
        let (paths, resolution) = (&request.references, request.reference_resolution);
        let references = fit_references(pipeline, paths, resolution)?;
        Self::with_references(pipeline, request, references)
    }

    /// The same for references that are encoded elsewhere: of these sizes at most.
    pub fn of_encoded(
        pipeline: &'a Pipeline,
        request: ImageRequest,
        sizes: impl IntoIterator<Item = ReferenceSize>,
    ) -> Result<Self> {
        let references = sizes.into_iter().map(|size| (PathBuf::new(), size)).collect();
        Self::with_references(pipeline, request, references)
    }

    fn with_references(
        pipeline: &'a Pipeline,
        request: ImageRequest,
        references: Vec<(PathBuf, ReferenceSize)>,
    ) -> Result<Self> {
        let unit = pipeline.pixels_per_token();
        let wrong = |problem: String, hint| Err(TrainerError::Request { problem, hint });
        let [width, height] = request.size;
        if width == 0 || height == 0 || !width.is_multiple_of(unit) || !height.is_multiple_of(unit)
        {
            let near = |side: usize| (side / unit * unit).max(unit);
            return wrong(
                format!(
                    "size {width}x{height} is not a multiple of {unit}, {}x{} would be",
                    near(width),
                    near(height)
                ),
                "give --size as multiples of that number",
            );
        }
        if let Some(most) = pipeline.max_side().filter(|most| width.max(height) > *most) {
            return wrong(
                format!("size {width}x{height} is larger than the model's {most}x{most}"),
                "choose a smaller --size",
            );
        }
        if request.steps == 0 || request.prompts.is_empty() {
            let (steps, prompts) = (request.steps, request.prompts.len());
            return wrong(format!("{steps} steps for {prompts} prompts"), "ask for one at least");
        }
        check_frames(pipeline, request.frames)?;
        Ok(Self { pipeline, request, references })
    }

    /// The fastest plan that fits into `limit` bytes, by dry runs. If none does, the error names the nearest request
    /// that would.
    pub fn plan(&self, kind: DeviceKind, limit: usize) -> Result<SamplePlan> {
        let plan = self.fastest_plan(kind, limit)?;
        if let Some(phase) = plan.phases.iter().find(|phase| phase.peak_bytes > limit) {
            return Err(too_large(*phase, limit, self.remedy(kind, limit)?));
        }
        // One at a time: there are a few at most.
        let DecodingNeed { largest, largest_bytes, .. } = decoding_need(&self.references)?;
        let beside = plan.phases.iter().find(|phase| phase.name == REFERENCES);
        let needed = largest_bytes + beside.map_or(0, |phase| phase.peak_bytes);
        let shares_memory = !matches!(kind, DeviceKind::Cuda { .. });
        if shares_memory && needed > limit {
            return Err(TrainerError::DecodingTooLarge { path: largest, needed, limit });
        }
        Ok(SamplePlan { decoding_bytes: largest_bytes, ..plan })
    }

    /// The fastest plan whose phases fit into `limit` bytes; for a phase that does not fit, the option that takes the
    /// least memory.
    fn fastest_plan(&self, kind: DeviceKind, limit: usize) -> Result<SamplePlan> {
        let Self { pipeline, request, references } = self;
        let n_texts = request.prompts.len() + 1;
        let seen: Vec<[u32; 2]> = self.encoder_images();
        let (stages, encoder_loading) =
            plan_encoding(&pipeline.encoders, request.precision, n_texts, &seen, kind, limit)?;
        let mut phases: Vec<StageMemory> = stages.into_iter().map(|stage| stage.memory).collect();
        if !references.is_empty() {
            let device = Device::meta(kind, UNLIMITED);
            encode_references(pipeline, &device, references, &DecodingMemory::new(0), &|_| true)?;
            phases.push(StageMemory { name: REFERENCES, peak_bytes: device.usage().extent });
        }
        let empty = [self.dry_run_prompt()?];
        let pairings = match pipeline.family().guidance.cfg_scale(request.guidance) {
            None => vec![true],
            Some(_) if pipeline.encoders.pads() => vec![true, false],
            // Prompts of different length are faster apart than with a mask.
            Some(_) => vec![false],
        };
        let (is_paired, peak_bytes) = first_fitting(kind, limit, pairings, |device, is_paired| {
            self.denoise(device, &empty, is_paired, &|_| true).map(drop)
        })?;
        phases.push(StageMemory { name: DENOISE, peak_bytes });
        let tilings = Tiling::candidates(self.latent_shape()).map(Some);
        let tilings = std::iter::once(None).chain(tilings).collect();
        let latents = vec![vec![0.0; self.latent_shape().count()]];
        let (tiling, peak_bytes) = first_fitting(kind, limit, tilings, |device, tiling| {
            self.decode(device, &latents, tiling, &|_| true).map(drop)
        })?;
        phases.push(StageMemory { name: DECODE, peak_bytes });
        let is_cfg_batched = is_paired;
        Ok(SamplePlan { phases, is_cfg_batched, tiling, encoder_loading, decoding_bytes: 0 })
    }

    /// What could be asked for instead: smaller weights, then fewer frames, then smaller images, then small weights with
    /// one of these.
    fn remedy(&self, kind: DeviceKind, limit: usize) -> Result<Option<Remedy>> {
        let whole = &self.request;
        let precision = Precision { base: Some(Quantisation::Nf4), ..whole.precision };
        let can_quantise = whole.precision.base != Some(Quantisation::Nf4);
        let weights = || ("--quantise nf4".to_owned(), ImageRequest { precision, ..whole.clone() });
        let frames = self
            .fewer_frames()
            .into_iter()
            .map(|frames| (format!("--frames {frames}"), ImageRequest { frames, ..whole.clone() }));
        let sizes = self.smaller_sizes().into_iter().map(|size| {
            let [width, height] = size;
            (format!("--size {width}x{height}"), ImageRequest { size, ..whole.clone() })
        });
        let less: Vec<_> = frames.chain(sizes).collect();
        let both = less.iter().filter(|_| can_quantise).map(|(typed, request)| {
            let request = ImageRequest { precision, ..request.clone() };
            (format!("--quantise nf4 {typed}"), request)
        });
        let both: Vec<_> = both.collect();
        let first = can_quantise.then(weights).into_iter();
        let candidates: Vec<_> = first.chain(less).chain(both).collect();
        nearest_fitting(limit, &candidates, |request, _| {
            let (pipeline, references) = (self.pipeline, self.references.clone());
            let job = Self { pipeline, request: request.clone(), references };
            Ok(job.fastest_plan(kind, 0)?.peak_bytes())
        })
    }

    /// Clips of the same size with half as many frames, and fewer; none for an image.
    fn fewer_frames(&self) -> Vec<usize> {
        let step = self.pipeline.vae.temporal_scale_factor();
        let steps = self.request.frames.saturating_sub(1) / step;
        let halves = std::iter::successors(Some(steps / 2), |steps| Some(steps / 2));
        halves.take_while(|steps| *steps > 0).map(|steps| steps * step + 1).collect()
    }

    /// Images of the same shape, half as large and smaller.
    fn smaller_sizes(&self) -> Vec<[usize; 2]> {
        let unit = self.pipeline.pixels_per_token();
        let part = |shares: usize| {
            self.request.size.map(|side| (side * shares / 4 / unit * unit).max(unit))
        };
        let mut sizes: Vec<_> = [3, 2, 1].map(part).into();
        sizes.dedup();
        sizes.retain(|size| *size != self.request.size);
        sizes
    }

    /// Samples the images on a device with memory for the plan.
    pub fn run(
        &self,
        device: &Device,
        plan: &SamplePlan,
        on_event: SampleEventFn<'_>,
    ) -> Result<Vec<Clip>> {
        let prompts = self.encode(device, plan, on_event)?;
        let latents = self.denoise(device, &prompts, plan.is_cfg_batched, on_event)?;
        check_finite(latents.iter().map(|latents| &latents[..]))?;
        let clips = self.decode(device, &latents, plan.tiling, on_event)?;
        let frames = clips.iter().map(|clip| clip.frames.iter().flat_map(|frame| &frame.values));
        check_finite(frames)?;
        Ok(clips)
    }

    /// All prompts, with the negative one and the references, which are the same for all.
    fn encode(
        &self,
        device: &Device,
        plan: &SamplePlan,
        on_event: SampleEventFn<'_>,
    ) -> Result<Vec<SampleCondition>> {
        let memory = Arc::new(DecodingMemory::new(plan.decoding_bytes));
        let texts = std::iter::once(&self.request.negative).chain(&self.request.prompts);
        let images = self.references.iter();
        let images = images.filter_map(|(path, size)| prompt_image(path, *size, &memory));
        let images: Vec<_> = images.collect();
        let prompt = |text: &String| Prompt { text: text.clone(), images: images.clone() };
        let prompts: Vec<Prompt> = texts.map(prompt).collect();
        let begin = |name, _: &Device| _ = on_event(SampleEvent::Phase(name));
        let tick = |bytes| on_event(SampleEvent::Loaded(bytes));
        let watch = EncodeCallbacks { on_begin: &begin, tick: &tick, on_encoded: &|| true };
        let encoding =
            EncodingOptions { precision: self.request.precision, loading: plan.encoder_loading };
        let mut conditions =
            self.pipeline.encoders.encode(device, encoding, &prompts, watch)?.into_iter();
        let negative = Arc::new(conditions.next().expect("the negative one is there"));
        if !self.references.is_empty() {
            on_event(SampleEvent::Phase(REFERENCES));
        }
        let references =
            encode_references(self.pipeline, device, &self.references, &memory, &tick)?;
        let encoded = |prompt: Condition| SampleCondition {
            prompt: Arc::new(prompt),
            negative: Arc::clone(&negative),
            references: references.clone(),
        };
        Ok(conditions.map(encoded).collect())
    }

    /// Sizes of references as the text encoder sees them, if it sees images.
    fn encoder_images(&self) -> Vec<[u32; 2]> {
        let sizes = self.references.iter().filter_map(|(_, size)| size.encoder);
        sizes.map(Bucket::sides).collect()
    }

    /// A prompt for a dry run.
    pub fn dry_run_prompt(&self) -> Result<SampleCondition> {
        let empty = self.pipeline.encoders.zero_condition(&self.encoder_images())?;
        let empty = Arc::new(empty);
        let latents = |(_, size): &(PathBuf, ReferenceSize)| {
            let shape = self.pipeline.latent_shape([size.vae.width, size.vae.height], 1);
            ReferenceLatents { values: vec![0.0; shape.count()], shape }
        };
        let references = self.references.iter().map(latents).collect();
        Ok(SampleCondition { prompt: Arc::clone(&empty), negative: empty, references })
    }

    /// Latents as models see them, one per prompt.
    fn denoise(
        &self,
        device: &Device,
        prompts: &[SampleCondition],
        is_paired: bool,
        on_event: SampleEventFn<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        on_event(SampleEvent::Phase(DENOISE));
        let tick = |bytes| on_event(SampleEvent::Loaded(bytes));
        let mut adapters = self.pipeline.loaded_adapter();
        let model =
            self.pipeline.load_denoiser(device, self.request.precision, &mut adapters, &tick)?;
        self.denoise_with(device, &model, &adapters.params, prompts, is_paired, on_event)
    }

    /// The same with a model that is loaded already.
    pub fn denoise_with(
        &self,
        device: &Device,
        model: &Denoiser,
        params: &Params,
        prompts: &[SampleCondition],
        is_paired: bool,
        on_event: SampleEventFn<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        let tokens = self.pipeline.image_tokens(self.request.size, self.request.frames);
        let sigmas = self.pipeline.schedule.sigmas(tokens, self.request.steps);
        // Every step takes the same memory: a dry run needs one.
        let n_steps = if device.is_meta() { 1 } else { self.request.steps };
        let denoiser =
            GuidedDenoiser { job: self, device, model, params, is_cfg_batched: is_paired };
        let mut all = Vec::with_capacity(prompts.len());
        for (index, prompt) in prompts.iter().enumerate() {
            let mut latents = self.noise(device, index)?;
            for pair in sigmas.windows(2).take(n_steps) {
                let velocity = denoiser.velocity(&latents, pair[0], prompt)?;
                scheduler::euler_step(&mut latents, &velocity, pair[0], pair[1]);
                check_cancelled(on_event(SampleEvent::Step))?;
            }
            all.push(latents);
        }
        Ok(all)
    }

    /// The initial noise of an image.
    fn noise(&self, device: &Device, index: usize) -> Result<Vec<f32>> {
        let shape = self.latent_shape();
        let count = shape.count();
        match &self.request.latents {
            Some(path) if !device.is_meta() => read_latents(path, index, shape),
            _ => {
                let sequence = RandomSequence::new(self.request.seed + index as u64, 0);
                Ok(to_vec(&device.normal([count], Dtype::F32, 1.0, sequence)?)?)
            }
        }
    }

    /// Images or clips of latents.
    pub fn decode(
        &self,
        device: &Device,
        latents: &[Vec<f32>],
        tiling: Option<Tiling>,
        on_event: SampleEventFn<'_>,
    ) -> Result<Vec<Clip>> {
        on_event(SampleEvent::Phase(DECODE));
        let tick = |bytes| on_event(SampleEvent::Loaded(bytes));
        // Its activations outgrow half precision (`force_upcast` in its settings).
        let decoder =
            self.pipeline.vae.load_decoder(device, Precision::plain(Dtype::F32), &tick)?;
        let statistics = self.pipeline.vae.statistics();
        let params = Params::default();
        let mut clips = Vec::with_capacity(latents.len());
        for latents in latents {
            let scaled = statistics.from_model(latents, self.latent_shape());
            let latent = LatentView { values: &scaled, shape: self.latent_shape() };
            let tape = Tape::inference(device, &params, 0);
            let tiling = tiling.unwrap_or(Tiling::largest(latent.shape));
            let mut values = decode_tiled(&tape, &decoder, latent, tiling)?;
            for value in &mut values {
                *value = (*value / 2.0 + 0.5).clamp(0.0, 1.0);
            }
            clips.push(Clip::new(&values, self.request.size, self.request.fps));
            check_cancelled(on_event(SampleEvent::ImageDone))?;
        }
        Ok(clips)
    }

    fn latent_shape(&self) -> LatentShape {
        self.pipeline.latent_shape(self.request.size, self.request.frames)
    }
}

/// Fails where an image or its latents have a value that is not finite: it would be written as black.
fn check_finite<'a>(images: impl Iterator<Item: IntoIterator<Item = &'a f32>>) -> Result<()> {
    for (number, values) in (1..).zip(images) {
        if !values.into_iter().all(|value| value.is_finite()) {
            return Err(TrainerError::OutputLost { what: format!("image {number}") });
        }
    }
    Ok(())
}

/// Checks that a model can make so many frames.
fn check_frames(pipeline: &Pipeline, frames: usize) -> Result<()> {
    let wrong = |problem: String, hint| Err(TrainerError::Request { problem, hint });
    if frames != 1 && !pipeline.vae.takes_clips() {
        let title = pipeline.family().title;
        return wrong(
            format!("{frames} frames of {title} model, which makes images"),
            "leave out --frames",
        );
    }
    let step = pipeline.vae.temporal_scale_factor();
    if frames == 0 || !(frames - 1).is_multiple_of(step) {
        let below = frames.saturating_sub(1) / step * step + 1;
        return wrong(
            format!(
                "{frames} frames are not a multiple of {step} and one more, {below} and {} would be",
                below + step
            ),
            "give --frames as one of these",
        );
    }
    Ok(())
}

/// The `index`-th of a file's latents.
fn read_latents(path: &Path, index: usize, shape: LatentShape) -> Result<Vec<f32>> {
    let catalog = Catalog::open(path)?;
    let tensor = catalog.find("latents").or_else(|_| catalog.find("in.latents"))?;
    let wanted: Vec<u64> = shape.sizes().iter().map(|size| *size as u64).collect();
    if tensor.shape.get(1..) != Some(&wanted) || tensor.shape[0] <= index as u64 {
        return Err(TrainerError::Request {
            problem: format!(
                "latents have shape {:?}, image {} asks for {wanted:?} at {index}: {}",
                tensor.shape,
                index + 1,
                path.display()
            ),
            hint: "give --size as the latents' width and height times 8, and no more prompts than latents",
        });
    }
    let count = shape.count() as u64;
    let first = index as u64 * count;
    Ok(load_f32(&catalog, tensor, first..first + count)?)
}
