//! What a run will be fed with, as far as its memory depends on it: sizes of pictures and how many of
//! each, and what has to be encoded first.

use std::collections::BTreeMap;

use crate::cache::{Caching, Index, Sample};
use crate::data::Bucket;

/// Sizes that occur, each with how many there are.
pub type Counts = BTreeMap<Bucket, usize>;

/// What lies ahead of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// What an epoch shows.
    pub train: Counts,
    /// Pictures that are measured on.
    pub held_out: Counts,
    /// Latents that are not in the cache yet.
    pub to_encode: Counts,
    /// Whether a text is not in the cache yet.
    pub has_texts: bool,
}

impl Outlook {
    /// Where nothing is known of the pictures yet.
    pub fn nominal(config: &crate::config::RunConfig) -> Self {
        let side = config.data.resolution;
        let counts: Counts = [(Bucket { width: side, height: side }, config.train.batch)].into();
        Self { train: counts.clone(), held_out: counts.clone(), to_encode: counts, has_texts: true }
    }

    /// Of a folder that was looked through and compared with the cache.
    pub fn of(caching: &Caching<'_>) -> Self {
        let Index { train, held_out, .. } = caching.index();
        Self {
            train: counts(train, |sample| sample.repeats as usize),
            held_out: counts(held_out, |_| 1),
            to_encode: caching.to_encode(),
            has_texts: caching.missing().texts > 0,
        }
    }
}

fn counts(samples: &[Sample], weight: impl Fn(&Sample) -> usize) -> Counts {
    let mut counts = Counts::new();
    for sample in samples {
        *counts.entry(sample.bucket).or_default() += weight(sample);
    }
    counts
}
