//! Which images of a folder are trained on, in which size, and which are held out.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;

use compute::RandomSequence;
use weights::BytesDoneFn;
use weights::checksum::{FileStamp, Hash, Hasher};

use super::bucketed::{
    BucketedFolders, BucketedImage, assign_buckets, check_any, n_held_out, n_items,
};
use super::mask::{CachedMask, HashedMask, hash_mask};
use super::reference::{CachedPrompt, CachedReference, ReferenceHasher};
use super::store::CacheKey;
use crate::config::data::{self, DataConfig, LearningTarget};
use crate::config::data_sets::DataSets;
use crate::data::caption::{CaptionSettings, Shuffle};
use crate::data::{
    Bucket, ClipSegment, Crop, ImageItem, Problem, ProblemKind, SampleSize, TrainingClip,
};
use crate::error::{Result, TrainerError};
use crate::hashes::{HashCache, field};
use crate::model::diffusion::Pipeline;

/// Incremented when the same image would give other latents: another way to scale, or to encode.
pub(super) const IMAGES_VERSION: u64 = 1;

/// The same of clips. Version 1 blended tiles of long ones in another way.
const CLIPS_VERSION: u64 = 2;

/// Keep these random numbers apart from others of the same seed: "crop", "hold".
const CROP_PURPOSE: u64 = 0x6372_6f70_0000_0000;
const HOLD_PURPOSE: u64 = 0x686f_6c64_0000_0000;

/// In how many orders the tags of a caption are seen. Chosen: each is encoded beforehand and takes
/// some megabytes; with eight no position of a tag is memorised.
const N_ORDERS: NonZeroU16 = NonZeroU16::new(8).expect("eight is not zero");

/// An image with its caption, encoded.
#[derive(Clone, Debug)]
pub struct CachedSample {
    /// Which of the job's sets it is of.
    pub set: usize,
    /// The image.
    pub path: PathBuf,
    /// Its caption as written; `caption::for_step` makes a text of it.
    pub caption: String,
    /// The size it is trained in.
    pub bucket: Bucket,
    /// How often an epoch shows it.
    pub repeats: u32,
    /// The weight of its loss.
    pub loss_weight: f32,
    /// What is learnt of it.
    pub target: LearningTarget,
    /// Its reference images, for an editing model.
    pub references: Vec<Arc<CachedReference>>,
    pub(super) crop: Crop,
    /// Which part of it the loss counts.
    pub(super) mask: Option<CachedMask>,
    /// Of a clip, the part that is seen.
    pub(super) clip: Option<ClipPart>,
    /// The stamps of its files when their checksums were taken.
    pub(super) stamps: Vec<FileStamp>,
    pub(super) cache_key: CacheKey,
    /// The latents of its mirror image, if it is shown too.
    pub(crate) mirrored_key: Option<CacheKey>,
    /// Decides whether it is held out.
    draw: u32,
}

/// A segment of a clip.
#[derive(Clone, Debug)]
pub(super) struct ClipPart {
    pub clip: Arc<TrainingClip>,
    /// Width and height of its frames.
    pub size: [u32; 2],
    pub segment: ClipSegment,
}

impl CachedSample {
    /// What its work depends on.
    pub fn size(&self) -> SampleSize {
        let references = self.references.iter().map(|reference| reference.size);
        SampleSize::new(self.bucket, references).with_frames(self.frames())
    }

    /// Frames of a clip; 1 of an image.
    pub fn frames(&self) -> usize {
        self.clip.as_ref().map_or(1, |part| part.segment.frames)
    }

    /// How often all of it counts, though it has a mask.
    pub fn unmasked_probability(&self) -> f32 {
        self.mask.as_ref().map_or(0.0, |mask| mask.unmasked_probability)
    }

    /// The frame at which a later segment of a clip begins.
    pub(super) fn start(&self) -> Option<usize> {
        Some(self.clip.as_ref()?.segment.start).filter(|start| *start > 0)
    }

    /// Whether it is a clip, or an image.
    pub fn is_clip(&self) -> bool {
        self.clip.is_some()
    }

    /// A text as the text encoder sees it with the sample's references.
    pub fn prompt(&self, text: String, is_mirrored: bool) -> CachedPrompt {
        CachedPrompt::new(text, &self.references, is_mirrored)
    }
}

/// What the folders give.
pub(super) struct SampleSelection {
    pub train: Vec<CachedSample>,
    pub held_out: Vec<CachedSample>,
    pub problems: Vec<Problem>,
}

