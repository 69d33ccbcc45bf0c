//! Learning from pictures: a model that draws, the loss of flow matching, and pictures drawn to see
//! what it does; what such a job does before and after the loop.
//!
//! Shapes: S samples, C channels, H and W of a latent.

mod draw;
mod feed;
mod noisy;
pub(crate) mod outlook;
pub(crate) mod read;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use compute::ops::NoisyLatents;
use compute::{Device, Dtype, Kind, Tape, Var};
use weights::Tick;

use self::draw::Pictures;
pub(crate) use self::feed::Feed;
use self::noisy::{FIXED_PLACES, Noise, NoisySample, mix};
use self::read::ReadySample;
use super::folder::Folder;
use super::preparation::{prepares, tell_findings};
use super::workplace::{On, Planned, Setup, Workplace};
use crate::cache::scaled::RESOLUTIONS;
use crate::cache::{Caching, Index, Latents, Request, plan_pictures};
use crate::config::data::Data;
use crate::config::sample::Sample;
use crate::config::{RunConfig, Size};
use crate::cost::Cost;
use crate::data::Bucket;
use crate::error::Result;
use crate::event::{Event, Sink};
use crate::export::{Exported, export, model};
use crate::fingerprint::Fingerprint;
use crate::model::adapter::Adapters;
use crate::model::adapter::read::Component;
use crate::model::build::{Precision, Want};
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::condition::{Condition, Conditions};
use crate::model::diffusion::denoiser::{Denoiser, Input};
use crate::model::recompute::Recompute;
use crate::model::vae::Tiling;
use crate::objective::flow::Scheme;
use crate::plan::{Job, Plan, choose, ladder, rehearse};
use crate::progress;
use crate::sample::encoding::plan_encoding;
use crate::task::lesson::{Before, Learner, Lesson, Outlook, Smaller};
use crate::task::prefetch::AHEAD;
use crate::task::session::Trained;

/// A model that draws, and what it is to draw.
#[derive(Clone, Copy)]
pub struct Drawing<'a> {
    /// The model with all that belongs to it.
    pub pipeline: &'a Pipeline,
    /// The pictures.
    pub data: &'a Data,
    /// Pictures drawn while training.
    pub sample: &'a Sample,
    /// Their size.
    pub sample_size: Size,
}

/// Pictures of one size with their prompts.
pub struct Portion {
    /// At least one.
    samples: Vec<NoisySample>,
}

impl<'a> Drawing<'a> {
    /// What a job is about; an error if it is about something else.
    pub fn of(config: &'a RunConfig, pipeline: &'a Pipeline) -> Result<Self> {
        let (data, sample) = config.material.pictures()?;
        Ok(Self { pipeline, data, sample, sample_size: sample.size })
    }
}

