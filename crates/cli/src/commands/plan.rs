//! `hearth plan`: the memory and time that a job takes, without running it.

use std::io::Write;
use std::path::{Path, PathBuf};

use compute::DeviceKind;
use machine::{Machine, MachineRecording, ProbeSource};
use serde_json::{Map, Value, json};
use trainer::config::batch::PlanChoice;
use trainer::config::training_data::TrainingData;
use trainer::error::{LimitRaise, Remedy, TrainerError};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::text::EncoderLoading;
use trainer::plan::memory_plot::{self, MemoryPlot};
use trainer::plan::{self, DeviceBudget, Plan, PlanCandidate, Rates};
use trainer::task::traits::{DatasetSummary, Task};
use trainer::train::compress;
use trainer::train::diffusion::DiffusionTask;
use trainer::train::language::LanguagePipeline;
use trainer::train::preference::PreferencePipeline;
use weights::Catalog;

use super::device::{COMPUTER, DeviceArgs, MemoryLimitArg};
use super::job::JobArgs;
use super::output;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::plan::{MORE_BYTES, PlanReport, PlanTarget, PlannedDownload};

/// Show the memory and time that a job takes, without running it.
///
/// Does a dry run of every phase from file headers alone, so the memory is exact to the byte. Chooses what the
/// job leaves open: quantisation of the base, micro-batch size, gradient checkpointing and block offloading
/// (block swap). The best precision that fits wins, then the fastest. Nothing is written and no device is
/// opened. Exits with 1 if the job does not fit.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth plan job.toml
  hearth plan black-forest-labs/FLUX.1-dev              a model alone, also before it is downloaded
  hearth plan job.toml --limit 8GB                      in less memory
  hearth plan job.toml --plot memory.html               memory over one step, as a chart
  hearth plan job.toml --resolution 512 --json | jq .peak_bytes
  hearth plan recipes/sd3.5-medium-lora-16gb.toml --machine machines/apple-m2-16gb.toml")]
pub struct PlanArgs {
    #[command(flatten)]
    job: JobArgs,

    /// Plan for a recorded machine (`hearth doctor --record`) instead of this one
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Plot memory over one step into a new file: an HTML page, or an image if the name ends in .svg
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &PlanArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let config = arguments.job.resolve_planned()?;
    if let Some(path) = &arguments.plot {
        output::check_file(path)?;
    }
    let mut source = match &arguments.machine {
        Some(path) => ProbeSource::replay(MachineRecording::load(path)?),
        None => ProbeSource::live(),
    };
    let machine = Machine::probe(&mut source);
    let engine = arguments.engine.for_job(&config);
    let (engine, kind, rates) = match arguments.machine {
        Some(_) => {
            let (engine, kind) = engine.for_recorded(&machine);
            (engine, kind, Rates::documented(&machine, kind))
        }
        None => (engine.clone(), engine.kind(), engine.rates(&machine)),
    };
    engine.check_fp8(&config, &machine)?;
    let limit_bytes = engine.limit_bytes_of(&machine, arguments.limit);
    let host_bytes = engine.host_bytes_of(&machine);
    let default_limit = engine.default_limit_of(&machine).filter(|_| arguments.limit.is_none());
    let raisable = engine.raisable_of(&machine);
    let on = PlanTarget { machine, kind, rates, limit_bytes, default_limit, raisable, host_bytes };
    match &config.data {
        TrainingData::Images { .. } => {
            let parts = config.base.parts();
            let pipeline = Pipeline::open_or_published(&config.base.path, &parts)?;
            let task = &DiffusionTask::new(&config, &pipeline)?;
            let dataset = &DatasetSummary::estimate(task, config.train.batch_size)?;
            let weight_bytes = Some(pipeline.weight_bytes());
            let request = plan::PlanRequest { task, config: &config, dataset };
            show(arguments, request, on, weight_bytes, out)
        }
        TrainingData::Texts { compress: Some(compress), .. } => {
            let opened = compress::open(&config, compress, true)?;
            let task = &opened.task(&config)?;
            let dataset = &task.dataset_summary(config.train.batch_size);
            show(arguments, plan::PlanRequest { task, config: &config, dataset }, on, None, out)
        }
        TrainingData::Texts { preference: Some(preference), .. } => {
            let opened = PreferencePipeline::open(&config, true)?;
            let task = &opened.task(&config, preference)?;
            let dataset = &task.dataset_summary(config.train.batch_size);
            let weight_bytes = opened.base().catalog().map(Catalog::bytes);
            let request = plan::PlanRequest { task, config: &config, dataset };
            show(arguments, request, on, weight_bytes, out)
        }
        TrainingData::Texts { compress: None, .. } => {
            let opened = LanguagePipeline::open(&config, true)?;
            let task = &opened.task(&config)?;
            let dataset = &task.dataset_summary(config.train.batch_size);
            let weight_bytes = opened.base.catalog().map(Catalog::bytes);
            let request = plan::PlanRequest { task, config: &config, dataset };
            show(arguments, request, on, weight_bytes, out)
        }
    }
}

