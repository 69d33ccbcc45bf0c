//! What a run finds in the cache: its samples, their latents, and texts as the model sees them.
//! Reads from any thread; nothing here computes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::Dtype;
use weights::checksum::{Hash, Hasher};

use super::reference::{CachedPrompt, CachedReference};
use super::select::CachedSample;
use super::store::{CacheEntry, CacheKey, CacheStore, StoredTensor};
use crate::data::caption::{self, CaptionDraws, CaptionSettings};
use crate::data::{BatchSampler, Findings, Problem};
use crate::error::{Result, TrainerError};
use crate::fingerprint::{CAPTION, Fingerprint, PartHashes, short};
use crate::hashes::field;
use crate::model::diffusion::condition::{Condition, NamedTensor};
use crate::model::diffusion::vae::LatentShape;
use crate::model::files::file_dtype;

/// Everything a run asks for, encoded.
pub struct CacheIndex {
    /// What is trained on, sorted by path.
    pub train: Vec<CachedSample>,
    /// What the loss is measured on, sorted by path.
    pub held_out: Vec<CachedSample>,
    /// What was wrong with images, captions and the cache itself.
    pub problems: Vec<Problem>,
    /// How many texts can be asked for.
    pub n_texts: usize,
    /// What is done to captions, by set.
    pub(super) captions: Vec<CaptionSettings>,
    /// The references of each sample image.
    pub(super) sample_references: Vec<Vec<Arc<CachedReference>>>,
    pub(super) store: CacheStore,
    /// The checksum of what makes a prompt of a text.
    pub(super) encoders_hash: Hash,
}

/// The latents of an image or a clip from the VAE, unscaled: a normal distribution for each value, so that every step
/// draws a new sample.
#[derive(Clone, Debug, PartialEq)]
pub struct CachedLatents {
    /// Means.
    pub mean: Vec<f32>,
    /// Standard deviations; none of a reference image, of which models see the means.
    pub std: Vec<f32>,
    /// The shape of both.
    pub shape: LatentShape,
}

const MEAN: &str = "mean";
const DEVIATION: &str = "deviation";

impl CacheIndex {
    /// What is to be said of the images and their captions, in a few lines; without the first problems,
    /// if they were told before.
    pub fn findings(&self, n_told: usize) -> Findings {
        let n_used = self.train.len() + self.held_out.len();
        let has_clips = self.train.iter().chain(&self.held_out).any(CachedSample::is_clip);
        let unit = if has_clips { "sample" } else { "image" };
        Findings::of_samples(&self.problems[n_told..], n_used, unit)
    }

    /// A sample's latents, or those of its mirror image.
    pub fn latents(&self, sample: &CachedSample, is_mirrored: bool) -> Result<CachedLatents> {
        let address = if is_mirrored { sample.mirrored_key } else { Some(sample.cache_key) };
        self.read_latents(address, &sample.path, is_mirrored)
    }

    /// The latents of a reference, or of its mirror image: their means alone.
    pub fn reference(
        &self,
        reference: &CachedReference,
        is_mirrored: bool,
    ) -> Result<CachedLatents> {
        self.read_latents(Some(reference.key(is_mirrored)), &reference.path, is_mirrored)
    }

    fn read_latents(
        &self,
        address: Option<CacheKey>,
        path: &Path,
        is_mirrored: bool,
    ) -> Result<CachedLatents> {
        let entry = address.and_then(|address| self.store.get(&address).transpose());
        let entry = entry.ok_or_else(|| {
            let mirrored = if is_mirrored { ", mirrored," } else { "" };
            missing(&format!("image {}{mirrored}", path.display()))
        })??;
        CachedLatents::read(&entry).ok_or_else(|| missing(&format!("image {}", path.display())))
    }

    /// A prompt as the model sees it: one that a sample's caption can become, the empty one, or one
    /// of those asked for besides.
    pub fn condition(&self, prompt: &CachedPrompt) -> Result<Condition> {
        let entry = self.store.get(&self.cache_key(prompt))?;
        let entry = entry.ok_or_else(|| missing(&format!("text {:?}", prompt.text)))?;
        let named = |part: &StoredTensor| NamedTensor {
            name: part.name.clone(),
            sizes: part.shape.iter().map(|size| *size as usize).collect(),
            values: part.values(),
        };
        Ok(Condition(entry.iter().map(named).collect()))
    }

    /// The references of the sample image of a prompt; none where the job has none.
    pub fn sample_references(&self, index: usize) -> &[Arc<CachedReference>] {
        match &self.sample_references[..] {
            [] => &[],
            [one] => one,
            several => several.get(index).map_or(&[], |references| references),
        }
    }

    /// What is done to a sample's caption.
    pub fn captions_of(&self, sample: &CachedSample) -> &CaptionSettings {
        &self.captions[sample.set]
    }

