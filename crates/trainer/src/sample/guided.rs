//! The denoiser with guidance: the velocity of latents for a prompt, against that for the negative prompt.

use compute::{Device, Params, Tape};

use super::reference::ReferenceLatents;
use super::{SampleCondition, SampleJob};
use crate::error::Result;
use crate::model::diffusion::condition::{Condition, Conditions};
use crate::model::diffusion::denoiser::{Denoiser, DenoiserInput};
use crate::model::host::to_vec;
use crate::model::recompute::Recompute;

/// The denoiser with guidance.
pub(super) struct GuidedDenoiser<'a> {
    pub job: &'a SampleJob<'a>,
    pub device: &'a Device,
    pub model: &'a Denoiser,
    pub params: &'a Params,
    pub is_cfg_batched: bool,
}

impl GuidedDenoiser<'_> {
    /// The guided velocity of the latents at a sigma.
    pub fn velocity(
        &self,
        latents: &[f32],
        sigma: f32,
        SampleCondition { prompt, negative, references }: &SampleCondition,
    ) -> Result<Vec<f32>> {
        let SampleJob { pipeline, request, .. } = self.job;
        let guidance = pipeline.family().guidance;
        let predict = |prompts: &[&Condition]| self.predict(latents, sigma, prompts, references);
        let Some(scale) = guidance.cfg_scale(request.guidance) else {
            return predict(&[prompt]);
        };
        let patch = pipeline.transformer.config.latent_spec().patch_size;
        let shape = self.job.latent_shape();
        if self.is_cfg_batched {
            let both = predict(&[negative, prompt])?;
            let (without, with) = both.split_at(latents.len());
            return Ok(guidance.apply([without, with], scale, shape, patch));
        }
        let without = predict(&[negative])?;
        let with = predict(&[prompt])?;
        Ok(guidance.apply([&without, &with], scale, shape, patch))
    }

    /// The same latents' velocity for each prompt.
    fn predict(
        &self,
        latents: &[f32],
        sigma: f32,
        prompts: &[&Condition],
        references: &[ReferenceLatents],
    ) -> Result<Vec<f32>> {
        let SampleJob { pipeline, request, .. } = self.job;
        let (dtype, samples) = (request.precision.dtype, prompts.len());
        let tape = Tape::inference(self.device, self.params, 0);
        let shape = self.job.latent_shape().batch(samples);
        let latents = self.device.upload_as(shape, &latents.repeat(samples), dtype)?;
        let upload = |ReferenceLatents { values, shape }: &ReferenceLatents| {
            self.device.upload_as(shape.batch(samples), &values.repeat(samples), dtype)
        };
        let references = references.iter().map(upload).collect::<compute::Result<Vec<_>>>()?;
        let embedded = pipeline.family().guidance.embedded(request.guidance.guidance, samples);
        let input = DenoiserInput {
            latents: &latents,
            references: &references,
            timesteps: &vec![pipeline.schedule.timestep(sigma); samples],
            condition: &Conditions::upload(self.device, prompts, dtype)?,
            guidance: embedded.as_deref(),
            time_dtype: dtype,
        };
        let predicted = self.model.predict(&tape, input, Recompute::None)?;
        Ok(to_vec(predicted.latents(&tape)?.tensor())?)
    }
}
