//! Pictures from prompts: encode, take noise away, decode. The same functions are run first on a
//! device without data, which tells what each phase takes; then an arena of that size is enough.
//! `text` writes instead of drawing.

pub mod choice;
pub(crate) mod encoding;
mod exif;
pub mod picture;
pub mod text;

use std::path::{Path, PathBuf};

use compute::{Device, Dtype, Kind, Params, Quantisation, Tape};
use weights::Catalog;
use weights::load::floats;

use self::encoding::plan_encoding;
use crate::cost::{Phase, choose, go_on, nearest, too_large};
use crate::error::{Remedy, Result, TrainerError};
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::condition::{Condition, Conditions};
use crate::model::diffusion::denoiser::{Denoiser, Input};
use crate::model::diffusion::schedule;
use crate::model::diffusion::text::{Encoding, T5Loading, Watch};
use crate::model::diffusion::vae::LatentShape;
use crate::model::host::numbers;
use crate::model::recompute::Recompute;
use crate::model::vae::{Latent, Tiling, decode_tiled};

/// What is to be drawn.
#[derive(Clone, Debug)]
pub struct Request {
    /// A picture for each.
    pub prompts: Vec<String>,
    /// What none of them shall show.
    pub negative: String,
    /// Width and height in pixels.
    pub size: [usize; 2],
    /// Steps from noise to picture.
    pub steps: usize,
    /// How much the prompt is exaggerated; up to 1 not at all.
    pub guidance: f32,
    /// The first picture's; each next one has the next.
    pub seed: u64,
    /// Where noise comes from instead of the seed: a file with a tensor `latents` [pictures,
    /// channels, height, width].
    pub latents: Option<PathBuf>,
    /// In which formats the model is held.
    pub precision: Precision,
}

/// A picture: three colours, 0 to 1, [3, height, width].
#[derive(Clone, Debug)]
pub struct Picture {
    /// Its numbers.
    pub numbers: Vec<f32>,
    /// Width and height.
    pub size: [usize; 2],
}

/// What happens while pictures are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A phase begins.
    Phase(&'static str),
    /// Bytes were read.
    Loaded(u64),
    /// A step of a picture was taken.
    Step,
    /// A picture is finished.
    Drawn,
}

/// Told what happens; answers whether to go on. Called from several threads.
pub type Tell<'a> = &'a (dyn Fn(Event) -> bool + Sync);

/// How the work is done, and what it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What each phase takes at its peak.
    pub phases: Vec<Phase>,
    /// Whether a picture with and one without the prompt are computed at once.
    pub is_paired: bool,
    /// How latents are cut for decoding, if they are.
    pub tiling: Option<Tiling>,
    /// How much of T5 is in memory at a time.
    pub t5: T5Loading,
}

impl Plan {
    /// Bytes that are enough for every phase.
    pub fn peak_bytes(&self) -> usize {
        self.phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
    }
}

const DENOISE: &str = "denoise";
const DECODE: &str = "decode";

/// Pictures to be drawn with a model.
pub struct Job<'a> {
    pipeline: &'a Pipeline,
    request: Request,
}

impl<'a> Job<'a> {
    /// Checks what is asked for against the model.
    pub fn new(pipeline: &'a Pipeline, request: Request) -> Result<Self> {
        let unit = pipeline.unit();
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
        if let Some(most) = pipeline.most_pixels().filter(|most| width.max(height) > *most) {
            return wrong(
                format!("size {width}x{height} is larger than the model's {most}x{most}"),
                "choose a smaller --size",
            );
        }
        if request.steps == 0 || request.prompts.is_empty() {
            let (steps, prompts) = (request.steps, request.prompts.len());
            return wrong(format!("{steps} steps for {prompts} prompts"), "ask for one at least");
        }
        Ok(Self { pipeline, request })
    }

