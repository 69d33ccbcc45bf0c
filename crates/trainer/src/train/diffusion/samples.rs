//! Sample images during training. The prompts were encoded with the captions, so no text encoder is loaded; the
//! VAE decoder is, and freed.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use compute::{Device, WorkStats};

use super::DiffusionTask;
use super::model::DiffusionModel;
use crate::cache::{CacheIndex, CachedLatents, CachedPrompt, CachedReference};
use crate::config::sample::SampleConfig;
use crate::cost::Cost;
use crate::data::reference::scaled_reference;
use crate::data::{DecodingMemory, ReferenceSize};
use crate::error::{Result, TrainerError};
use crate::event::Event;
use crate::model::adapter::training::TrainingAdapter;
use crate::model::build::Precision;
use crate::model::diffusion::vae::LatentStatistics;
use crate::model::vae::Tiling;
use crate::sample::clip::{self, Clip};
use crate::sample::reference::ReferenceLatents;
use crate::sample::{self, Image, ImageRequest, SampleCondition, SampleJob, image_file};
use crate::task::traits::TrainableModel;

/// Draws sample images.
pub struct SampleImageWriter<'a> {
    task: DiffusionTask<'a>,
    job: SampleJob<'a>,
    sample: &'a SampleConfig,
    tiling: Option<Tiling>,
    /// Bytes of the decoder's files.
    file_bytes: u64,
    statistics: LatentStatistics,
    /// What samples are drawn without.
    training_adapter: Option<&'a TrainingAdapter>,
}

impl DiffusionTask<'_> {
    /// Frames of a sample and frames per second; an image is one frame.
    pub(super) fn sample_frames(&self) -> (usize, usize) {
        let video = self.pipeline.family().video;
        let (frames, fps) = video.map_or((1, 1), |video| (video.frames, video.fps));
        let Self { data, sample, .. } = self;
        (sample.frames.or(data.common().frames).unwrap_or(frames), data.common().fps.unwrap_or(fps))
    }
}

impl<'a> SampleImageWriter<'a> {
    /// Checks the request.
    pub fn new(
        task: DiffusionTask<'a>,
        references: Vec<ReferenceSize>,
        precision: Precision,
        tiling: Option<Tiling>,
    ) -> Result<Self> {
        let DiffusionTask { pipeline, data, sample, sample_size: size, .. } = task;
        let (frames, fps) = task.sample_frames();
        let request = ImageRequest {
            prompts: sample.prompts.clone(),
            negative: sample.negative_prompt.clone(),
            size: [size.width, size.height],
            frames,
            fps,
            steps: sample.steps,
            guidance: sample.guidance(),
            seed: sample.seed,
            latents: None,
            references: Vec::new(),
            reference_resolution: data.common().reference_resolution,
            precision,
        };
        let file_bytes = pipeline.vae.file_bytes();
        let job = SampleJob::of_encoded(pipeline, request, references)?;
        let statistics = pipeline.vae.statistics();
        let training_adapter = pipeline.training_adapter();
        Ok(Self { task, job, sample, tiling, file_bytes, statistics, training_adapter })
    }

    /// Draws an image on the meta device, in one step; returns what all of them cost.
    pub fn dry_run(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, DiffusionModel>,
    ) -> Result<Cost> {
        let (prompt, begun) = (self.job.dry_run_prompt()?, device.work());
        let prompt = self.task.with_trained(device, trainable, prompt, [""; 2])?;
        let before = device.work();
        let latents = self.denoise(device, trainable, &[prompt], &|_| true)?;
        let denoised = device.work();
        self.job.decode(device, &latents, self.tiling, &|_| true)?;
        let n = self.sample.prompts.len() as f64;
        let times = |times: f64, from: &WorkStats, to: &WorkStats| (times * n, to.since(from));
        let works = vec![
            times(1.0, &begun, &before),
            times(self.sample.steps as f64, &before, &denoised),
            times(1.0, &denoised, &device.work()),
        ];
        Ok(Cost { works, read_bytes: self.file_bytes })
    }

