//! Pictures drawn while training, with the model that is in training: to see what it does. The
//! prompts were encoded with the captions, so no text encoder is loaded; the decoder is, and freed.

use std::path::{Path, PathBuf};

use compute::Device;

use super::event::Event;
use super::session::Session;
use crate::cache::Index;
use crate::config::RunConfig;
use crate::config::sample::Sample;
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::sd3::pipeline::Pipeline;
use crate::model::sd3::prompts::Prompt;
use crate::model::vae::Tiling;
use crate::sample::{self, Job, Request, picture};

/// What is drawn, and how.
pub struct Pictures<'a> {
    job: Job<'a>,
    sample: &'a Sample,
    tiling: Option<Tiling>,
}

impl<'a> Pictures<'a> {
    /// Checks what is asked for; nothing if no prompts are.
    pub fn new(
        pipeline: &'a Pipeline,
        config: &'a RunConfig,
        tiling: Option<Tiling>,
    ) -> Result<Option<Self>> {
        let sample = &config.sample;
        if sample.prompts.is_empty() {
            return Ok(None);
        }
        let request = Request {
            prompts: sample.prompts.clone(),
            negative: sample.negative.clone(),
            size: [sample.size.width, sample.size.height],
            steps: sample.steps,
            guidance: sample.guidance as f32,
            seed: sample.seed,
            latents: None,
            precision: Precision { dtype: config.base.dtype, base: config.base.quantise },
        };
        Ok(Some(Self { job: Job::new(pipeline, request)?, sample, tiling }))
    }

    /// Texts that have to be encoded.
    pub fn texts(sample: &Sample) -> Vec<String> {
        if sample.prompts.is_empty() {
            return Vec::new();
        }
        std::iter::once(&sample.negative).chain(&sample.prompts).cloned().collect()
    }

    /// Draws everything on a device without data, to see what it takes.
    pub fn rehearse(&self, device: &Device, session: &Session<'_>) -> Result<()> {
        let prompts = self.job.rehearsed_prompts();
        self.draw_all(device, session, &prompts, &|_| true).map(drop)
    }

    /// Draws a picture for each prompt into `samples/` of the run's folder.
    pub fn draw(
        &self,
        device: &Device,
        session: &Session<'_>,
        index: &Index,
        (run, step): (&Path, u64),
        tell: sample::Tell<'_>,
    ) -> Result<Vec<Event>> {
        let texts = Self::texts(self.sample);
        let prompts: Vec<Prompt> =
            texts.iter().map(|text| index.prompt(text)).collect::<Result<_>>()?;
        let pictures = self.draw_all(device, session, &prompts, tell)?;
        let folder = Path::new("samples");
        let failed = |source| TrainerError::Io { what: "write", path: run.join(folder), source };
        std::fs::create_dir_all(run.join(folder)).map_err(failed)?;
        let mut events = Vec::with_capacity(pictures.len());
        for (number, (picture, prompt)) in pictures.iter().zip(&self.sample.prompts).enumerate() {
            let path: PathBuf = folder.join(format!("step-{step:06}-{}.png", number + 1));
            let seed = self.sample.seed + number as u64;
            let facts = [("prompt", prompt.clone()), ("seed", seed.to_string())];
            picture::write(&run.join(&path), picture, &facts)?;
            events.push(Event::Sample { step, path, prompt: prompt.clone(), seed });
        }
        Ok(events)
    }

    fn draw_all(
        &self,
        device: &Device,
        session: &Session<'_>,
        prompts: &[Prompt],
        tell: sample::Tell<'_>,
    ) -> Result<Vec<sample::Picture>> {
        // One after the other: with and without the prompt at once would take twice the memory.
        let latents = self.job.denoise_with(device, session.model(), prompts, false, tell)?;
        self.job.decode(device, &latents, self.tiling, tell)
    }
}