    /// The fastest way that fits into `limit` bytes, found without reading a number. If none does, the error names
    /// the nearest request that would.
    pub fn plan(&self, kind: Kind, limit: usize) -> Result<Plan> {
        let plan = self.fastest(kind, limit)?;
        match plan.phases.iter().find(|phase| phase.peak_bytes > limit) {
            None => Ok(plan),
            Some(phase) => Err(too_large(*phase, limit, self.remedy(kind, limit)?)),
        }
    }

    /// The fastest way whose phases fit into `limit` bytes; of a phase that does not fit, the way that takes the
    /// least.
    fn fastest(&self, kind: Kind, limit: usize) -> Result<Plan> {
        let Self { pipeline, request } = self;
        let n_texts = request.prompts.len() + 1;
        let (stages, t5) =
            plan_encoding(&pipeline.encoders, request.precision, n_texts, (kind, limit))?;
        let mut phases: Vec<Phase> = stages.into_iter().map(|stage| stage.phase).collect();
        let empty = self.rehearsed_prompts();
        let is_guided = pipeline.family().guidance.is_paired(request.guidance);
        let pairings = if is_guided { vec![true, false] } else { vec![false] };
        let (is_paired, peak_bytes) = choose(kind, limit, pairings, |device, is_paired| {
            self.denoise(device, &empty, is_paired, &|_| true).map(drop)
        })?;
        phases.push(Phase { name: DENOISE, peak_bytes });
        let LatentShape { height, width, .. } = self.latent_shape();
        let tilings = Tiling::candidates().filter(|tiling| tiling.tile < height.max(width));
        let tilings = std::iter::once(None).chain(tilings.map(Some)).collect();
        let latents = vec![vec![0.0; self.latent_shape().count()]];
        let (tiling, peak_bytes) = choose(kind, limit, tilings, |device, tiling| {
            self.decode(device, &latents, tiling, &|_| true).map(drop)
        })?;
        phases.push(Phase { name: DECODE, peak_bytes });
        Ok(Plan { phases, is_paired, tiling, t5 })
    }

    /// What could be asked for instead: smaller weights, then smaller images, then both.
    fn remedy(&self, kind: Kind, limit: usize) -> Result<Option<Remedy>> {
        let Request { precision, size, .. } = self.request;
        let quantised = Precision { base: Some(Quantisation::Nf4), ..precision };
        let can_quantise = precision.base != Some(Quantisation::Nf4);
        let weights = can_quantise.then(|| ("--quantise nf4".to_owned(), (quantised, size)));
        let sizes = || self.smaller_sizes().into_iter();
        let typed = |[width, height]: [usize; 2]| format!("--size {width}x{height}");
        let smaller = sizes().map(|size| (typed(size), (precision, size)));
        let both = sizes().filter(|_| can_quantise);
        let both = both.map(|size| (format!("--quantise nf4 {}", typed(size)), (quantised, size)));
        let candidates: Vec<_> = weights.into_iter().chain(smaller).chain(both).collect();
        nearest(limit, candidates, |(precision, size), _| {
            let request = Request { precision: *precision, size: *size, ..self.request.clone() };
            let job = Self { pipeline: self.pipeline, request };
            Ok(job.fastest(kind, 0)?.peak_bytes())
        })
    }

    /// Images of the same shape, half as large and smaller.
    fn smaller_sizes(&self) -> Vec<[usize; 2]> {
        let unit = self.pipeline.unit();
        let part = |shares: usize| {
            self.request.size.map(|side| (side * shares / 4 / unit * unit).max(unit))
        };
        let mut sizes: Vec<_> = [3, 2, 1].map(part).into();
        sizes.dedup();
        sizes.retain(|size| *size != self.request.size);
        sizes
    }

    /// Draws the pictures on a device that has room for the plan.
    pub fn run(&self, device: &Device, plan: &Plan, tell: Tell<'_>) -> Result<Vec<Picture>> {
        let prompts = self.encode(device, plan.t5, tell)?;
        let latents = self.denoise(device, &prompts, plan.is_paired, tell)?;
        self.decode(device, &latents, plan.tiling, tell)
    }

