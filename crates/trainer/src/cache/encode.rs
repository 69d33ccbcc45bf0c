//! What is missing, through the encoders and into the store. Pictures are decoded and scaled by
//! threads that run a few pictures ahead of the autoencoder.

use std::collections::BTreeMap;
use std::mem;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Scope, available_parallelism, scope};

use compute::{Device, Dtype, Params, Tape};
use weights::checksum::Stamp;

use super::PICTURES;
use super::index::{Index, Latents, condition_entry};
use super::select::Sample;
use super::store::Address;
use crate::cost::{Cost, go_on};
use crate::data::{Bucket, Counts, Crop, Pixels, Problem, ProblemKind, decode, fit, to_numbers};
use crate::error::Result;
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::model::diffusion::text::{Encoding, Watch};
use crate::model::diffusion::vae::LatentShape;
use crate::model::host::numbers;
use crate::model::vae::Encoder;
use crate::progress::{Event, Tell};

/// Threads that decode. Chosen: a decoder is some ten times as fast as an encoder on the same core,
/// and each may hold a picture of half a gigabyte.
const MOST_DECODERS: usize = 4;

/// Pictures that wait for the encoder. Chosen: enough to bridge a slow one.
const AHEAD: usize = 4;

/// Pixels that go through the autoencoder together, in pictures of one size. Chosen: with fewer, small
/// pictures wait for its weights more than for their own numbers; four times as many gain 2 % more
/// at twice the memory.
const PIXELS_AT_ONCE: usize = 256 * 256;

/// Texts that go through all encoders together. Chosen: what the first two make of them is held
/// until the last is done, 0.6 MB for each with the published models; and loading the encoders
/// again is little beside encoding as many texts.
const TEXTS_AT_ONCE: usize = 512;

/// Logarithms of variances beyond these are taken as these. Taken: diffusers'
/// `DiagonalGaussianDistribution`.
const LOG_VARIANCES: [f32; 2] = [-30.0, 20.0];

/// A picture to encode.
pub(super) struct Picture {
    path: PathBuf,
    stamp: Stamp,
    pub bucket: Bucket,
    crop: Crop,
    /// Mirrored or not, and where the latents go.
    pub wanted: Vec<(bool, Address)>,
}

impl Picture {
    pub fn new(sample: &Sample, wanted: Vec<(bool, Address)>) -> Self {
        let Sample { path, stamp, bucket, crop, .. } = sample;
        Self { path: path.clone(), stamp: *stamp, bucket: *bucket, crop: *crop, wanted }
    }

    /// Opens and scales it.
    fn pixels(&self) -> std::result::Result<Pixels, ProblemKind> {
        let pixels = fit(&decode(&self.path)?, self.bucket, self.crop);
        // Its latents would lie under the address of what it was.
        if Stamp::of(&self.path).ok() != Some(self.stamp) {
            return Err(ProblemKind::Unreadable { why: "it was changed meanwhile".into() });
        }
        Ok(pixels)
    }
}

impl Sample {
    /// Mirrored or not, and where the latents are.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (bool, Address)> {
        [(false, Some(self.plain)), (true, self.mirrored)]
            .into_iter()
            .filter_map(|(is_mirrored, address)| Some((is_mirrored, address?)))
    }
}

/// Encodes pictures of all buckets on a device without data; gives what so many of them take.
pub(super) fn rehearse_pictures(
    pipeline: &Pipeline,
    device: &Device,
    counts: &Counts<Bucket>,
) -> Result<Cost> {
    let encoder = pipeline.vae.load_encoder(device, PRECISION, &|_| true)?;
    let mut works = Vec::new();
    for (bucket, count) in counts {
        let empty = vec![0.0; 3 * bucket.width * bucket.height];
        let pictures = vec![&empty[..]; at_once(*bucket).min(*count)];
        let before = device.work();
        encode(&encoder, device, &pictures, *bucket)?;
        let times = *count as f64 / pictures.len().max(1) as f64;
        works.push((times, device.work().since(&before)));
    }
    Ok(Cost { works, read_bytes: pipeline.vae.file_bytes() })
}

/// How many pictures of a size are encoded together.
fn at_once(bucket: Bucket) -> usize {
    (PIXELS_AT_ONCE / (bucket.width * bucket.height)).max(1)
}

/// The encoder's activations outgrow half precision (`force_upcast` in its settings).
const PRECISION: Precision = Precision::plain(Dtype::F32);

/// Puts the latents of pictures into the index; those that cannot be decoded become problems.
pub(super) fn encode_pictures(
    pipeline: &Pipeline,
    device: &Device,
    pictures: &[Picture],
    index: &mut Index,
    tell: Tell<'_>,
) -> Result<()> {
    if pictures.is_empty() {
        return Ok(());
    }
    tell(Event::Phase { name: PICTURES, total: pictures.len() });
    let mut batches = Batches { pipeline, device, encoder: None, waiting: BTreeMap::new() };
    scope(|scope| {
        for (picture, pixels) in decode_ahead(scope, pictures) {
            match pixels {
                Ok(pixels) => batches.add(picture, pixels, index, tell)?,
                Err(kind) => {
                    index.problems.push(Problem::skipped(&picture.path, kind));
                    go_on(tell(Event::Done))?;
                }
            }
        }
        batches.finish(index, tell)?;
        // Before text encoders are loaded, which takes its time.
        index.store.flush()
    })
}

