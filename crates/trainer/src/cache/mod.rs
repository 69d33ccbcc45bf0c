//! The cache of latents and text embeddings: all that a run needs from the VAE and the text encoders is
//! known before it begins, so they are loaded one at a time, run, and freed. What was encoded before is found again by what it was made from: the bytes
//! of the image or text, of the weights and settings of the encoder, the size, the crop.
//!
//! ```text
//! cache/
//! └── v2/                                another form of files would be another folder
//!     ├── hashes.json                    checksums of files by path, length, time and inode
//!     ├── 5a0c….safetensors              a shard; its name is its BLAKE3 checksum
//!     │     __metadata__                   address: checksum of the entry, names of its tensors
//!     │     ADDRESS.mean                   of an image: F32 [channels, height, width], as the VAE gives it;
//!     │                                    of a clip: F32 [channels, frames, height, width]
//!     │     ADDRESS.deviation              F32, the same shape
//!     │     ADDRESS.mask                   of a mask: F32 [height, width] of the latents, 0 to 1
//!     │     ADDRESS.tokens                 of a text: what the family's model is told, SD3's
//!     │     ADDRESS.pooled                 in the format that the model is run in
//!     ├── 91f3….safetensors.damaged      put aside; what it held was encoded again
//!     └── .77ab….safetensors.4711.partial   being written, or left by a killed program
//! ```
//!
//! Several jobs, and several programs at once, may share one folder. Nothing in it is ever changed;
//! all of it may be deleted at any time. Left out on purpose: removing entries that no job asks for
//! any more, since no job knows of the others.

pub(crate) mod bucketed;
mod encode;
mod import;
mod index;
mod mask;
mod reference;
pub(crate) mod scaled;
mod select;
mod store;
#[cfg(test)]
mod tests;
mod truncation;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::{Device, DeviceKind, Quantisation};
use weights::BytesDoneFn;
use weights::checksum::{Hash, Hasher};

pub use bucketed::media_kinds;
pub(crate) use encode::waiting_bytes;
pub use import::ImportedEntries;
pub use index::{CacheIndex, CachedLatents};
pub use mask::LatentMask;
pub use reference::{CachedPrompt, CachedReference};
pub use select::CachedSample;

use crate::config::RunConfig;
use crate::config::data_sets::DataSets;
use crate::cost::{Stage, StageMemory, UNLIMITED, nearest_fitting, too_large};
use crate::data::caption::variants;
use crate::data::decoding::SMALL_BYTES;
use crate::data::{DecodingMemory, DecodingNeed, Problem, ProblemKind, SampleSize, SizeCounts};
use crate::demo::draw_set;
use crate::error::{Remedy, Result, TrainerError};
use crate::hashes::{HashCache, field};
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::text::{EncoderLoading, EncodingOptions, TextEncoders};
use crate::model::encoder::tokenizer::TemplateImages;
use crate::progress::{ProgressEvent, ProgressFn};
use crate::sample::encoding::plan_encoding;
use crate::sample::reference::fit_references;
use bucketed::check_any;
use encode::{PendingImage, decoding_need, dry_run_images, encode_images, encode_texts};
use reference::ReferenceHasher;
use scaled::{RESOLUTIONS, fewer_frames, scaled_counts, shortened_counts};
use select::{captions, select};
use store::CacheStore;

/// The form of the files, and that before it.
const VERSION: &str = "v2";
const OLDER: &str = "v1";

/// Incremented when the same text would give another embedding.
const TEXTS_VERSION: u64 = 1;

/// What is to be encoded.
pub struct CacheRequest<'a> {
    /// The images and what is done to them.
    pub data: &'a DataSets,
    /// What crops and held-out images follow from.
    pub seed: u64,
    /// In which formats the text encoders are held, and prompts kept.
    pub precision: Precision,
    /// The cache.
    pub folder: PathBuf,
    /// Texts of sample images.
    pub samples: SampleTexts,
}

/// What sample images are made from.
#[derive(Clone, Debug, Default)]
pub struct SampleTexts {
    /// A prompt for each.
    pub prompts: Vec<String>,
    /// The negative prompt of all.
    pub negative: String,
    /// Reference images for an editing model: of each, or one list for all. Without any, those of the data.
    pub references: Vec<Vec<PathBuf>>,
}

