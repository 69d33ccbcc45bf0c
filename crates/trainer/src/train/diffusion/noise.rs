//! Images as a step sees them: latents drawn from their distributions, mixed with noise, and what the
//! model is to find. What is drawn is decided here, sample by sample, and depends on nothing that was
//! drawn before; the numbers themselves are made and mixed on the device.

use std::sync::Arc;

use compute::ops::{LatentScaling, LatentStd, NoisyLatents, add_noise, sample_latents};
use compute::{Device, Dtype, RandomSequence, Tensor};

use super::batch::EncodedSample;
use crate::cache::CachedLatents;
use crate::error::Result;
use crate::model::diffusion::condition::Condition;
use crate::model::diffusion::scheduler::TrainTimesteps;
use crate::model::diffusion::vae::{LatentShape, LatentStatistics};
use crate::objective::flow::{Timestep, WeightingScheme};
use crate::task::seed::{Purpose, seed};

/// Decides how noisy samples are.
pub struct NoiseSampler {
    /// Levels of noise.
    pub levels: TrainTimesteps,
    /// Which of them are drawn.
    pub scheme: WeightingScheme,
    /// The run's.
    pub seed: u64,
}

/// A sample, and what is drawn for it.
pub struct NoisySample {
    /// What its latents are drawn from.
    pub latents: Arc<CachedLatents>,
    /// Its text as the model sees it.
    pub prompt: Arc<Condition>,
    /// How noisy it is.
    pub level: Timestep,
    /// What its error counts.
    pub weight: f32,
    /// Where in its distribution it lies; in the middle if there is none.
    latent_noise: Option<RandomSequence>,
    noise: RandomSequence,
}

/// Where among the levels held-out images are measured. Chosen: the middles of four equal parts.
pub const FIXED_TIMESTEPS: [f64; 4] = [0.125, 0.375, 0.625, 0.875];

impl NoiseSampler {
    /// For training: everything is drawn by the number of the draw.
    pub fn draw(&self, EncodedSample { latents, prompt, draw }: &EncodedSample) -> NoisySample {
        let of_level = self.random(Purpose::Timesteps, *draw);
        let (even, normal) = (of_level.uniform(0), of_level.normal(2));
        let level = self.levels.at(self.scheme.sample_u(even.into(), normal.into()));
        NoisySample {
            latents: Arc::clone(latents),
            prompt: Arc::clone(prompt),
            level,
            weight: self.scheme.weight(level.sigma),
            latent_noise: Some(self.random(Purpose::Latents, *draw)),
            noise: self.random(Purpose::Noise, *draw),
        }
    }

    /// For measuring: a level that is always the same, noise that belongs to the image, and the mean
    /// of its distribution. Every level counts alike, so that jobs can be compared.
    pub fn fixed(
        &self,
        (latents, prompt): (&Arc<CachedLatents>, &Arc<Condition>),
        index: u64,
        at: f64,
    ) -> NoisySample {
        NoisySample {
            latents: Arc::clone(latents),
            prompt: Arc::clone(prompt),
            level: self.levels.at(at),
            weight: 1.0,
            latent_noise: None,
            noise: self.random(Purpose::HeldOut, index),
        }
    }

    fn random(&self, purpose: Purpose, number: u64) -> RandomSequence {
        RandomSequence::new(seed(self.seed, purpose), number)
    }
}

/// Draws the latents and the noise of samples of one size on the device, and mixes them.
pub fn noisy_latents(
    samples: &[NoisySample],
    device: &Device,
    statistics: &LatentStatistics,
    dtype: Dtype,
) -> Result<NoisyLatents> {
    let latents = draw_latents(samples, device, statistics)?;
    let sigmas: Vec<f32> = samples.iter().map(|sample| sample.level.sigma).collect();
    let noise: Vec<RandomSequence> = samples.iter().map(|sample| sample.noise).collect();
    Ok(add_noise(latents, &device.upload([samples.len()], &sigmas)?, &noise, dtype)?)
}

/// Latents as the model sees them. Theirs is the first piece of memory that is taken, and all else is given
/// back: they live as long as the step, and nothing beneath them would be of use to it.
fn draw_latents(
    samples: &[NoisySample],
    device: &Device,
    LatentStatistics { shift, scale }: &LatentStatistics,
) -> Result<Tensor> {
    let LatentShape { channels, .. } = samples[0].latents.shape;
    let shape = samples[0].latents.shape.batch(samples.len());
    let upload = |numbers: fn(&CachedLatents) -> &[f32]| {
        let parts: Vec<_> = samples.iter().map(|sample| numbers(&sample.latents)).collect();
        device.upload_parts(shape, &parts, Dtype::F32)
    };
    let mean = upload(|latents| &latents.mean)?;
    // All of them have one, or none has.
    let streams: Option<Vec<RandomSequence>> =
        samples.iter().map(|sample| sample.latent_noise).collect();
    let deviation = streams.is_some().then(|| upload(|latents| &latents.std)).transpose()?;
    let spread = deviation.as_ref().zip(streams.as_ref());
    let spread =
        spread.map(|(deviation, streams)| LatentStd { std: deviation, sequences: streams });
    let [shift, scale] = [shift, scale].map(|numbers| device.upload([channels], numbers));
    Ok(sample_latents(mean, spread, LatentScaling { shift: &shift?, scale: &scale? })?)
}
