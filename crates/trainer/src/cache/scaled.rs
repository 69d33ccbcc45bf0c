//! The same images at another resolution: what a job could ask for that takes less.

use crate::config::data::DataConfig;
use crate::config::data_sets::DataSets;
use crate::data::clip::whole;
use crate::data::{Bucket, SampleSize, SizeCounts};

/// Sizes of images to fall back to. Chosen: those that people train in.
pub(crate) const RESOLUTIONS: [usize; 5] = [1024, 768, 512, 384, 256];

/// Lengths of clips to fall back to. Chosen: those that people train in, from five seconds at 24 frames a second down.
pub(crate) const FRAME_COUNTS: [usize; 7] = [97, 81, 61, 49, 33, 17, 5];

/// The same sizes at another resolution.
pub(crate) fn scaled_counts(
    counts: &SizeCounts<SampleSize>,
    data: &DataSets,
    resolution: usize,
) -> SizeCounts<SampleSize> {
    mapped(counts, |size| size.with_bucket(scaled_bucket(size.bucket, data, resolution)))
}

/// The same sizes with at most so many frames.
pub(crate) fn shortened_counts(
    counts: &SizeCounts<SampleSize>,
    most: usize,
) -> SizeCounts<SampleSize> {
    mapped(counts, |size| size.with_frames(size.frames.min(most)))
}

/// Numbers of frames below those of a job that a VAE takes.
pub(crate) fn fewer_frames(than: usize, unit: usize) -> impl Iterator<Item = usize> {
    let is_possible = move |frames: &usize| *frames < than && whole(*frames, unit) == *frames;
    FRAME_COUNTS.into_iter().filter(is_possible)
}

fn mapped(
    counts: &SizeCounts<SampleSize>,
    change: impl Fn(SampleSize) -> SampleSize,
) -> SizeCounts<SampleSize> {
    let mut changed = SizeCounts::new();
    for (size, count) in counts {
        *changed.entry(change(*size)).or_default() += count;
    }
    changed
}

/// A bucket where no resolution is above another. Which one it is of is not known any more: the smallest that it can be
/// of, so that a plan with it is never too small.
pub(crate) fn scaled_bucket(bucket: Bucket, data: &DataSets, most: usize) -> Bucket {
    let sides = data.iter().flat_map(|set: &DataConfig| set.resolution.iter());
    let can_be = |side: &usize| bucket.width * bucket.height <= side * side;
    let own = sides.filter(can_be).min().unwrap_or_else(|| data.largest_resolution());
    if own <= most {
        return bucket;
    }
    let step = data.common().bucket_step;
    let side = |side: usize| (side * most / own / step * step).max(step);
    Bucket { width: side(bucket.width), height: side(bucket.height) }
}