impl Lesson for Drawing<'_> {
    type Model = Denoiser;
    type Size = Bucket;
    type Portion = Portion;

    fn path(&self) -> &Path {
        &self.pipeline.path
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        self.pipeline.fingerprint()
    }

    fn component(&self) -> Component {
        Component::Transformer
    }

    fn tensors(&self) -> Result<Vec<Want>> {
        self.pipeline.transformer.config.tensors()
    }

    fn load(
        &self,
        device: &Device,
        precision: Precision,
        adapters: &mut Adapters,
        tick: Tick<'_>,
    ) -> Result<Denoiser> {
        self.pipeline.load_denoiser(device, precision, adapters, tick)
    }

    fn loss<'m>(
        &self,
        model: &'m Denoiser,
        tape: &Tape<'m>,
        Portion { samples }: &Portion,
        (dtype, recompute): (Dtype, Recompute),
    ) -> Result<Var> {
        let device = tape.device();
        let NoisyLatents { noisy, velocity } =
            mix(samples, device, &self.pipeline.vae.statistics(), dtype)?;
        let told = self.pipeline.family().guidance.trained(samples.len());
        let prompts: Vec<&Condition> = samples.iter().map(|sample| &*sample.prompt).collect();
        let input = Input {
            latents: &noisy,
            levels: &samples.iter().map(|sample| sample.level).collect::<Vec<_>>(),
            condition: &Conditions::upload(device, &prompts, dtype)?,
            guidance: told.as_deref(),
        };
        let predicted = model.predict(tape, input, recompute)?;
        let target = model.arrange(tape, velocity)?;
        let weights: Vec<f32> = samples.iter().map(|sample| sample.weight).collect();
        predicted.loss(tape, &target, &weights)
    }

    fn rehearsed(&self, size: Bucket, n: usize) -> Result<Portion> {
        let levels = self.pipeline.schedule.levels();
        let noise = Noise { levels, scheme: Scheme::Uniform, seed: 0 };
        let shape = self.pipeline.latent_shape([size.width, size.height]);
        let zeros = || vec![0.0; shape.count()];
        let latents = Arc::new(Latents { mean: zeros(), deviation: zeros(), shape });
        let prompt = Arc::new(self.pipeline.encoders.hollow_condition());
        let sample = ReadySample { latents, prompt, draw: 0 };
        Ok(Portion { samples: (0..n).map(|_| noise.draw(&sample)).collect() })
    }

    fn before(
        &self,
        config: &RunConfig,
        outlook: &Outlook<Bucket>,
        kind: Kind,
        limit: usize,
    ) -> Result<Before> {
        let mut stages: Vec<_> =
            plan_pictures(self.pipeline, &outlook.to_encode, kind)?.into_iter().collect();
        if outlook.n_texts == 0 {
            return Ok(Before { stages, ..Before::default() });
        }
        let base = config.base.quantise_encoders;
        let precision = Precision { base, ..Precision::plain(config.base.dtype) };
        let encoders = &self.pipeline.encoders;
        let (texts, t5) = plan_encoding(encoders, precision, outlook.n_texts, (kind, limit))?;
        stages.extend(texts);
        Ok(Before { stages, t5 })
    }

    fn file_bytes(&self) -> u64 {
        self.pipeline.transformer.file_bytes()
    }

    fn host_bytes(&self, config: &RunConfig, outlook: &Outlook<Bucket>) -> usize {
        let pipeline = self.pipeline;
        let prompt = pipeline.encoders.hollow_condition().count();
        let latents = |size: Bucket| pipeline.latent_shape([size.width, size.height]).count();
        // A mean and a deviation for each number of a latent.
        let sample = |size| (2 * latents(size) + prompt) * Dtype::F32.bytes();
        let sizes = || outlook.train.iter().map(|(size, n)| (sample(*size), n));
        let repeats = (self.data.repeats as usize).max(1);
        let all: usize = sizes().map(|(bytes, shown)| bytes * shown.div_ceil(repeats)).sum();
        let largest = sizes().map(|(bytes, _)| bytes).max().unwrap_or(0);
        let batch = config.train.batch * largest;
        // What is read ahead is also kept, as long as there is room for it.
        if all <= read::KEPT_BYTES { all } else { read::KEPT_BYTES + (AHEAD + 1) * batch }
    }

    fn weight(Bucket { width, height }: Bucket) -> usize {
        width * height
    }

    fn shows(&self) -> bool {
        !self.sample.prompts.is_empty()
    }

    fn n_measured(&self) -> usize {
        FIXED_PLACES.len()
    }

    fn rehearse_showing(
        &self,
        device: &Device,
        learner: Learner<'_, Denoiser>,
        tiling: Option<Tiling>,
    ) -> Result<Cost> {
        Pictures::new(*self, learner.precision, tiling)?.rehearse(device, learner)
    }

    fn smaller(&self, outlook: &Outlook<Bucket>) -> Vec<Smaller<Self>> {
        let samples = smaller_sides(self.sample_size.width.max(self.sample_size.height));
        let samples: Vec<usize> = samples.filter(|_| self.shows()).collect();
        let resolutions: Vec<usize> = smaller_sides(self.data.resolution).collect();
        let of_samples = samples.iter().map(|side| (None, Some(*side)));
        let of_images = resolutions.iter().map(|side| (Some(*side), None));
        let both = RESOLUTIONS.into_iter().filter_map(|side| {
            let of = |sides: &[usize]| sides.contains(&side).then_some(side);
            Some((Some(of(&resolutions)?), Some(of(&samples)?)))
        });
        let least = (resolutions.last().copied(), samples.last().copied());
        let all = of_samples.chain(of_images).chain(both).chain([least]);
        all.map(|asked| self.asking(asked, outlook)).collect()
    }
}

/// Sides of images that people use, smaller than this.
fn smaller_sides(than: usize) -> impl Iterator<Item = usize> {
    RESOLUTIONS.into_iter().filter(move |side| *side < than)
}

