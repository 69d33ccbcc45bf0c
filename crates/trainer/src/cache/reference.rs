//! Reference images of editing models: their latents, and the prompts that the text encoder sees together with them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use weights::BytesDoneFn;
use weights::checksum::{FileStamp, Hash, Hasher};

use super::select::IMAGES_VERSION;
use super::store::CacheKey;
use crate::archive;
use crate::data::reference::{ReferenceSize, mirrored, scaled_reference};
use crate::data::{Bucket, DecodingMemory, ProblemKind};
use crate::error::{Result, TrainerError};
use crate::hashes::{HashCache, field};
use crate::model::diffusion::text::{Prompt, PromptImage};
use crate::pixels::Pixels;

/// A reference image, and where its latents are.
#[derive(Clone, Debug)]
pub struct CachedReference {
    /// The image.
    pub path: PathBuf,
    /// The sizes in which the model sees it.
    pub size: ReferenceSize,
    /// The file's stamp when its checksum was taken.
    pub(super) stamp: FileStamp,
    hash: Hash,
    pub(super) cache_key: CacheKey,
    /// The latents of its mirror image, if it is shown too.
    pub(super) mirrored_key: Option<CacheKey>,
}

/// What the addresses of references are made of, beside the references.
pub(super) struct ReferenceHasher<'a> {
    pub hashes: &'a mut HashCache,
    pub vae: Hash,
    pub has_mirror_images: bool,
}

impl ReferenceHasher<'_> {
    /// Hashes a reference.
    pub fn reference(
        &mut self,
        path: PathBuf,
        size: ReferenceSize,
        tick: BytesDoneFn<'_>,
    ) -> Result<CachedReference> {
        let (hash, stamp) = self.hashes.hash_file(&path, tick)?;
        let vae = self.vae;
        let key = |is_mirrored: bool| {
            let mut hasher = Hasher::new();
            field(&mut hasher, b"reference");
            field(&mut hasher, &IMAGES_VERSION.to_le_bytes());
            field(&mut hasher, hash.as_bytes());
            field(&mut hasher, vae.as_bytes());
            field_size(&mut hasher, size.vae);
            if let Some(side) = size.cropped_from {
                field(&mut hasher, &side.to_le_bytes());
            }
            field(&mut hasher, &[u8::from(is_mirrored)]);
            hasher.finalize()
        };
        let mirrored_key = self.has_mirror_images.then(|| key(true));
        Ok(CachedReference { path, size, stamp, hash, cache_key: key(false), mirrored_key })
    }
}

fn field_size(hasher: &mut Hasher, size: Bucket) {
    for side in [size.width, size.height] {
        field(hasher, &(side as u64).to_le_bytes());
    }
}

impl CachedReference {
    /// Where its latents are, or those of its mirror image.
    pub(super) fn key(&self, is_mirrored: bool) -> CacheKey {
        self.mirrored_key.filter(|_| is_mirrored).unwrap_or(self.cache_key)
    }

    /// Where its latents are, of both views.
    pub(super) fn cache_keys(&self) -> impl Iterator<Item = (bool, CacheKey)> {
        let mirrored = self.mirrored_key.map(|key| (true, key));
        [(false, self.cache_key)].into_iter().chain(mirrored)
    }

    /// Its pixels in a size, if it is still the file that was hashed.
    fn pixels(
        &self,
        size: Bucket,
        memory: &DecodingMemory,
    ) -> std::result::Result<Pixels, ProblemKind> {
        let pixels = scaled_reference(&self.path, size, memory)?;
        if archive::stamp(&self.path).ok() != Some(self.stamp) {
            return Err(ProblemKind::Unreadable { why: "it was changed meanwhile".into() });
        }
        Ok(pixels)
    }
}

/// A prompt of a run: a text, with the images that the text encoder sees, if it sees any.
#[derive(Clone, Debug)]
pub struct CachedPrompt {
    /// The text.
    pub text: String,
    pub(super) images: Vec<Arc<CachedReference>>,
    pub(super) is_mirrored: bool,
}

impl CachedPrompt {
    /// A text about references, of which the text encoder sees those that it takes.
    pub fn new(text: String, references: &[Arc<CachedReference>], is_mirrored: bool) -> Self {
        let seen = references.iter().filter(|reference| reference.size.encoder.is_some());
        let images: Vec<_> = seen.cloned().collect();
        let is_mirrored = is_mirrored && !images.is_empty();
        Self { text, images, is_mirrored }
    }

    /// Sizes of its images as the text encoder sees them.
    pub(super) fn image_sizes(&self) -> Vec<[u32; 2]> {
        self.images.iter().filter_map(|image| image.size.encoder.map(Bucket::sides)).collect()
    }

    /// Where the latents of its images are.
    pub(super) fn latent_keys(&self) -> impl Iterator<Item = CacheKey> {
        self.images.iter().map(|image| image.key(self.is_mirrored))
    }

    /// Adds what tells it from other prompts.
    pub(super) fn hash(&self, hasher: &mut Hasher) {
        field(hasher, self.text.as_bytes());
        for image in &self.images {
            field(hasher, image.hash.as_bytes());
            field_size(hasher, image.size.encoder.expect("it sees all of them"));
            field(hasher, &[u8::from(self.is_mirrored)]);
        }
    }

    /// As the text encoder takes it. `images` has those of other prompts, by where their latents are.
    pub(super) fn to_encode(
        &self,
        images: &mut HashMap<CacheKey, PromptImage>,
        memory: &Arc<DecodingMemory>,
    ) -> Prompt {
        let image = |image: &Arc<CachedReference>| {
            let known = images.entry(image.key(self.is_mirrored));
            let read = || prompt_image(Arc::clone(image), self.is_mirrored, Arc::clone(memory));
            known.or_insert_with(read).clone()
        };
        Prompt { text: self.text.clone(), images: self.images.iter().map(image).collect() }
    }
}

/// An image as the text encoder takes it: read when it is encoded.
fn prompt_image(
    image: Arc<CachedReference>,
    is_mirrored: bool,
    memory: Arc<DecodingMemory>,
) -> PromptImage {
    let size = image.size.encoder.expect("it sees all of them");
    let read = move || {
        let pixels = image.pixels(size, &memory).map_err(|kind| TrainerError::Request {
            problem: format!("{} {kind}", image.path.display()),
            hint: "leave it as it is while it is encoded",
        })?;
        Ok(if is_mirrored { mirrored(&pixels) } else { pixels })
    };
    PromptImage { size: size.sides(), read: Arc::new(read) }
}

impl From<&str> for CachedPrompt {
    fn from(text: &str) -> Self {
        Self::new(text.to_owned(), &[], false)
    }
}
