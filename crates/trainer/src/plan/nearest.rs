//! What could be changed in a job that does not fit, so that it does. What is free was tried already:
//! left are the keys that somebody typed, then the size of pictures.

use compute::Quantisation;

use super::choice::{FORMATS, ways};
use super::{Choice, Counts, Job, Outlook, Room, Search};
use crate::config::adapter::AdapterKind;
use crate::config::optimizer::OptimizerKind;
use crate::data::Bucket;
use crate::error::Result;
use crate::model::recompute::Recompute;

/// Sizes of pictures to fall back to. Chosen: those that people train in.
const RESOLUTIONS: [usize; 5] = [1024, 768, 512, 384, 256];

/// A key, what would be typed for it, and what that does.
type Change = (&'static str, &'static str, fn(&mut Choice));

/// From what costs the least to what costs the most.
const CHANGES: [Change; 5] = [
    ("train.micro_batch", "1", |choice| choice.micro_batch = 1),
    ("train.recompute", "\"block\"", |choice| choice.recompute = Recompute::Block),
    ("optimizer.kind", "\"adamw_8bit\"", |choice| choice.optimizer = OptimizerKind::AdamW8bit),
    ("base.quantise_encoders", "\"nf4\"", |choice| {
        choice.quantise_encoders = Some(Quantisation::Nf4);
    }),
    ("base.quantise", "\"nf4\"", |choice| choice.quantise = Some(Quantisation::Nf4)),
];

/// A change that fits, as it would be typed: one key, else several, else smaller pictures.
pub(super) fn change(job: Job<'_>, room: Room<'_>) -> Option<String> {
    let tightest = tightest(job);
    let is_frozen = job.config.adapter.kind != AdapterKind::None;
    let is_possible =
        |(key, ..): &&Change| !job.config.is_free(key) && (is_frozen || *key != "base.quantise");
    let typed: Vec<&Change> = CHANGES.iter().filter(is_possible).collect();
    let alone = typed.iter().map(std::slice::from_ref);
    let together = (2..=typed.len()).map(|n| &typed[..n]);
    for changes in alone.chain(together) {
        let mut choice = tightest;
        for (.., apply) in changes {
            apply(&mut choice);
        }
        if fits(job, room, choice).is_ok() {
            let text = |(key, value, _): &&Change| format!("{key} = {value}");
            return Some(changes.iter().map(text).collect::<Vec<_>>().join(" and "));
        }
    }
    let smaller = RESOLUTIONS.into_iter().filter(|side| *side < job.config.data.resolution);
    for resolution in smaller {
        let outlook = scaled(job, resolution);
        if fits(Job { outlook: &outlook, ..job }, room, tightest).is_ok() {
            return Some(format!("data.resolution = {resolution}"));
        }
    }
    None
}

/// Everything that is free as tight as it goes.
fn tightest(job: Job<'_>) -> Choice {
    let is_free = |key| job.config.is_free(key);
    let mut choice = Choice::of(job.config);
    if let Some(how) = ways(job.config).last() {
        (choice.micro_batch, choice.recompute) = (how.micro, how.recompute);
    }
    let least = FORMATS[FORMATS.len() - 1];
    if is_free("base.quantise") && job.config.adapter.kind != AdapterKind::None {
        choice.quantise = least;
    }
    if is_free("base.quantise_encoders") {
        choice.quantise_encoders = least;
    }
    if is_free("optimizer.kind") {
        choice.optimizer = OptimizerKind::AdamW8bit;
    }
    choice
}

fn fits(job: Job<'_>, room: Room<'_>, choice: Choice) -> Result<()> {
    let mut search = Search::new(job, room);
    // What fails mostly fails here, and is found sooner.
    let step = search.rehearsal(&job.config.with(&choice)).step(room.rates)?;
    if step.peak_bytes > search.limit {
        return Err(search.too_large());
    }
    let encoding = search.rehearsal(&job.config.with(&choice)).encoding(search.encoding_limit)?;
    search.complete(choice, &encoding).map(drop)
}

/// The same pictures at another resolution.
fn scaled(job: Job<'_>, resolution: usize) -> Outlook {
    let data = &job.config.data;
    let side = |side: usize| {
        let pixels = side * resolution / data.resolution;
        (pixels / data.bucket_step * data.bucket_step).max(data.bucket_step)
    };
    let counts = |counts: &Counts| {
        let mut smaller = Counts::new();
        for (bucket, count) in counts {
            let bucket = Bucket { width: side(bucket.width), height: side(bucket.height) };
            *smaller.entry(bucket).or_default() += count;
        }
        smaller
    };
    let Outlook { train, held_out, to_encode, .. } = job.outlook;
    Outlook {
        train: counts(train),
        held_out: counts(held_out),
        to_encode: counts(to_encode),
        ..job.outlook.clone()
    }
}
