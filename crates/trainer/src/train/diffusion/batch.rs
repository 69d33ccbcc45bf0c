//! Batches of encoded images. A sample's caption and whether it is flipped follow from the seed, the batch and
//! its index there, so a resumed run sees the same.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use compute::RandomSequence;
use weights::checksum::Hash;

use crate::cache::{CacheIndex, CachedLatents, CachedPrompt, CachedReference, LatentMask};
use crate::config::data::LearningTarget;
use crate::data::caption::{CaptionDraws, for_step};
use crate::data::{BatchSampler, SampleSize};
use crate::error::{Result, TrainerError};
use crate::model::diffusion::condition::Condition;
use crate::task::traits::TrainBatch;

/// Keeps the numbers drawn here apart from others that follow from the same seed: "text".
const TEXT_SEED: u64 = 0x7465_7874_0000_0000;

/// Bits of a draw that count samples in a batch; the rest counts batches. Chosen: sixty-four times
/// the largest batch of a job.
const SLOT_BITS: u32 = 16;

/// Chosen: small datasets are not read again in every epoch, and it is little memory.
pub(crate) const SAMPLE_CACHE_BYTES: usize = 256 << 20;

/// A sample of a batch.
#[derive(Clone, Debug)]
pub struct EncodedSample {
    /// Its latents, or those of its mirror image.
    pub latents: Arc<CachedLatents>,
    /// The latents of its reference images, for an editing model.
    pub references: Vec<Arc<CachedLatents>>,
    /// Its text.
    pub text: String,
    /// The same as the model sees it.
    pub prompt: Arc<Condition>,
    /// The weight of its loss.
    pub loss_weight: f32,
    /// What is learnt of it.
    pub target: LearningTarget,
    /// Which part of it the loss counts; all of it without one.
    pub mask: Option<Arc<LatentMask>>,
    /// A number that no other sample of the run has, for random numbers.
    pub draw: u64,
}

/// Reads batches by their number.
pub struct BatchReader {
    index: Arc<CacheIndex>,
    order: BatchSampler,
    seed: u64,
    cache: SampleCache,
}

impl BatchReader {
    /// Of these images in this order.
    pub fn new(index: Arc<CacheIndex>, order: BatchSampler, seed: u64) -> Self {
        Self { index, order, seed, cache: SampleCache::default() }
    }

    /// A batch.
    pub fn read(&mut self, number: u64) -> Result<TrainBatch<SampleSize, EncodedSample>> {
        let samples = self.order.batch(number);
        let size = samples.first().and_then(|first| Some(self.index.train.get(*first)?.size()));
        let size = size.ok_or_else(|| TrainerError::Request {
            problem: "there is nothing to train on".into(),
            hint: "give data.images a folder of images",
        })?;
        let samples = samples.into_iter().zip(0..);
        let samples = samples.map(|(index, slot)| self.sample(index, number, slot));
        let samples = samples.collect::<Result<_>>()?;
        Ok(TrainBatch { number, samples, size })
    }

    fn sample(&mut self, index: usize, number: u64, slot: u64) -> Result<EncodedSample> {
        let draw = (number << SLOT_BITS) | slot;
        let sequence = RandomSequence::new(self.seed ^ TEXT_SEED, draw);
        let word = |at| u64::from(sequence.word(at)) << 32 | u64::from(sequence.word(at + 1));
        let draws = CaptionDraws { dropout: word(0), order: word(2), choice: word(6) };
        let sample = &self.index.train[index];
        let is_mirrored = sample.mirrored_key.is_some() && sequence.word(4) & 1 == 1;
        let text = for_step(&sample.caption, self.index.captions_of(sample), draws);
        let prompt = sample.prompt(text, is_mirrored);
        let (text, prompt) = (prompt.text.clone(), self.cache.prompt(&self.index, &prompt)?);
        let references = sample.references.iter();
        let references = references
            .map(|reference| self.cache.reference(&self.index, reference, is_mirrored))
            .collect::<Result<_>>()?;
        let latents = self.cache.latents(&self.index, index, is_mirrored)?;
        // The upper 24 bits are a number below 1 without rounding.
        let uniform = (sequence.word(5) >> 8) as f32 / (1 << 24) as f32;
        let is_masked = uniform >= sample.unmasked_probability();
        let mask = if is_masked { self.cache.mask(&self.index, index, is_mirrored)? } else { None };
        let (loss_weight, target) = (sample.loss_weight, sample.target);
        Ok(EncodedSample { latents, references, text, prompt, loss_weight, target, mask, draw })
    }
}

/// Samples read before, up to [`SAMPLE_CACHE_BYTES`].
#[derive(Default)]
struct SampleCache {
    latents: HashMap<(usize, bool), Arc<CachedLatents>>,
    references: HashMap<(PathBuf, bool), Arc<CachedLatents>>,
    masks: HashMap<(usize, bool), Arc<LatentMask>>,
    prompts: HashMap<Hash, Arc<Condition>>,
    bytes: usize,
}

impl SampleCache {
    fn latents(
        &mut self,
        from: &CacheIndex,
        index: usize,
        is_mirrored: bool,
    ) -> Result<Arc<CachedLatents>> {
        if let Some(latents) = self.latents.get(&(index, is_mirrored)) {
            return Ok(Arc::clone(latents));
        }
        let latents = Arc::new(from.latents(&from.train[index], is_mirrored)?);
        if self.reserve(latents.mean.len() + latents.std.len()) {
            self.latents.insert((index, is_mirrored), Arc::clone(&latents));
        }
        Ok(latents)
    }

    fn mask(
        &mut self,
        from: &CacheIndex,
        index: usize,
        is_mirrored: bool,
    ) -> Result<Option<Arc<LatentMask>>> {
        if let Some(mask) = self.masks.get(&(index, is_mirrored)) {
            return Ok(Some(Arc::clone(mask)));
        }
        let Some(mask) = from.mask(&from.train[index], is_mirrored)?.map(Arc::new) else {
            return Ok(None);
        };
        if self.reserve(mask.values.len()) {
            self.masks.insert((index, is_mirrored), Arc::clone(&mask));
        }
        Ok(Some(mask))
    }

    /// One reference may belong to several samples.
    fn reference(
        &mut self,
        from: &CacheIndex,
        reference: &CachedReference,
        is_mirrored: bool,
    ) -> Result<Arc<CachedLatents>> {
        let key = (reference.path.clone(), is_mirrored);
        if let Some(latents) = self.references.get(&key) {
            return Ok(Arc::clone(latents));
        }
        let latents = Arc::new(from.reference(reference, is_mirrored)?);
        if self.reserve(latents.mean.len()) {
            self.references.insert(key, Arc::clone(&latents));
        }
        Ok(latents)
    }

    fn prompt(&mut self, from: &CacheIndex, prompt: &CachedPrompt) -> Result<Arc<Condition>> {
        let key = from.cache_key(prompt);
        if let Some(prompt) = self.prompts.get(&key) {
            return Ok(Arc::clone(prompt));
        }
        let prompt = Arc::new(from.condition(prompt)?);
        if self.reserve(prompt.n_values()) {
            self.prompts.insert(key, Arc::clone(&prompt));
        }
        Ok(prompt)
    }

    /// Reserves memory for so many values, if it is within the limit.
    fn reserve(&mut self, n_values: usize) -> bool {
        let bytes = self.bytes + n_values * size_of::<f32>();
        let has_room = bytes <= SAMPLE_CACHE_BYTES;
        if has_room {
            self.bytes = bytes;
        }
        has_room
    }
}
