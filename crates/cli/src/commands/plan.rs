//! `hearth plan`: what a job would take and how it would be done, without doing any of it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use compute::Kind;
use machine::{Machine, Recording, Source};
use serde_json::{Map, Value, json};
use trainer::config::how::Choice;
use trainer::config::material::Material;
use trainer::error::{Remedy, TrainerError};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::text::T5Loading;
use trainer::plan::picture::{self, Memory};
use trainer::plan::{self, Considered, Plan, Rates, Room};
use trainer::task::lesson::{Lesson, Outlook};
use trainer::train::pictures::Drawing;
use trainer::train::texts::Opened;

use super::engine::{COMPUTER, Engine, Limit};
use super::job::Job;
use super::output;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::render;
use crate::render::plan::{Computer, MORE_BYTES, Planned};

/// Say what a job would take and how it would be done, without doing any of it.
///
/// Rehearses every phase from the headers of files alone, so the memory is exact, and chooses what
/// the job leaves open: the best precision that fits, in the fastest way that fits. Nothing is
/// written and no device is touched. Exits with 1 if the job does not fit.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth plan job.toml
  hearth plan job.toml --limit 8GB
  hearth plan job.toml --picture memory.html
  hearth plan job.toml --resolution 512 --json | jq .peak_bytes
  hearth plan recipes/sd3.5-medium-lora-16gb.toml --machine machines/apple-m2-16gb.toml")]
pub struct Arguments {
    #[command(flatten)]
    job: Job,

    /// Plan for a recorded machine instead of this one
    #[arg(long, value_name = "FILE")]
    machine: Option<PathBuf>,

    /// The most memory to take: 16GB, or 70% of what hearth would take [default: all of that]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<Limit>,

    #[command(flatten)]
    engine: Engine,

    /// Draw the memory over a step into a new file: a page, or with .svg the picture alone
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let config = arguments.job.resolve("plan")?;
    if let Some(path) = &arguments.picture {
        output::check_file(path)?;
    }
    let mut source = match &arguments.machine {
        Some(path) => Source::replay(Recording::load(path)?),
        None => Source::live(),
    };
    let machine = Machine::probe(&mut source);
    let engine = arguments.engine.for_job(&config);
    let (engine, kind, rates) = match arguments.machine {
        Some(_) => {
            let (engine, kind) = engine.recorded(&machine);
            (engine, kind, Rates::documented(&machine, kind))
        }
        None => (engine.clone(), engine.kind(), engine.rates(&machine)),
    };
    let limit_bytes = engine.limit_bytes_of(&machine, arguments.limit);
    let host_bytes = engine.host_bytes_of(&machine);
    let on = Computer { machine, kind, rates, limit_bytes, host_bytes };
    match &config.material {
        Material::Pictures { .. } => {
            let rest = config.base.rest.as_deref();
            let pipeline = Pipeline::open_or_published(&config.base.path, rest)?;
            let lesson = &Drawing::of(&config, &pipeline)?;
            let outlook = &Outlook::foreseen(lesson, config.train.batch)?;
            show(arguments, plan::Job { lesson, config: &config, outlook }, on, out)
        }
        Material::Texts { .. } => {
            let opened = Opened::of(&config, true)?;
            let lesson = &opened.lesson(&config)?;
            let outlook = &lesson.outlook(config.train.batch);
            show(arguments, plan::Job { lesson, config: &config, outlook }, on, out)
        }
    }
}

/// Plans, and says how it comes out.
fn show<L: Lesson>(
    arguments: &Arguments,
    job: plan::Job<'_, L>,
    on: Computer,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let Computer { kind, limit_bytes, host_bytes, .. } = on;
    let room = Room { kind, limit_bytes, rates: &on.rates, host_bytes };
    let plan = match plan::choose(job, room) {
        Err(TrainerError::TooLarge { phase, needed, limit, remedy }) if arguments.json => {
            let remedy = remedy.map(|Remedy { change, needed, fits }| {
                json!({ "change": change, "needed_bytes": needed, "fits": fits })
            });
            let shortfall = json!({
                "fits": false, "phase": phase, "needed_bytes": needed, "limit_bytes": limit,
                "shortfall_bytes": needed.saturating_sub(limit), "remedy": remedy,
            });
            writeln!(out, "{shortfall:#}")?;
            return Ok(Outcome::Differs);
        }
        plan => plan?,
    };
    if let Some(path) = &arguments.picture {
        draw(path, job, &plan, room)?;
    }
    let more = Room { limit_bytes: on.limit_bytes.saturating_add(MORE_BYTES), ..room };
    let with_more = plan::choose(job, more).ok().filter(|more| more.choice != plan.choice);
    let (config, is_nominal) = (job.config.clone(), job.outlook.is_nominal);
    let n_weights = job.lesson.tensors()?.iter().map(|want| want.shape.elements()).sum();
    let planned = Planned { on, config, n_weights, plan, is_nominal, with_more };
    if arguments.json {
        writeln!(out, "{:#}", planned.json())?;
    } else {
        write!(out, "{}", render::plan::page(&planned))?;
    }
    Ok(Outcome::Done)
}

fn draw<L: Lesson>(
    path: &Path,
    job: plan::Job<'_, L>,
    plan: &Plan,
    room: Room<'_>,
) -> Result<(), Failure> {
    let recording = plan::recorded_step(job, plan, room.kind)?;
    let memory = Memory { recording: &recording, limit_bytes: room.limit_bytes };
    let text = if path.extension().is_some_and(|end| end == "svg") {
        picture::svg(&memory)
    } else {
        let base = job.config.base.path.file_name().unwrap_or_default().to_string_lossy();
        picture::page(&format!("{base}: {}", plan.choice), &memory, &plan.phases)
    };
    fs::write(path, text).map_err(|error| Failure::Write { path: path.into(), error })
}

/// What computes, in JSON.
fn engine_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Cpu { .. } => "cpu",
        Kind::Cuda { .. } => "cuda",
        Kind::Gpu { .. } => "gpu",
    }
}

impl Planned {
    fn json(&self) -> Value {
        let Plan { choice, phases, step_secs, considered, .. } = &self.plan;
        let rejected = considered.iter().filter(|it| it.choice != *choice);
        json!({
            "fits": true,
            "machine": self.on.machine.title,
            "engine": engine_name(self.on.kind),
            "weights": self.n_weights,
            "is_deterministic": self.on.kind.is_deterministic(),
            "peak_bytes": self.plan.peak_bytes(),
            "host_bytes": self.plan.host_bytes,
            "streamed_bytes": self.plan.streamed_bytes,
            "total_bytes": self.plan.total_bytes,
            "limit_bytes": self.on.limit_bytes,
            "is_t5_in_blocks": self.plan.t5 == T5Loading::Blocks,
            "step_secs": step_secs,
            "is_step_secs_measured": self.on.rates.is_measured,
            "total_secs": self.plan.times.total_secs(),
            "times": self.plan.times,
            "certainty": self.plan.times.certainty(),
            "phases": phases,
            "chosen": settings(choice),
            "rejected": rejected.map(|it| self.rejected(it)).collect::<Vec<_>>(),
            "with_8gib_more": self.with_more.as_ref().map(|more| settings(&more.choice)),
        })
    }

    fn rejected(&self, considered: &Considered) -> Value {
        let Considered { choice, peak_bytes, fits, .. } = considered;
        json!({
            "settings": settings(choice),
            "peak_bytes": peak_bytes,
            "fits": fits,
            "times_slower": self.times_slower(considered),
        })
    }
}

fn settings(choice: &Choice) -> Map<String, Value> {
    choice.settings().into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect()
}