/// Plans, and says how it comes out. `weight_bytes` is the size of the base where that is known.
fn show<L: Task>(
    arguments: &PlanArgs,
    job: plan::PlanRequest<'_, L>,
    on: PlanTarget,
    weight_bytes: Option<u64>,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let room = on.budget();
    let plan = match plan::choose(job, room) {
        Err(TrainerError::TooLarge { phase, needed, limit, remedy }) if arguments.json => {
            let remedy = remedy.map(|Remedy { change, needed, fits, raise }| {
                let raised = match raise {
                    LimitRaise::Enough { needed, change, .. } => {
                        json!({ "change": change, "needed_bytes": needed })
                    }
                    LimitRaise::Unknown | LimitRaise::TooLow { .. } => Value::Null,
                };
                json!({
                    "change": change, "needed_bytes": needed, "fits": fits, "raised_limit": raised,
                })
            });
            let shortfall = json!({
                "fits": false, "phase": phase, "needed_bytes": needed, "limit_bytes": limit,
                "shortfall_bytes": needed.saturating_sub(limit), "remedy": remedy,
            });
            writeln!(out, "{shortfall:#}")?;
            return Ok(CommandOutcome::Differs);
        }
        plan => plan?,
    };
    if let Some(path) = &arguments.plot {
        draw(path, job, &plan, room)?;
    }
    let more = DeviceBudget { limit_bytes: on.limit_bytes.saturating_add(MORE_BYTES), ..room };
    let with_more = plan::choose(job, more).ok().filter(|more| more.choice != plan.choice);
    let (config, is_nominal) = (job.config.clone(), job.dataset.is_nominal);
    let n_weights = job.task.tensors()?.iter().map(|want| want.shape.elements()).sum();
    let paths = config.model_paths().into_iter();
    let about = |at: usize| weight_bytes.filter(|_| at == 0);
    let downloads = paths.enumerate().filter_map(|(at, path)| PlannedDownload::of(path, about(at)));
    let downloads = downloads.collect();
    let planned =
        PlanReport { target: on, config, n_weights, plan, is_nominal, with_more, downloads };
    if arguments.json {
        writeln!(out, "{:#}", planned.json())?;
    } else {
        write!(out, "{}", render::plan::page(&planned))?;
    }
    Ok(CommandOutcome::Done)
}

fn draw<L: Task>(
    path: &Path,
    job: plan::PlanRequest<'_, L>,
    plan: &Plan,
    room: DeviceBudget<'_>,
) -> Result<(), Failure> {
    let recording = plan::recorded_step(job, plan, room.kind)?;
    let memory = MemoryPlot { recording: &recording, limit_bytes: room.limit_bytes };
    let text = if path.extension().is_some_and(|end| end == "svg") {
        memory_plot::svg(&memory)
    } else {
        let base = weights::hub::model_name(&job.config.base.path);
        memory_plot::page(&format!("{base}: {}", plan.choice), &memory, &plan.phases)
    };
    Ok(weights::write::write_whole(path, text.as_bytes())?)
}

/// What computes, in JSON.
fn engine_name(kind: DeviceKind) -> &'static str {
    match kind {
        DeviceKind::Cpu { .. } => "cpu",
        DeviceKind::Cuda { .. } => "cuda",
        DeviceKind::Gpu { .. } => "gpu",
    }
}

impl PlanReport {
    fn json(&self) -> Value {
        let Plan { choice, phases, step_secs, candidates: considered, .. } = &self.plan;
        let rejected = considered.iter().filter(|it| it.choice != *choice);
        json!({
            "fits": true,
            "machine": self.target.machine.title,
            "engine": engine_name(self.target.kind),
            "weights": self.n_weights,
            "is_deterministic": self.target.kind.is_deterministic(),
            "peak_bytes": self.plan.peak_bytes(),
            "host_bytes": self.plan.host_bytes,
            "offloaded_bytes": self.plan.offloaded_bytes,
            "total_bytes": self.plan.total_bytes,
            "limit_bytes": self.target.limit_bytes,
            "is_encoder_in_blocks": self.plan.encoder_loading == EncoderLoading::Blocks,
            "step_secs": step_secs,
            "is_step_secs_measured": self.target.rates.is_measured,
            "total_secs": self.plan.times.total_secs(),
            "times": self.plan.times,
            "certainty": self.plan.times.certainty(),
            "phases": phases,
            "chosen": settings(choice),
            "rejected": rejected.map(|it| self.rejected(it)).collect::<Vec<_>>(),
            "downloads": self.downloads,
            "with_8gib_more": self.with_more.as_ref().map(|more| settings(&more.choice)),
        })
    }

    fn rejected(&self, considered: &PlanCandidate) -> Value {
        let PlanCandidate { choice, peak_bytes, fits, .. } = considered;
        json!({
            "settings": settings(choice),
            "peak_bytes": peak_bytes,
            "fits": fits,
            "times_slower": self.times_slower(considered),
        })
    }
}

fn settings(choice: &PlanChoice) -> Map<String, Value> {
    choice.settings().into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect()
}