    /// The negative prompt, then the others.
    fn encode(&self, device: &Device, t5: T5Loading, tell: Tell<'_>) -> Result<Vec<Condition>> {
        let texts: Vec<String> =
            std::iter::once(&self.request.negative).chain(&self.request.prompts).cloned().collect();
        let begin = |name, _: &Device| _ = tell(Event::Phase(name));
        let tick = |bytes| tell(Event::Loaded(bytes));
        let watch = Watch { begin: &begin, tick: &tick, encoded: &|| true };
        let encoding = Encoding { precision: self.request.precision, t5 };
        self.pipeline.encoders.encode(device, encoding, &texts, watch)
    }

    /// Prompts for a rehearsal, the negative one first.
    pub fn rehearsed_prompts(&self) -> Vec<Condition> {
        vec![self.pipeline.encoders.hollow_condition(); 2]
    }

    /// Latents as models see them, one per prompt but the first.
    fn denoise(
        &self,
        device: &Device,
        prompts: &[Condition],
        is_paired: bool,
        tell: Tell<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        tell(Event::Phase(DENOISE));
        let tick = |bytes| tell(Event::Loaded(bytes));
        let mut adapters = self.pipeline.own_adapter();
        let model =
            self.pipeline.load_denoiser(device, self.request.precision, &mut adapters, &tick)?;
        self.denoise_with(device, (&model, &adapters.params), prompts, is_paired, tell)
    }

    /// The same with a model that is loaded already.
    pub fn denoise_with(
        &self,
        device: &Device,
        (model, params): (&Denoiser, &Params),
        prompts: &[Condition],
        is_paired: bool,
        tell: Tell<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        let tokens = self.pipeline.image_tokens(self.request.size);
        let sigmas = self.pipeline.schedule.sigmas(tokens, self.request.steps);
        // Every step takes the same memory: a rehearsal needs one.
        let n_steps = if device.is_meta() { 1 } else { self.request.steps };
        let drawer = Drawer { job: self, device, model, params, is_paired };
        let (negative, prompts) = prompts.split_first().expect("the negative one is there");
        let mut all = Vec::with_capacity(prompts.len());
        for (index, prompt) in prompts.iter().enumerate() {
            let mut latents = self.noise(device, index)?;
            for pair in sigmas.windows(2).take(n_steps) {
                let velocity = drawer.velocity(&latents, pair[0], prompt, negative)?;
                schedule::step(&mut latents, &velocity, pair[0], pair[1]);
                go_on(tell(Event::Step))?;
            }
            all.push(latents);
        }
        Ok(all)
    }

    /// Where a picture begins.
    fn noise(&self, device: &Device, index: usize) -> Result<Vec<f32>> {
        let shape = self.latent_shape();
        let count = shape.count();
        match &self.request.latents {
            Some(path) if !device.is_meta() => read_latents(path, index, shape),
            _ => {
                let numbers_of = (self.request.seed + index as u64, 0);
                Ok(numbers(&device.normal([count], Dtype::F32, 1.0, numbers_of)?)?)
            }
        }
    }

    /// Pictures of latents.
    pub fn decode(
        &self,
        device: &Device,
        latents: &[Vec<f32>],
        tiling: Option<Tiling>,
        tell: Tell<'_>,
    ) -> Result<Vec<Picture>> {
        tell(Event::Phase(DECODE));
        let tick = |bytes| tell(Event::Loaded(bytes));
        // Its activations outgrow half precision (`force_upcast` in its settings).
        let decoder =
            self.pipeline.vae.load_decoder(device, Precision::plain(Dtype::F32), &tick)?;
        let (vae, statistics) = (&self.pipeline.vae, self.pipeline.vae.statistics());
        let params = Params::default();
        let mut pictures = Vec::with_capacity(latents.len());
        for latents in latents {
            let scaled = statistics.from_model(latents);
            let LatentShape { channels, height, width, .. } = self.latent_shape();
            let latent = Latent { numbers: &scaled, sizes: [channels, height, width] };
            let tape = Tape::inference(device, &params, 0);
            // One tile as large as the latent is the latent.
            let tiling = tiling.unwrap_or(Tiling { tile: height.max(width), overlap: 0 });
            let mut numbers = decode_tiled(&tape, &decoder, latent, vae.reduction(), tiling)?;
            for number in &mut numbers {
                *number = (*number / 2.0 + 0.5).clamp(0.0, 1.0);
            }
            pictures.push(Picture { numbers, size: self.request.size });
            go_on(tell(Event::Drawn))?;
        }
        Ok(pictures)
    }

