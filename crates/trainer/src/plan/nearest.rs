//! What could be changed in a job that does not fit, so that it does: tried, not guessed. What is free was tried
//! already: left are the keys that somebody typed, then the size of samples.

use compute::{Dtype, Quantisation};

use super::choice::{FORMATS, streams, ways};
use super::{Choice, Job, Outlook, Room, Search};
use crate::config::RunConfig;
use crate::config::adapter::{Adapter, AdapterKind};
use crate::config::optimizer::OptimizerKind;
use crate::cost::nearest;
use crate::error::{Remedy, Result, TrainerError};
use crate::model::recompute::Recompute;
use crate::model::stream::Stream;
use crate::task::lesson::{Lesson, Smaller};

/// A key, what would be typed for it, and what that does.
type Change = (&'static str, &'static str, fn(&mut RunConfig));

/// From what costs the least to what costs the most.
const CHANGES: [Change; 10] = [
    ("train.micro_batch", "1", |job| job.train.micro_batch = Some(1)),
    ("train.recompute", "\"block\"", |job| job.train.recompute = Recompute::Block),
    ("machine.stream", BLOCKS, |job| job.machine.stream = Stream::Blocks),
    ("machine.stream", NONE, |job| job.machine.stream = Stream::None),
    ("base.dtype", "\"bf16\"", |job| job.base.dtype = Dtype::Bf16),
    ("optimizer.kind", "\"adamw_8bit\"", |job| job.optimizer.kind = OptimizerKind::AdamW8bit),
    ("base.quantise_encoders", "\"nf4\"", |job| {
        job.base.quantise_encoders = Some(Quantisation::Nf4);
    }),
    ("base.quantise", "\"nf4\"", |job| job.base.quantise = Some(Quantisation::Nf4)),
    ("adapter.rank", "8", |job| {
        for target in &mut job.adapter.targets {
            target.rank = target.rank.min(LOW_RANK);
        }
    }),
    ("adapter.kind", "\"lora\"", |job| job.adapter = Adapter::usual(&job.material)),
];

const BLOCKS: &str = "\"blocks\"";
const NONE: &str = "\"none\"";

/// The rank above. Chosen: what small adapters have.
const LOW_RANK: usize = 8;

/// A job to try, with everything that is free as tight as it goes.
struct Candidate<L: Lesson> {
    config: RunConfig,
    lesson: L,
    outlook: Outlook<L::Size>,
}

/// The nearest change that fits, as it would be typed: one key, several, smaller samples, or all of it.
pub(super) fn remedy<L: Lesson>(job: Job<'_, L>, room: Room<'_>) -> Result<Option<Remedy>> {
    let Job { lesson, config, outlook } = job;
    let tightest = tightest(config, room);
    let typed: Vec<&Change> =
        CHANGES.iter().filter(|change| is_possible(change, &tightest, job, room)).collect();
    let mut candidates = Vec::new();
    for changes in combined(&typed) {
        let (change, config) = changed(&tightest, &changes, room);
        let (lesson, outlook) = (*lesson, outlook.clone());
        candidates.push((change, Candidate { config, lesson, outlook }));
    }
    let all_typed = (!typed.is_empty()).then(|| changed(&tightest, &typed, room));
    for (before, config) in
        [Some((String::new(), tightest.clone())), all_typed].into_iter().flatten()
    {
        let all = lesson.smaller(outlook).into_iter().filter(|job| !job.change.is_empty());
        for Smaller { change, lesson, outlook } in all {
            let and = if before.is_empty() { "" } else { " and " };
            let config = config.clone();
            let candidate = Candidate { config, lesson, outlook };
            candidates.push((format!("{before}{and}{change}"), candidate));
        }
    }
    if candidates.is_empty() {
        let (lesson, outlook) = (*lesson, outlook.clone());
        candidates.push((String::new(), Candidate { config: tightest, lesson, outlook }));
    }
    nearest(room.limit_bytes, candidates, |candidate, limit| candidate.need(room, limit))
}

/// Each alone, each two, then as many as it takes in their order; all of them last.
fn combined<'a>(typed: &[&'a Change]) -> Vec<Vec<&'a Change>> {
    let alone = typed.iter().map(|change| vec![*change]);
    let two = typed.iter().enumerate().flat_map(|(index, first)| {
        typed[index + 1..].iter().map(move |second| vec![*first, *second])
    });
    let more = (3..=typed.len()).map(|n| typed[..n].to_vec());
    alone.chain(two).chain(more).collect()
}

/// Whether a key was typed, and this would change something.
fn is_possible<L: Lesson>(
    (key, value, apply): &Change,
    tightest: &RunConfig,
    Job { config, outlook, .. }: Job<'_, L>,
    room: Room<'_>,
) -> bool {
    let mut changed = tightest.clone();
    apply(&mut changed);
    let is_frozen = config.adapter.kind != AdapterKind::None;
    let can = match (*key, *value) {
        ("base.quantise", _) => is_frozen,
        ("machine.stream", BLOCKS) => is_frozen && room.host_bytes.is_some(),
        ("machine.stream", _) => config.machine.stream == Stream::Blocks,
        ("base.dtype", _) => config.base.dtype == Dtype::F32,
        ("base.quantise_encoders", _) => outlook.n_texts > 0,
        ("adapter.kind", _) => !is_frozen && !config.base.fresh,
        _ => true,
    };
    // What an adapter is like is never chosen by a plan.
    let is_typed = key.starts_with("adapter.") || !config.is_free(key);
    can && is_typed && changed != *tightest
}

/// A job with some changes, as they would be typed.
fn changed(config: &RunConfig, changes: &[&Change], room: Room<'_>) -> (String, RunConfig) {
    let mut changed = config.clone();
    for (.., apply) in changes {
        apply(&mut changed);
    }
    let text = |(key, value, _): &&Change| format!("{key} = {value}");
    // With another kind of adapter something else may be free.
    let has_other = changed.adapter.kind != config.adapter.kind;
    let changed = if has_other { tightest(&changed, room) } else { changed };
    (changes.iter().map(text).collect::<Vec<_>>().join(" and "), changed)
}

/// A job with everything that is free as tight as it goes.
fn tightest(config: &RunConfig, room: Room<'_>) -> RunConfig {
    let is_free = |key| config.is_free(key);
    let mut choice = Choice::of(config);
    if let Some(how) = ways(config).last() {
        (choice.micro_batch, choice.recompute) = (how.micro, how.recompute);
    }
    if let Some(stream) = streams(config, room).last() {
        choice.stream = *stream;
    }
    let least = FORMATS[FORMATS.len() - 1];
    if is_free("base.quantise") && config.adapter.kind != AdapterKind::None {
        choice.quantise = least;
    }
    if is_free("base.quantise_encoders") {
        choice.quantise_encoders = least;
    }
    if is_free("optimizer.kind") {
        choice.optimizer = OptimizerKind::AdamW8bit;
    }
    config.with(&choice)
}

impl<L: Lesson> Candidate<L> {
    /// Bytes that the whole program takes; where that is more than `limit`, perhaps only a part of it; the most
    /// there is where it can have none.
    fn need(&self, room: Room<'_>, limit: usize) -> Result<usize> {
        let Self { config, lesson, outlook } = self;
        let search = Search::new(Job { lesson, config, outlook }, room);
        match search.least_bytes(config, limit) {
            // Main memory has no room for the blocks: another limit, which this one cannot say.
            Err(TrainerError::TooLarge { .. }) => Ok(usize::MAX),
            needed => needed,
        }
    }
}
