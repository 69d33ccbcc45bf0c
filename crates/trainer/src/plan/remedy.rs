//! What could be changed in a job that does not fit, so that it does: tried, not guessed. What is free was tried
//! already: left are the keys that somebody typed, then the size of samples.

use compute::{Dtype, Quantisation};

use super::choice::{FORMATS, batch_options, offloads};
use super::{DatasetSummary, DeviceBudget, PlanChoice, PlanRequest, PlanSearch};
use crate::config::RunConfig;
use crate::config::adapter::{AdapterConfig, AdapterKind};
use crate::config::optimizer::OptimizerKind;
use crate::cost::nearest_fitting;
use crate::error::{Remedy, Result, TrainerError};
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;
use crate::task::traits::{SmallerTask, Task};

/// A key, what would be typed for it, and what that does.
type ConfigChange = (&'static str, &'static str, fn(&mut RunConfig));

/// From what costs the least to what costs the most.
const CHANGES: [ConfigChange; 10] = [
    ("train.micro_batch", "1", |job| job.train.micro_batch = Some(1)),
    ("train.recompute", "\"block\"", |job| job.train.recompute = Recompute::Block),
    ("machine.offload", BLOCKS, |job| job.machine.offload = Offload::Blocks),
    ("machine.offload", NONE, |job| job.machine.offload = Offload::None),
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
    ("adapter.kind", "\"lora\"", |job| job.adapter = AdapterConfig::default_for(&job.data)),
];

const BLOCKS: &str = "\"blocks\"";
const NONE: &str = "\"none\"";

/// The rank above. Chosen: what small adapters have.
const LOW_RANK: usize = 8;

/// A job to try, with everything that is free as tight as it goes.
struct SmallerCandidate<L: Task> {
    config: RunConfig,
    task: L,
    dataset: DatasetSummary<L::Size>,
}

/// The nearest change that fits, as it would be typed: one key, several, smaller samples, or all of it.
pub(super) fn remedy<L: Task>(
    job: PlanRequest<'_, L>,
    room: DeviceBudget<'_>,
) -> Result<Option<Remedy>> {
    let PlanRequest { task: task, config, dataset: dataset } = job;
    let tightest = tightest(config, room);
    let typed: Vec<&ConfigChange> =
        CHANGES.iter().filter(|change| is_possible(change, &tightest, job, room)).collect();
    let mut candidates = Vec::new();
    for changes in combined(&typed) {
        let (change, config) = changed(&tightest, &changes, room);
        let (task, dataset) = (*task, dataset.clone());
        candidates.push((change, SmallerCandidate { config, task: task, dataset: dataset }));
    }
    let all_typed = (!typed.is_empty()).then(|| changed(&tightest, &typed, room));
    for (before, config) in
        [Some((String::new(), tightest.clone())), all_typed].into_iter().flatten()
    {
        let all = task.smaller(dataset).into_iter().filter(|job| !job.change.is_empty());
        for SmallerTask { change, task: task, dataset: dataset } in all {
            let and = if before.is_empty() { "" } else { " and " };
            let config = config.clone();
            let candidate = SmallerCandidate { config, task: task, dataset: dataset };
            candidates.push((format!("{before}{and}{change}"), candidate));
        }
    }
    if candidates.is_empty() {
        let (task, dataset) = (*task, dataset.clone());
        candidates.push((
            String::new(),
            SmallerCandidate { config: tightest, task: task, dataset: dataset },
        ));
    }
    nearest_fitting(room.limit_bytes, candidates, |candidate, limit| {
        candidate.needed_bytes(room, limit)
    })
}

/// Each alone, each two, then as many as it takes in their order; all of them last.
fn combined<'a>(typed: &[&'a ConfigChange]) -> Vec<Vec<&'a ConfigChange>> {
    let alone = typed.iter().map(|change| vec![*change]);
    let two = typed.iter().enumerate().flat_map(|(index, first)| {
        typed[index + 1..].iter().map(move |second| vec![*first, *second])
    });
    let more = (3..=typed.len()).map(|n| typed[..n].to_vec());
    alone.chain(two).chain(more).collect()
}

/// Whether a key was typed, and this would change something.
fn is_possible<L: Task>(
    (key, value, apply): &ConfigChange,
    tightest: &RunConfig,
    PlanRequest { config, dataset: dataset, .. }: PlanRequest<'_, L>,
    room: DeviceBudget<'_>,
) -> bool {
    let mut changed = tightest.clone();
    apply(&mut changed);
    let is_frozen = config.adapter.kind != AdapterKind::Full;
    let can = match (*key, *value) {
        ("base.quantise", _) => is_frozen,
        ("machine.offload", BLOCKS) => is_frozen && room.host_bytes.is_some(),
        ("machine.offload", _) => config.machine.offload == Offload::Blocks,
        ("base.dtype", _) => config.base.dtype == Dtype::F32,
        ("base.quantise_encoders", _) => dataset.n_texts > 0,
        ("adapter.kind", _) => !is_frozen && !config.base.random_init,
        _ => true,
    };
    // What an adapter is like is never chosen by a plan.
    let is_typed = key.starts_with("adapter.") || !config.is_free(key);
    can && is_typed && changed != *tightest
}

/// A job with some changes, as they would be typed.
fn changed(
    config: &RunConfig,
    changes: &[&ConfigChange],
    room: DeviceBudget<'_>,
) -> (String, RunConfig) {
    let mut changed = config.clone();
    for (.., apply) in changes {
        apply(&mut changed);
    }
    let text = |(key, value, _): &&ConfigChange| format!("{key} = {value}");
    // With another kind of adapter something else may be free.
    let has_other = changed.adapter.kind != config.adapter.kind;
    let changed = if has_other { tightest(&changed, room) } else { changed };
    (changes.iter().map(text).collect::<Vec<_>>().join(" and "), changed)
}

/// A job with everything that is free as tight as it goes.
fn tightest(config: &RunConfig, room: DeviceBudget<'_>) -> RunConfig {
    let is_free = |key| config.is_free(key);
    let mut choice = PlanChoice::from_config(config);
    if let Some(how) = batch_options(config).last() {
        (choice.micro_batch, choice.recompute) = (how.micro, how.recompute);
    }
    if let Some(stream) = offloads(config, room).last() {
        choice.offload = *stream;
    }
    let least = FORMATS[FORMATS.len() - 1];
    if is_free("base.quantise") && config.adapter.kind != AdapterKind::Full {
        choice.quantise = least;
    }
    if is_free("base.quantise_encoders") {
        choice.quantise_encoders = least;
    }
    if is_free("optimizer.kind") {
        choice.optimizer = OptimizerKind::AdamW8bit;
    }
    config.with_choice(&choice)
}

impl<L: Task> SmallerCandidate<L> {
    /// Bytes that the whole program takes; where that is more than `limit`, perhaps only a part of it; the most
    /// there is where it can have none.
    fn needed_bytes(&self, room: DeviceBudget<'_>, limit: usize) -> Result<usize> {
        let Self { config, task: task, dataset: dataset } = self;
        let search = PlanSearch::new(PlanRequest { task: task, config, dataset: dataset }, room);
        match search.least_bytes(config, limit) {
            // Main memory has no room for the blocks: another limit, which this one cannot say.
            Err(TrainerError::TooLarge { .. }) => Ok(usize::MAX),
            needed => needed,
        }
    }
}