impl<'a> CacheRequest<'a> {
    /// What a job asks for.
    pub fn from_config(config: &'a RunConfig) -> Result<Self> {
        let RunConfig { base, train, .. } = config;
        let (data, sample) = config.data.images()?;
        Ok(Self {
            data,
            seed: train.seed,
            precision: Precision { base: base.quantise_encoders, ..Precision::plain(base.dtype) },
            folder: config.cache_folder(),
            samples: SampleTexts {
                prompts: sample.prompts.clone(),
                negative: sample.negative_prompt.clone(),
                references: sample.references.0.clone(),
            },
        })
    }
}

/// How much is not in the cache yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingEntries {
    /// Images whose latents, or those of their mirror images, or masks, are missing.
    pub images: usize,
    /// Texts.
    pub texts: usize,
}

const CHECKSUMS_PHASE: &str = "checksums";

/// The phase in which images are encoded.
pub const IMAGES_PHASE: &str = "images";

/// How missing latents and prompts are encoded, and what that takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachePlan {
    /// What each phase takes at its peak; none if all is there.
    pub phases: Vec<StageMemory>,
    /// How much of a large text encoder is in memory at a time.
    pub loading: EncoderLoading,
    /// Main memory for decoding images, beside that of the phases.
    pub decoding_bytes: usize,
}

/// A folder of images compared with the cache.
pub struct CacheBuilder<'a> {
    pipeline: &'a Pipeline,
    data: &'a DataSets,
    precision: Precision,
    index: CacheIndex,
    images: Vec<PendingImage>,
    prompts: Vec<CachedPrompt>,
}

impl<'a> CacheBuilder<'a> {
    /// Looks through the images and the cache. Reads what it has not read before, of images,
    /// weights and cache; encodes nothing.
    pub fn new(
        pipeline: &'a Pipeline,
        request: CacheRequest<'a>,
        on_progress: ProgressFn<'_>,
    ) -> Result<Self> {
        let CacheRequest { data, seed, precision, folder, samples: texts } = request;
        check_bare(pipeline)?;
        for set in data {
            if let Some(style) = set.draw {
                draw_set(&set.images, style, set.draw_count, seed)?;
            }
        }
        on_progress(ProgressEvent::Phase { name: CHECKSUMS_PHASE, total: 0 });
        let tick = |bytes| on_progress(ProgressEvent::Loaded(bytes));
        let older = older(&folder);
        let folder = folder.join(VERSION);
        let mut hashes = HashCache::open(folder.join("hashes.json"));
        let (store, damaged) = CacheStore::open(&folder, &mut hashes, &tick)?;
        let selected = select(pipeline, data, seed, &mut hashes, &tick);
        let references = sample_references(pipeline, data, &texts.references, &mut hashes, &tick);
        let encoders = hashes.hash_files(&pipeline.encoders.sources(), &tick);
        hashes.save();
        let selected = selected?;
        let settings: Vec<_> = data.iter().map(captions).collect();
        let samples = selected.train.iter().chain(&selected.held_out);
        let too_long = truncation::truncated_captions(&pipeline.encoders, &settings, samples);
        let mut index = CacheIndex {
            train: selected.train,
            held_out: selected.held_out,
            problems: [selected.problems, too_long, damaged, older].concat(),
            n_texts: 0,
            captions: settings,
            sample_references: references?,
            store,
            encoders_hash: encoding_hash(pipeline, encoders?, precision)?,
        };
        if pipeline.family().editing.is_some() && index.sample_references.is_empty() {
            index.sample_references = references_of_data(&index, texts.prompts.len());
        }
        let mut prompts = all_prompts(&index, &texts);
        index.n_texts = prompts.len();
        prompts.retain(|prompt| !index.store.has(&index.cache_key(prompt)));
        let images = missing_images(&index);
        Ok(Self { pipeline, data, precision, index, images, prompts })
    }

    /// What would be encoded.
    pub fn missing(&self) -> MissingEntries {
        let images = self.images.len() + mask::n_missing(&self.index);
        MissingEntries { images, texts: self.prompts.len() }
    }

    /// How many latents of each size would be encoded: of images, and of their references.
    pub fn to_encode(&self) -> [SizeCounts<SampleSize>; 2] {
        let mut counts = [SizeCounts::new(), SizeCounts::new()];
        for image in &self.images {
            let of_kind = &mut counts[usize::from(image.is_reference())];
            *of_kind.entry(image.size).or_default() += image.wanted.len();
        }
        counts
    }

    /// What was found so far; latents and prompts may be missing.
    pub fn index(&self) -> &CacheIndex {
        &self.index
    }

    /// What decoding the missing images takes.
    pub fn decoding_need(&self) -> DecodingNeed {
        let mut need = decoding_need(&self.images);
        mask::add_decoding_need(&self.index, &mut need);
        need
    }

