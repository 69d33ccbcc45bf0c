//! The model of a diffusion job: the denoiser, and beside it the text encoders that are trained with it.

use compute::Device;

use super::DiffusionTask;
use super::noise::NoisySample;
use super::task::ImageMicroBatch;
use crate::error::Result;
use crate::model::diffusion::denoiser::Denoiser;
use crate::model::diffusion::text::{EncoderTraining, TrainedEncoders};
use crate::sample::SampleCondition;
use crate::task::seed::{Purpose, seed};
use crate::task::traits::TrainableModel;

/// A denoiser in training.
pub struct DiffusionModel {
    /// The denoiser.
    pub denoiser: Denoiser,
    /// Text encoders that are trained with it.
    pub text_encoders: TrainedEncoders,
}

impl<'a> DiffusionTask<'a> {
    /// Which text encoders are trained.
    pub(super) fn encoder_training(&self) -> EncoderTraining<'a> {
        EncoderTraining {
            adapters: self.text_encoders,
            seed: seed(self.train.seed, Purpose::EncoderAdapters),
        }
    }

    /// Samples with the tokens of their texts, for text encoders in training.
    pub(super) fn micro_batch(&self, samples: Vec<NoisySample>, texts: &[&str]) -> ImageMicroBatch {
        let tokens = self.pipeline.encoders.trained_tokens(self.encoder_training(), texts);
        ImageMicroBatch { samples, tokens }
    }

    /// What an image is made from, as text encoders in training make it of these texts now.
    pub(super) fn with_trained(
        &self,
        device: &Device,
        TrainableModel { model, params, .. }: TrainableModel<'_, DiffusionModel>,
        cached: SampleCondition,
        [prompt, negative]: [&str; 2],
    ) -> Result<SampleCondition> {
        let training = self.encoder_training();
        if training.adapters.is_empty() {
            return Ok(cached);
        }
        let (encoders, trained) = (&self.pipeline.encoders, &model.text_encoders);
        let now = |text, cached| {
            let tokens = encoders.trained_tokens(training, &[text]);
            encoders.condition_with_trained(device, trained, params, &tokens, cached)
        };
        Ok(SampleCondition {
            prompt: now(prompt, &cached.prompt)?.into(),
            negative: now(negative, &cached.negative)?.into(),
            ..cached
        })
    }
}