/// Looks through the folders and gives every image its sizes and addresses.
pub(super) fn select(
    pipeline: &Pipeline,
    sets: &DataSets,
    seed: u64,
    hashes: &mut HashCache,
    tick: BytesDoneFn<'_>,
) -> Result<SampleSelection> {
    let BucketedFolders { images, mut problems } = assign_buckets(pipeline, sets, tick)?;
    let vae = hashes.hash_files(&pipeline.vae.sources(), tick)?;
    let mut samples = Vec::with_capacity(images.len());
    let mut first = HashMap::<Hash, PathBuf>::new();
    let mut last = None;
    for image in images {
        let data = &sets[image.set];
        let mut hasher = ReferenceHasher { hashes, vae, has_mirror_images: data.flip };
        let references = references(&image, &mut hasher, tick);
        let hashed = references.and_then(|references| {
            let item = hash_item(&image.item, &mut last, hashes, tick)?;
            Ok((references, item, hash_mask(&image.item, hashes, tick)?))
        });
        match hashed {
            Ok((references, HashedItem { hash, stamps, .. }, mask)) => {
                let path = &image.item.path;
                let other = first.get(&hash).filter(|other| *other != path);
                // The same result of other references is another sample.
                if let Some(other) = other.filter(|_| references.is_empty()) {
                    let kind = ProblemKind::SameImage { other: other.clone() };
                    problems.push(Problem::warning(path, kind));
                }
                first.entry(hash).or_insert_with(|| path.clone());
                let addressing = CacheKeyInputs { data, seed, vae, hash, stamps, mask };
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
    check_any(samples.iter().map(|sample| (sample.set, sample.repeats)), sets, &problems)?;
    let (train, held_out) = hold_out(samples, sets)?;
    Ok(SampleSelection { train, held_out, problems })
}

/// The checksum of an image or a clip.
#[derive(Clone)]
struct HashedItem {
    path: PathBuf,
    hash: Hash,
    stamps: Vec<FileStamp>,
}

/// Of a folder of frames, the checksum of theirs in their order. `last` is the one before, since segments of a clip follow
/// each other.
fn hash_item(
    item: &ImageItem,
    last: &mut Option<HashedItem>,
    hashes: &mut HashCache,
    tick: BytesDoneFn<'_>,
) -> Result<HashedItem> {
    if let Some(known) = last.as_ref().filter(|known| known.path == item.path) {
        return Ok(known.clone());
    }
    let own = vec![item.path.as_path()];
    let files = item.clip.as_ref().map_or(own, |clip| clip.files(&item.path));
    let hashed: Vec<(Hash, FileStamp)> =
        files.iter().map(|file| hashes.hash_file(file, tick)).collect::<Result<_>>()?;
    let mut hasher = Hasher::new();
    for (hash, _) in &hashed {
        field(&mut hasher, hash.as_bytes());
    }
    // A file has its own, as images always had.
    let hash = if let [(hash, _)] = hashed[..] { hash } else { hasher.finalize() };
    let stamps = hashed.into_iter().map(|(_, stamp)| stamp).collect();
    Ok(last.insert(HashedItem { path: item.path.clone(), hash, stamps }).clone())
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
        choice: data.caption_choice,
        trigger: data.trigger.clone(),
        shuffle: data.shuffle_tags.then_some(Shuffle { n_kept, n_orders: N_ORDERS }),
        dropout: data.caption_dropout as f32,
    }
}

/// Those of each set with the smallest draws, so that an image more or less hardly changes which. An image that several
/// sets have is trained on in none if one of them holds it out.
fn hold_out(
    mut samples: Vec<CachedSample>,
    data: &DataSets,
) -> Result<(Vec<CachedSample>, Vec<CachedSample>)> {
    let mut held = HashSet::<PathBuf>::new();
    for set in 0..data.n_sets() {
        let of_set = || samples.iter().filter(|sample| sample.set == set);
        let n_held = n_held_out(n_items(of_set().map(|sample| &*sample.path)), data, set)?;
        let mut draws: Vec<(u32, PathBuf)> =
            of_set().map(|sample| (sample.draw, sample.path.clone())).collect();
        draws.sort();
        // All segments of a clip are held out, or none: they look alike. So do the sizes of an image.
        draws.dedup();
        held.extend(draws.into_iter().take(n_held).map(|(_, path)| path));
    }
    let held_out: Vec<_> = samples.extract_if(.., |sample| held.contains(&sample.path)).collect();
    if samples.is_empty() {
        return Err(TrainerError::Request {
            problem: format!("{} images are held out, and none is left to train on", held.len()),
            hint: "sets of the same images hold each other's out; lower data.validation",
        });
    }
    Ok((samples, held_out))
}

/// What the addresses of an image's latents are made of.
struct CacheKeyInputs<'a> {
    data: &'a DataConfig,
    seed: u64,
    vae: Hash,
    hash: Hash,
    stamps: Vec<FileStamp>,
    mask: Option<HashedMask>,
}

impl CacheKeyInputs<'_> {
    fn sample(&self, image: BucketedImage) -> CachedSample {
        let (BucketedImage { set, item, bucket, segment, repeats, .. }, crop) =
            (image, self.crop());
        let key = |is_mirrored| self.cache_key(bucket, segment, crop, is_mirrored);
        let mask = item.mask.zip(self.mask);
        let mask =
            mask.map(|(mask, hashed)| CachedMask::new(mask, hashed, self.data, bucket, crop));
        let clip = item.clip.zip(segment);
        let clip = clip.map(|(clip, segment)| ClipPart { clip, size: item.size, segment });
        CachedSample {
            set,
            path: item.path,
            caption: item.caption,
            bucket,
            repeats,
            loss_weight: self.data.loss_weight as f32,
            target: self.data.target,
            references: Vec::new(),
            crop,
            mask,
            clip,
            stamps: self.stamps.clone(),
            cache_key: key(false),
            mirrored_key: self.data.flip.then(|| key(true)),
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

    fn cache_key(
        &self,
        bucket: Bucket,
        segment: Option<ClipSegment>,
        crop: Crop,
        is_mirrored: bool,
    ) -> CacheKey {
        let mut hasher = Hasher::new();
        match segment {
            None => {
                field(&mut hasher, b"latents");
                field(&mut hasher, &IMAGES_VERSION.to_le_bytes());
            }
            Some(ClipSegment { start, frames, fps }) => {
                field(&mut hasher, b"clip");
                for number in [CLIPS_VERSION, start as u64, frames as u64, fps as u64] {
                    field(&mut hasher, &number.to_le_bytes());
                }
            }
        }
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