    /// The text of a sample where nothing is left to chance, to measure the loss with.
    pub fn plain_text(&self, sample: &CachedSample) -> String {
        caption::for_step(&sample.caption, self.captions_of(sample), CaptionDraws::PLAIN)
    }

    /// What tells these images from others: contents, captions, sizes, repeats, and what makes prompts of captions,
    /// hashed. `folders` are those of the sets.
    pub fn fingerprint(&self, folders: &[PathBuf]) -> Fingerprint {
        let (mut hasher, mut parts) = (Hasher::new(), PartHashes::new());
        field(&mut hasher, self.encoders_hash.as_bytes());
        parts.insert("the text encoders".into(), short(&self.encoders_hash));
        for sample in self.train.iter().chain(&self.held_out) {
            field(&mut hasher, sample.cache_key.as_bytes());
            field(&mut hasher, sample.caption.as_bytes());
            field(&mut hasher, &sample.repeats.to_le_bytes());
            let name = part_name(sample, folders);
            // The same in another size.
            let is_known = parts.contains_key(&name);
            let name = if is_known { format!("{name} at {}", sample.bucket) } else { name };
            if folders.len() > 1 {
                field(&mut hasher, &(sample.set as u64).to_le_bytes());
            }
            if let Some(mask) = &sample.mask {
                field(&mut hasher, mask.key.as_bytes());
                parts.insert(format!("mask of {name}"), short(&mask.key));
            }
            for (number, reference) in (1..).zip(&sample.references) {
                field(&mut hasher, reference.cache_key.as_bytes());
                let part = format!("reference {number} of {name}");
                parts.insert(part, short(&reference.cache_key));
            }
            let caption = blake3::hash(sample.caption.as_bytes());
            parts.insert(format!("{CAPTION}{name}"), short(&caption));
            parts.insert(name, format!("{} x{}", short(&sample.cache_key), sample.repeats));
        }
        Fingerprint { whole: hasher.finalize().to_hex().to_string(), parts }
    }

    /// The order in which the samples are trained on, up to `batch` at a time.
    pub fn batch_sampler(&self, batch: usize, seed: u64) -> BatchSampler {
        let samples: Vec<_> =
            self.train.iter().map(|sample| (sample.size(), sample.repeats)).collect();
        BatchSampler::new(&samples, batch, seed)
    }

    /// Bytes of all that lies in the folder, of other runs too.
    pub fn bytes(&self) -> u64 {
        self.store.bytes()
    }

    /// Where a prompt is; no two prompts have the same.
    pub(crate) fn cache_key(&self, prompt: &CachedPrompt) -> CacheKey {
        let mut hasher = Hasher::new();
        field(&mut hasher, b"prompt");
        field(&mut hasher, self.encoders_hash.as_bytes());
        prompt.hash(&mut hasher);
        hasher.finalize()
    }
}

impl CachedLatents {
    pub(super) fn entry(&self) -> CacheEntry {
        let sizes = self.shape.sizes();
        let part = |name, numbers: &[f32]| {
            StoredTensor::new(name, weights::FileDtype::F32, &sizes, numbers)
        };
        let deviation = (!self.std.is_empty()).then(|| part(DEVIATION, &self.std));
        std::iter::once(part(MEAN, &self.mean)).chain(deviation).collect()
    }

    /// Nothing if the entry holds something else.
    fn read(entry: &CacheEntry) -> Option<Self> {
        let find = |name: &str| entry.iter().find(|part| part.name == name);
        let mean = find(MEAN)?;
        let sizes: Vec<usize> = mean.shape.iter().map(|size| *size as usize).collect();
        let shape = LatentShape::from_sizes(&sizes)?;
        let std = find(DEVIATION).map_or_else(Vec::new, StoredTensor::values);
        Some(Self { mean: mean.values(), std, shape })
    }
}

/// A condition in the format that the model is run in: it would be converted to that anyway.
pub(super) fn condition_entry(condition: &Condition, dtype: Dtype) -> CacheEntry {
    let part = |named: &NamedTensor| {
        StoredTensor::new(&named.name, file_dtype(dtype), &named.sizes, &named.values)
    };
    condition.0.iter().map(part).collect()
}

/// What a sample is called where it is told what has changed.
fn part_name(sample: &CachedSample, folders: &[PathBuf]) -> String {
    let path = sample.path.strip_prefix(&folders[sample.set]).unwrap_or(&sample.path).display();
    let from = sample.start().map(|start| format!(" from frame {start}")).unwrap_or_default();
    match folders {
        [_] => format!("{path}{from}"),
        _ => format!("{path}{from} of data[{}]", sample.set),
    }
}

pub(super) fn missing(what: &str) -> TrainerError {
    TrainerError::Request {
        problem: format!("{what} is not in the cache"),
        hint: "run `hearth cache` on the job as it is now",
    }
}
