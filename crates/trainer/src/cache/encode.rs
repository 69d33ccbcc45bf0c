//! What is missing, through the encoders and into the store. Images and clips are decoded and scaled by
//! threads that run a few of them ahead of the autoencoder.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::scope;

use compute::{Device, DeviceKind, Dtype};
use weights::checksum::FileStamp;

use super::IMAGES_PHASE;
use super::index::{CacheIndex, CachedLatents, condition_entry};
use super::reference::{CachedPrompt, CachedReference};
use super::select::{CachedSample, ClipPart};
use super::store::CacheKey;
use crate::archive;
use crate::cost::{Cost, UNLIMITED, check_cancelled};
use crate::data::decoding::{MAX_DECODERS, decoding_bytes};
use crate::data::reference::{ReferenceFit, scaled_reference};
use crate::data::{
    Bucket, Crop, DecodingMemory, DecodingNeed, Pixels, Problem, ProblemKind, SampleSize,
    SizeCounts, decode, frames_to_chw, resize_and_crop,
};
use crate::error::Result;
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::text::{EncodeCallbacks, EncodingOptions, Prompt};
use crate::model::diffusion::vae::{LatentShape, encode_clip, vae_moments};
use crate::model::vae::{Tiling, VaeEncoder};
use crate::progress::{ProgressEvent, ProgressFn};
use crate::read_ahead::{ReadAhead, read_ahead};

/// Threads that decode.
const DECODERS: ReadAhead = ReadAhead::by(MAX_DECODERS);

/// Bytes of decoded frames that wait, or are being made. Chosen: two clips of 121 frames of 768 x 512 pixels.
const DECODED_BYTES: usize = 300 << 20;

/// Pixels that go through the autoencoder together, in images of one size. Chosen: with fewer, small
/// images wait for its weights more than for their own numbers; four times as many gain 2 % more
/// at twice the memory.
const PIXELS_PER_BATCH: usize = 256 * 256;

/// Texts that go through all encoders together. Chosen: what the first two make of them is held
/// until the last is done, 0.6 MB for each with the published models; and loading the encoders
/// again is little beside encoding as many texts.
const TEXTS_PER_BATCH: usize = 512;

/// Log variances are clamped to this range. Taken: diffusers'
/// `DiagonalGaussianDistribution`.
const LOGVAR_RANGE: [f32; 2] = [-30.0, 20.0];

/// An image or a segment of a clip to encode.
pub(super) struct PendingImage {
    path: PathBuf,
    stamps: Vec<FileStamp>,
    clip: Option<ClipPart>,
    /// Its bucket and frames, without references.
    pub size: SampleSize,
    fit: ImageFit,
    /// Mirrored or not, and where the latents go.
    pub wanted: Vec<(bool, CacheKey)>,
}

/// How an image becomes as large as its bucket.
#[derive(Clone, Copy)]
enum ImageFit {
    /// Scaled and cropped: an image to train on.
    Crop(Crop),
    /// A reference, of which a model sees the means of its latents.
    Reference(ReferenceFit),
}

impl PendingImage {
    pub fn new(sample: &CachedSample, wanted: Vec<(bool, CacheKey)>) -> Self {
        let CachedSample { path, stamps, bucket, crop, clip, .. } = sample;
        let (path, stamps, fit) = (path.clone(), stamps.clone(), ImageFit::Crop(*crop));
        let size = SampleSize::from(*bucket).with_frames(sample.frames());
        Self { path, stamps, clip: clip.clone(), size, fit, wanted }
    }

    pub fn reference(reference: &CachedReference, wanted: Vec<(bool, CacheKey)>) -> Self {
        let CachedReference { path, stamp, size, .. } = reference;
        let (path, stamps, fit) = (path.clone(), vec![*stamp], ImageFit::Reference(size.of_vae()));
        Self { path, stamps, clip: None, size: size.vae.into(), fit, wanted }
    }

    /// Whether it is a reference.
    pub fn is_reference(&self) -> bool {
        matches!(self.fit, ImageFit::Reference(_))
    }

