//! A plan as a page: what each phase takes against the limit, what was chosen and why, and what more
//! memory would buy.

use std::mem::discriminant;
use std::path::Path;

use compute::DeviceKind;
use machine::budget::{MemoryBound, MemoryLimit};
use machine::{Bytes, Machine, Provenance};
use serde::Serialize;
use trainer::config::{RunConfig, Switch};
use trainer::event::{PlannedPhase, RepeatedTime, TimeEstimate};
use trainer::model::diffusion::text::EncoderLoading;
use trainer::plan::{DeviceBudget, Plan, PlanCandidate, RaisableLimit, Rates};
use weights::hub::HubPath;
use weights::hub::complete::FetchState;
use weights::hub::listing::HubListing;

use crate::render::doctor::limit_line;
use crate::render::progress::duration;
use crate::render::training::speed;
use crate::text::{BOLD, DIM, GOOD, PLAIN, TextPage, WARN, bar, thousands};

/// Chosen: what the next size of a machine has more.
pub const MORE_BYTES: usize = 8 << 30;

/// What a job is planned for.
pub struct PlanTarget {
    pub machine: Machine,
    pub kind: DeviceKind,
    pub rates: Rates,
    pub limit_bytes: usize,
    /// How the limit came about, if none was typed.
    pub default_limit: Option<MemoryLimit>,
    pub raisable: Option<RaisableLimit>,
    /// Main memory for offloaded blocks.
    pub host_bytes: Option<usize>,
}

impl PlanTarget {
    /// For plans.
    pub fn budget(&self) -> DeviceBudget<'_> {
        let Self { kind, limit_bytes, host_bytes, raisable, ref rates, .. } = *self;
        DeviceBudget { kind, limit_bytes, rates, host_bytes, raisable }
    }
}

/// All there is to say about a job.
pub struct PlanReport {
    pub target: PlanTarget,
    pub config: RunConfig,
    /// Parameters of the model that is trained.
    pub n_weights: usize,
    pub plan: Plan,
    /// Whether there was no folder to count samples in.
    pub is_nominal: bool,
    /// What would be done with [`MORE_BYTES`] more.
    pub with_more: Option<Plan>,
    /// Models that are not in the cache, or not all of them.
    pub downloads: Vec<PlannedDownload>,
}

/// A model that `hearth fetch` would download.
#[derive(Serialize)]
pub struct PlannedDownload {
    /// As it is typed.
    pub name: String,
    /// What is still to come, as far as the hub was ever asked.
    pub bytes: Option<u64>,
    /// Its weights in 16 bits, as most models are published.
    pub about_bytes: Option<u64>,
}

impl PlannedDownload {
    /// Of a model's path; nothing if it is there, or is no name.
    pub fn of(path: &Path, about_bytes: Option<u64>) -> Option<Self> {
        let found = HubPath::of(path).filter(|found| found.state() != FetchState::Complete)?;
        let (name, snapshot) = (found.short_name(), found.snapshot());
        let listing = HubListing::read(&machine::folders::cache_dir()?.join("hearth"), &name);
        let missing = listing.map(|listing| {
            let missing = listing.files.iter().filter(|file| !snapshot.join(&file.path).exists());
            missing.map(|file| file.bytes).fold(0, u64::saturating_add)
        });
        Some(Self { name: name.to_string(), bytes: missing, about_bytes })
    }

    fn line(&self) -> String {
        let Self { name, bytes: missing, about_bytes } = self;
        let size = match (missing, about_bytes) {
            (Some(missing), _) => format!("{} to come", Bytes(*missing)),
            (None, Some(about)) => {
                format!("about {}, exactly by `hearth fetch {name} --dry-run`", Bytes(*about))
            }
            (None, None) => format!("how large it is, `hearth fetch {name} --dry-run` tells"),
        };
        format!("not downloaded yet: `hearth fetch {name}`; {size}")
    }
}

impl PlanReport {
    /// How much longer a step takes than with the chosen settings.
    pub fn times_slower(&self, considered: &PlanCandidate) -> Option<f64> {
        self.plan.chosen().map(|chosen| considered.secs / chosen.secs)
    }
}

/// What is said of a large text encoder where it does not fit whole.
pub const IN_BLOCKS: &str = "text encoder block by block from disk: slower loading, same result";

