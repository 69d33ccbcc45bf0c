//! CLIP scores of a run's samples: how near they are to their prompts (Hessel et al., arXiv 2104.08718), and to the images
//! that the run trains on (CLIP-I of Ruiz et al., arXiv 2208.12242). Not a part of a run: they are measured beside it or
//! later, and tell when samples stop following prompts.

pub mod model;
pub mod tasks;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::Path;

use crate::data;
use crate::error::Result;
use crate::event::clip_scores::ClipScore;
use crate::event::history::SampleImage;
use model::LoadedClip;

/// Scores samples one by one.
pub struct SampleScorer<'a> {
    clip: &'a LoadedClip<'a>,
    /// Embeddings of prompts that occurred.
    prompts: HashMap<String, Vec<f32>>,
    images: ImageMean,
}

/// The mean of embeddings: a cosine with it, times its length, is the mean of the cosines.
#[derive(Default)]
struct ImageMean {
    sum: Vec<f64>,
    n: usize,
}

impl<'a> SampleScorer<'a> {
    /// Without any images to compare with.
    pub fn new(clip: &'a LoadedClip<'a>) -> Self {
        Self { clip, prompts: HashMap::new(), images: ImageMean::default() }
    }

    /// One more image that samples are compared with, or why it cannot be read.
    pub fn add_image(&mut self, path: &Path) -> Result<std::result::Result<(), data::ProblemKind>> {
        let pixels = match data::decode(path) {
            Ok(pixels) => pixels,
            Err(problem) => return Ok(Err(problem)),
        };
        let embedding = self.clip.image(pixels)?;
        self.images.add(&embedding);
        Ok(Ok(()))
    }

    /// Images that samples are compared with.
    pub fn n_images(&self) -> usize {
        self.images.n
    }

    /// The scores of a sample, or why it cannot be read.
    pub fn score(
        &mut self,
        run: &Path,
        sample: &SampleImage,
    ) -> Result<std::result::Result<ClipScore, data::ProblemKind>> {
        let pixels = match data::decode(&run.join(&sample.path)) {
            Ok(pixels) => pixels,
            Err(problem) => return Ok(Err(problem)),
        };
        let image = self.clip.image(pixels)?;
        if !self.prompts.contains_key(&sample.prompt) {
            self.prompts.insert(sample.prompt.clone(), self.clip.text(&sample.prompt)?);
        }
        Ok(Ok(ClipScore {
            step: sample.step,
            path: sample.path.clone(),
            prompt: sample.prompt.clone(),
            to_prompt: dot(&image, self.prompts[&sample.prompt].iter().map(|x| f64::from(*x))),
            to_images: self.images.mean_cosine(&image),
        }))
    }
}

impl ImageMean {
    fn add(&mut self, embedding: &[f32]) {
        self.sum.resize(embedding.len(), 0.0);
        self.sum.iter_mut().zip(embedding).for_each(|(sum, x)| *sum += f64::from(*x));
        self.n += 1;
    }

    /// The mean cosine with all of them; none if there are none.
    fn mean_cosine(&self, embedding: &[f32]) -> Option<f64> {
        (self.n > 0).then(|| dot(embedding, self.sum.iter().copied()) / self.n as f64)
    }
}

fn dot(a: &[f32], b: impl Iterator<Item = f64>) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * b).sum()
}
