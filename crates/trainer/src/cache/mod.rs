//! Pictures and captions, encoded once: what a run asks of the autoencoder and the text encoders is
//! known before it begins, so they are loaded one at a time, asked, and freed, and a step sees
//! nothing but numbers. What was encoded before is found again by what it was made from: the bytes
//! of the picture or text, of the weights and settings of the encoder, the size, the crop.
//!
//! ```text
//! cache/
//! └── v2/                                another form of files would be another folder
//!     ├── hashes.json                    checksums of files by path, length, time and inode
//!     ├── 5a0c….safetensors              a shard; its name is its BLAKE3 checksum
//!     │     __metadata__                   address: checksum of the entry, names of its tensors
//!     │     ADDRESS.mean                   of an image: F32 [channels, height, width], as the VAE gives it
//!     │     ADDRESS.deviation              F32, the same shape
//!     │     ADDRESS.tokens                 of a text: what the family's model is told, SD3's
//!     │     ADDRESS.pooled                 in the format that the model is run in
//!     ├── 91f3….safetensors.damaged      put aside; what it held was encoded again
//!     └── .77ab….safetensors.4711.partial   being written, or left by a killed program
//! ```
//!
//! Several jobs, and several programs at once, may share one folder. Nothing in it is ever changed;
//! all of it may be deleted at any time. Left out on purpose: removing entries that no job asks for
//! any more, since no job knows of the others.

mod cut;
mod encode;
mod index;
pub(crate) mod placed;
pub(crate) mod scaled;
mod select;
mod store;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use compute::{Device, Kind, Quantisation};
use weights::checksum::{Hash, Hasher};

pub use index::{Index, Latents};
pub use select::Sample;

use crate::config::RunConfig;
use crate::config::data::Data;
use crate::cost::{Phase, Stage, UNLIMITED, nearest, too_large};
use crate::data::caption::variants;
use crate::data::{Bucket, Counts, Problem, ProblemKind};
use crate::demo::draw_set;
use crate::error::{Remedy, Result, TrainerError};
use crate::hashes::{Hashes, field};
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::text::{Encoding, T5Loading};
use crate::progress::{Event, Tell};
use crate::sample::encoding::plan_encoding;
use encode::{Picture, encode_pictures, encode_texts, rehearse_pictures};
use placed::check_any;
use scaled::{RESOLUTIONS, scaled_counts};
use select::{captions, select};
use store::Store;

/// The form of the files, and that before it.
const VERSION: &str = "v2";
const OLDER: &str = "v1";

/// Counted up when the same text would give another prompt.
const TEXTS_VERSION: u64 = 1;

/// What is to be encoded.
pub struct Request<'a> {
    /// The pictures and what is done to them.
    pub data: &'a Data,
    /// What crops and held-out pictures follow from.
    pub seed: u64,
    /// In which formats the text encoders are held, and prompts kept.
    pub precision: Precision,
    /// The cache.
    pub folder: PathBuf,
    /// Texts besides captions and the empty one.
    pub extra_texts: Vec<String>,
}

impl<'a> Request<'a> {
    /// What a job asks for.
    pub fn of(config: &'a RunConfig) -> Result<Self> {
        let RunConfig { base, train, .. } = config;
        let (data, sample) = config.material.pictures()?;
        Ok(Self {
            data,
            seed: train.seed,
            precision: Precision { base: base.quantise_encoders, ..Precision::plain(base.dtype) },
            folder: config.cache_folder(),
            extra_texts: sample.prompts.iter().chain([&sample.negative]).cloned().collect(),
        })
    }
}

/// How much is not in the cache yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Pictures whose latents, or those of their mirror images, are missing.
    pub pictures: usize,
    /// Texts.
    pub texts: usize,
}

const READ: &str = "checksums";

/// The phase in which pictures are encoded.
pub const PICTURES: &str = "pictures";

/// How missing latents and prompts are encoded, and what that takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachePlan {
    /// What each phase takes at its peak; none if all is there.
    pub phases: Vec<Phase>,
    /// How much of T5 is in memory at a time.
    pub t5: T5Loading,
}

/// A folder of pictures compared with the cache.
pub struct Caching<'a> {
    pipeline: &'a Pipeline,
    data: &'a Data,
    precision: Precision,
    index: Index,
    pictures: Vec<Picture>,
    texts: Vec<String>,
}

