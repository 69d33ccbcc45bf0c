//! What there is to score: the samples of a run, and the images that it trains on.

use std::path::{Component, Path, PathBuf};

use weights::BytesDoneFn;

use crate::config::RawConfig;
use crate::config::training_data::TrainingData;
use crate::data::{MediaKinds, ScanOptions, scan};
use crate::error::{Result, TrainerError};
use crate::event::history::{History, SampleImage};

/// What there is to score.
#[derive(Clone, Debug, Default)]
pub struct ClipScoreTasks {
    /// By step, then in the order in which they were drawn.
    pub samples: Vec<SampleImage>,
    /// Images to compare with, evenly chosen.
    pub images: Vec<PathBuf>,
    /// How many there are.
    pub n_all_images: usize,
    /// What is left out, and why.
    pub notes: Vec<String>,
}

/// Which images samples are compared with.
#[derive(Clone, Debug)]
pub struct ComparedImages {
    /// A folder instead of the job's.
    pub folder: Option<PathBuf>,
    /// The most of them; 0 for none.
    pub most: usize,
}

/// A folder with images.
struct ImageFolder {
    path: PathBuf,
    follow_links: bool,
}

impl ClipScoreTasks {
    /// Those of a run. Fails if it has no sample; images that cannot be found are a note.
    pub fn find(run: &Path, compared: &ComparedImages, tick: BytesDoneFn<'_>) -> Result<Self> {
        let mut tasks = Self::default();
        let history = History::open(run)?;
        for sample in history.samples {
            tasks.take(sample);
        }
        if tasks.samples.is_empty() {
            return Err(nothing_to_score(run));
        }
        if compared.most > 0 {
            tasks.find_images(run, compared, tick)?;
        }
        Ok(tasks)
    }

    fn take(&mut self, sample: SampleImage) {
        let SampleImage { path, clip, .. } = &sample;
        // A history may come from somewhere else.
        let is_inside = path.components().all(|part| matches!(part, Component::Normal(_)));
        if clip.is_some() {
            self.notes.push(format!("{} is a clip, which CLIP does not see", path.display()));
        } else if is_inside {
            self.samples.push(sample);
        } else {
            self.notes.push(format!("{} is outside the run's folder", path.display()));
        }
    }

    fn find_images(
        &mut self,
        run: &Path,
        compared: &ComparedImages,
        tick: BytesDoneFn<'_>,
    ) -> Result<()> {
        let given = compared.folder.clone();
        let is_given = given.is_some();
        let folders = match given {
            Some(path) => vec![ImageFolder { path, follow_links: false }],
            None => folders_of(run)?,
        };
        let mut all = Vec::new();
        for ImageFolder { path, follow_links } in folders {
            let options = ScanOptions { media: MediaKinds::Images, follow_links };
            match scan(&path, &[], options, tick) {
                Ok(found) => all.extend(found.items.into_iter().map(|item| item.path)),
                Err(error) if is_given => return Err(error),
                Err(error) => self.notes.push(format!("not compared with images: {error}")),
            }
        }
        self.n_all_images = all.len();
        self.images = evenly(all, compared.most);
        Ok(())
    }
}

/// The folders that a run trains on. Regularisation images are not what it is to learn.
fn folders_of(run: &Path) -> Result<Vec<ImageFolder>> {
    let job = RawConfig::from_file(&run.join("config.toml"))?.resolve()?;
    let TrainingData::Images { data, .. } = job.data else { return Ok(Vec::new()) };
    let learnt = data.iter().filter(|set| !set.regularisation);
    let folder = |set: &crate::config::data::DataConfig| ImageFolder {
        path: set.images.clone(),
        follow_links: set.follow_links,
    };
    Ok(learnt.map(folder).collect())
}

/// At most so many, at even distances.
fn evenly<T>(all: Vec<T>, most: usize) -> Vec<T> {
    let n = all.len();
    if n <= most {
        return all;
    }
    let is_chosen = |index: usize| (index + 1) * most / n > index * most / n;
    let chosen = all.into_iter().enumerate().filter(|(index, _)| is_chosen(*index));
    chosen.map(|(_, item)| item).collect()
}

fn nothing_to_score(run: &Path) -> TrainerError {
    TrainerError::Request {
        problem: format!("the run in {} has no sample images", run.display()),
        hint: "train an image model with prompts: `--prompt`, or `prompts` in `[sample]`",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_chosen_at_even_distances() {
        let chosen = |n: usize, most| evenly((0..n).collect(), most);
        assert_eq!(chosen(3, 5), [0, 1, 2]);
        assert_eq!(chosen(9, 3), [2, 5, 8]);
        assert_eq!(chosen(1000, 7).len(), 7);
    }
}