    /// Draws an image for each prompt into `samples/` of the run's folder.
    pub fn write(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, DiffusionModel>,
        index: &CacheIndex,
        run: &Path,
        step: u64,
        on_event: sample::SampleEventFn<'_>,
    ) -> Result<Vec<Event>> {
        let prompt = |number: usize| {
            let texts = [&*self.sample.prompts[number], &*self.sample.negative_prompt];
            self.task.with_trained(device, trainable, self.prompt(index, number)?, texts)
        };
        let prompts = (0..self.sample.prompts.len()).map(prompt);
        let prompts: Vec<SampleCondition> = prompts.collect::<Result<_>>()?;
        let latents = self.denoise(device, trainable, &prompts, on_event)?;
        let clips = self.job.decode(device, &latents, self.tiling, on_event)?;
        let folder = Path::new("samples");
        let failed = |source| TrainerError::Io { what: "write", path: run.join(folder), source };
        // Not the run's own folder: one that was moved is not made again.
        match std::fs::create_dir(run.join(folder)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed(error));
            }
            _ => {}
        }
        let mut events = Vec::with_capacity(clips.len());
        for (number, (clip, prompt)) in clips.iter().zip(&self.sample.prompts).enumerate() {
            let path: PathBuf = folder.join(format!("step-{step:06}-{}.png", number + 1));
            let seed = self.sample.seed + number as u64;
            let facts = [("prompt", prompt.clone()), ("seed", seed.to_string())];
            image_file::write(&run.join(&path), &clip.strip(), &facts)?;
            let clip = write_clip(run, &path, clip)?;
            let references = index.sample_references(number);
            let references = write_references(run, folder, number, references)?;
            let prompt = prompt.clone();
            events.push(Event::ImageSample { step, path, prompt, seed, references, clip });
        }
        Ok(events)
    }

    /// A prompt, the negative one and the references of an image, from the cache.
    fn prompt(&self, index: &CacheIndex, number: usize) -> Result<SampleCondition> {
        let references = index.sample_references(number);
        let condition = |text: &String| {
            index.condition(&CachedPrompt::new(text.clone(), references, false)).map(Arc::new)
        };
        let latents = |reference: &Arc<CachedReference>| -> Result<ReferenceLatents> {
            let CachedLatents { mean, shape, .. } = index.reference(reference, false)?;
            Ok(ReferenceLatents { values: self.statistics.to_model(&mean, shape), shape })
        };
        Ok(SampleCondition {
            prompt: condition(&self.sample.prompts[number])?,
            negative: condition(&self.sample.negative_prompt)?,
            references: references.iter().map(latents).collect::<Result<_>>()?,
        })
    }

    fn denoise(
        &self,
        device: &Device,
        trainable: TrainableModel<'_, DiffusionModel>,
        prompts: &[SampleCondition],
        on_event: sample::SampleEventFn<'_>,
    ) -> Result<Vec<Vec<f32>>> {
        // One after the other: both halves of classifier-free guidance at once would take twice the memory.
        let TrainableModel { model, params, .. } = trainable;
        let denoise =
            || self.job.denoise_with(device, &model.denoiser, params, prompts, false, on_event);
        match self.training_adapter {
            Some(adapter) => adapter.without(denoise),
            None => denoise(),
        }
    }
}

/// A clip beside the strip of its frames, and as MP4 where that can be written; an image has none.
fn write_clip(run: &Path, strip: &Path, clip: &Clip) -> Result<Option<PathBuf>> {
    if clip.frames.len() == 1 {
        return Ok(None);
    }
    let path = strip.with_extension("webp");
    clip::write(&run.join(&path), clip)?;
    clip::write_mp4_beside(&run.join(&path), clip);
    Ok(Some(path))
}

/// Copies of the references of an image as the model sees them, beside it: a run's folder stands by itself.
fn write_references(
    run: &Path,
    folder: &Path,
    number: usize,
    references: &[Arc<CachedReference>],
) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::with_capacity(references.len());
    // It was decoded before, within the plan.
    let memory = &DecodingMemory::new(usize::MAX);
    for (at, reference) in references.iter().enumerate() {
        let path = folder.join(format!("reference-{}-{}.png", number + 1, at + 1));
        // A file that is gone meanwhile is no reason to end a run: its latents are in the cache.
        if !run.join(&path).exists()
            && let Ok(pixels) = scaled_reference(&reference.path, reference.size.of_vae(), memory)
        {
            image_file::write(&run.join(&path), &Image::from(&pixels), &[])?;
        }
        paths.push(path);
    }
    Ok(paths)
}
