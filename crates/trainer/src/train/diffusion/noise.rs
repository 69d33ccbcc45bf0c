//! Noisy latents and their targets. Timestep and seeds are decided here, sample by sample, independent of
//! earlier samples; the noise itself is drawn and added on the device.

use std::sync::Arc;

use compute::ops::{LatentScaling, LatentStd, NoisyLatents, add_noise, sample_latents};
use compute::{Device, Dtype, RandomSequence, Tensor};

use super::batch::EncodedSample;
use crate::cache::{CachedLatents, LatentMask};
use crate::config::data::LearningTarget;
use crate::error::Result;
use crate::model::diffusion::condition::Condition;
use crate::model::diffusion::scheduler::TrainTimesteps;
use crate::model::diffusion::vae::{LatentShape, LatentStatistics};
use crate::objective::bias::TimestepBias;
use crate::objective::flow::{Timestep, TimestepRange, WeightingScheme};
use crate::objective::weighting::LossWeighting;
use crate::task::seed::{Purpose, seed};

/// Draws timesteps and noise.
pub struct NoiseSampler {
    /// All timesteps.
    pub timesteps: TrainTimesteps,
    /// Which of them are trained.
    pub range: TimestepRange,
    /// How often each is drawn, and its loss weight.
    pub scheme: WeightingScheme,
    /// Which are drawn more often than that.
    pub bias: TimestepBias,
    /// Loss weights beside the scheme's.
    pub weighting: LossWeighting,
    /// Pixels of a latent along a token's side.
    pub patch_size: usize,
    /// The run's.
    pub seed: u64,
}

/// A sample with its timestep and noise.
pub struct NoisySample {
    /// Mean and standard deviation of its latents.
    pub latents: Arc<CachedLatents>,
    /// The latents of its reference images.
    pub references: Vec<Arc<CachedLatents>>,
    /// Its text as the model sees it.
    pub prompt: Arc<Condition>,
    /// Its timestep.
    pub timestep: Timestep,
    /// Its loss weight.
    pub weight: f32,
    /// What is learnt of it.
    pub target: LearningTarget,
    /// Which part of it the loss counts; all of it without one.
    pub mask: Option<Arc<LatentMask>>,
    /// Draws the latents from their distribution; without it they are its mean.
    latent_noise: Option<RandomSequence>,
    noise: RandomSequence,
}

/// Numbers of a sequence that a timestep takes.
const DRAWS_PER_ATTEMPT: usize = 4;

/// Timesteps that are drawn for one in the range. Chosen: enough for one in a hundred, with hardly a sample that finds none.
const MOST_ATTEMPTS: usize = 1000;

/// Fractions that are looked through where none was found. Chosen: several for each timestep of a scheduler.
const FINE_FRACTIONS: usize = 4000;

/// Timesteps of held-out images, as shares of the range. Chosen: the middles of four equal parts.
pub const FIXED_TIMESTEPS: [f64; 4] = [0.125, 0.375, 0.625, 0.875];

impl NoiseSampler {
    /// For training: everything is drawn by the number of the draw.
    pub fn draw(&self, sample: &EncodedSample) -> NoisySample {
        let EncodedSample { latents, references, prompt, loss_weight, target, mask, draw, .. } =
            sample;
        let timestep = self.draw_timestep(self.random(Purpose::Timesteps, *draw), latents.shape);
        let of_timestep =
            self.scheme.weight(timestep.sigma) * self.weighting.weight(timestep.sigma);
        NoisySample {
            latents: Arc::clone(latents),
            references: references.clone(),
            prompt: Arc::clone(prompt),
            timestep,
            weight: of_timestep * loss_weight,
            target: *target,
            mask: mask.clone(),
            latent_noise: Some(self.random(Purpose::Latents, *draw)),
            noise: self.random(Purpose::Noise, *draw),
        }
    }

    /// For validation: a fixed timestep, fixed noise for each image, and the mean of its latents. Every timestep
    /// has the same weight, so that jobs can be compared.
    pub fn fixed(&self, sample: &EncodedSample, u: f64) -> NoisySample {
        let EncodedSample { latents, references, prompt, mask, draw, .. } = sample;
        NoisySample {
            latents: Arc::clone(latents),
            references: references.clone(),
            prompt: Arc::clone(prompt),
            timestep: self.timestep(u, latents.shape),
            weight: 1.0,
            target: LearningTarget::Images,
            mask: mask.clone(),
            latent_noise: None,
            noise: self.random(Purpose::HeldOut, *draw),
        }
    }