/// Draws everything.
pub fn page(planned: &PlanReport) -> String {
    let PlanReport { target: PlanTarget { machine, limit_bytes, .. }, plan, .. } = planned;
    let mut page = TextPage::new();
    page.line(BOLD, &title(planned));
    if let Provenance::Documented { basis } = &machine.provenance {
        page.line(DIM, &format!("from published facts, not measured: {basis}"));
    }
    planned.downloads.iter().for_each(|download| page.line(WARN, &download.line()));
    page.heading("memory");
    phases(planned, &mut page);
    let counted = if planned.target.budget().shares_memory() {
        ", program and prefetched samples included"
    } else {
        " GPU memory; the program's main memory is not counted"
    };
    let fits = format!("fits: {} of {}{counted}", bytes(plan.total_bytes), bytes(*limit_bytes));
    page.item("✓", GOOD, &fits);
    // More than is free: why that may be counted on has to be said.
    let is_half = |limit: &&MemoryLimit| limit.bound_by == MemoryBound::HalfWorkingSet;
    if let Some(limit) = planned.target.default_limit.as_ref().filter(is_half) {
        page.item("✓", GOOD, &limit_line(limit));
    }
    if let (DeviceKind::Cuda { .. }, true) = (planned.target.kind, plan.offloaded_bytes > 0) {
        let text = format!(
            "block offloading: {} of main memory hold blocks until the GPU needs them",
            bytes(plan.offloaded_bytes)
        );
        page.item("✓", GOOD, &text);
    }
    if plan.encoder_loading == EncoderLoading::Blocks {
        page.item("✓", GOOD, IN_BLOCKS);
    }
    page.heading("time");
    times(planned, &mut page);
    if let DeviceKind::Cuda { is_deterministic } = planned.target.kind {
        page.row("bits", PLAIN, same_bits(is_deterministic));
    }
    if let Switch::On(every) = planned.config.cluster.sync_every {
        let steps = format!(
            "local steps (DiLoCo), weights averaged every {every}: not one process's result"
        );
        page.row("ranks", PLAIN, &steps);
    }
    page.heading("chosen");
    chosen(planned, &mut page);
    page.heading("instead");
    alternatives(planned, &mut page);
    page.finish()
}

fn title(planned: &PlanReport) -> String {
    let engine = match planned.target.kind {
        DeviceKind::Cpu { threads, .. } => format!("cpu with {threads} threads"),
        DeviceKind::Cuda { .. } => "its NVIDIA GPU".to_owned(),
        DeviceKind::Gpu { .. } => "its GPU".to_owned(),
    };
    let base = weights::hub::model_name(&planned.config.base.path);
    let weights = thousands(planned.n_weights);
    format!("{base}, {weights} parameters, on {}, {engine}", planned.target.machine.title)
}

/// Sizes of samples that have a row each. Chosen: as many as most folders have; of more, the largest say what is needed.
const SHOWN_SIZES: usize = 12;

fn phases(planned: &PlanReport, page: &mut TextPage) {
    let row = |name: String, peak_bytes: usize| {
        let share = peak_bytes as f64 / planned.target.limit_bytes as f64;
        [name, format!("{:>9}", bytes(peak_bytes)), bar(share)]
    };
    let mut rows = Vec::new();
    let kind = |phase: &PlannedPhase| discriminant(&phase.name);
    for same in planned.plan.phases.chunk_by(|a, b| kind(a) == kind(b)) {
        let mut peaks: Vec<usize> = same.iter().map(|phase| phase.peak_bytes).collect();
        peaks.sort_unstable_by(|a, b| b.cmp(a));
        let least = peaks.get(SHOWN_SIZES).copied().unwrap_or(0);
        let shown =
            same.iter().filter(|phase| phase.peak_bytes > least || same.len() <= SHOWN_SIZES);
        let n_rows = rows.len();
        rows.extend(shown.map(|phase| row(phase.name.to_string(), phase.peak_bytes)));
        let n_left = same.len() - (rows.len() - n_rows);
        if n_left > 0 {
            rows.push(row(format!("{n_left} other sizes"), least));
        }
    }
    page.table(&rows);
}

