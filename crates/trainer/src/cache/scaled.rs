//! The same images at another resolution: what a job could ask for that takes less.

use crate::config::data::DataConfig;
use crate::data::Bucket;

type CountsByBucket = crate::data::SizeCounts<Bucket>;

/// Sizes of images to fall back to. Chosen: those that people train in.
pub(crate) const RESOLUTIONS: [usize; 5] = [1024, 768, 512, 384, 256];

/// The same sizes at another resolution.
pub(crate) fn scaled_counts(
    counts: &CountsByBucket,
    data: &DataConfig,
    resolution: usize,
) -> CountsByBucket {
    let mut smaller = CountsByBucket::new();
    for (bucket, count) in counts {
        *smaller.entry(scaled_bucket(*bucket, data, resolution)).or_default() += count;
    }
    smaller
}

/// A bucket at another resolution.
pub(crate) fn scaled_bucket(bucket: Bucket, data: &DataConfig, resolution: usize) -> Bucket {
    let side = |side: usize| {
        let pixels = side * resolution / data.resolution;
        (pixels / data.bucket_step * data.bucket_step).max(data.bucket_step)
    };
    Bucket { width: side(bucket.width), height: side(bucket.height) }
}
