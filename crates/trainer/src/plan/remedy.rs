//! Changes that make a job fit: tried, not guessed. Keys that were not set were tried by the plan already: left
//! are the keys that were set, then the size of samples.

use compute::{Dtype, Quantisation};

use super::choice::{FORMATS, batch_options, fused_options, offloads};
use super::{DatasetSummary, DeviceBudget, PlanChoice, PlanRequest, PlanSearch, RaisableLimit};
use crate::config::adapter::{AdapterConfig, AdapterKind};
use crate::config::base::ComputeType;
use crate::config::optimizer::OptimizerKind;
use crate::config::train::WeightDtype;
use crate::config::{RunConfig, Switch};
use crate::cost::nearest_fitting;
use crate::error::{LimitRaise, Remedy, Result, TrainerError, typed_limit};
use crate::model::adapter::AdapterForm;
use crate::model::adapter::factors::LokrShape;
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;
use crate::task::traits::{SmallerTask, Task};

/// A key, the value that would be typed for it, and its effect.
type ConfigChange = (&'static str, &'static str, fn(&mut RunConfig));

/// From what costs the least to what costs the most.
const CHANGES: [ConfigChange; 13] = [
    ("train.micro_batch", "1", |job| job.train.micro_batch = Some(1)),
    ("train.recompute", "\"block\"", |job| job.train.recompute = Recompute::Block),
    ("train.fused_backward_pass", "true", |job| job.train.fused_backward_pass = true),
    ("train.gradient_accumulation", "1", |job| {
        job.train.gradient_accumulation = 1;
        job.train.micro_batch = Some(job.train.batch_size);
        job.train.fused_backward_pass = true;
    }),
    ("machine.offload", BLOCKS, |job| job.machine.offload = Offload::Blocks),
    ("machine.offload", NONE, |job| job.machine.offload = Offload::None),
    ("base.dtype", "\"bf16\"", |job| job.base.dtype = Dtype::Bf16),
    ("optimizer.kind", "\"adamw_8bit\"", |job| job.optimizer.kind = OptimizerKind::AdamW8bit),
    ("train.weight_dtype", "\"bf16\"", |job| job.train.weight_dtype = WeightDtype::Bf16),
    ("base.quantise_encoders", "\"nf4\"", |job| {
        job.base.quantise_encoders = Some(Quantisation::Nf4);
    }),
    ("base.quantise", "\"nf4\"", |job| job.base.quantise = Some(Quantisation::Nf4)),
    ("adapter.rank", "8", |job| {
        for target in &mut job.adapter.targets {
            target.rank = target.rank.min(LOW_RANK);
        }
    }),
    ("adapter.kind", "\"lora\"", |job| {
        job.adapter = AdapterConfig::default_for(&job.data, &job.base.path);
    }),
];

/// Changes that mean nothing with an adapter.
const OF_FULL_FINE_TUNES: [&str; 3] =
    ["train.fused_backward_pass", "train.gradient_accumulation", "train.weight_dtype"];

const BLOCKS: &str = "\"blocks\"";
const NONE: &str = "\"none\"";

/// The rank above. Chosen: what small adapters have.
const LOW_RANK: usize = 8;

/// A job to try, with every key that was not set at its smallest.
#[derive(Clone)]
struct SmallerCandidate<T: Task> {
    config: RunConfig,
    task: T,
    dataset: DatasetSummary<T::Size>,
}