    /// The peak memory of each phase, by a dry run; empty if all is cached. If one does not fit into
    /// `limit` bytes, the error names the nearest change of the job that would. Images are decoded in `host_limit` bytes
    /// of main memory, or in what the phases leave of `limit` where it is the same memory.
    pub fn plan(
        &self,
        kind: DeviceKind,
        limit: usize,
        host_limit: Option<usize>,
    ) -> Result<CachePlan> {
        let plan = self.planned(&self.to_encode(), self.precision, kind, limit)?;
        if let Some(phase) = plan.phases.iter().find(|phase| phase.peak_bytes > limit) {
            return Err(too_large(*phase, limit, self.remedy(kind, limit)?));
        }
        let need = self.decoding_need();
        let is_decoding = |phase: &&StageMemory| phase.name == IMAGES_PHASE;
        let beside = plan.phases.iter().find(is_decoding).map_or(0, |phase| phase.peak_bytes);
        let (limit, beside) = host_limit.map_or((limit, beside), |limit| (limit, 0));
        // Small images are of no account, as the program itself.
        match need.fit(limit - beside + SMALL_BYTES) {
            Some(decoding_bytes) => Ok(CachePlan { decoding_bytes, ..plan }),
            None => Err(TrainerError::DecodingTooLarge {
                needed: beside + need.least_bytes(),
                path: need.largest,
                limit,
            }),
        }
    }

    fn planned(
        &self,
        counts: &[SizeCounts<SampleSize>; 2],
        precision: Precision,
        kind: DeviceKind,
        limit: usize,
    ) -> Result<CachePlan> {
        let mut stages: Vec<Stage> =
            plan_images(self.pipeline, counts, kind, limit)?.into_iter().collect();
        let mut loading = EncoderLoading::Whole;
        if !self.prompts.is_empty() {
            let (encoders, n) = (&self.pipeline.encoders, self.prompts.len());
            let images = self.largest_images()?;
            let (texts, planned) = plan_encoding(encoders, precision, n, &images, kind, limit)?;
            stages.extend(texts);
            loading = planned;
        }
        let phases = stages.into_iter().map(|stage| stage.memory).collect();
        Ok(CachePlan { phases, loading, decoding_bytes: 0 })
    }

    /// Sizes of the images of the missing prompt whose images take the most tokens.
    pub fn largest_images(&self) -> Result<Vec<[u32; 2]>> {
        let sizes = self.prompts.iter().map(CachedPrompt::image_sizes);
        largest_images(&self.pipeline.encoders, sizes)
    }