    fn latent_shape(&self) -> LatentShape {
        self.pipeline.latent_shape(self.request.size)
    }
}

/// The model at work on one picture.
struct Drawer<'a> {
    job: &'a Job<'a>,
    device: &'a Device,
    model: &'a Denoiser,
    params: &'a Params,
    is_paired: bool,
}

impl Drawer<'_> {
    /// Where the latents go at a level of noise, the prompt followed as closely as was asked for.
    fn velocity(
        &self,
        latents: &[f32],
        sigma: f32,
        prompt: &Condition,
        negative: &Condition,
    ) -> Result<Vec<f32>> {
        let Job { pipeline, request } = self.job;
        let (guidance, scale) = (pipeline.family().guidance, request.guidance);
        if !guidance.is_paired(scale) {
            return self.predict(latents, sigma, &[prompt]);
        }
        let patch = pipeline.transformer.config.latents().patch;
        let sizes = (self.job.latent_shape(), patch);
        if self.is_paired {
            let both = self.predict(latents, sigma, &[negative, prompt])?;
            let (without, with) = both.split_at(latents.len());
            return Ok(guidance.apply([without, with], scale, sizes));
        }
        let without = self.predict(latents, sigma, &[negative])?;
        let with = self.predict(latents, sigma, &[prompt])?;
        Ok(guidance.apply([&without, &with], scale, sizes))
    }

    /// The same latents' velocity for each prompt.
    fn predict(&self, latents: &[f32], sigma: f32, prompts: &[&Condition]) -> Result<Vec<f32>> {
        let Job { pipeline, request } = self.job;
        let (dtype, samples) = (request.precision.dtype, prompts.len());
        let tape = Tape::inference(self.device, self.params, 0);
        let shape = self.job.latent_shape().batch(samples);
        let latents = self.device.upload_as(shape, &latents.repeat(samples), dtype)?;
        let told = pipeline.family().guidance.embedded(request.guidance, samples);
        let input = Input {
            latents: &latents,
            levels: &vec![pipeline.schedule.level(sigma); samples],
            condition: &Conditions::upload(self.device, prompts, dtype)?,
            guidance: told.as_deref(),
        };
        let predicted = self.model.predict(&tape, input, Recompute::None)?;
        Ok(numbers(predicted.latents(&tape)?.tensor())?)
    }
}

/// The `index`-th of a file's latents.
fn read_latents(path: &Path, index: usize, shape: LatentShape) -> Result<Vec<f32>> {
    let catalog = Catalog::open(path)?;
    let tensor = catalog.find("latents").or_else(|_| catalog.find("in.latents"))?;
    let wanted: Vec<u64> = shape.sizes().iter().map(|size| *size as u64).collect();
    if tensor.shape.get(1..) != Some(&wanted) || tensor.shape[0] <= index as u64 {
        return Err(TrainerError::Request {
            problem: format!(
                "latents have shape {:?}, picture {} asks for {wanted:?} at {index}: {}",
                tensor.shape,
                index + 1,
                path.display()
            ),
            hint: "give --size as the latents' width and height times 8, and no more prompts than latents",
        });
    }
    let count = shape.count() as u64;
    let first = index as u64 * count;
    Ok(floats(&catalog, tensor, first..first + count)?)
}
