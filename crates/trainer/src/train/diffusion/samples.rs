//! Sample images during training. The prompts were encoded with the captions, so no text encoder is loaded; the
//! VAE decoder is, and freed.

use std::path::{Path, PathBuf};

use compute::{Device, WorkStats};

use super::DiffusionTask;
use crate::cache::CacheIndex;
use crate::config::sample::SampleConfig;
use crate::cost::Cost;
use crate::error::{Result, TrainerError};
use crate::event::Event;
use crate::model::build::Precision;
use crate::model::diffusion::condition::Condition;
use crate::model::diffusion::denoiser::Denoiser;
use crate::model::vae::Tiling;
use crate::sample::{self, ImageRequest, SampleJob, image_file};
use crate::task::traits::TrainableModel;

/// Draws sample images.
pub struct SampleImageWriter<'a> {
    job: SampleJob<'a>,
    sample: &'a SampleConfig,
    tiling: Option<Tiling>,
    /// Bytes of the decoder's files.
    file_bytes: u64,
}

impl<'a> SampleImageWriter<'a> {
    /// Checks the request.
    pub fn new(
        DiffusionTask { pipeline, sample, sample_size: size, .. }: DiffusionTask<'a>,
        precision: Precision,
        tiling: Option<Tiling>,
    ) -> Result<Self> {
        let request = ImageRequest {
            prompts: sample.prompts.clone(),
            negative: sample.negative_prompt.clone(),
            size: [size.width, size.height],
            steps: sample.steps,
            guidance: sample.guidance(),
            seed: sample.seed,
            latents: None,
            precision,
        };
        let file_bytes = pipeline.vae.file_bytes();
        Ok(Self { job: SampleJob::new(pipeline, request)?, sample, tiling, file_bytes })
    }

    /// Draws an image on the meta device, in one step; returns what all of them cost.
    pub fn dry_run(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Denoiser>,
    ) -> Result<Cost> {
        let (prompts, before) = (self.job.dry_run_prompts(), device.work());
        let latents = self.denoise(device, trainable, &prompts, &|_| true)?;
        let denoised = device.work();
        self.job.decode(device, &latents, self.tiling, &|_| true)?;
        let n = self.sample.prompts.len() as f64;
        let times = |times: f64, from: &WorkStats, to: &WorkStats| (times * n, to.since(from));
        let works = vec![
            times(self.sample.steps as f64, &before, &denoised),
            times(1.0, &denoised, &device.work()),
        ];
        Ok(Cost { works, read_bytes: self.file_bytes })
    }

    /// Draws an image for each prompt into `samples/` of the run's folder.
    pub fn write(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Denoiser>,
        index: &CacheIndex,
        run: &Path,
        step: u64,
        on_event: sample::SampleEventFn<'_>,
    ) -> Result<Vec<Event>> {
        let texts = std::iter::once(&self.sample.negative_prompt).chain(&self.sample.prompts);
        let prompts: Vec<Condition> =
            texts.map(|text| index.condition(text)).collect::<Result<_>>()?;
        let latents = self.denoise(device, trainable, &prompts, on_event)?;
        let images = self.job.decode(device, &latents, self.tiling, on_event)?;
        let folder = Path::new("samples");
        let failed = |source| TrainerError::Io { what: "write", path: run.join(folder), source };
        std::fs::create_dir_all(run.join(folder)).map_err(failed)?;
        let mut events = Vec::with_capacity(images.len());
        for (number, (image, prompt)) in images.iter().zip(&self.sample.prompts).enumerate() {
            let path: PathBuf = folder.join(format!("step-{step:06}-{}.png", number + 1));
            let seed = self.sample.seed + number as u64;
            let facts = [("prompt", prompt.clone()), ("seed", seed.to_string())];
            image_file::write(&run.join(&path), image, &facts)?;
            events.push(Event::ImageSample { step, path, prompt: prompt.clone(), seed });
        }
        Ok(events)
    }

    fn denoise(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, Denoiser>,
        prompts: &[Condition],
        on_event: sample::SampleEventFn<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        // One after the other: both halves of classifier-free guidance at once would take twice the memory.
        let TrainableModel { model, params, .. } = trainable;
        self.job.denoise_with(device, model, params, prompts, false, on_event)
    }
}