    /// Opens and scales it: an image, or the frames of a clip, each as soon as it is decoded.
    fn pixels(&self, memory: &DecodingMemory) -> std::result::Result<Vec<Pixels>, ProblemKind> {
        let Self { path, size: SampleSize { bucket, .. }, .. } = self;
        let reserved = || memory.reserve(self.decoding_bytes()?);
        let frames = match (self.fit, &self.clip) {
            (ImageFit::Reference(fit), _) => vec![scaled_reference(path, fit, memory)?],
            (ImageFit::Crop(crop), None) => {
                let _reserved = reserved()?;
                vec![resize_and_crop(decode(path)?, *bucket, crop)]
            }
            (ImageFit::Crop(crop), Some(ClipPart { clip, size, segment })) => {
                let _reserved = reserved()?;
                let mut frames = Vec::with_capacity(segment.frames);
                let mut add = |frame: Pixels| frames.push(resize_and_crop(frame, *bucket, crop));
                clip.read(path, *size, *segment, &mut add)?;
                frames
            }
        };
        // Its latents would lie under the address of what it was.
        if self.files().into_iter().map(|file| archive::stamp(file).ok()).ne(self
            .stamps
            .iter()
            .copied()
            .map(Some))
        {
            return Err(ProblemKind::Unreadable { why: "it was changed meanwhile".into() });
        }
        Ok(frames)
    }

    /// Bytes at the peak of decoding and scaling it.
    fn decoding_bytes(&self) -> std::result::Result<usize, ProblemKind> {
        let to = self.size.bucket.sides();
        match &self.clip {
            None => decoding_bytes(&self.path, to),
            Some(ClipPart { clip, size, .. }) => clip.decoding_bytes(&self.path, *size, to),
        }
    }

    fn files(&self) -> Vec<&Path> {
        self.clip.as_ref().map_or_else(|| vec![&*self.path], |part| part.clip.files(&self.path))
    }
}

impl CachedSample {
    /// Mirrored or not, and where the latents are.
    pub(super) fn cache_keys(&self) -> impl Iterator<Item = (bool, CacheKey)> {
        [(false, Some(self.cache_key)), (true, self.mirrored_key)]
            .into_iter()
            .filter_map(|(is_mirrored, address)| Some((is_mirrored, address?)))
    }
}

/// Encodes images of all sizes on the meta device, in tiles that fit into `limit` bytes if any do; gives the cost of so
/// many.
pub(super) fn dry_run_images(
    pipeline: &Pipeline,
    device: &Device,
    counts: &SizeCounts<SampleSize>,
    limit: usize,
) -> Result<Cost> {
    let encoder = pipeline.vae.load_encoder(device, PRECISION, &|_| true)?;
    let mut works = Vec::new();
    for (size, count) in counts {
        let empty = vec![0.0; 3 * size.pixels()];
        let images = vec![&empty[..]; batch_size(*size).min(*count)];
        let tiling = tiling(pipeline, device.kind(), *size, limit)?;
        let before = device.work();
        encode(&encoder, device, &images, *size, tiling)?;
        let times = *count as f64 / images.len().max(1) as f64;
        works.push((times, device.work().since(&before)));
    }
    Ok(Cost { works, read_bytes: pipeline.vae.file_bytes() })
}

/// How many images of a size are encoded together.
fn batch_size(size: SampleSize) -> usize {
    (PIXELS_PER_BATCH / size.pixels()).max(1)
}

/// The largest tiles that fit, by a dry run; the smallest where none does. VAEs of images take an image whole.
fn tiling(
    pipeline: &Pipeline,
    kind: DeviceKind,
    size: SampleSize,
    limit: usize,
) -> Result<Option<Tiling>> {
    if !pipeline.vae.takes_clips() {
        return Ok(None);
    }
    let SampleSize { bucket, frames, .. } = size;
    let latent = pipeline.latent_shape([bucket.width, bucket.height], frames);
    let largest = std::iter::once(Tiling::largest(latent));
    let tilings: Vec<Tiling> = largest.chain(Tiling::candidates(latent)).collect();
    let empty = vec![0.0; 3 * size.pixels()];
    let images = vec![&empty[..]; batch_size(size)];
    for tiling in &tilings {
        let device = Device::meta(kind, UNLIMITED);
        let encoder = pipeline.vae.load_encoder(&device, PRECISION, &|_| true)?;
        encode(&encoder, &device, &images, size, Some(*tiling))?;
        if device.usage().extent <= limit {
            return Ok(Some(*tiling));
        }
    }
    Ok(tilings.last().copied())
}

/// The encoder's activations outgrow half precision (`force_upcast` in its settings).
const PRECISION: Precision = Precision::plain(Dtype::F32);