    /// What could be changed in the job: the format of text encoders, then the length of clips, then the size of images,
    /// then the first with one of the others.
    fn remedy(&self, kind: DeviceKind, limit: usize) -> Result<Option<Remedy>> {
        const QUANTISED: &str = "base.quantise_encoders = \"nf4\"";
        let (precision, counts) = (self.precision, self.to_encode());
        let quantised = Precision { base: Some(Quantisation::Nf4), ..precision };
        let can_quantise = precision.base != quantised.base;
        let [of_images, of_references] = &counts;
        let longest = of_images.keys().map(|size| size.frames).max().unwrap_or(1);
        let unit = self.pipeline.vae.temporal_scale_factor();
        let smaller = || {
            let shorter = fewer_frames(longest, unit).map(|frames| {
                (format!("data.frames = {frames}"), shortened_counts(of_images, frames))
            });
            let largest = self.data.largest_resolution();
            let sides = RESOLUTIONS.into_iter().filter(move |side| *side < largest);
            let scaled = sides.map(|side| {
                (self.data.resolution_change(side), scaled_counts(of_images, self.data, side))
            });
            shorter.chain(scaled).map(|(change, images)| (change, [images, of_references.clone()]))
        };
        let weights = can_quantise.then(|| (QUANTISED.to_owned(), (quantised, self.to_encode())));
        let images = smaller().map(|(change, counts)| (change, (precision, counts)));
        let both = smaller()
            .filter(|_| can_quantise)
            .map(|(change, counts)| (format!("{QUANTISED} and {change}"), (quantised, counts)));
        let candidates: Vec<_> = weights.into_iter().chain(images).chain(both).collect();
        nearest_fitting(limit, &candidates, |(precision, counts), _| {
            let plan = self.planned(counts, *precision, kind, 0)?;
            Ok(plan.phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0))
        })
    }

    /// Encodes what is missing, on a device that has room for the plan.
    pub fn run(
        mut self,
        device: &Device,
        loading: EncoderLoading,
        decoding_bytes: usize,
        on_progress: ProgressFn<'_>,
    ) -> Result<CacheIndex> {
        self.encode(device, loading, decoding_bytes, on_progress)?;
        self.finish()
    }

    /// The same, and may be asked again: what was encoded before an error or an interruption stays.
    pub fn encode(
        &mut self,
        device: &Device,
        loading: EncoderLoading,
        decoding_bytes: usize,
        on_progress: ProgressFn<'_>,
    ) -> Result<()> {
        let memory = Arc::new(DecodingMemory::new(decoding_bytes));
        let Self { pipeline, precision, index, images, prompts, .. } = self;
        let encoding = EncodingOptions { precision: *precision, loading };
        let encoded = mask::encode_masks(pipeline, &memory, index);
        let encoded = encoded
            .and_then(|()| encode_images(pipeline, device, images, &memory, index, on_progress));
        let encoded = encoded.and_then(|()| {
            // Images that turned out to be damaged cannot be seen by the text encoder either.
            prompts.retain(|prompt| prompt.latent_keys().all(|key| index.store.has(&key)));
            encode_texts(pipeline, device, encoding, prompts, &memory, index, on_progress)
        });
        let flushed = index.store.flush();
        *images = missing_images(index);
        prompts.retain(|prompt| !index.store.has(&index.cache_key(prompt)));
        encoded.and(flushed)
    }

    /// What there is, without images that turned out to be damaged.
    pub fn finish(self) -> Result<CacheIndex> {
        let Self { data, mut index, .. } = self;
        for samples in [&mut index.train, &mut index.held_out] {
            samples.retain(|sample| sample.cache_keys().all(|(_, at)| index.store.has(&at)));
            let has_mask = |mask: &mask::CachedMask| index.store.has(&mask.key);
            samples.retain(|sample| sample.mask.as_ref().is_none_or(has_mask));
            samples.retain(|sample| {
                let mut keys = sample.references.iter().flat_map(|image| image.cache_keys());
                keys.all(|(_, at)| index.store.has(&at))
            });
        }
        // Others of several sets may hold out all that one has.
        let held_out = index.held_out.iter().filter(|_| !index.train.is_empty());
        let images = index.train.iter().chain(held_out);
        check_any(images.map(|sample| (sample.set, sample.repeats)), data, &index.problems)?;
        Ok(index)
    }
}

/// A cache of the form before, if there is none of this one yet. What it holds was addressed by less than it depends on.
fn older(folder: &Path) -> Vec<Problem> {
    let is_older = folder.join(OLDER).is_dir() && !folder.join(VERSION).exists();
    let problem = || Problem::warning(folder.join(OLDER), ProblemKind::CacheOlder);
    is_older.then(problem).into_iter().collect()
}

/// The cost of encoding so many images and references, by a dry run; `None` if there are none.
pub(crate) fn plan_images(
    pipeline: &Pipeline,
    [images, references]: &[SizeCounts<SampleSize>; 2],
    kind: DeviceKind,
    limit: usize,
) -> Result<Option<Stage>> {
    let mut counts = images.clone();
    for (size, n) in references {
        *counts.entry(*size).or_default() += n;
    }
    if counts.is_empty() {
        return Ok(None);
    }
    let device = Device::meta(kind, UNLIMITED);
    let cost = dry_run_images(pipeline, &device, &counts, limit)?;
    let phase = StageMemory { name: IMAGES_PHASE, peak_bytes: device.usage().extent };
    Ok(Some(Stage { memory: phase, cost }))
}

/// An adapter would change the embeddings, and cache keys do not cover it.
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
fn encoding_hash(pipeline: &Pipeline, encoders: Hash, precision: Precision) -> Result<Hash> {
    let mut hasher = Hasher::new();
    field(&mut hasher, &TEXTS_VERSION.to_le_bytes());
    field(&mut hasher, encoders.as_bytes());
    field(&mut hasher, pipeline.family().name.as_bytes());
    let shape = pipeline.encoders.zero_condition(&[])?;
    for named in &shape.0 {
        field(&mut hasher, named.name.as_bytes());
        named.sizes.iter().for_each(|size| field(&mut hasher, &(*size as u64).to_le_bytes()));
    }
    for length in pipeline.encoders.lengths() {
        field(&mut hasher, &(length as u64).to_le_bytes());
    }
    for template in pipeline.encoders.templates() {
        field(&mut hasher, template.prefix.as_bytes());
        field(&mut hasher, template.suffix.as_bytes());
        field(&mut hasher, &(template.n_dropped as u64).to_le_bytes());
        match template.images {
            TemplateImages::None => {}
            TemplateImages::One => field(&mut hasher, b"an image"),
            TemplateImages::Numbered => field(&mut hasher, b"numbered images"),
        }
    }
    let base = precision.base.map_or_else(|| "none".into(), |base| base.to_string());
    field(&mut hasher, precision.dtype.to_string().as_bytes());
    field(&mut hasher, base.as_bytes());
    Ok(hasher.finalize())
}

