//! Latents and prompts from the cache of another trainer: `FlyMyAI`'s for Qwen-Image, and its forks'.
//!
//! ```text
//! cache/                                    in its output folder
//! ├── img_embs/fox.png.pt                   a tensor [16, 1, height / 8, width / 8]: a sample of the VAE's distribution,
//! │                                         not normalised
//! ├── text_embs/fox.txt.pt                  prompt_embeds [tokens, width], prompt_embeds_mask [tokens]
//! └── text_embs/empty_embedding.pt          the same of the text that stands for a dropped caption
//! ```
//!
//! Forks write `.safetensors` instead of `.pt`, with the latent as `latent`. Entries are found by the names of images. What
//! is missing or does not fit the job is encoded here, and said.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use weights::load::{LoadOptions, LoadRequest, load, load_f32};
use weights::{Catalog, FileDtype, TensorEncoding, TensorInfo};

use super::index::condition_entry;
use super::select::CachedSample;
use super::{CacheBuilder, CachedLatents, CachedPrompt, missing_images};
use crate::cost::check_cancelled;
use crate::data::{Problem, ProblemKind};
use crate::error::{Result, TrainerError};
use crate::model::diffusion::condition::Condition;
use crate::progress::{ProgressEvent, ProgressFn};

const IMAGES: &str = "img_embs";
const TEXTS: &str = "text_embs";
const EMPTY: &str = "empty_embedding";
const ENDINGS: [&str; 2] = ["safetensors", "pt"];
const IMPORT_PHASE: &str = "import";

/// What was taken from another cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImportedEntries {
    /// Latents.
    pub images: usize,
    /// Prompts.
    pub texts: usize,
}

/// An entry, or why it is not taken.
type Imported<T> = std::result::Result<T, String>;

impl CacheBuilder<'_> {
    /// Takes latents and prompts that are missing from the cache of another trainer; what is wrong with others becomes a
    /// problem of the index.
    pub fn import(
        &mut self,
        folder: &Path,
        on_progress: ProgressFn<'_>,
    ) -> Result<ImportedEntries> {
        let folder = cache_folder(folder)?;
        let samples: Vec<CachedSample> =
            self.index.train.iter().chain(&self.index.held_out).cloned().collect();
        let mut n_named = HashMap::<OsString, usize>::new();
        for sample in &samples {
            *n_named.entry(file_name(sample)).or_default() += 1;
        }
        let mut imported = ImportedEntries::default();
        on_progress(ProgressEvent::Phase { name: IMPORT_PHASE, total: samples.len() });
        for sample in &samples {
            match n_named[&file_name(sample)] {
                1 => self.import_sample(&folder, sample, &mut imported)?,
                n => self.refuse(sample, format!("{n} images have its name")),
            }
            check_cancelled(on_progress(ProgressEvent::Done))?;
        }
        if !self.index.store.has(&self.index.cache_key(&"".into()))
            && let Ok(condition) = self.prompt(&folder, EMPTY)
        {
            self.put_prompt(&"".into(), &condition)?;
            imported.texts += 1;
        }
        self.index.store.flush()?;
        let Self { index, images, prompts, .. } = self;
        *images = missing_images(index);
        prompts.retain(|prompt| !index.store.has(&index.cache_key(prompt)));
        Ok(imported)
    }

    /// What of a sample is missing here.
    fn import_sample(
        &mut self,
        folder: &Path,
        sample: &CachedSample,
        imported: &mut ImportedEntries,
    ) -> Result<()> {
        if !self.index.store.has(&sample.cache_key) {
            match self.latents(folder, sample) {
                Ok(latents) => {
                    self.index.store.put(sample.cache_key, latents.entry())?;
                    imported.images += 1;
                }
                Err(why) => self.refuse(sample, why),
            }
        }
        if sample.mirrored_key.is_some_and(|key| !self.index.store.has(&key)) {
            self.refuse(sample, "the other cache has no mirror images (data.flip)".into());
        }
        let text = self.index.plain_text(sample);
        let prompt = sample.prompt(text.clone(), false);
        if !self.index.store.has(&self.index.cache_key(&prompt)) {
            match self.caption(folder, sample, &text) {
                Ok(condition) => {
                    self.put_prompt(&prompt, &condition)?;
                    imported.texts += 1;
                }
                Err(why) => self.refuse(sample, why),
            }
        }
        Ok(())
    }

    fn refuse(&mut self, sample: &CachedSample, why: String) {
        let kind = ProblemKind::NotImported { why };
        self.index.problems.push(Problem::warning(&sample.path, kind));
    }

    /// A single sample of the VAE's distribution has no deviation.
    fn latents(&self, folder: &Path, sample: &CachedSample) -> Imported<CachedLatents> {
        let shape = self
            .pipeline
            .latent_shape([sample.bucket.width, sample.bucket.height], sample.frames());
        let catalog = open(&folder.join(IMAGES), &file_name(sample))?;
        let tensor = find(&catalog, &["latent", "tensor"])?;
        // [16, 1, height, width]: the frames of an image are one.
        let sizes: Vec<usize> = tensor.shape.iter().map(|size| *size as usize).collect();
        let (found, expected) = (sizes.iter().filter(|n| **n != 1), shape.sizes());
        if !found.eq(expected.iter().filter(|n| **n != 1)) {
            return Err(format!("its latent is {sizes:?}, this job's is {expected:?}"));
        }
        let mean = floats(&catalog, tensor)?;
        Ok(CachedLatents { std: vec![0.0; mean.len()], mean, shape })
    }

    fn caption(&self, folder: &Path, sample: &CachedSample, text: &str) -> Imported<Condition> {
        if text != sample.caption {
            return Err("data.trigger changes its caption".into());
        }
        let stem = sample.path.file_stem().unwrap_or_default();
        self.prompt(folder, &format!("{}.txt", stem.to_string_lossy()))
    }

    fn put_prompt(&mut self, prompt: &CachedPrompt, condition: &Condition) -> Result<()> {
        let entry = condition_entry(condition, self.precision.dtype);
        self.index.store.put(self.index.cache_key(prompt), entry)
    }

    /// The tokens that the mask counts.
    fn prompt(&self, folder: &Path, name: &str) -> Imported<Condition> {
        let catalog = open(&folder.join(TEXTS), name.as_ref())?;
        let embeds = find(&catalog, &["prompt_embeds"])?;
        let width = *embeds.shape.last().unwrap_or(&0) as usize;
        let values = floats(&catalog, embeds)?;
        let n = values.len() / width.max(1);
        let mask = match catalog.find("prompt_embeds_mask") {
            Ok(mask) => integers(&catalog, mask)?,
            // Newer diffusers have none where all tokens count.
            Err(_) => vec![1; n],
        };
        if mask.len() != n {
            return Err(format!("{n} tokens, prompt_embeds_mask has {}", mask.len()));
        }
        let tokens = values.chunks(width.max(1)).zip(&mask).filter(|(_, counts)| **counts != 0);
        let tokens: Vec<f32> = tokens.flat_map(|(token, _)| token.iter().copied()).collect();
        self.pipeline.encoders.condition_of(tokens, width)
    }
}

