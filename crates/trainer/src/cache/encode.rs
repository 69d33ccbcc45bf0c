//! What is missing, through the encoders and into the store. Images are decoded and scaled by
//! threads that run a few images ahead of the autoencoder.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Scope, available_parallelism, scope};

use compute::{Device, Dtype};
use weights::checksum::FileStamp;

use super::IMAGES_PHASE;
use super::index::{CacheIndex, CachedLatents, condition_entry};
use super::reference::{CachedPrompt, CachedReference};
use super::select::CachedSample;
use super::store::CacheKey;
use crate::cost::{Cost, check_cancelled};
use crate::data::reference::scaled_reference;
use crate::data::{
    Bucket, Crop, Pixels, Problem, ProblemKind, SizeCounts, decode, resize_and_crop, to_chw,
};
use crate::error::Result;
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::text::{EncodeCallbacks, EncodingOptions, Prompt};
use crate::model::diffusion::vae::{LatentShape, vae_moments};
use crate::model::vae::VaeEncoder;
use crate::progress::{ProgressEvent, ProgressFn};

/// Threads that decode. Chosen: a decoder is some ten times as fast as an encoder on the same core,
/// and each may hold an image of half a gigabyte.
const MOST_DECODERS: usize = 4;

/// Images that wait for the encoder. Chosen: enough to bridge a slow one.
const AHEAD: usize = 4;

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

/// An image to encode.
pub(super) struct PendingImage {
    path: PathBuf,
    stamp: FileStamp,
    pub bucket: Bucket,
    fit: ImageFit,
    /// Mirrored or not, and where the latents go.
    pub wanted: Vec<(bool, CacheKey)>,
}

/// How an image becomes as large as its bucket.
#[derive(Clone, Copy)]
enum ImageFit {
    /// Scaled and cropped: an image to train on.
    Crop(Crop),
    /// Scaled alone: a reference, of which a model sees the means of its latents.
    Whole,
}

impl PendingImage {
    pub fn new(sample: &CachedSample, wanted: Vec<(bool, CacheKey)>) -> Self {
        let CachedSample { path, stamp, bucket, crop, .. } = sample;
        let fit = ImageFit::Crop(*crop);
        Self { path: path.clone(), stamp: *stamp, bucket: *bucket, fit, wanted }
    }

    pub fn reference(reference: &CachedReference, wanted: Vec<(bool, CacheKey)>) -> Self {
        let CachedReference { path, stamp, size, .. } = reference;
        let fit = ImageFit::Whole;
        Self { path: path.clone(), stamp: *stamp, bucket: size.vae, fit, wanted }
    }

    /// Whether it is a reference.
    pub fn is_reference(&self) -> bool {
        matches!(self.fit, ImageFit::Whole)
    }

