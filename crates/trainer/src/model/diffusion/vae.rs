//! Between images and latents: a variant for each kind of autoencoder. All of them give latents that are scaled, number
//! by number or channel by channel, before a model sees them.

use std::path::{Path, PathBuf};

use compute::Device;
use weights::{Catalog, Tick};

use super::part::Part;
use crate::error::Result;
use crate::model::adapter::Adapters;
use crate::model::build::{Builder, Precision, wants};
use crate::model::config::read_checked;
use crate::model::files::{self, Files};
use crate::model::vae::{self as kl, Decoder, Encoder};

/// An autoencoder, open.
pub enum Vae {
    /// diffusers' `AutoencoderKL`: SD3, FLUX.
    Kl(Part<kl::Config>),
}

/// How latents are scaled for a model: (latent - shift) · scale, channel by channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Taken off, a number for each channel.
    pub shift: Vec<f32>,
    /// Multiplied by, a number for each channel.
    pub scale: Vec<f32>,
}

impl Statistics {
    /// Latents [channels, …] as models see them.
    pub fn to_model(&self, latents: &[f32]) -> Vec<f32> {
        self.map(latents, |latent, shift, scale| (latent - shift) * scale)
    }

    /// Latents [channels, …] as the decoder sees them.
    pub fn from_model(&self, latents: &[f32]) -> Vec<f32> {
        self.map(latents, |latent, shift, scale| latent / scale + shift)
    }

    fn map(&self, latents: &[f32], each: impl Fn(f32, f32, f32) -> f32) -> Vec<f32> {
        let pixels = (latents.len() / self.scale.len().max(1)).max(1);
        let channel = |at: usize| (self.shift[at / pixels], self.scale[at / pixels]);
        let numbers = latents.iter().enumerate().map(|(at, latent)| {
            let (shift, scale) = channel(at);
            each(*latent, shift, scale)
        });
        numbers.collect()
    }
}

impl Vae {
    /// The folder's, or the checkpoint's own if it has one.
    pub(super) fn open(pipeline: &Path, original: Option<&Path>) -> Result<Self> {
        let read = |path: &Path| read_checked(path, kl::Config::check);
        let part = Part::open(&pipeline.join("vae"), read)?;
        let Some(path) = original else { return Ok(Self::Kl(part)) };
        let catalog = Catalog::open(path)?;
        Ok(Self::Kl(match kl::names::prefix(&catalog) {
            Some(prefix) => part.with_weights(catalog, prefix),
            None => part,
        }))
    }

    /// One that is not there.
    pub(super) fn hollow(folder: &Path, config: kl::Config) -> Result<Self> {
        let mut tensors = wants(|build| Encoder::new(&config, build))?;
        tensors.extend(wants(|build| Decoder::new(&config, build))?);
        Ok(Self::Kl(Part::hollow(folder, config, tensors)))
    }

    /// That it can decode.
    pub(super) fn check(&self) -> Result<()> {
        let Self::Kl(part) = self;
        part.find(|build| Decoder::new(&part.config, build)).map(drop)
    }

    /// Channels of a latent.
    pub fn channels(&self) -> usize {
        let Self::Kl(part) = self;
        part.config.latent_channels
    }

    /// Pixels of an image along the side of a latent's pixel.
    pub fn reduction(&self) -> usize {
        let Self::Kl(part) = self;
        part.config.reduction()
    }

    /// Channels, height and width of the latent of an image of this width and height.
    pub fn latent_sizes(&self, size: [usize; 2]) -> [usize; 3] {
        let [width, height] = size.map(|side| side / self.reduction());
        [self.channels(), height, width]
    }

    /// How latents are scaled for a model.
    pub fn statistics(&self) -> Statistics {
        let Self::Kl(part) = self;
        part.config.statistics()
    }

    /// The files that decide what it computes.
    pub fn sources(&self) -> Vec<PathBuf> {
        let Self::Kl(part) = self;
        part.sources()
    }

    /// Bytes of its files.
    pub fn file_bytes(&self) -> u64 {
        let Self::Kl(part) = self;
        part.file_bytes()
    }

    /// What its files hold.
    pub fn catalog(&self) -> &Catalog {
        let Self::Kl(part) = self;
        &part.catalog
    }

    /// Latents to images.
    pub fn load_decoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: Tick<'_>,
    ) -> Result<Decoder> {
        let Self::Kl(part) = self;
        let build = |build: &mut Builder<'_>| Decoder::new(&part.config, build);
        let files = part.find(build)?;
        files::open(device, &files, precision, &mut Adapters::none(), tick, build)
    }

    /// Images to latents. Its half of the files is compared here and not when the pipeline is
    /// opened: whoever samples can do without.
    pub fn load_encoder(
        &self,
        device: &Device,
        precision: Precision,
        tick: Tick<'_>,
    ) -> Result<Encoder> {
        let Self::Kl(part) = self;
        let build = |build: &mut Builder<'_>| Encoder::new(&part.config, build);
        let files = part.find(build)?;
        files::open(device, &files, precision, &mut Adapters::none(), tick, build)
    }
}

impl Part<kl::Config> {
    /// The weights of one half.
    fn find<T>(&self, build: impl FnOnce(&mut Builder<'_>) -> Result<T>) -> Result<Files<'_>> {
        let Self { config, catalog, original, .. } = self;
        let layout = match original {
            Some(prefix) => kl::names::original(config, prefix),
            None => kl::names::diffusers(catalog),
        };
        Files::find(catalog, &layout, build)
    }
}