impl<'a> Caching<'a> {
    /// Looks through the pictures and the cache. Reads what it has not read before, of pictures,
    /// weights and cache; encodes nothing.
    pub fn new(pipeline: &'a Pipeline, request: Request<'a>, tell: Tell<'_>) -> Result<Self> {
        let Request { data, seed, precision, folder, extra_texts } = request;
        check_bare(pipeline)?;
        if let Some(style) = data.draw {
            draw_set(&data.images, style, data.draw_count, seed)?;
        }
        tell(Event::Phase { name: READ, total: 0 });
        let tick = |bytes| tell(Event::Loaded(bytes));
        let older = older(&folder);
        let folder = folder.join(VERSION);
        let mut hashes = Hashes::open(folder.join("hashes.json"));
        let (store, damaged) = Store::open(&folder, &mut hashes, &tick)?;
        let selected = select(pipeline, data, seed, &mut hashes, &tick);
        let encoders = hashes.of_all(&pipeline.encoders.sources(), &tick);
        hashes.save();
        let selected = selected?;
        let settings = captions(data);
        let samples = selected.train.iter().chain(&selected.held_out);
        let too_long = cut::too_long(&pipeline.encoders, &settings, samples);
        let mut index = Index {
            train: selected.train,
            held_out: selected.held_out,
            problems: [selected.problems, too_long, damaged, older].concat(),
            n_texts: 0,
            captions: settings,
            store,
            encoders: encoding(pipeline, encoders?, precision),
        };
        let mut texts = all_texts(&index, extra_texts);
        index.n_texts = texts.len();
        texts.retain(|text| !index.store.has(&index.address(text)));
        let pictures = missing_pictures(&index);
        Ok(Self { pipeline, data, precision, index, pictures, texts })
    }

    /// What would be encoded.
    pub fn missing(&self) -> Missing {
        Missing { pictures: self.pictures.len(), texts: self.texts.len() }
    }

    /// How many latents of each size would be encoded.
    pub fn to_encode(&self) -> Counts<Bucket> {
        let mut counts = Counts::new();
        for picture in &self.pictures {
            *counts.entry(picture.bucket).or_default() += picture.wanted.len();
        }
        counts
    }

    /// What was found so far; latents and prompts may be missing.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// What each phase takes, found without reading a number; nothing if all is there. If one does not fit into
    /// `limit` bytes, the error names the nearest change of the job that would.
    pub fn plan(&self, kind: Kind, limit: usize) -> Result<CachePlan> {
        let plan = self.planned(&self.to_encode(), self.precision, (kind, limit))?;
        match plan.phases.iter().find(|phase| phase.peak_bytes > limit) {
            None => Ok(plan),
            Some(phase) => Err(too_large(*phase, limit, self.remedy(kind, limit)?)),
        }
    }

    fn planned(
        &self,
        counts: &Counts<Bucket>,
        precision: Precision,
        (kind, limit): (Kind, usize),
    ) -> Result<CachePlan> {
        let mut stages: Vec<Stage> =
            plan_pictures(self.pipeline, counts, kind)?.into_iter().collect();
        let mut t5 = T5Loading::Whole;
        if !self.texts.is_empty() {
            let (encoders, n) = (&self.pipeline.encoders, self.texts.len());
            let (texts, loading) = plan_encoding(encoders, precision, n, (kind, limit))?;
            stages.extend(texts);
            t5 = loading;
        }
        Ok(CachePlan { phases: stages.into_iter().map(|stage| stage.phase).collect(), t5 })
    }