    /// Opens and scales it.
    fn pixels(&self) -> std::result::Result<Pixels, ProblemKind> {
        let pixels = match self.fit {
            ImageFit::Crop(crop) => resize_and_crop(&decode(&self.path)?, self.bucket, crop),
            ImageFit::Whole => scaled_reference(&self.path, self.bucket)?,
        };
        // Its latents would lie under the address of what it was.
        if FileStamp::read(&self.path).ok() != Some(self.stamp) {
            return Err(ProblemKind::Unreadable { why: "it was changed meanwhile".into() });
        }
        Ok(pixels)
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

/// Encodes images of all buckets on the meta device; gives the cost of so many.
pub(super) fn dry_run_images(
    pipeline: &Pipeline,
    device: &Device,
    counts: &SizeCounts<Bucket>,
) -> Result<Cost> {
    let encoder = pipeline.vae.load_encoder(device, PRECISION, &|_| true)?;
    let mut works = Vec::new();
    for (bucket, count) in counts {
        let empty = vec![0.0; 3 * bucket.width * bucket.height];
        let images = vec![&empty[..]; batch_size(*bucket).min(*count)];
        let before = device.work();
        encode(&encoder, device, &images, *bucket)?;
        let times = *count as f64 / images.len().max(1) as f64;
        works.push((times, device.work().since(&before)));
    }
    Ok(Cost { works, read_bytes: pipeline.vae.file_bytes() })
}

/// How many images of a size are encoded together.
fn batch_size(bucket: Bucket) -> usize {
    (PIXELS_PER_BATCH / (bucket.width * bucket.height)).max(1)
}

/// The encoder's activations outgrow half precision (`force_upcast` in its settings).
const PRECISION: Precision = Precision::plain(Dtype::F32);

/// Puts the latents of images into the index; those that cannot be decoded become problems.
pub(super) fn encode_images(
    pipeline: &Pipeline,
    device: &Device,
    images: &[PendingImage],
    index: &mut CacheIndex,
    on_progress: ProgressFn<'_>,
) -> Result<()> {
    if images.is_empty() {
        return Ok(());
    }
    on_progress(ProgressEvent::Phase { name: IMAGES_PHASE, total: images.len() });
    let mut batches = EncodeBatches { pipeline, device, encoder: None, waiting: BTreeMap::new() };
    scope(|scope| {
        for (image, pixels) in decode_ahead(scope, images) {
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
    waiting: BTreeMap<Bucket, Vec<(&'a PendingImage, Pixels)>>,
}

impl<'a> EncodeBatches<'a> {
    fn add(
        &mut self,
        image: &'a PendingImage,
        pixels: Pixels,
        index: &mut CacheIndex,
        on_progress: ProgressFn<'_>,
    ) -> Result<()> {
        let waiting = self.waiting.entry(image.bucket).or_default();
        waiting.push((image, pixels));
        if waiting.len() < batch_size(image.bucket) {
            return Ok(());
        }
        let batch = mem::take(waiting);
        self.encode(image.bucket, &batch, index, on_progress)
    }

    /// Encodes what still waits.
    fn finish(&mut self, index: &mut CacheIndex, on_progress: ProgressFn<'_>) -> Result<()> {
        for (bucket, batch) in mem::take(&mut self.waiting) {
            self.encode(bucket, &batch, index, on_progress)?;
        }
        Ok(())
    }

    fn encode(
        &mut self,
        bucket: Bucket,
        batch: &[(&PendingImage, Pixels)],
        index: &mut CacheIndex,
        on_progress: ProgressFn<'_>,
    ) -> Result<()> {
        let tick = |bytes| on_progress(ProgressEvent::Loaded(bytes));
        let encoder = match self.encoder.take() {
            Some(encoder) => encoder,
            None => self.pipeline.vae.load_encoder(self.device, PRECISION, &tick)?,
        };
        let encoder = self.encoder.insert(encoder);
        let mut wanted = Vec::<(CacheKey, ImageFit, Vec<f32>)>::new();
        for (image, pixels) in batch {
            for (is_mirrored, at) in &image.wanted {
                // Several files may hold the same image.
                if !index.store.has(at) && wanted.iter().all(|(other, ..)| other != at) {
                    wanted.push((*at, image.fit, to_chw(pixels, *is_mirrored)));
                }
            }
        }
        for wanted in wanted.chunks(batch_size(bucket)) {
            let input: Vec<_> = wanted.iter().map(|(.., numbers)| numbers.as_slice()).collect();
            let latents = encode(encoder, self.device, &input, bucket)?;
            for ((at, fit, _), mut latents) in wanted.iter().zip(latents) {
                if matches!(fit, ImageFit::Whole) {
                    latents.std.clear();
                }
                index.store.put(*at, latents.entry())?;
            }
        }
        for _ in batch {
            check_cancelled(on_progress(ProgressEvent::Done))?;
        }
        Ok(())
    }
}

type DecodedImage<'a> = (&'a PendingImage, std::result::Result<Pixels, ProblemKind>);

/// Images as they become ready. The threads end when nobody receives any more.
fn decode_ahead<'scope, 'a: 'scope>(
    scope: &'scope Scope<'scope, '_>,
    images: &'a [PendingImage],
) -> Receiver<DecodedImage<'a>> {
    let (sender, receiver) = sync_channel(AHEAD);
    let waiting = Arc::new(Mutex::new(images.iter()));
    let n = available_parallelism().map_or(1, usize::from).min(MOST_DECODERS).min(images.len());
    for _ in 0..n {
        let (sender, waiting) = (sender.clone(), Arc::clone(&waiting));
        scope.spawn(move || {
            let next = || waiting.lock().ok()?.next();
            while let Some(image) = next() {
                if sender.send((image, image.pixels())).is_err() {
                    break;
                }
            }
        });
    }
    receiver
}

/// The latents of images [3, height, width].
fn encode(
    encoder: &VaeEncoder,
    device: &Device,
    images: &[&[f32]],
    bucket: Bucket,
) -> Result<Vec<CachedLatents>> {
    let (moments, shape) = vae_moments(encoder, device, images, [bucket.width, bucket.height], 1)?;
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
            prompts.iter().map(|prompt| prompt.to_encode(&mut images)).collect();
        pipeline.encoders.encode_each(device, encoding, &encoded, watch, &mut |condition| {
            let prompt = left.next().expect("there is a condition for each prompt");
            let entry = condition_entry(&condition, encoding.precision.dtype);
            index.store.put(index.cache_key(prompt), entry)
        })?;
    }
    Ok(())
}