/// Pictures that wait for others of their size.
struct Batches<'a> {
    pipeline: &'a Pipeline,
    device: &'a Device,
    /// Loaded for the first picture that can be decoded; there may be none.
    encoder: Option<Encoder>,
    waiting: BTreeMap<Bucket, Vec<(&'a Picture, Pixels)>>,
}

impl<'a> Batches<'a> {
    fn add(
        &mut self,
        picture: &'a Picture,
        pixels: Pixels,
        index: &mut Index,
        tell: Tell<'_>,
    ) -> Result<()> {
        let waiting = self.waiting.entry(picture.bucket).or_default();
        waiting.push((picture, pixels));
        if waiting.len() < at_once(picture.bucket) {
            return Ok(());
        }
        let batch = mem::take(waiting);
        self.encode(picture.bucket, &batch, index, tell)
    }

    /// Encodes what still waits.
    fn finish(&mut self, index: &mut Index, tell: Tell<'_>) -> Result<()> {
        for (bucket, batch) in mem::take(&mut self.waiting) {
            self.encode(bucket, &batch, index, tell)?;
        }
        Ok(())
    }

    fn encode(
        &mut self,
        bucket: Bucket,
        batch: &[(&Picture, Pixels)],
        index: &mut Index,
        tell: Tell<'_>,
    ) -> Result<()> {
        let tick = |bytes| tell(Event::Loaded(bytes));
        let encoder = match self.encoder.take() {
            Some(encoder) => encoder,
            None => self.pipeline.vae.load_encoder(self.device, PRECISION, &tick)?,
        };
        let encoder = self.encoder.insert(encoder);
        let mut wanted = Vec::<(Address, Vec<f32>)>::new();
        for (picture, pixels) in batch {
            for (is_mirrored, at) in &picture.wanted {
                // Several files may hold the same picture.
                if !index.store.has(at) && wanted.iter().all(|(other, _)| other != at) {
                    wanted.push((*at, to_numbers(pixels, *is_mirrored)));
                }
            }
        }
        for wanted in wanted.chunks(at_once(bucket)) {
            let input: Vec<_> = wanted.iter().map(|(_, numbers)| numbers.as_slice()).collect();
            let latents = encode(encoder, self.device, &input, bucket)?;
            for ((at, _), latents) in wanted.iter().zip(latents) {
                index.store.put(*at, latents.entry())?;
            }
        }
        for _ in batch {
            go_on(tell(Event::Done))?;
        }
        Ok(())
    }
}

type Decoded<'a> = (&'a Picture, std::result::Result<Pixels, ProblemKind>);

/// Pictures as they become ready. The threads end when nobody receives any more.
fn decode_ahead<'scope, 'a: 'scope>(
    scope: &'scope Scope<'scope, '_>,
    pictures: &'a [Picture],
) -> Receiver<Decoded<'a>> {
    let (sender, receiver) = sync_channel(AHEAD);
    let waiting = Arc::new(Mutex::new(pictures.iter()));
    let n = available_parallelism().map_or(1, usize::from).min(MOST_DECODERS).min(pictures.len());
    for _ in 0..n {
        let (sender, waiting) = (sender.clone(), Arc::clone(&waiting));
        scope.spawn(move || {
            let next = || waiting.lock().ok()?.next();
            while let Some(picture) = next() {
                if sender.send((picture, picture.pixels())).is_err() {
                    break;
                }
            }
        });
    }
    receiver
}

/// The latents of pictures [3, height, width].
fn encode(
    encoder: &Encoder,
    device: &Device,
    pictures: &[&[f32]],
    bucket: Bucket,
) -> Result<Vec<Latents>> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    let sizes = [pictures.len(), 3, bucket.height, bucket.width];
    let input = device.upload(sizes, &pictures.concat())?;
    let encoded = encoder.forward(&tape, &input)?;
    let moments = numbers(encoded.tensor())?;
    let shape = encoded.tensor().shape();
    let [n, channels, height, width] = shape.sizes() else {
        unreachable!("pictures have four dimensions, and so have latents")
    };
    let latent = LatentShape::image(channels / 2, *height, *width);
    Ok(moments.chunks(moments.len() / n).map(|moments| to_latents(moments, latent)).collect())
}

fn to_latents(moments: &[f32], shape: LatentShape) -> Latents {
    let (mean, log_variances) = moments.split_at(moments.len() / 2);
    let [least, most] = LOG_VARIANCES;
    let deviation = log_variances.iter().map(|log| (0.5 * log.clamp(least, most)).exp()).collect();
    Latents { mean: mean.to_vec(), deviation, shape }
}

/// Puts the prompts of texts into the index.
pub(super) fn encode_texts(
    pipeline: &Pipeline,
    device: &Device,
    encoding: Encoding,
    texts: &[String],
    index: &mut Index,
    tell: Tell<'_>,
) -> Result<()> {
    for texts in texts.chunks(TEXTS_AT_ONCE) {
        let begin = |name, _: &Device| _ = tell(Event::Phase { name, total: texts.len() });
        let tick = |bytes| tell(Event::Loaded(bytes));
        let watch = Watch { begin: &begin, tick: &tick, encoded: &|| tell(Event::Done) };
        let mut left = texts.iter();
        pipeline.encoders.encode_each(device, encoding, texts, watch, &mut |condition| {
            let text = left.next().expect("there is a condition for each text");
            let entry = condition_entry(&condition, encoding.precision.dtype);
            index.store.put(index.address(text), entry)
        })?;
    }
    Ok(())
}
