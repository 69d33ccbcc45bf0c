//! Prompts with images for a text encoder that has a vision tower: which tokens they have, and what the tower makes of the
//! images.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::{Device, Dtype};

use super::encoder::{EncoderConfig, TextEncoder, TextEncoderSpec};
use super::prompt::{Prompt, PromptImage, PromptTexts};
use super::token_source::TokenSource;
use super::{EncodeCallbacks, EncoderLoading, EncodingOptions};
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::config::Unsupported;
use crate::model::diffusion::part::PipelinePart;
use crate::model::encoder::qwen25vl::processor::{ImageProcessor, PatchGrid};
use crate::model::encoder::qwen25vl::tower::{TowerFiles, TowerImage};
use crate::model::encoder::qwen25vl::vision::{self, VisionConfig};
use crate::model::encoder::stack::{ImageSpan, ImageTokens, PromptTokens, TEXT_BATCH};
use crate::model::encoder::tokenizer::{IMAGE_TOKEN, TemplateImages};

/// What an encoder of prompts with images has beside its language model.
pub(super) struct PromptVision {
    config: VisionConfig,
    processor: ImageProcessor,
    /// The file of the processor's settings.
    pub source: Option<PathBuf>,
    /// The token in whose place an image is seen.
    image_token: u32,
}

/// The folder of the image processor.
const PROCESSOR: &str = "processor";

impl PromptVision {
    /// What a pipeline's folder has of it; nothing if the encoder's template has no images.
    pub fn open(
        spec: &TextEncoderSpec,
        part: &PipelinePart<EncoderConfig>,
        words: &TokenSource,
        folder: &Path,
    ) -> Result<Option<Self>> {
        if spec.template.images == TemplateImages::None {
            return Ok(None);
        }
        let path = &part.catalog.path;
        if !vision::has_tower(&part.catalog) {
            let (name, path) = (spec.name, path.display());
            let problem =
                format!("prompts have images, text encoder {name} has no vision tower: {path}");
            let hint = "give the safetensors of the whole model (qwen_2.5_vl_7b.safetensors); GGUF files have none";
            return Err(TrainerError::Request { problem, hint });
        }
        let config = checked(&part.config, path)?;
        let (processor, source) = ImageProcessor::open(&folder.join(PROCESSOR), &config)?;
        let image_token = words.token_id(IMAGE_TOKEN).ok_or_else(|| TrainerError::Config {
            problem: format!("the tokenizer of {} has no token {IMAGE_TOKEN}", spec.name),
            path: folder.join(spec.tokenizer),
        })?;
        Ok(Some(Self { config, processor, source: Some(source), image_token }))
    }

    /// As published, without files.
    pub fn meta(
        spec: &TextEncoderSpec,
        part: &PipelinePart<EncoderConfig>,
    ) -> Result<Option<Self>> {
        if spec.template.images == TemplateImages::None {
            return Ok(None);
        }
        let config = checked(&part.config, &part.catalog.path)?;
        let processor = ImageProcessor::published();
        Ok(Some(Self { config, processor, source: None, image_token: 0 }))
    }

    /// The tower of a model's files.
    pub fn tower<'a>(
        &'a self,
        part: &'a PipelinePart<EncoderConfig>,
        options: EncodingOptions,
        callbacks: EncodeCallbacks<'a>,
    ) -> TowerFiles<'a> {
        let (precision, tick) = (options.precision, callbacks.tick);
        TowerFiles { config: &self.config, catalog: &part.catalog, precision, tick }
    }

    /// Checks that the files have all of the tower.
    pub fn check_tower(&self, part: &PipelinePart<EncoderConfig>) -> Result<()> {
        let (config, catalog, precision) =
            (&self.config, &part.catalog, Precision::plain(Dtype::F32));
        TowerFiles { config, catalog, precision, tick: &|_| true }.check()
    }

    /// The patches of an image, and where its tokens are if the first is at `first`.
    fn place(&self, size: [u32; 2], first: usize) -> Result<(PatchGrid, ImageSpan)> {
        let grid = self.processor.grid(size)?;
        let PatchGrid { rows, columns } = grid.merged(self.config.spatial_merge_size);
        Ok((grid, ImageSpan { first, rows, columns }))
    }

    /// Reads the values of an image's patches.
    fn values(&self, image: &PromptImage, grid: PatchGrid) -> Result<Vec<f32>> {
        let (pixels, [width, height]) = ((image.read)()?, image.size);
        if [pixels.width, pixels.height] != image.size {
            let problem = format!(
                "an image of a prompt has {} x {} pixels, expected {width} x {height}",
                pixels.width, pixels.height
            );
            return Err(TrainerError::Request {
                problem,
                hint: "it may have changed; start again",
            });
        }
        Ok(self.processor.patches(pixels, grid))
    }
}

