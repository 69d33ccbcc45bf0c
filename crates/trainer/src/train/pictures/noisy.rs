//! A picture as a step sees it: its latent drawn from its distribution, mixed with noise, and what
//! the model is to find. Nothing here depends on what was drawn before.

use compute::{Device, Dtype, Stream};

use crate::cache::Latents;
use crate::error::Result;
use crate::model::host::numbers;
use crate::model::vae;
use crate::objective::flow::{Level, Levels, Scheme, mix, velocity};
use crate::train::draws::{Purpose, seed};

/// How latents are mixed with noise.
pub struct Mixer {
    /// Between the autoencoder's latents and the model's.
    pub vae: vae::Config,
    /// Levels of noise.
    pub levels: Levels,
    /// Which of them are drawn.
    pub scheme: Scheme,
    /// The run's.
    pub seed: u64,
}

/// A picture with noise.
pub struct Noisy {
    /// What the model sees, [C, H, W].
    pub latents: Vec<f32>,
    /// What it is to find.
    pub target: Vec<f32>,
    /// How noisy it is.
    pub level: Level,
    /// What its error counts.
    pub weight: f32,
}

/// Where among the levels held-out pictures are measured. Chosen: the middles of four equal parts.
pub const FIXED_PLACES: [f64; 4] = [0.125, 0.375, 0.625, 0.875];

impl Mixer {
    /// For training: everything is drawn by the number of the draw.
    pub fn draw(&self, device: &Device, latents: &Latents, draw: u64) -> Result<Noisy> {
        let numbers_for = Stream::new(seed(self.seed, Purpose::Levels), draw);
        let (even, normal) = (numbers_for.uniform(0), numbers_for.normal(2));
        let level = self.levels.at(self.scheme.place(even.into(), normal.into()));
        let spread = self.normal(device, latents, Purpose::Latents, draw)?;
        let parts = latents.mean.iter().zip(&latents.deviation).zip(spread);
        let latent = parts.map(|((mean, deviation), spread)| mean + deviation * spread);
        let noise = self.normal(device, latents, Purpose::Noise, draw)?;
        Ok(self.mixed(latent, &noise, level, self.scheme.weight(level.sigma)))
    }

    /// What drawing a latent of so many numbers takes of a device without data.
    pub fn rehearse(device: &Device, numbers: usize) -> Result<()> {
        for purpose in [Purpose::Latents, Purpose::Noise] {
            device.normal([numbers], Dtype::F32, 1.0, (seed(0, purpose), 0))?;
        }
        Ok(())
    }

    /// For measuring: a level that is always the same, noise that belongs to the picture, and the
    /// middle of its distribution. Every level counts alike, so that jobs can be compared.
    pub fn fixed(&self, device: &Device, latents: &Latents, index: u64, at: f64) -> Result<Noisy> {
        let noise = self.normal(device, latents, Purpose::HeldOut, index)?;
        Ok(self.mixed(latents.mean.iter().copied(), &noise, self.levels.at(at), 1.0))
    }

    fn mixed(
        &self,
        latent: impl Iterator<Item = f32>,
        noise: &[f32],
        level: Level,
        weight: f32,
    ) -> Noisy {
        let latent = latent.map(|latent| self.vae.to_model(latent));
        let (latents, target) = latent
            .zip(noise)
            .map(|(latent, noise)| (mix(latent, *noise, level.sigma), velocity(latent, *noise)))
            .unzip();
        Noisy { latents, target, level, weight }
    }

    fn normal(
        &self,
        device: &Device,
        latents: &Latents,
        purpose: Purpose,
        stream: u64,
    ) -> Result<Vec<f32>> {
        let from = (seed(self.seed, purpose), stream);
        Ok(numbers(&device.normal([latents.mean.len()], Dtype::F32, 1.0, from)?)?)
    }
}