/// The folder itself, or the one in the trainer's output folder.
fn cache_folder(given: &Path) -> Result<PathBuf> {
    let is_cache = |folder: &PathBuf| folder.join(IMAGES).is_dir() || folder.join(TEXTS).is_dir();
    let found = [given.to_owned(), given.join("cache")].into_iter().find(is_cache);
    found.ok_or_else(|| TrainerError::Request {
        problem: format!("no cache to import in {}: no {IMAGES} or {TEXTS} there", given.display()),
        hint: "give the cache folder of FlyMyAI's trainer, or its output folder",
    })
}

fn file_name(sample: &CachedSample) -> OsString {
    sample.path.file_name().unwrap_or_default().to_owned()
}

/// The file of an entry, in either format.
fn open(folder: &Path, name: &OsStr) -> Imported<Catalog> {
    let path = |ending: &str| {
        let mut file = name.to_owned();
        file.push(format!(".{ending}"));
        folder.join(file)
    };
    let found = ENDINGS.into_iter().map(path).find(|path| path.is_file());
    let path = found.ok_or_else(|| format!("no {}", path(ENDINGS[1]).display()))?;
    Catalog::open(&path).map_err(|error| error.to_string())
}

fn find<'c>(catalog: &'c Catalog, names: &[&str]) -> Imported<&'c TensorInfo> {
    let found = names.iter().find_map(|name| catalog.find(name).ok());
    found.ok_or_else(|| format!("no {} in {}", names.join(" or "), catalog.path.display()))
}

fn floats(catalog: &Catalog, tensor: &TensorInfo) -> Imported<Vec<f32>> {
    let values = load_f32(catalog, tensor, 0..tensor.numel()).map_err(|error| error.to_string())?;
    match values.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(format!("{} has the value {value}", tensor.name)),
        None => Ok(values),
    }
}

fn integers(catalog: &Catalog, tensor: &TensorInfo) -> Imported<Vec<i64>> {
    let TensorEncoding::Plain(dtype @ (FileDtype::I64 | FileDtype::Bool)) = tensor.encoding else {
        return Err(format!("{} is neither of int64 nor of bool", tensor.name));
    };
    let size = dtype.bytes() as usize;
    let mut bytes = vec![0; tensor.numel() as usize * size];
    let wanted = vec![LoadRequest::whole(tensor, dtype, &mut bytes[..])];
    load(catalog, wanted, LoadOptions::default(), &|_| true).map_err(|error| error.to_string())?;
    let number = |bytes: &[u8]| i64::from(bytes.iter().any(|byte| *byte != 0));
    Ok(bytes.chunks(size).map(number).collect())
}
