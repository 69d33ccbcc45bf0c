//! Pictures drawn while training, with the model that is in training: to see what it does. The
//! prompts were encoded with the captions, so no text encoder is loaded; the decoder is, and freed.

use std::path::{Path, PathBuf};

use compute::Device;

use super::Drawing;
use crate::cache::Index;
use crate::config::sample::Sample;
use crate::error::{Result, TrainerError};
use crate::model::build::Precision;
use crate::model::sd3::Sd3;
use crate::model::sd3::prompts::Prompt;
use crate::model::vae::Tiling;
use crate::sample::{self, Job, Request, picture};
use crate::train::event::Event;
use crate::train::lesson::Learner;

/// What is drawn, and how.
pub struct Pictures<'a> {
    job: Job<'a>,
    sample: &'a Sample,
    tiling: Option<Tiling>,
}

impl<'a> Pictures<'a> {
    /// Checks what is asked for.
    pub fn new(
        Drawing { pipeline, sample, .. }: Drawing<'a>,
        precision: Precision,
        tiling: Option<Tiling>,
    ) -> Result<Self> {
        let request = Request {
            prompts: sample.prompts.clone(),
            negative: sample.negative.clone(),
            size: [sample.size.width, sample.size.height],
            steps: sample.steps,
            guidance: sample.guidance as f32,
            seed: sample.seed,
            latents: None,
            precision,
        };
        Ok(Self { job: Job::new(pipeline, request)?, sample, tiling })
    }

    /// Draws everything on a device without data, to see what it takes.
    pub fn rehearse(&self, device: &Device, learner: Learner<'_, Sd3>) -> Result<()> {
        let prompts = self.job.rehearsed_prompts();
        self.draw_all(device, learner, &prompts, &|_| true).map(drop)
    }

    /// Draws a picture for each prompt into `samples/` of the run's folder.
    pub fn draw(
        &self,
        device: &Device,
        learner: Learner<'_, Sd3>,
        index: &Index,
        (run, step): (&Path, u64),
        tell: sample::Tell<'_>,
    ) -> Result<Vec<Event>> {
        let texts = std::iter::once(&self.sample.negative).chain(&self.sample.prompts);
        let prompts: Vec<Prompt> = texts.map(|text| index.prompt(text)).collect::<Result<_>>()?;
        let pictures = self.draw_all(device, learner, &prompts, tell)?;
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
        learner: Learner<'_, Sd3>,
        prompts: &[Prompt],
        tell: sample::Tell<'_>,
    ) -> Result<Vec<sample::Picture>> {
        // One after the other: with and without the prompt at once would take twice the memory.
        let model = (learner.model, learner.params);
        let latents = self.job.denoise_with(device, model, prompts, false, tell)?;
        self.job.decode(device, &latents, self.tiling, tell)
    }
}