    /// What could be changed in the job: the format of text encoders, then the size of images, then both.
    fn remedy(&self, kind: Kind, limit: usize) -> Result<Option<Remedy>> {
        const QUANTISED: &str = "base.quantise_encoders = \"nf4\"";
        let (precision, counts) = (self.precision, self.to_encode());
        let quantised = Precision { base: Some(Quantisation::Nf4), ..precision };
        let can_quantise = precision.base != quantised.base;
        let smaller = || {
            let sides = RESOLUTIONS.into_iter().filter(|side| *side < self.data.resolution);
            sides.map(|side| {
                let change = format!("data.resolution = {side}");
                (change, scaled_counts(&counts, self.data, side))
            })
        };
        let weights = can_quantise.then(|| (QUANTISED.to_owned(), (quantised, self.to_encode())));
        let images = smaller().map(|(change, counts)| (change, (precision, counts)));
        let both = smaller()
            .filter(|_| can_quantise)
            .map(|(change, counts)| (format!("{QUANTISED} and {change}"), (quantised, counts)));
        let candidates: Vec<_> = weights.into_iter().chain(images).chain(both).collect();
        nearest(limit, candidates, |(precision, counts), _| {
            let plan = self.planned(counts, *precision, (kind, 0))?;
            Ok(plan.phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0))
        })
    }

    /// Encodes what is missing, on a device that has room for the plan.
    pub fn run(mut self, device: &Device, t5: T5Loading, tell: Tell<'_>) -> Result<Index> {
        self.encode(device, t5, tell)?;
        self.finish()
    }

    /// The same, and may be asked again: what was encoded before an error or an interruption stays.
    pub fn encode(&mut self, device: &Device, t5: T5Loading, tell: Tell<'_>) -> Result<()> {
        let Self { pipeline, precision, index, pictures, texts, .. } = self;
        let encoding = Encoding { precision: *precision, t5 };
        let encoded = encode_pictures(pipeline, device, pictures, index, tell)
            .and_then(|()| encode_texts(pipeline, device, encoding, texts, index, tell));
        let flushed = index.store.flush();
        *pictures = missing_pictures(index);
        texts.retain(|text| !index.store.has(&index.address(text)));
        encoded.and(flushed)
    }

    /// What there is, without pictures that turned out to be damaged.
    pub fn finish(self) -> Result<Index> {
        let Self { data, mut index, .. } = self;
        for samples in [&mut index.train, &mut index.held_out] {
            samples.retain(|sample| sample.addresses().all(|(_, at)| index.store.has(&at)));
        }
        check_any(index.train.iter().map(|sample| sample.repeats), data, &index.problems)?;
        Ok(index)
    }
}

/// A cache of the form before, if there is none of this one yet. What it holds was addressed by less than it depends on.
fn older(folder: &Path) -> Vec<Problem> {
    let is_older = folder.join(OLDER).is_dir() && !folder.join(VERSION).exists();
    let problem = || Problem::warning(folder.join(OLDER), ProblemKind::CacheOlder);
    is_older.then(problem).into_iter().collect()
}

/// What encoding so many pictures takes, found without reading a number; nothing if there are none.
pub(crate) fn plan_pictures(
    pipeline: &Pipeline,
    counts: &Counts<Bucket>,
    kind: Kind,
) -> Result<Option<Stage>> {
    if counts.is_empty() {
        return Ok(None);
    }
    let device = Device::meta(kind, UNLIMITED);
    let cost = rehearse_pictures(pipeline, &device, counts)?;
    let phase = Phase { name: PICTURES, peak_bytes: device.usage().extent };
    Ok(Some(Stage { phase, cost }))
}

/// An adapter would change what texts become, and addresses do not know of it.
fn check_bare(pipeline: &Pipeline) -> Result<()> {
    let mut adapters = pipeline.encoders.adapter().into_iter();
    if adapters.all(|(_, layers)| layers.is_empty()) {
        return Ok(());
    }
    Err(TrainerError::Request {
        problem: "captions cannot be cached with an adapter on the text encoders".into(),
        hint: "train on the base without it",
    })
}

/// The checksum of all that makes a prompt of a text.
fn encoding(pipeline: &Pipeline, encoders: Hash, precision: Precision) -> Hash {
    let mut hasher = Hasher::new();
    field(&mut hasher, &TEXTS_VERSION.to_le_bytes());
    field(&mut hasher, encoders.as_bytes());
    field(&mut hasher, pipeline.family().name.as_bytes());
    let shape = pipeline.encoders.hollow_condition();
    for named in &shape.0 {
        field(&mut hasher, named.name.as_bytes());
        named.sizes.iter().for_each(|size| field(&mut hasher, &(*size as u64).to_le_bytes()));
    }
    for length in pipeline.encoders.lengths() {
        field(&mut hasher, &(length as u64).to_le_bytes());
    }
    let base = precision.base.map_or_else(|| "none".into(), |base| base.to_string());
    field(&mut hasher, precision.dtype.to_string().as_bytes());
    field(&mut hasher, base.as_bytes());
    hasher.finalize()
}

fn missing_pictures(index: &Index) -> Vec<Picture> {
    let samples = index.train.iter().chain(&index.held_out);
    let missing = samples.filter_map(|sample| {
        let is_missing = |(_, at): &(bool, _)| !index.store.has(at);
        let wanted: Vec<_> = sample.addresses().filter(is_missing).collect();
        (!wanted.is_empty()).then(|| Picture::new(sample, wanted))
    });
    missing.collect()
}

/// Every text that can be asked for, each once.
fn all_texts(index: &Index, extra: Vec<String>) -> Vec<String> {
    let samples = index.train.iter().chain(&index.held_out);
    let captions = samples.flat_map(|sample| variants(&sample.caption, &index.captions));
    let all: BTreeSet<String> = captions.chain([String::new()]).chain(extra).collect();
    all.into_iter().collect()
}
