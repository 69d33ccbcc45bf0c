//! What is missing, through the encoders and into the store. Pictures are decoded and scaled by
//! threads that run a few pictures ahead of the autoencoder.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{Scope, available_parallelism, scope};

use compute::{Device, Dtype, Params, Tape};
use weights::checksum::Stamp;

use super::index::{Index, Latents, prompt_entry};
use super::select::Sample;
use super::store::Address;
use super::{Event, PICTURES, Tell};
use crate::data::{Bucket, Crop, Pixels, Problem, ProblemKind, decode, fit, to_numbers};
use crate::error::Result;
use crate::model::build::Precision;
use crate::model::host::numbers;
use crate::model::sd3::pipeline::Pipeline;
use crate::model::sd3::prompts::Watch;
use crate::model::vae::Encoder;
use crate::sample::go_on;

/// Threads that decode. Chosen: a decoder is some ten times as fast as an encoder on the same core,
/// and each may hold a picture of half a gigabyte.
const MOST_DECODERS: usize = 4;

/// Pictures that wait for the encoder. Chosen: enough to bridge a slow one.
const AHEAD: usize = 4;

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
    wanted: Vec<(bool, Address)>,
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

/// What the pictures of all buckets take at their peak.
pub(super) fn rehearse_pictures(
    pipeline: &Pipeline,
    device: &Device,
    buckets: &BTreeSet<Bucket>,
) -> Result<()> {
    let encoder = pipeline.load_encoder(device, PRECISION, &|_| true)?;
    for bucket in buckets {
        let empty = vec![0.0; 3 * bucket.width * bucket.height];
        encode(&encoder, device, &empty, *bucket)?;
    }
    Ok(())
}

/// The encoder's activations outgrow half precision (`force_upcast` in its settings).
const PRECISION: Precision = Precision { dtype: Dtype::F32, base: None };

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
    let tick = |bytes| tell(Event::Loaded(bytes));
    // Loaded for the first picture that can be decoded; there may be none.
    let mut loaded: Option<Encoder> = None;
    scope(|scope| {
        for (picture, pixels) in decode_ahead(scope, pictures) {
            match pixels {
                Ok(pixels) => {
                    let encoder = match loaded.take() {
                        Some(encoder) => encoder,
                        None => pipeline.load_encoder(device, PRECISION, &tick)?,
                    };
                    encode_picture(&encoder, device, picture, &pixels, index)?;
                    loaded = Some(encoder);
                }
                Err(kind) => index.problems.push(Problem::skipped(&picture.path, kind)),
            }
            go_on(tell(Event::Done))?;
        }
        // Before text encoders are loaded, which takes its time.
        index.store.flush()
    })
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

fn encode_picture(
    encoder: &Encoder,
    device: &Device,
    picture: &Picture,
    pixels: &Pixels,
    index: &mut Index,
) -> Result<()> {
    for (is_mirrored, address) in &picture.wanted {
        // Another file may hold the same picture.
        if !index.store.has(address) {
            let input = to_numbers(pixels, *is_mirrored);
            let latents = encode(encoder, device, &input, picture.bucket)?;
            index.store.put(*address, latents.entry())?;
        }
    }
    Ok(())
}

/// The latents of a picture [3, height, width].
fn encode(encoder: &Encoder, device: &Device, picture: &[f32], bucket: Bucket) -> Result<Latents> {
    let params = Params::default();
    let tape = Tape::inference(device, &params, 0);
    let input = device.upload([1, 3, bucket.height, bucket.width], picture)?;
    let encoded = encoder.forward(&tape, &input)?;
    let moments = numbers(encoded.tensor());
    let shape = encoded.tensor().shape();
    let [_, channels, height, width] = shape.sizes() else {
        unreachable!("pictures have four dimensions, and so have latents")
    };
    let (mean, log_variances) = moments.split_at(moments.len() / 2);
    let [least, most] = LOG_VARIANCES;
    let deviation = log_variances.iter().map(|log| (0.5 * log.clamp(least, most)).exp()).collect();
    let sizes = [channels / 2, *height, *width];
    Ok(Latents { mean: mean.to_vec(), deviation, sizes })
}

/// Puts the prompts of texts into the index.
pub(super) fn encode_texts(
    pipeline: &Pipeline,
    device: &Device,
    precision: Precision,
    texts: &[String],
    index: &mut Index,
    tell: Tell<'_>,
) -> Result<()> {
    for texts in texts.chunks(TEXTS_AT_ONCE) {
        let begin = |name, _: &Device| _ = tell(Event::Phase { name, total: texts.len() });
        let tick = |bytes| tell(Event::Loaded(bytes));
        let watch = Watch { begin: &begin, tick: &tick, encoded: &|| tell(Event::Done) };
        let mut left = texts.iter();
        pipeline.encoders.encode_each(device, precision, texts, watch, &mut |prompt| {
            let text = left.next().expect("there is a prompt for each text");
            let entry = prompt_entry(&prompt, pipeline.encoders.n_tokens(), precision.dtype);
            index.store.put(index.address(text), entry)
        })?;
    }
    Ok(())
}