impl Drawing<'_> {
    /// The same with images of this resolution, and samples of this side.
    fn asking(
        &self,
        (resolution, side): (Option<usize>, Option<usize>),
        outlook: &Outlook<Bucket>,
    ) -> Smaller<Self> {
        let images = resolution.map(|side| format!("data.resolution = {side}"));
        let samples = side.map(|side| format!("sample.size = {side}"));
        let changes: Vec<String> = images.into_iter().chain(samples).collect();
        let sample_size = side.map_or(self.sample_size, |side| Size { width: side, height: side });
        let outlook = match resolution {
            Some(resolution) => outlook::scaled(outlook, self.data, resolution),
            None => outlook.clone(),
        };
        Smaller { change: changes.join(" and "), lesson: Self { sample_size, ..*self }, outlook }
    }
}

/// Finds the images, decides how the run is done, and encodes what is not in the cache.
pub(super) fn prepare(
    config: &RunConfig,
    pipeline: &Pipeline,
    on: &On<'_>,
    events: &Sink<'_>,
) -> Result<(Planned, Arc<Index>, Workplace)> {
    let (planned, caching) = plan(config, pipeline, on, events)?;
    let n_known = caching.index().problems.len();
    tell_findings(events, caching.index().findings(0))?;
    let (index, place) = encode(caching, planned.setup(on), events)?;
    // Those that only showed when an image was decoded.
    tell_findings(events, index.findings(n_known))?;
    Ok((planned, index, place))
}

/// Looks through the images and decides how the run is done.
fn plan<'p>(
    config: &'p RunConfig,
    pipeline: &'p Pipeline,
    on: &On<'_>,
    events: &Sink<'_>,
) -> Result<(Planned, Caching<'p>)> {
    let room = on.room();
    let lesson = &Drawing::of(config, pipeline)?;
    let look = |encoders| {
        let precision = Precision { base: encoders, ..Precision::plain(config.base.dtype) };
        let request = Request { precision, ..Request::of(config)? };
        Caching::new(pipeline, request, &|done| prepares(events, done))
    };
    let caching = look(config.base.quantise_encoders)?;
    let outlook = Outlook::of(&caching);
    let plan = choose(Job { lesson, config, outlook: &outlook }, room)?;
    let planned = config.with(&plan.choice);
    let ladder = ladder(Job { lesson, config: &planned, outlook: &outlook }, room)?;
    if planned.base.quantise_encoders == config.base.quantise_encoders {
        return Ok((Planned { config: planned, plan, ladder }, caching));
    }
    // Other encoders make other prompts, which may be in the cache or not.
    let caching = look(planned.base.quantise_encoders)?;
    let outlook = Outlook::of(&caching);
    let again = rehearse(Job { lesson, config: &planned, outlook: &outlook }, room)?;
    let plan = Plan { considered: plan.considered, ..again };
    Ok((Planned { config: planned, plan, ladder }, caching))
}

/// Encodes what is not in the cache, and measures each encoder. What is encoded when a GPU is lost stays.
fn encode(
    mut caching: Caching<'_>,
    setup: Setup<'_>,
    events: &Sink<'_>,
) -> Result<(Arc<Index>, Workplace)> {
    let place = Workplace::open(setup.on, setup.plan)?;
    let ((), place) =
        place.surviving(setup, events, |Workplace { device, meter }, events, _| {
            let meter = Mutex::new(meter);
            caching.encode(device, setup.plan.t5, &|event| {
                if let progress::Event::Phase { name, .. } = event {
                    meter.lock().unwrap_or_else(PoisonError::into_inner).begin(name.into());
                }
                prepares(events, event)
            })
        })?;
    Ok((Arc::new(caching.finish()?), place))
}

/// Writes what was trained for every program that was asked for.
pub(super) fn write_result(
    config: &RunConfig,
    pipeline: &mut Pipeline,
    trained: Trained,
    folder: &Folder,
    events: &Sink<'_>,
) -> Result<()> {
    let layers = match trained {
        Trained::Adapter(layers) => layers,
        Trained::Own(own) => {
            let trained = |name: &str| Ok(own.get(name).cloned());
            model::write(pipeline, &trained, config.base.dtype, &folder.path.join("model"))?;
            let (format, path) = ("model".into(), "model".into());
            return events.emit(Event::Exported { format, path, layers: own.len() });
        }
    };
    pipeline.set_adapter(vec![(Component::Transformer, layers)]);
    for format in &config.output.formats {
        let (name, into) = (config.output.name.as_str(), folder.path.join("adapter"));
        let Exported { path, n_layers, .. } = export(pipeline, *format, &into, name)?;
        let path = path.strip_prefix(&folder.path).unwrap_or(&path).into();
        let format = format!("{format:?}").to_lowercase();
        events.emit(Event::Exported { format, path, layers: n_layers })?;
    }
    Ok(())
}