    /// The first of those drawn that is in the range and that the bias keeps. Where hardly any is, all in the range are as likely.
    fn draw_timestep(&self, random: RandomSequence, latents: LatentShape) -> Timestep {
        let drawn = |attempt: usize| {
            let random = random.skip(attempt * DRAWS_PER_ATTEMPT);
            let (uniform, normal) = (random.uniform(0), random.normal(2));
            let u = self.bias.sample_u(self.scheme, uniform.into(), normal.into());
            let timestep = self.timestep(u, latents);
            let is_kept = self.bias.keeps(timestep, random.uniform(1).into());
            (is_kept && self.range.has(timestep)).then_some(timestep)
        };
        let found = (0..MOST_ATTEMPTS).find_map(drawn);
        found.unwrap_or_else(|| {
            let fractions = (0..FINE_FRACTIONS).map(|at| (at as f64 + 0.5) / FINE_FRACTIONS as f64);
            let all: Vec<Timestep> = fractions.map(|u| self.timestep(u, latents)).collect();
            let inside: Vec<Timestep> =
                all.iter().copied().filter(|timestep| self.range.has(*timestep)).collect();
            // A range between two timesteps: the nearest.
            let [least, most] = self.range.sigmas;
            let apart = |it: &Timestep| (it.sigma - least).abs().min((it.sigma - most).abs());
            let nearest = || all.iter().copied().min_by(|a, b| apart(a).total_cmp(&apart(b)));
            let at = (random.uniform(0) * inside.len() as f32) as usize;
            inside.get(at).copied().or_else(nearest).expect("there are timesteps")
        })
    }

    fn timestep(&self, u: f64, latents: LatentShape) -> Timestep {
        let LatentShape { frames, height, width, .. } = latents;
        self.timesteps.at(u, frames * (height / self.patch_size) * (width / self.patch_size))
    }

    fn random(&self, purpose: Purpose, number: u64) -> RandomSequence {
        RandomSequence::new(seed(self.seed, purpose), number)
    }
}

/// Draws the latents and the noise of samples of one size on the device, and adds them.
pub fn noisy_latents(
    samples: &[NoisySample],
    device: &Device,
    statistics: &LatentStatistics,
    dtype: Dtype,
) -> Result<NoisyLatents> {
    let latents = draw_latents(samples, device, statistics)?;
    let sigmas: Vec<f32> = samples.iter().map(|sample| sample.timestep.sigma).collect();
    let noise: Vec<RandomSequence> = samples.iter().map(|sample| sample.noise).collect();
    Ok(add_noise(latents, &device.upload([samples.len()], &sigmas)?, &noise, dtype)?)
}

/// The masks of samples as factors of their latents' values, 1 where a sample has none.
pub fn latent_masks(samples: &[NoisySample], device: &Device) -> Result<Tensor> {
    let factors = |sample: &NoisySample| -> Vec<f32> {
        let LatentShape { channels, frames, height, width } = sample.latents.shape;
        match &sample.mask {
            Some(mask) => mask.values.repeat(channels * frames),
            None => vec![1.0; channels * frames * height * width],
        }
    };
    let factors: Vec<Vec<f32>> = samples.iter().map(factors).collect();
    let parts: Vec<&[f32]> = factors.iter().map(Vec::as_slice).collect();
    Ok(device.upload_parts(samples[0].latents.shape.batch(samples.len()), &parts, Dtype::F32)?)
}

/// The scaled latents of the samples' reference images, all of the first ones together: their means, without noise.
pub fn reference_latents(
    samples: &[NoisySample],
    device: &Device,
    statistics: &LatentStatistics,
    dtype: Dtype,
) -> Result<Vec<Tensor>> {
    let references = samples[0].references.iter().enumerate();
    let upload = |(index, first): (usize, &Arc<CachedLatents>)| {
        let scaled = |it: &NoisySample| {
            let CachedLatents { mean, shape, .. } = &*it.references[index];
            statistics.to_model(mean, *shape)
        };
        let scaled: Vec<Vec<f32>> = samples.iter().map(scaled).collect();
        let parts: Vec<&[f32]> = scaled.iter().map(Vec::as_slice).collect();
        Ok(device.upload_parts(first.shape.batch(samples.len()), &parts, dtype)?)
    };
    references.map(upload).collect()
}