/// The smallest change that fits, as it would be typed: one key, several, smaller samples, or all of them.
pub(super) fn remedy<T: Task>(
    job: PlanRequest<'_, T>,
    budget: DeviceBudget<'_>,
) -> Result<Option<Remedy>> {
    let PlanRequest { task, config, dataset } = job;
    let smallest = smallest(config, budget);
    let typed: Vec<&ConfigChange> =
        CHANGES.iter().filter(|change| is_possible(change, &smallest, job, budget)).collect();
    let mut candidates = Vec::new();
    for changes in combined(&typed) {
        let (change, config) = changed(&smallest, &changes, budget);
        let (task, dataset) = (*task, dataset.clone());
        candidates.push((change, SmallerCandidate { config, task, dataset }));
    }
    let all_typed = (!typed.is_empty()).then(|| changed(&smallest, &compatible(&typed), budget));
    for (before, config) in
        [Some((String::new(), smallest.clone())), all_typed].into_iter().flatten()
    {
        let all = task.smaller(dataset).into_iter().filter(|job| !job.change.is_empty());
        for SmallerTask { change, task, dataset } in all {
            let and = if before.is_empty() { "" } else { " and " };
            let config = config.clone();
            let candidate = SmallerCandidate { config, task, dataset };
            candidates.push((format!("{before}{and}{change}"), candidate));
        }
    }
    let (task, dataset) = (*task, dataset.clone());
    let unchanged = (String::new(), SmallerCandidate { config: smallest, task, dataset });
    if candidates.is_empty() {
        candidates.push(unchanged.clone());
    }
    let need = |candidate: &SmallerCandidate<T>, limit| candidate.needed_bytes(budget, limit);
    let Some(remedy) = nearest_fitting(budget.limit_bytes, &candidates, need)? else {
        return Ok(None);
    };
    // A change that fits into the limit is nearer than one that needs a higher limit too.
    let with_change = if remedy.fits { &[][..] } else { &candidates };
    // Where nothing fits, this is the least: it may be tried first and spare the others.
    let least = if remedy.fits { 0 } else { remedy.needed };
    let raise = raise(budget, least, std::iter::once(&unchanged).chain(with_change))?;
    Ok(Some(Remedy { raise, ..remedy }))
}

/// The first of the candidates, which take `least` bytes or more, that fits into what the machine can give.
fn raise<'c, T: Task + 'c>(
    budget: DeviceBudget<'_>,
    least: usize,
    candidates: impl Iterator<Item = &'c (String, SmallerCandidate<T>)>,
) -> Result<LimitRaise> {
    let is_higher = |limit: &RaisableLimit| limit.max_limit_bytes > budget.limit_bytes;
    let Some(raisable) = budget.raisable.filter(is_higher) else { return Ok(LimitRaise::Unknown) };
    let max_bytes = raisable.max_limit_bytes;
    if typed_limit(least).0 > max_bytes {
        return Ok(LimitRaise::TooLow { max_bytes });
    }
    for (change, candidate) in candidates {
        let needed = candidate.needed_bytes(budget, max_bytes)?;
        let (limit_bytes, _) = typed_limit(needed);
        if limit_bytes <= max_bytes {
            let takes_others = limit_bytes > raisable.default_bytes;
            return Ok(LimitRaise::Enough { needed, change: change.clone(), takes_others });
        }
    }
    Ok(LimitRaise::TooLow { max_bytes })
}

/// Each alone, each two, then as many as it takes in their order; all of them last.
fn combined<'a>(typed: &[&'a ConfigChange]) -> Vec<Vec<&'a ConfigChange>> {
    let alone = typed.iter().map(|change| vec![*change]);
    let two = typed.iter().enumerate().flat_map(|(index, first)| {
        typed[index + 1..].iter().map(move |second| vec![*first, *second])
    });
    let more = (3..=typed.len()).map(|n| compatible(&typed[..n]));
    let two = two.filter(|changes| compatible(changes).len() == changes.len());
    alone.chain(two).chain(more).collect()
}

/// Without those that only a full fine-tune has, if another of them makes an adapter of it.
fn compatible<'a>(changes: &[&'a ConfigChange]) -> Vec<&'a ConfigChange> {
    let makes_adapter = changes.iter().any(|(key, ..)| *key == "adapter.kind");
    let is_kept =
        |change: &&ConfigChange| !makes_adapter || !OF_FULL_FINE_TUNES.contains(&change.0);
    changes.iter().copied().filter(is_kept).collect()
}

