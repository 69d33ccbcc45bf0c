//! `hearth cache`: pictures and captions of a job, encoded once.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use trainer::cache::{Caching, Index, Missing, Request};
use trainer::config::RunConfig;
use trainer::data::{Bucket, Problem};
use trainer::model::sd3::pipeline::Pipeline;
use trainer::sample::Phase;

use super::engine::{Engine, Limit};
use super::job::Job;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::render;
use crate::render::cache::Encoding;

/// Encode the pictures and captions of a job, once.
///
/// Training does it too; this does it alone, to see what a folder holds or on another computer. What
/// is in the cache already is not encoded again. The autoencoder and the text encoders are loaded one
/// after the other, and never more than fits. It may be interrupted at any time and goes on where it
/// was.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth cache job.toml
  hearth cache job.toml --plan
  hearth cache job.toml --set data.resolution=512 --set data.cache=shared-cache --limit 8GB")]
pub struct Arguments {
    #[command(flatten)]
    job: Job,

    /// The most memory to take: 16GB, or 70% of what hearth would take [default: all of that]
    #[arg(long, value_name = "SIZE")]
    limit: Option<Limit>,

    #[command(flatten)]
    engine: Engine,

    /// Say what is missing and how much memory each phase takes, and stop
    #[arg(long)]
    plan: bool,

    /// Do not say how far it has come
    #[arg(long)]
    quiet: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What is in the cache for a job, and what was done for it.
#[derive(Serialize)]
pub struct Summary {
    pub folder: PathBuf,
    /// Pictures that are trained on.
    pub pictures: usize,
    pub held_out: usize,
    pub texts: usize,
    /// What was encoded now, or would be.
    pub missing_pictures: usize,
    pub missing_texts: usize,
    pub is_done: bool,
    pub buckets: Vec<Row>,
    pub problems: Vec<Wrong>,
    pub phases: Vec<Memory>,
    pub peak_bytes: usize,
    pub limit_bytes: usize,
    /// Bytes of the whole cache, of other jobs too.
    pub bytes: u64,
    pub secs: f64,
    pub pictures_per_sec: Option<f64>,
}

/// Pictures of one size.
#[derive(Serialize)]
pub struct Row {
    pub width: usize,
    pub height: usize,
    pub pictures: usize,
}

/// Something wrong with a file.
#[derive(Serialize)]
pub struct Wrong {
    pub path: PathBuf,
    pub what: String,
    pub is_skipped: bool,
}

/// A part of the work and its memory.
#[derive(Serialize)]
pub struct Memory {
    pub name: &'static str,
    pub peak_bytes: usize,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let begun = Instant::now();
    let config = arguments.job.resolve()?;
    let pipeline = Pipeline::open(&config.base.path, config.base.rest.as_deref())?;
    let encoding = Encoding::begin(arguments.quiet)?;
    let tell = |event| encoding.tell(event);
    let caching = Caching::new(&pipeline, Request::of(&config)?, &tell)?;
    let (limit, missing) = (arguments.engine.limit_bytes(arguments.limit), caching.missing());
    let phases = caching.plan(arguments.engine.kind(), limit)?;
    let summary = if arguments.plan {
        Summary::new(&config, caching.index(), missing, &phases)
    } else {
        let peak_bytes = phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0);
        let device = arguments.engine.open(peak_bytes)?;
        Summary::new(&config, &caching.run(&device, &tell)?, missing, &phases)
    };
    let pictures_per_sec = encoding.pictures_per_sec();
    drop(encoding);
    let secs = begun.elapsed().as_secs_f64();
    let is_done = !arguments.plan;
    let summary = Summary { limit_bytes: limit, secs, pictures_per_sec, is_done, ..summary };
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, &summary).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", render::cache::page(&summary))?;
    }
    Ok(Outcome::Done)
}

impl Summary {
    fn new(config: &RunConfig, index: &Index, missing: Missing, phases: &[Phase]) -> Self {
        let mut buckets = BTreeMap::<Bucket, usize>::new();
        for sample in index.train.iter().chain(&index.held_out) {
            *buckets.entry(sample.bucket).or_default() += 1;
        }
        let row = |(bucket, pictures): (Bucket, usize)| Row {
            width: bucket.width,
            height: bucket.height,
            pictures,
        };
        let wrong = |problem: &Problem| Wrong {
            path: problem.path.clone(),
            what: problem.kind.to_string(),
            is_skipped: problem.is_skipped,
        };
        let memory = |phase: &Phase| Memory { name: phase.name, peak_bytes: phase.peak_bytes };
        Self {
            folder: config.cache_folder(),
            pictures: index.train.len(),
            held_out: index.held_out.len(),
            texts: index.n_texts,
            missing_pictures: missing.pictures,
            missing_texts: missing.texts,
            is_done: false,
            buckets: buckets.into_iter().map(row).collect(),
            problems: index.problems.iter().map(wrong).collect(),
            phases: phases.iter().map(memory).collect(),
            peak_bytes: phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0),
            limit_bytes: 0,
            bytes: index.bytes(),
            secs: 0.0,
            pictures_per_sec: None,
        }
    }
}