/// Scaled latents. Their memory is allocated first and all else freed: they live as long as the step, and memory
/// below them would be a hole.
fn draw_latents(
    samples: &[NoisySample],
    device: &Device,
    statistics: &LatentStatistics,
) -> Result<Tensor> {
    let of_batch = samples[0].latents.shape;
    // One scale for a channel is for the device. Scaled here, latents are only drawn there.
    let is_by_channel = statistics.patch == 1;
    let upload = |values: fn(&CachedLatents) -> &[f32], scaled: ScaledFn<'_>| {
        let scaled = |sample: &NoisySample| scaled(values(&sample.latents), of_batch);
        let scaled: Option<Vec<_>> = (!is_by_channel).then(|| samples.iter().map(scaled).collect());
        let parts: Vec<&[f32]> = match &scaled {
            Some(scaled) => scaled.iter().map(Vec::as_slice).collect(),
            None => samples.iter().map(|sample| values(&sample.latents)).collect(),
        };
        device.upload_parts(of_batch.batch(samples.len()), &parts, Dtype::F32)
    };
    let mean = upload(|latents| &latents.mean, &|mean, shape| statistics.to_model(mean, shape))?;
    // All of them have one, or none has.
    let sequences: Option<Vec<RandomSequence>> =
        samples.iter().map(|sample| sample.latent_noise).collect();
    let std = sequences.is_some().then(|| {
        upload(|latents| &latents.std, &|std, shape| statistics.spread_to_model(std, shape))
    });
    let std = std.transpose()?;
    let std = std.as_ref().zip(sequences.as_ref());
    let std = std.map(|(std, sequences)| LatentStd { std, sequences });
    let LatentStatistics { shift, scale, .. } = statistics;
    let [shift, scale] = if is_by_channel {
        [shift.clone(), scale.clone()]
    } else {
        [0.0, 1.0].map(|value| vec![value; of_batch.channels])
    };
    let [shift, scale] = [shift, scale].map(|values| device.upload([of_batch.channels], &values));
    Ok(sample_latents(mean, std, LatentScaling { shift: &shift?, scale: &scale? })?)
}

/// Values of a latent, scaled.
type ScaledFn<'a> = &'a dyn Fn(&[f32], LatentShape) -> Vec<f32>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::diffusion::scheduler::{FlowMatchScheduler, SigmaSpacing};
    use crate::objective::flow::TimestepShift;

    fn sampler(sigmas: [f32; 2], scheme: WeightingScheme) -> NoiseSampler {
        let schedule = FlowMatchScheduler::fixed(3.0, SigmaSpacing::Trained);
        let timesteps = schedule.train_timesteps(TimestepShift::Scheduler);
        NoiseSampler {
            timesteps,
            range: TimestepRange { sigmas },
            scheme,
            bias: TimestepBias::None,
            weighting: LossWeighting::None,
            patch_size: 2,
            seed: 5,
        }
    }

    fn drawn(sampler: &NoiseSampler) -> Vec<f32> {
        let shape = LatentShape::image(4, 8, 8);
        let random = |number| sampler.random(Purpose::Timesteps, number);
        (0..400).map(|number| sampler.draw_timestep(random(number), shape).sigma).collect()
    }

    /// Those in the range stay as they were, the others are drawn again.
    #[test]
    fn timesteps_are_drawn_within_their_range() {
        let scheme = WeightingScheme::LogitNormal { mean: 0.0, deviation: 1.0 };
        let all = drawn(&sampler(TimestepRange::ALL.sigmas, scheme));
        let some = drawn(&sampler([0.6, 0.9], scheme));
        let is_inside = |sigma: &f32| (0.6..=0.9).contains(sigma);
        assert!(some.iter().all(is_inside) && !all.iter().all(is_inside));
        let kept = all.iter().zip(&some).filter(|(all, _)| is_inside(all));
        assert!(kept.clone().count() > 100 && kept.into_iter().all(|(all, some)| all == some));
        // The shape is that of the rest: as many above the middle of the draws that were inside.
        let inside: Vec<f32> = all.iter().copied().filter(is_inside).collect();
        let share =
            |of: &[f32]| of.iter().filter(|it| **it > 0.75).count() as f32 / of.len() as f32;
        assert!((share(&inside) - share(&some)).abs() < 0.1, "{} {}", share(&inside), share(&some));
    }

    #[test]
    fn a_range_that_is_hardly_ever_drawn_has_timesteps_too() {
        let rare = WeightingScheme::LogitNormal { mean: 9.0, deviation: 0.1 };
        let found = drawn(&sampler([0.95, 1.0], rare));
        assert!(found.iter().all(|sigma| *sigma >= 0.95));
        assert!(found.iter().any(|sigma| *sigma > 0.99) && found.iter().any(|sigma| *sigma < 0.96));
        // Between two timesteps.
        let found = drawn(&sampler([0.00301, 0.00302], rare));
        assert!(found.iter().all(|sigma| (sigma - 0.003).abs() < 1e-4), "{:?}", &found[..3]);
    }
}
