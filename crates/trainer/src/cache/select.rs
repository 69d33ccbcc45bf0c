//! Which images of a folder are trained on, in which size, and which are held out.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;

use compute::RandomSequence;
use weights::BytesDoneFn;
use weights::checksum::{FileStamp, Hash, Hasher};

use super::bucketed::{BucketedFolder, BucketedImage, assign_buckets, check_any, n_held_out};
use super::reference::{CachedPrompt, CachedReference, ReferenceHasher};
use super::store::CacheKey;
use crate::config::data::{self, DataConfig, ValidationSplit};
use crate::data::caption::{CaptionSettings, Shuffle};
use crate::data::{Bucket, Crop, Problem, ProblemKind, SampleSize};
use crate::error::{Result, TrainerError};
use crate::hashes::{HashCache, field};
use crate::model::diffusion::Pipeline;

/// Incremented when the same image would give other latents: another way to scale, or to encode.
pub(super) const IMAGES_VERSION: u64 = 1;

/// Keep these random numbers apart from others of the same seed: "crop", "hold".
const CROP_PURPOSE: u64 = 0x6372_6f70_0000_0000;
const HOLD_PURPOSE: u64 = 0x686f_6c64_0000_0000;

/// In how many orders the tags of a caption are seen. Chosen: each is encoded beforehand and takes
/// some megabytes; with eight no position of a tag is memorised.
const N_ORDERS: NonZeroU16 = NonZeroU16::new(8).expect("eight is not zero");

/// An image with its caption, encoded.
#[derive(Clone, Debug)]
pub struct CachedSample {
    /// The image.
    pub path: PathBuf,
    /// Its caption as written; `caption::for_step` makes a text of it.
    pub caption: String,
    /// The size it is trained in.
    pub bucket: Bucket,
    /// How often an epoch shows it.
    pub repeats: u32,
    /// Its reference images, for an editing model.
    pub references: Vec<Arc<CachedReference>>,
    pub(super) crop: Crop,
    /// The file's stamp when its checksum was taken.
    pub(super) stamp: FileStamp,
    pub(super) cache_key: CacheKey,
    /// The latents of its mirror image, if it is shown too.
    pub(crate) mirrored_key: Option<CacheKey>,
    /// Decides whether it is held out.
    draw: u32,
}

impl CachedSample {
    /// What its work depends on.
    pub fn size(&self) -> SampleSize {
        SampleSize::new(self.bucket, self.references.iter().map(|reference| reference.size))
    }

    /// A text as the text encoder sees it with the sample's references.
    pub fn prompt(&self, text: String, is_mirrored: bool) -> CachedPrompt {
        CachedPrompt::new(text, &self.references, is_mirrored)
    }
}

/// What a folder gives.
pub(super) struct SampleSelection {
    pub train: Vec<CachedSample>,
    pub held_out: Vec<CachedSample>,
    pub problems: Vec<Problem>,
}

/// Looks through the folder and gives every image its size and addresses.
pub(super) fn select(
    pipeline: &Pipeline,
    data: &DataConfig,
    seed: u64,
    hashes: &mut HashCache,
    tick: BytesDoneFn<'_>,
) -> Result<SampleSelection> {
    let BucketedFolder { images, mut problems } = assign_buckets(pipeline, data, tick)?;
    let vae = hashes.hash_files(&pipeline.vae.sources(), tick)?;
    let mut samples = Vec::with_capacity(images.len());
    let mut first = HashMap::<Hash, PathBuf>::new();
    for image in images {
        let mut hasher = ReferenceHasher { hashes, vae, has_mirror_images: data.flip };
        let references = references(&image, &mut hasher, tick);
        let hashed = references
            .and_then(|references| Ok((references, hashes.hash_file(&image.item.path, tick)?)));
        match hashed {
            Ok((references, (hash, stamp))) => {
                let path = &image.item.path;
                // The same result of other references is another sample.
                if let Some(other) = first.get(&hash).filter(|_| references.is_empty()) {
                    let kind = ProblemKind::SameImage { other: other.clone() };
                    problems.push(Problem::warning(path, kind));
                }
                first.entry(hash).or_insert_with(|| path.clone());
                let addressing = CacheKeyInputs { data, seed, vae, hash, stamp };
                samples.push(CachedSample { references, ..addressing.sample(image) });
            }
            Err(error @ TrainerError::Weights(weights::WeightsError::Cancelled)) => {
                return Err(error);
            }
            Err(error) => {
                let kind = ProblemKind::Unreadable { why: error.to_string() };
                problems.push(Problem::skipped(image.item.path, kind));
            }
        }
    }
    check_any(samples.iter().map(|sample| sample.repeats), data, &problems)?;
    let (train, held_out) = hold_out(samples, data.validation)?;
    Ok(SampleSelection { train, held_out, problems })
}