fn checked(config: &EncoderConfig, path: &Path) -> Result<VisionConfig> {
    let problem = |problem| TrainerError::Config { problem, path: path.into() };
    match config {
        EncoderConfig::Qwen25Vl(config) => {
            let vision = config.checked_vision();
            vision.cloned().map_err(|Unsupported(text)| problem(text))
        }
        EncoderConfig::Clip(_) | EncoderConfig::T5(_) | EncoderConfig::Qwen3(_) => {
            Err(problem("a text encoder without a vision tower, its prompts have images".into()))
        }
    }
}

/// A prompt whose images were not seen yet.
struct PlacedPrompt<'a> {
    ids: Vec<u32>,
    images: Vec<PlacedImage<'a>>,
}

/// An image of it.
struct PlacedImage<'a> {
    grid: PatchGrid,
    span: ImageSpan,
    /// None in a dry run.
    image: Option<&'a PromptImage>,
}

/// Images without those that occur again: a caption and the empty prompt of an image see the same references.
struct DistinctImages<'a> {
    images: Vec<&'a PlacedImage<'a>>,
    /// Which of them each image is.
    places: Vec<usize>,
}

impl<'a> DistinctImages<'a> {
    fn of(all: &[&'a PlacedImage<'a>]) -> Self {
        let (mut images, mut places) = (Vec::new(), Vec::with_capacity(all.len()));
        let mut known = HashMap::new();
        for image in all {
            // Those of a dry run count one by one.
            let address = image.image.map(|image| Arc::as_ptr(&image.read).addr());
            let next = images.len();
            let place = address.map_or(next, |address| *known.entry(address).or_insert(next));
            if place == next {
                images.push(*image);
            }
            places.push(place);
        }
        Self { images, places }
    }
}

/// Values of images' tokens that may wait in main memory for the language model. Chosen: 1 GiB, 54 images of 1024 x 1024;
/// loading the encoder again takes little beside encoding as many.
const WAITING_VALUES: usize = 1 << 28;

impl TextEncoder {
    /// Tokens that images of these sizes add to a prompt.
    pub(super) fn image_tokens(&self, sizes: &[[u32; 2]]) -> Result<usize> {
        let Some(vision) = &self.vision else { return Ok(0) };
        let mut n_tokens =
            self.tokenizer.placeholder_tokens(self.spec.template, sizes.len()) - sizes.len();
        for size in sizes {
            let (_, span) = vision.place(*size, 0)?;
            n_tokens += span.rows * span.columns;
        }
        Ok(n_tokens)
    }

    /// Checks that prompts have as many images as the encoder's template.
    pub(super) fn check_images(&self, n: usize) -> Result<()> {
        let images = self.spec.template.images;
        if images.allows(n) {
            return Ok(());
        }
        let (name, expected) = (self.spec.name, images.expected());
        let problem = format!("a prompt with {n} images, text encoder {name} sees {expected}");
        Err(TrainerError::Request {
            problem,
            hint: "give each prompt as many images as the model takes",
        })
    }