/// Images and references whose latents are missing, each once.
fn missing_images(index: &CacheIndex) -> Vec<PendingImage> {
    let is_missing = |(_, at): &(bool, _)| !index.store.has(at);
    let samples = || index.train.iter().chain(&index.held_out);
    let images = samples().filter_map(|sample| {
        let wanted: Vec<_> = sample.cache_keys().filter(is_missing).collect();
        (!wanted.is_empty()).then(|| PendingImage::new(sample, wanted))
    });
    let mut seen = HashSet::new();
    let references = samples().flat_map(|sample| &sample.references);
    let references = references.chain(index.sample_references.iter().flatten());
    let references = references.filter_map(|reference| {
        let wanted: Vec<_> = reference.cache_keys().filter(is_missing).collect();
        let is_first = seen.insert(reference.cache_key);
        (is_first && !wanted.is_empty()).then(|| PendingImage::reference(reference, wanted))
    });
    images.chain(references).collect()
}

/// Every prompt that can be asked for, each once.
fn all_prompts(index: &CacheIndex, texts: &SampleTexts) -> Vec<CachedPrompt> {
    let mut all = Vec::new();
    for sample in index.train.iter().chain(&index.held_out) {
        let views = [false, true].into_iter().take(1 + usize::from(sample.mirrored_key.is_some()));
        for is_mirrored in views {
            let captions = variants(&sample.caption, index.captions_of(sample)).into_iter();
            all.extend(captions.map(|text| sample.prompt(text, is_mirrored)));
        }
    }
    for (number, text) in texts.prompts.iter().enumerate() {
        let references = index.sample_references(number);
        let of = |text: &String| CachedPrompt::new(text.clone(), references, false);
        all.extend([of(text), of(&texts.negative)]);
    }
    // An encoder that sees images has no use for a text without.
    if all.iter().all(|prompt| prompt.images.is_empty()) {
        all.extend(["", &texts.negative].map(CachedPrompt::from));
    }
    let mut seen = HashSet::new();
    all.retain(|prompt| seen.insert(index.cache_key(prompt)));
    all.sort_by(|a, b| a.text.cmp(&b.text));
    all
}

/// The references of the first samples, held-out ones if there are any, one for each sample image.
fn references_of_data(index: &CacheIndex, n: usize) -> Vec<Vec<Arc<CachedReference>>> {
    let samples = if index.held_out.is_empty() { &index.train } else { &index.held_out };
    samples.iter().cycle().take(n).map(|sample| sample.references.clone()).collect()
}

/// The references of sample images that a job names.
fn sample_references(
    pipeline: &Pipeline,
    data: &DataSets,
    lists: &[Vec<PathBuf>],
    hashes: &mut HashCache,
    tick: BytesDoneFn<'_>,
) -> Result<Vec<Vec<Arc<CachedReference>>>> {
    let vae = hashes.hash_files(&pipeline.vae.sources(), tick)?;
    let mut hasher = ReferenceHasher { hashes, vae, has_mirror_images: false };
    let mut hashed = |(path, size)| hasher.reference(path, size, tick).map(Arc::new);
    let list = |paths: &Vec<PathBuf>| -> Result<Vec<Arc<CachedReference>>> {
        let sized = fit_references(pipeline, paths, data.common().reference_resolution)?;
        sized.into_iter().map(&mut hashed).collect()
    };
    lists.iter().map(list).collect()
}

/// Of the images of several prompts, those that take the most tokens.
pub(crate) fn largest_images(
    encoders: &TextEncoders,
    prompts: impl Iterator<Item = Vec<[u32; 2]>>,
) -> Result<Vec<[u32; 2]>> {
    let mut largest = (0, Vec::new());
    for images in prompts {
        let n = encoders.image_tokens(&images)?;
        if n > largest.0 {
            largest = (n, images);
        }
    }
    Ok(largest.1)
}