/// The parts of the job, each with how long it takes.
fn times(planned: &PlanReport, page: &mut TextPage) {
    let TimeEstimate { encode_secs, load_secs, steps, validation, samples, saving, .. } =
        planned.plan.times;
    let times = planned.plan.times;
    if let Some(secs) = times.total_secs() {
        page.row("total", BOLD, &format!("about {}", duration(secs)));
    }
    let before = [("encode", encode_secs), ("load", load_secs)];
    for (name, secs) in before.into_iter().filter(|(_, secs)| *secs > 0.0) {
        page.row(name, PLAIN, &short(secs));
    }
    page.row("steps", PLAIN, &all_steps(steps));
    for (name, of) in [("validation", validation), ("samples", samples), ("saving", saving)] {
        if of.times > 0 {
            let text = format!("{}: {} times {}", short(of.total_secs()), of.times, short(of.secs));
            page.row(name, PLAIN, &text);
        }
    }
    page.row("from", PLAIN, &times.certainty());
    if planned.is_nominal {
        page.row(
            "",
            DIM,
            "no images or texts were found to count: their number and sizes are assumed",
        );
    }
}

fn all_steps(steps: RepeatedTime) -> String {
    match steps.times {
        0 => format!("{}; how many there are depends on the texts or images", speed(steps.secs)),
        n => format!("{}: {n} steps at {}", short(steps.total_secs()), speed(steps.secs)),
    }
}

/// A duration that may be less than a second.
fn short(secs: f64) -> String {
    if secs < 0.95 { format!("{:.0} ms", 1e3 * secs) } else { duration(secs) }
}

/// What a GPU gives up to be fast, or does not.
fn same_bits(is_deterministic: bool) -> &'static str {
    if is_deterministic {
        "the same on every run: attention's query gradient is computed by hearth's own kernel"
    } else {
        "differ slightly from run to run: attention's backward is cuDNN's where available, which is a \
         quarter faster; `machine.deterministic = true` makes them equal"
    }
}

fn chosen(planned: &PlanReport, page: &mut TextPage) {
    let config = &planned.config;
    // Those that mean nothing in this job have no origin.
    let settings = planned.plan.choice.settings().into_iter();
    let rows = settings.filter(|(key, _)| config.origin(key).is_some()).map(|(key, value)| {
        let why = if config.is_free(key) { "chosen by the plan" } else { "set by the job" };
        [key.to_owned(), value, why.to_owned()]
    });
    page.table(&rows.collect::<Vec<_>>());
}

fn alternatives(planned: &PlanReport, page: &mut TextPage) {
    let Plan { choice, candidates: considered, .. } = &planned.plan;
    let too_large =
        considered.iter().filter(|it| !it.fits).min_by(|a, b| a.secs.total_cmp(&b.secs));
    if let Some(it) = too_large {
        let text = format!("{}: needs {}, does not fit", it.choice, bytes(it.peak_bytes));
        page.row("rejected", PLAIN, &text);
    }
    if let Some(it) = planned.plan.runner_up() {
        let text =
            format!("{}: {}, fits in {}", it.choice, slower(planned, it), bytes(it.peak_bytes));
        page.row("runner-up", PLAIN, &text);
    }
    let text = match &planned.with_more {
        Some(more) => {
            let faster = 100.0 * (1.0 - more.step_secs / planned.plan.step_secs);
            let takes = bytes(more.peak_bytes());
            if more.choice.quantise == choice.quantise {
                format!("{}: {faster:.0} % less time, {takes}", more.choice)
            } else {
                format!("{}: more precise, {takes}", more.choice)
            }
        }
        None => "would change nothing".into(),
    };
    page.row("8 GiB more", PLAIN, &text);
}

fn slower(planned: &PlanReport, considered: &PlanCandidate) -> String {
    match planned.times_slower(considered) {
        Some(times) if times >= 1.005 => format!("{:.0} % slower", 100.0 * (times - 1.0)),
        // Too little for block offloading; see `PlanCandidate::cost`.
        Some(times) if times <= 0.995 => format!("{:.0} % faster", 100.0 * (1.0 - times)),
        _ => "as fast".into(),
    }
}

fn bytes(bytes: usize) -> String {
    Bytes(bytes as u64).to_string()
}
