//! How near the samples of a run are to their prompts, and to the images that the run trains on: cosines between CLIP's
//! embeddings. `hearth clip-score` writes them into the run's folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::after_run;
use super::history::SampleImage;
use crate::error::Result;

/// What the file is called in a run's folder.
pub const FILE_NAME: &str = "clip-scores.json";

/// The scores of a run's samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClipScores {
    /// The CLIP model, as it was given. Those of two models cannot be compared.
    pub model: String,
    /// Images that samples were compared with; 0 if with none.
    pub n_images: usize,
    /// By step, then in the order in which they were drawn.
    pub samples: Vec<ClipScore>,
}

/// The scores of a sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClipScore {
    /// Steps taken by then; 0 is the base alone.
    pub step: u64,
    /// Relative to the run's folder.
    pub path: PathBuf,
    /// What was to be drawn.
    pub prompt: String,
    /// Cosine of the image and its prompt.
    pub to_prompt: f64,
    /// Mean cosine of the image and those that the run trains on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_images: Option<f64>,
}

/// Means over the samples of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ClipStepScore {
    /// Steps taken by then.
    pub step: u64,
    /// Samples.
    pub n: usize,
    /// Cosine of image and prompt.
    pub to_prompt: f64,
    /// Cosine of image and training images.
    pub to_images: Option<f64>,
}

impl ClipScores {
    /// Reads those of a run; none if it has none.
    pub fn read(run_folder: &Path) -> Result<Option<Self>> {
        let remedy = "remove it, or measure again with `hearth clip-score`";
        after_run::read(run_folder.join(FILE_NAME), remedy)
    }

    /// Writes them, in the place of those before.
    pub fn write(&self, run_folder: &Path) -> Result<PathBuf> {
        let path = run_folder.join(FILE_NAME);
        after_run::write(&path, self)?;
        Ok(path)
    }

    /// The means of each step, of the samples that `are_there`: steps that a run lost are not a part of it.
    pub fn by_step(&self, are_there: &[SampleImage]) -> Vec<ClipStepScore> {
        let is_there =
            |score: &&ClipScore| are_there.iter().any(|sample| sample.path == score.path);
        let mut steps = BTreeMap::<u64, Vec<&ClipScore>>::new();
        for score in self.samples.iter().filter(is_there) {
            steps.entry(score.step).or_default().push(score);
        }
        steps.into_iter().map(|(step, scores)| ClipStepScore::mean(step, &scores)).collect()
    }
}

impl ClipStepScore {
    fn mean(step: u64, scores: &[&ClipScore]) -> Self {
        let n = scores.len();
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / n as f64;
        let to_prompt = mean(scores.iter().map(|score| score.to_prompt).collect());
        let to_images: Option<Vec<f64>> = scores.iter().map(|score| score.to_images).collect();
        Self { step, n, to_prompt, to_images: to_images.map(mean) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(step: u64, name: &str, to_prompt: f64, to_images: Option<f64>) -> ClipScore {
        ClipScore { step, path: name.into(), prompt: "a fox".into(), to_prompt, to_images }
    }

    fn sample(step: u64, name: &str) -> SampleImage {
        SampleImage {
            step,
            path: name.into(),
            prompt: "a fox".into(),
            seed: 1,
            references: Vec::new(),
            clip: None,
        }
    }

    #[test]
    fn means_are_those_of_samples_that_are_there() {
        let samples = vec![
            score(0, "a", 0.25, Some(0.5)),
            score(0, "b", 0.75, Some(0.25)),
            score(10, "c", 0.5, None),
            score(20, "lost", 0.9, Some(0.9)),
        ];
        let scores = ClipScores { model: "clip".into(), n_images: 3, samples };
        let there = [sample(0, "a"), sample(0, "b"), sample(10, "c"), sample(10, "unscored")];
        let of = |step, n, to_prompt, to_images| ClipStepScore { step, n, to_prompt, to_images };
        let expected = [of(0, 2, 0.5, Some(0.375)), of(10, 1, 0.5, None)];
        assert_eq!(scores.by_step(&there), expected);
    }

    #[test]
    fn they_are_read_as_written_and_damage_is_told() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(ClipScores::read(folder.path()).unwrap(), None);
        let samples = vec![score(0, "samples/a.png", 0.25, None)];
        let scores = ClipScores { model: "clip".into(), n_images: 0, samples };
        let path = scores.write(folder.path()).unwrap();
        assert_eq!(ClipScores::read(folder.path()).unwrap(), Some(scores));
        std::fs::write(path, "{").unwrap();
        let error = ClipScores::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains(FILE_NAME), "{error}");
    }
}
