//! The pictures of a folder in the sizes they are trained in, from their headers alone. A run goes
//! on from here to their bytes (`select`); a plan ends here (`plan::Outlook`). Both see the same
//! pictures in the same sizes because there is no second way to choose them.

use crate::config::data::{Data, Validation};
use crate::data::findings::explained;
use crate::data::{Bucket, Buckets, Item, Problem, scan};
use crate::error::{Result, TrainerError};
use crate::model::diffusion::Pipeline;

/// Chosen: what an epoch's order takes in memory stays below a gigabyte.
const MOST_SHOWN: u64 = 100_000_000;

/// A picture in its size.
pub(crate) struct Placed {
    pub item: Item,
    pub bucket: Bucket,
    /// How often an epoch shows it.
    pub repeats: u32,
}

/// What a folder's headers give.
pub(crate) struct Placement {
    /// Sorted by path.
    pub pictures: Vec<Placed>,
    pub problems: Vec<Problem>,
}

/// Looks through the folder and gives every picture its size.
pub(crate) fn place(pipeline: &Pipeline, data: &Data) -> Result<Placement> {
    let buckets = buckets(pipeline, data)?;
    let found = scan(&data.images)?;
    let placed = |item: Item| {
        let repeats = u64::from(item.repeats).saturating_mul(data.repeats);
        let repeats = u32::try_from(repeats).unwrap_or(u32::MAX);
        Placed { bucket: buckets.choose(item.size), item, repeats }
    };
    let pictures: Vec<Placed> = found.items.into_iter().map(placed).collect();
    check_any(pictures.iter().map(|picture| picture.repeats), data, &found.problems)?;
    check_sizes(pipeline, &pictures)?;
    Ok(Placement { pictures, problems: found.problems })
}

/// How many of `n` pictures are held out.
pub(crate) fn n_held_out(n: usize, validation: Validation) -> Result<usize> {
    let n_held = match validation {
        Validation::None => 0,
        Validation::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        Validation::Share(share) => ((n as f64 * share).round() as usize).max(1),
    };
    if n_held < n {
        return Ok(n_held);
    }
    Err(TrainerError::Request {
        problem: format!("data.validation holds out {n_held} pictures, there are {n}"),
        hint: "leave at least one to train on",
    })
}

/// That there is a picture, and no more of them than an epoch can hold.
pub(super) fn check_any(
    repeats: impl Iterator<Item = u32>,
    data: &Data,
    problems: &[Problem],
) -> Result<()> {
    let (n, n_shown) =
        repeats.fold((0_u64, 0_u64), |(n, shown), repeats| (n + 1, shown + u64::from(repeats)));
    if n_shown > MOST_SHOWN {
        return Err(TrainerError::Request {
            problem: format!("an epoch shows {n_shown} pictures, most is {MOST_SHOWN}"),
            hint: "lower data.repeats, or the numbers that folders begin with",
        });
    }
    if n > 0 {
        return Ok(());
    }
    let why = explained(problems).unwrap_or_else(|| "it holds none".into());
    Err(TrainerError::Request {
        problem: format!("no picture to train with in {}: {why}", data.images.display()),
        hint: "give data.images a folder with png, jpeg, webp or gif pictures",
    })
}

fn buckets(pipeline: &Pipeline, data: &Data) -> Result<Buckets> {
    let unit = pipeline.unit();
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
fn check_sizes(pipeline: &Pipeline, pictures: &[Placed]) -> Result<()> {
    let Some(most) = pipeline.most_pixels() else { return Ok(()) };
    let too_long = |picture: &&Placed| picture.bucket.width.max(picture.bucket.height) > most;
    let Some(picture) = pictures.iter().find(too_long) else { return Ok(()) };
    let Bucket { width, height } = picture.bucket;
    Err(TrainerError::Request {
        problem: format!(
            "bucket {width}x{height} is larger than the model's {most}x{most}: {}",
            picture.item.path.display()
        ),
        hint: "lower data.resolution, or leave out very long pictures",
    })
}