/// The references of an image that its model takes, hashed.
fn references(
    image: &BucketedImage,
    hasher: &mut ReferenceHasher<'_>,
    tick: BytesDoneFn<'_>,
) -> Result<Vec<Arc<CachedReference>>> {
    let references = image.item.references.iter().zip(&image.references);
    let hashed = references.map(|(reference, size)| {
        hasher.reference(reference.path.clone(), *size, tick).map(Arc::new)
    });
    hashed.collect()
}

/// What a job does to captions.
pub(super) fn captions(data: &DataConfig) -> CaptionSettings {
    let n_kept = usize::try_from(data.keep_tags).unwrap_or(usize::MAX);
    CaptionSettings {
        trigger: data.trigger.clone(),
        shuffle: data.shuffle_tags.then_some(Shuffle { n_kept, n_orders: N_ORDERS }),
        dropout: data.caption_dropout as f32,
    }
}

/// Those with the smallest draws, so that an image more or less hardly changes which.
fn hold_out(
    mut samples: Vec<CachedSample>,
    validation: ValidationSplit,
) -> Result<(Vec<CachedSample>, Vec<CachedSample>)> {
    let n_held = n_held_out(samples.len(), validation)?;
    let mut draws: Vec<(u32, PathBuf)> =
        samples.iter().map(|sample| (sample.draw, sample.path.clone())).collect();
    draws.sort();
    let held: HashSet<PathBuf> = draws.into_iter().take(n_held).map(|(_, path)| path).collect();
    let held_out = samples.extract_if(.., |sample| held.contains(&sample.path)).collect();
    Ok((samples, held_out))
}

/// What the addresses of an image's latents are made of.
struct CacheKeyInputs<'a> {
    data: &'a DataConfig,
    seed: u64,
    vae: Hash,
    hash: Hash,
    stamp: FileStamp,
}

impl CacheKeyInputs<'_> {
    fn sample(&self, image: BucketedImage) -> CachedSample {
        let (BucketedImage { item, bucket, repeats, .. }, crop) = (image, self.crop());
        let mirrored = self.data.flip.then(|| self.cache_key(bucket, crop, true));
        CachedSample {
            path: item.path,
            caption: item.caption,
            bucket,
            repeats,
            references: Vec::new(),
            crop,
            stamp: self.stamp,
            cache_key: self.cache_key(bucket, crop, false),
            mirrored_key: mirrored,
            draw: self.random(HOLD_PURPOSE).word(0),
        }
    }

    /// The random numbers of this image, wherever it lies and whatever lies beside it.
    fn random(&self, purpose: u64) -> RandomSequence {
        let (start, _) = self.hash.as_bytes().split_first_chunk().expect("a hash has 32 bytes");
        RandomSequence::new(self.seed ^ purpose, u64::from_le_bytes(*start))
    }

    fn crop(&self) -> Crop {
        match self.data.crop {
            data::CropMode::Centre => Crop::Centre,
            data::CropMode::Random => {
                let stream = self.random(CROP_PURPOSE);
                Crop::At { x: stream.uniform(0), y: stream.uniform(1) }
            }
        }
    }

    fn cache_key(&self, bucket: Bucket, crop: Crop, is_mirrored: bool) -> CacheKey {
        let mut hasher = Hasher::new();
        field(&mut hasher, b"latents");
        field(&mut hasher, &IMAGES_VERSION.to_le_bytes());
        field(&mut hasher, self.hash.as_bytes());
        field(&mut hasher, self.vae.as_bytes());
        for side in [bucket.width, bucket.height] {
            field(&mut hasher, &(side as u64).to_le_bytes());
        }
        match crop {
            Crop::Centre => field(&mut hasher, b"centre"),
            Crop::At { x, y } => [x, y].iter().for_each(|at| field(&mut hasher, &at.to_le_bytes())),
        }
        field(&mut hasher, &[u8::from(is_mirrored)]);
        hasher.finalize()
    }
}