/// What decoding images takes. One whose header cannot be read any more is told when it is decoded.
pub(super) fn decoding_need(images: &[PendingImage]) -> DecodingNeed {
    let mut need = DecodingNeed::default();
    for image in images {
        need.add(&image.path, image.decoding_bytes().unwrap_or(0));
    }
    need.waiting_bytes = waiting_bytes(images.iter().map(|image| image.size));
    need
}

/// Bytes of decoded images of these sizes that wait, and of those that are encoded, as floats.
pub(crate) fn waiting_bytes(sizes: impl Iterator<Item = SampleSize> + Clone) -> usize {
    let ReadAhead { threads, waiting } = decoders(sizes.clone());
    let of_size = |size: SampleSize| {
        let values = 3 * size.pixels();
        values * (threads + waiting) + values * batch_size(size) * size_of::<f32>()
    };
    sizes.map(of_size).max().unwrap_or(0)
}

/// Puts the latents of images into the index; those that cannot be decoded become problems.
pub(super) fn encode_images(
    pipeline: &Pipeline,
    device: &Device,
    images: &[PendingImage],
    memory: &DecodingMemory,
    index: &mut CacheIndex,
    on_progress: ProgressFn<'_>,
) -> Result<()> {
    if images.is_empty() {
        return Ok(());
    }
    on_progress(ProgressEvent::Phase { name: IMAGES_PHASE, total: images.len() });
    let mut batches = EncodeBatches {
        pipeline,
        device,
        encoder: None,
        tilings: BTreeMap::new(),
        waiting: BTreeMap::new(),
    };
    scope(|scope| {
        let ahead = decoders(images.iter().map(|image| image.size));
        for (at, pixels) in read_ahead(scope, images, ahead, |image| image.pixels(memory)) {
            let image = &images[at];
            match pixels {
                Ok(pixels) => batches.add(image, pixels, index, on_progress)?,
                Err(kind) => {
                    index.problems.push(Problem::skipped(&image.path, kind));
                    check_cancelled(on_progress(ProgressEvent::Done))?;
                }
            }
        }
        batches.finish(index, on_progress)?;
        // Before text encoders are loaded, which takes its time.
        index.store.flush()
    })
}

/// Images that wait for others of their size.
struct EncodeBatches<'a> {
    pipeline: &'a Pipeline,
    device: &'a Device,
    /// Loaded for the first image that can be decoded; there may be none.
    encoder: Option<VaeEncoder>,
    /// The tiles of each size.
    tilings: BTreeMap<SampleSize, Option<Tiling>>,
    waiting: BTreeMap<SampleSize, Vec<(&'a PendingImage, Vec<Pixels>)>>,
}

impl<'a> EncodeBatches<'a> {
    fn add(
        &mut self,
        image: &'a PendingImage,
        pixels: Vec<Pixels>,
        index: &mut CacheIndex,
        on_progress: ProgressFn<'_>,
    ) -> Result<()> {
        let waiting = self.waiting.entry(image.size).or_default();
        waiting.push((image, pixels));
        if waiting.len() < batch_size(image.size) {
            return Ok(());
        }
        let batch = mem::take(waiting);
        self.encode(image.size, &batch, index, on_progress)
    }

    /// Encodes what still waits.
    fn finish(&mut self, index: &mut CacheIndex, on_progress: ProgressFn<'_>) -> Result<()> {
        for (size, batch) in mem::take(&mut self.waiting) {
            self.encode(size, &batch, index, on_progress)?;
        }
        Ok(())
    }

