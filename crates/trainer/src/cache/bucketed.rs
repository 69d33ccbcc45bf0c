//! The images of a folder in the sizes they are trained in, from their headers alone. A run goes
//! on from here to their bytes (`select`); a plan ends here (`plan::DatasetSummary`). Both see the same
//! images in the same sizes because there is no second way to choose them.

use crate::config::data::{DataConfig, ValidationSplit};
use crate::data::findings::explained;
use crate::data::{Bucket, Buckets, ImageItem, Problem, scan};
use crate::error::{Result, TrainerError};
use crate::model::diffusion::Pipeline;

/// Chosen: what an epoch's order takes in memory stays below a gigabyte.
const MAX_EPOCH_SAMPLES: u64 = 100_000_000;

/// An image in its size.
pub(crate) struct BucketedImage {
    pub item: ImageItem,
    pub bucket: Bucket,
    /// How often an epoch shows it.
    pub repeats: u32,
}

/// What a folder's headers give.
pub(crate) struct BucketedFolder {
    /// Sorted by path.
    pub images: Vec<BucketedImage>,
    pub problems: Vec<Problem>,
}

/// Looks through the folder and gives every image its size.
pub(crate) fn assign_buckets(pipeline: &Pipeline, data: &DataConfig) -> Result<BucketedFolder> {
    let buckets = buckets(pipeline, data)?;
    let found = scan(&data.images)?;
    let placed = |item: ImageItem| {
        let repeats = u64::from(item.repeats).saturating_mul(data.repeats);
        let repeats = u32::try_from(repeats).unwrap_or(u32::MAX);
        BucketedImage { bucket: buckets.choose(item.size), item, repeats }
    };
    let images: Vec<BucketedImage> = found.items.into_iter().map(placed).collect();
    check_any(images.iter().map(|image| image.repeats), data, &found.problems)?;
    check_sizes(pipeline, &images)?;
    Ok(BucketedFolder { images, problems: found.problems })
}

/// How many of `n` images are held out.
pub(crate) fn n_held_out(n: usize, validation: ValidationSplit) -> Result<usize> {
    let n_held = match validation {
        ValidationSplit::None => 0,
        ValidationSplit::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        ValidationSplit::Share(share) => ((n as f64 * share).round() as usize).max(1),
    };
    if n_held < n {
        return Ok(n_held);
    }
    Err(TrainerError::Request {
        problem: format!("data.validation holds out {n_held} images, there are {n}"),
        hint: "leave at least one to train on",
    })
}

/// That there is an image, and no more of them than an epoch can hold.
pub(super) fn check_any(
    repeats: impl Iterator<Item = u32>,
    data: &DataConfig,
    problems: &[Problem],
) -> Result<()> {
    let (n, n_shown) =
        repeats.fold((0_u64, 0_u64), |(n, shown), repeats| (n + 1, shown + u64::from(repeats)));
    if n_shown > MAX_EPOCH_SAMPLES {
        return Err(TrainerError::Request {
            problem: format!("an epoch shows {n_shown} images, most is {MAX_EPOCH_SAMPLES}"),
            hint: "lower data.repeats, or the numbers that folders begin with",
        });
    }
    if n > 0 {
        return Ok(());
    }
    let why = explained(problems).unwrap_or_else(|| "it holds none".into());
    Err(TrainerError::Request {
        problem: format!("no image to train with in {}: {why}", data.images.display()),
        hint: "give data.images a folder with png, jpeg, webp or gif images",
    })
}

fn buckets(pipeline: &Pipeline, data: &DataConfig) -> Result<Buckets> {
    let unit = pipeline.pixels_per_token();
    if !data.bucket_step.is_multiple_of(unit) {
        return Err(TrainerError::Request {
            problem: format!(
                "data.bucket_step is {}, the model needs a multiple of {unit}",
                data.bucket_step
            ),
            hint: "choose a multiple of that number",
        });
    }
    let resolution = data.resolution;
    Buckets::new(resolution, data.bucket_step, resolution / 2, resolution * 2)
}

/// That the model has a place for every patch.
fn check_sizes(pipeline: &Pipeline, images: &[BucketedImage]) -> Result<()> {
    let Some(most) = pipeline.max_side() else { return Ok(()) };
    let too_long = |image: &&BucketedImage| image.bucket.width.max(image.bucket.height) > most;
    let Some(image) = images.iter().find(too_long) else { return Ok(()) };
    let Bucket { width, height } = image.bucket;
    Err(TrainerError::Request {
        problem: format!(
            "bucket {width}x{height} is larger than the model's {most}x{most}: {}",
            image.item.path.display()
        ),
        hint: "lower data.resolution, or leave out very long images",
    })
}