    /// Passes the tokens of prompts to `encode`, with what the vision tower makes of their images: as many at a time as
    /// may wait.
    pub(super) fn with_images(
        &self,
        vision: &PromptVision,
        device: &Device,
        options: EncodingOptions,
        texts: PromptTexts<'_>,
        callbacks: EncodeCallbacks<'_>,
        encode: &mut dyn FnMut(&[PromptTokens]) -> Result<()>,
    ) -> Result<()> {
        let placed = self.placed(vision, texts)?;
        let tower = vision.tower(&self.part, options, callbacks);
        let mut left = &placed[..];
        while !left.is_empty() {
            let n = self.n_together(left, options.loading);
            let (prompts, rest) = left.split_at(n);
            left = rest;
            let seen: Vec<_> = prompts.iter().flat_map(|prompt| &prompt.images).collect();
            let DistinctImages { images, places } = DistinctImages::of(&seen);
            let images: Vec<_> = images.into_iter().map(|it| vision.tower_image(it)).collect();
            let features = match options.loading {
                _ if images.is_empty() => Vec::new(),
                EncoderLoading::Whole => tower.encode(device, &images)?,
                EncoderLoading::Blocks => tower.encode_by_blocks(device, &images)?,
            };
            let mut features = places.into_iter().map(|place| features[place].clone());
            let tokens = prompts.iter().map(|prompt| prompt.with_features(&mut features));
            encode(&tokens.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// How many of these prompts go through tower and language model before the next.
    fn n_together(&self, prompts: &[PlacedPrompt<'_>], loading: EncoderLoading) -> usize {
        if loading == EncoderLoading::Blocks {
            return prompts.len().min(TEXT_BATCH);
        }
        let width = self.part.config.widths().tokens;
        let mut values = 0;
        let fits = |prompt: &&PlacedPrompt<'_>| {
            let spans = prompt.images.iter().map(|image| image.span);
            values += width * spans.map(|span| span.rows * span.columns).sum::<usize>();
            values <= WAITING_VALUES
        };
        prompts.iter().take_while(fits).count().max(1)
    }

    /// The tokens of prompts.
    fn placed<'p>(
        &self,
        vision: &PromptVision,
        texts: PromptTexts<'p>,
    ) -> Result<Vec<PlacedPrompt<'p>>> {
        match texts {
            PromptTexts::Given(prompts) => {
                prompts.iter().map(|prompt| self.placed_prompt(vision, prompt)).collect()
            }
            PromptTexts::Longest { n, images } => {
                (0..n).map(|_| self.longest_prompt(vision, images)).collect()
            }
        }
    }

    /// Each image token becomes as many as its image has.
    fn placed_prompt<'p>(
        &self,
        vision: &PromptVision,
        prompt: &'p Prompt,
    ) -> Result<PlacedPrompt<'p>> {
        let n_images = prompt.images.len();
        let found = self.tokenizer.encode_with_images(&prompt.text, n_images);
        let n_tokens = found.iter().filter(|id| **id == vision.image_token).count();
        if n_tokens != n_images {
            let problem =
                format!("a prompt has {n_images} images and {n_tokens} tokens {IMAGE_TOKEN}");
            let hint = "leave this token out of the text";
            return Err(TrainerError::Request { problem, hint });
        }
        let (mut ids, mut images) = (Vec::with_capacity(found.len()), Vec::new());
        let mut left = prompt.images.iter();
        for id in found {
            let image = if id == vision.image_token { left.next() } else { None };
            let Some(image) = image else {
                ids.push(id);
                continue;
            };
            let (grid, span) = vision.place(image.size, ids.len())?;
            ids.resize(ids.len() + span.rows * span.columns, id);
            images.push(PlacedImage { grid, span, image: Some(image) });
        }
        Ok(PlacedPrompt { ids, images })
    }

    /// For a dry run, which depends on the number of tokens alone, with the images first.
    fn longest_prompt(
        &self,
        vision: &PromptVision,
        sizes: &[[u32; 2]],
    ) -> Result<PlacedPrompt<'static>> {
        let (mut first, mut images) = (0, Vec::with_capacity(sizes.len()));
        for size in sizes {
            let (grid, span) = vision.place(*size, first)?;
            first += span.rows * span.columns;
            images.push(PlacedImage { grid, span, image: None });
        }
        let n = self.tokenizer.max_tokens() + self.image_tokens(sizes)?;
        Ok(PlacedPrompt { ids: vec![0; n], images })
    }
}

impl PromptVision {
    fn tower_image<'a>(&'a self, placed: &'a PlacedImage<'_>) -> TowerImage<'a> {
        let PlacedImage { grid, image, .. } = *placed;
        let read = move || match image {
            Some(image) => self.values(image, grid),
            None => Ok(vec![0.0; grid.len() * self.processor.values_per_patch()]),
        };
        TowerImage { grid, read: Box::new(read) }
    }
}

impl PlacedPrompt<'_> {
    /// With the next hidden states for its images.
    fn with_features(&self, features: &mut impl Iterator<Item = Vec<f32>>) -> PromptTokens {
        let spans = self.images.iter().map(|image| image.span);
        let images = spans.zip(features).map(|(span, features)| ImageTokens { span, features });
        PromptTokens { ids: self.ids.clone(), n_attended: None, images: images.collect() }
    }
}
