//! What could be changed in a job that does not fit, so that it does. What is free was tried already:
//! left are the keys that somebody typed, then the size of samples.

use compute::Quantisation;

use super::choice::{FORMATS, streams, ways};
use super::{Choice, Job, Room, Search};
use crate::config::adapter::AdapterKind;
use crate::config::optimizer::OptimizerKind;
use crate::error::Result;
use crate::model::recompute::Recompute;
use crate::model::stream::Stream;
use crate::train::lesson::Lesson;

/// A key, what would be typed for it, and what that does.
type Change = (&'static str, &'static str, fn(&mut Choice));

/// From what costs the least to what costs the most.
const CHANGES: [Change; 6] = [
    ("train.micro_batch", "1", |choice| choice.micro_batch = 1),
    ("train.recompute", "\"block\"", |choice| choice.recompute = Recompute::Block),
    ("machine.stream", "\"blocks\"", |choice| choice.stream = Stream::Blocks),
    ("optimizer.kind", "\"adamw_8bit\"", |choice| choice.optimizer = OptimizerKind::AdamW8bit),
    ("base.quantise_encoders", "\"nf4\"", |choice| {
        choice.quantise_encoders = Some(Quantisation::Nf4);
    }),
    ("base.quantise", "\"nf4\"", |choice| choice.quantise = Some(Quantisation::Nf4)),
];

/// A change that fits, as it would be typed: one key, else several, else smaller samples.
pub(super) fn change<L: Lesson>(job: Job<'_, L>, room: Room<'_>) -> Option<String> {
    let tightest = tightest(job, room);
    let is_frozen = job.config.adapter.kind != AdapterKind::None;
    let is_possible = |(key, ..): &&Change| {
        let can = match *key {
            "base.quantise" => is_frozen,
            "machine.stream" => is_frozen && room.host_bytes.is_some(),
            _ => true,
        };
        can && !job.config.is_free(key)
    };
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
    for (typed, outlook) in job.lesson.smaller(job.outlook) {
        if fits(Job { outlook: &outlook, ..job }, room, tightest).is_ok() {
            return Some(typed);
        }
    }
    None
}

/// Everything that is free as tight as it goes.
fn tightest<L: Lesson>(job: Job<'_, L>, room: Room<'_>) -> Choice {
    let is_free = |key| job.config.is_free(key);
    let mut choice = Choice::of(job.config);
    if let Some(how) = ways(job.config).last() {
        (choice.micro_batch, choice.recompute) = (how.micro, how.recompute);
    }
    if let Some(stream) = streams(job.config, room).last() {
        choice.stream = *stream;
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

fn fits<L: Lesson>(job: Job<'_, L>, room: Room<'_>, choice: Choice) -> Result<()> {
    let mut search = Search::new(job, room);
    // What fails mostly fails here, and is found sooner.
    let step = search.rehearsal(&job.config.with(&choice)).step(room.rates)?;
    let beside = search.beside(search.streamed_bytes(choice)?);
    if step.peak_bytes > room.limit_bytes.saturating_sub(beside) {
        return Err(search.too_large());
    }
    let encoding = search.rehearsal(&job.config.with(&choice)).before(search.encoding_limit)?;
    search.complete(choice, &encoding).map(drop)
}
