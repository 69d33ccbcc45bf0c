//! Masks in the cache: a number for each latent pixel, under an address of its own, since a mask may change while its image
//! does not. One entry serves both views of an image: a mask is mirrored when it is read.

use std::collections::HashSet;

use weights::checksum::{FileStamp, Hash, Hasher};
use weights::{BytesDoneFn, FileDtype};

use super::index::CacheIndex;
use super::select::CachedSample;
use super::store::{CacheEntry, CacheKey, StoredTensor};
use crate::archive;
use crate::config::data::DataConfig;
use crate::data::mask::{ImageMask, mask_bytes, read_mask};
use crate::data::{Bucket, Crop, DecodingMemory, DecodingNeed, ImageItem, Problem, ProblemKind};
use crate::error::Result;
use crate::hashes::{HashCache, field};
use crate::model::diffusion::Pipeline;

/// Incremented when the same mask would give other numbers.
const MASKS_VERSION: u64 = 1;

const MASK: &str = "mask";

/// The mask of a sample, and where its numbers are.
#[derive(Clone, Debug)]
pub(super) struct CachedMask {
    mask: ImageMask,
    /// The file's stamp when its checksum was taken.
    stamp: FileStamp,
    pub key: CacheKey,
    /// What the loss counts for where it is black.
    least: f32,
    /// How often all of the image counts.
    pub unmasked_probability: f32,
}

/// A mask as a step sees it: a factor for each latent pixel, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentMask {
    /// The factors.
    pub values: Vec<f32>,
}

/// A mask's file, hashed.
#[derive(Clone, Copy)]
pub(super) struct HashedMask {
    hash: Hash,
    stamp: FileStamp,
}

/// Hashes the mask of an image, if it has one.
pub(super) fn hash_mask(
    item: &ImageItem,
    hashes: &mut HashCache,
    tick: BytesDoneFn<'_>,
) -> Result<Option<HashedMask>> {
    let Some(mask) = &item.mask else { return Ok(None) };
    let (hash, stamp) = hashes.hash_file(mask.file(&item.path), tick)?;
    Ok(Some(HashedMask { hash, stamp }))
}

impl CachedMask {
    /// The mask of an image in its size.
    pub fn new(
        mask: ImageMask,
        HashedMask { hash, stamp }: HashedMask,
        data: &DataConfig,
        bucket: Bucket,
        crop: Crop,
    ) -> Self {
        let mut hasher = Hasher::new();
        field(&mut hasher, b"mask");
        field(&mut hasher, &MASKS_VERSION.to_le_bytes());
        field(&mut hasher, &[u8::from(mask == ImageMask::Alpha)]);
        field(&mut hasher, hash.as_bytes());
        for side in [bucket.width, bucket.height] {
            field(&mut hasher, &(side as u64).to_le_bytes());
        }
        match crop {
            Crop::Centre => field(&mut hasher, b"centre"),
            Crop::At { x, y } => [x, y].iter().for_each(|at| field(&mut hasher, &at.to_le_bytes())),
        }
        let unmasked_probability = data.unmasked_probability as f32;
        let least = data.unmasked_weight as f32;
        Self { mask, stamp, key: hasher.finalize(), least, unmasked_probability }
    }
}

/// Samples whose masks are missing, each mask once.
fn missing(index: &CacheIndex) -> Vec<(&CachedSample, &CachedMask)> {
    let samples = index.train.iter().chain(&index.held_out);
    let masked = samples.filter_map(|sample| Some((sample, sample.mask.as_ref()?)));
    let mut seen = HashSet::new();
    masked.filter(|(_, mask)| !index.store.has(&mask.key) && seen.insert(mask.key)).collect()
}

/// How many masks are missing of images that are not.
pub(super) fn n_missing(index: &CacheIndex) -> usize {
    let has_image =
        |sample: &CachedSample| sample.cache_keys().all(|(_, key)| index.store.has(&key));
    missing(index).iter().filter(|(sample, _)| has_image(sample)).count()
}

/// Adds what decoding the missing masks takes.
pub(super) fn add_decoding_need(index: &CacheIndex, need: &mut DecodingNeed) {
    for (sample, mask) in missing(index) {
        let bytes = mask_bytes(&mask.mask, &sample.path, sample.bucket).unwrap_or(0);
        need.add(mask.mask.file(&sample.path), bytes);
    }
}

/// Puts the missing masks into the store; those that cannot be decoded become problems.
pub(super) fn encode_masks(
    pipeline: &Pipeline,
    memory: &DecodingMemory,
    index: &mut CacheIndex,
) -> Result<()> {
    let mut entries = Vec::new();
    let mut problems = Vec::new();
    for (sample, mask) in missing(index) {
        match read(pipeline, sample, mask, memory) {
            Ok(entry) => entries.push((mask.key, entry)),
            Err(kind) => problems.push(Problem::skipped(&sample.path, kind)),
        }
    }
    index.problems.extend(problems);
    entries.into_iter().try_for_each(|(key, entry)| index.store.put(key, entry))
}

fn read(
    pipeline: &Pipeline,
    sample: &CachedSample,
    CachedMask { mask, stamp, .. }: &CachedMask,
    memory: &DecodingMemory,
) -> std::result::Result<CacheEntry, ProblemKind> {
    let file = mask.file(&sample.path);
    let unusable = |why: String| ProblemKind::MaskUnusable { mask: file.into(), why };
    let Bucket { width, height } = sample.bucket;
    let shape = pipeline.latent_shape([width, height], 1);
    let scale = height / shape.height.max(1);
    let values = read_mask(mask, &sample.path, sample.bucket, sample.crop, scale, memory);
    let values = values.map_err(|kind| unusable(kind.to_string()))?;
    if archive::stamp(file).ok() != Some(*stamp) {
        return Err(unusable("was changed meanwhile".into()));
    }
    Ok(vec![StoredTensor::new(MASK, FileDtype::F32, &[shape.height, shape.width], &values)])
}

impl CacheIndex {
    /// A sample's mask, or that of its mirror image; none if all of it counts.
    pub fn mask(&self, sample: &CachedSample, is_mirrored: bool) -> Result<Option<LatentMask>> {
        let Some(CachedMask { key, least, .. }) = sample.mask else { return Ok(None) };
        let entry = self.store.get(&key)?;
        let stored = entry.as_ref().and_then(|entry| entry.iter().find(|part| part.name == MASK));
        let stored = stored.ok_or_else(|| {
            super::index::missing(&format!("the mask of {}", sample.path.display()))
        })?;
        let mut values = stored.values();
        let width = stored.shape.last().map_or(1, |width| *width as usize);
        if is_mirrored {
            values.chunks_exact_mut(width.max(1)).for_each(<[f32]>::reverse);
        }
        for value in &mut values {
            *value = value.max(least);
        }
        Ok(Some(LatentMask { values }))
    }
}