/// Whether a key was typed, and this would change something.
fn is_possible<T: Task>(
    change: &ConfigChange,
    smallest: &RunConfig,
    PlanRequest { config, dataset, .. }: PlanRequest<'_, T>,
    budget: DeviceBudget<'_>,
) -> bool {
    let (key, value, apply) = change;
    let mut changed = smallest.clone();
    apply(&mut changed);
    let is_frozen = config.adapter.kind != AdapterKind::Full;
    let can = match (*key, *value) {
        ("base.quantise", _) => is_frozen && config.base.compute == ComputeType::Dtype,
        ("train.micro_batch", _) => !smallest.train.fused_backward_pass,
        ("train.weight_dtype", _) => {
            !is_frozen && smallest.base.dtype == Dtype::Bf16 && smallest.train.ema == Switch::Off
        }
        ("train.fused_backward_pass", _) => smallest.can_fuse_backward(),
        // Lets the plan fuse the backward pass.
        ("train.gradient_accumulation", _) => {
            let is_free = |key| config.is_free(key);
            let is_summed = config.train.gradient_accumulation > 1;
            let can = is_free("train.fused_backward_pass") && is_free("train.micro_batch");
            is_summed && can && changed.can_fuse_backward()
        }
        ("machine.offload", BLOCKS) => is_frozen && budget.host_bytes.is_some(),
        ("machine.offload", _) => config.machine.offload == Offload::Blocks,
        ("base.dtype", _) => config.base.dtype == Dtype::F32,
        ("base.quantise_encoders", _) => dataset.n_texts > 0,
        ("adapter.kind", _) => !is_frozen && !config.base.random_init,
        // Whole matrices have none.
        ("adapter.rank", _) => !config.adapter.targets.iter().any(|target| {
            matches!(target.form, AdapterForm::Lokr(LokrShape { is_full_matrix: true, .. }))
        }),
        _ => true,
    };
    // A plan never chooses the adapter's keys, nor this one.
    let is_never_planned = key.starts_with("adapter.") || *key == "train.weight_dtype";
    let is_typed = is_never_planned || !config.is_free(key);
    can && is_typed && changed != *smallest
}

/// A job with some changes, as they would be typed.
fn changed(
    config: &RunConfig,
    changes: &[&ConfigChange],
    budget: DeviceBudget<'_>,
) -> (String, RunConfig) {
    let mut changed = config.clone();
    for (.., apply) in changes {
        apply(&mut changed);
    }
    let text = |(key, value, _): &&ConfigChange| format!("{key} = {value}");
    // Another kind of adapter leaves other keys to the plan.
    let has_other = changed.adapter.kind != config.adapter.kind;
    let changed = if has_other { smallest(&changed, budget) } else { changed };
    (changes.iter().map(text).collect::<Vec<_>>().join(" and "), changed)
}

/// A job with every key that was not set at its smallest.
fn smallest(config: &RunConfig, budget: DeviceBudget<'_>) -> RunConfig {
    let is_free = |key| config.is_free(key);
    let mut choice = PlanChoice::from_config(config);
    // A batch of several samples may take more in one piece than its gradients.
    if is_free("train.fused_backward_pass") && config.train.batch_size == 1 {
        choice.fused_backward_pass = fused_options(config).contains(&true);
    }
    if let Some(settings) = batch_options(config, choice.fused_backward_pass).last() {
        (choice.micro_batch, choice.recompute) = (settings.micro_batch, settings.recompute);
    }
    if let Some(offload) = offloads(config, budget).last() {
        choice.offload = *offload;
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

impl<T: Task> SmallerCandidate<T> {
    /// Memory of the whole program; beyond `limit` it may be an underestimate. `usize::MAX` if the offloaded blocks
    /// do not fit into main memory.
    fn needed_bytes(&self, budget: DeviceBudget<'_>, limit: usize) -> Result<usize> {
        let Self { config, task, dataset } = self;
        let search = PlanSearch::new(PlanRequest { task, config, dataset }, budget);
        match search.least_bytes(config, limit) {
            // Another limit than `limit`.
            Err(TrainerError::TooLarge { .. }) => Ok(usize::MAX),
            needed => needed,
        }
    }
}