    fn encode(
        &mut self,
        size: SampleSize,
        batch: &[(&PendingImage, Vec<Pixels>)],
        index: &mut CacheIndex,
        on_progress: ProgressFn<'_>,
    ) -> Result<()> {
        let tick = |bytes| on_progress(ProgressEvent::Loaded(bytes));
        let encoder = match self.encoder.take() {
            Some(encoder) => encoder,
            None => self.pipeline.vae.load_encoder(self.device, PRECISION, &tick)?,
        };
        let tiling = match self.tilings.get(&size) {
            Some(tiling) => *tiling,
            None => tiling(self.pipeline, self.device.kind(), size, self.device.limit())?,
        };
        self.tilings.insert(size, tiling);
        let encoder = self.encoder.insert(encoder);
        let mut wanted = Vec::<WantedLatents<'_>>::new();
        for (image, frames) in batch {
            for (is_mirrored, key) in &image.wanted {
                // Several files may hold the same image.
                if !index.store.has(key) && wanted.iter().all(|other| other.key != *key) {
                    let (key, is_mirrored) = (*key, *is_mirrored);
                    wanted.push(WantedLatents { key, image, frames, is_mirrored });
                }
            }
        }
        for wanted in wanted.chunks(batch_size(size)) {
            // A clip as floats may take a gigabyte: not more of them than are encoded together.
            let floats = |it: &WantedLatents<'_>| frames_to_chw(it.frames, it.is_mirrored);
            let input: Vec<Vec<f32>> = wanted.iter().map(floats).collect();
            let input: Vec<&[f32]> = input.iter().map(Vec::as_slice).collect();
            let latents = encode(encoder, self.device, &input, size, tiling)?;
            for (WantedLatents { key, image, .. }, mut latents) in wanted.iter().zip(latents) {
                if image.is_reference() {
                    latents.std.clear();
                }
                index.store.put(*key, latents.entry())?;
            }
        }
        for _ in batch {
            check_cancelled(on_progress(ProgressEvent::Done))?;
        }
        Ok(())
    }
}

/// Latents of a view of an image or a clip.
struct WantedLatents<'a> {
    key: CacheKey,
    image: &'a PendingImage,
    frames: &'a [Pixels],
    is_mirrored: bool,
}

/// How far decoding runs ahead of the autoencoder.
fn decoders(sizes: impl Iterator<Item = SampleSize>) -> ReadAhead {
    let largest = sizes.map(|size| 3 * size.pixels()).max().unwrap_or(1);
    // Half of them are being made, half of them wait.
    let n_held = DECODED_BYTES / largest.max(1) / 2;
    let ReadAhead { threads, waiting } = DECODERS;
    ReadAhead { threads: threads.min(n_held).max(1), waiting: waiting.min(n_held) }
}

/// The latents of images or clips [3, frames, height, width]; one by one where they are tiled.
fn encode(
    encoder: &VaeEncoder,
    device: &Device,
    images: &[&[f32]],
    SampleSize { bucket: Bucket { width, height }, frames, .. }: SampleSize,
    tiling: Option<Tiling>,
) -> Result<Vec<CachedLatents>> {
    if let Some(tiling) = tiling.filter(|tiling| *tiling != Tiling::WHOLE) {
        let encode = |image: &&[f32]| {
            let tiling = Some(tiling);
            let found = encode_clip(encoder, device, image, [width, height], frames, tiling);
            found.map(|(moments, shape)| to_latents(&moments, shape))
        };
        return images.iter().map(encode).collect();
    }
    let (moments, shape) = vae_moments(encoder, device, images, [width, height], frames)?;
    Ok(moments.iter().map(|moments| to_latents(moments, shape)).collect())
}

fn to_latents(moments: &[f32], shape: LatentShape) -> CachedLatents {
    let (mean, log_variances) = moments.split_at(moments.len() / 2);
    let [least, most] = LOGVAR_RANGE;
    let deviation = log_variances.iter().map(|log| (0.5 * log.clamp(least, most)).exp()).collect();
    CachedLatents { mean: mean.to_vec(), std: deviation, shape }
}

/// Puts prompts into the index.
pub(super) fn encode_texts(
    pipeline: &Pipeline,
    device: &Device,
    encoding: EncodingOptions,
    prompts: &[CachedPrompt],
    memory: &Arc<DecodingMemory>,
    index: &mut CacheIndex,
    on_progress: ProgressFn<'_>,
) -> Result<()> {
    for prompts in prompts.chunks(TEXTS_PER_BATCH) {
        let total = prompts.len();
        let begin = |name, _: &Device| _ = on_progress(ProgressEvent::Phase { name, total });
        let tick = |bytes| on_progress(ProgressEvent::Loaded(bytes));
        let watch = EncodeCallbacks {
            on_begin: &begin,
            tick: &tick,
            on_encoded: &|| on_progress(ProgressEvent::Done),
        };
        let mut left = prompts.iter();
        let mut images = HashMap::new();
        let encoded: Vec<Prompt> =
            prompts.iter().map(|prompt| prompt.to_encode(&mut images, memory)).collect();
        pipeline.encoders.encode_each(device, encoding, &encoded, watch, &mut |condition| {
            let prompt = left.next().expect("there is a condition for each prompt");
            let entry = condition_entry(&condition, encoding.precision.dtype);
            index.store.put(index.cache_key(prompt), entry)
        })?;
    }
    Ok(())
}
