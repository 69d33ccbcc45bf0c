//! `hearth cache`: what a job is trained on, looked through and encoded once.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Instant;

use serde::Serialize;
use trainer::cache::{CachePlan, Caching, Index, Missing, Request};
use trainer::config::RunConfig;
use trainer::config::material::Material;
use trainer::cost::Phase;
use trainer::data::{Bucket, Findings, Problem, scan};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::text::T5Loading;
use trainer::train::texts::{Opened, open_texts};

use super::engine::{COMPUTER, Engine, Limit};
use super::job::Job;
use crate::commands::Outcome;
use crate::failure::Failure;
use crate::render;
use crate::render::cache::{BucketRow, CacheSummary, Encoding, PhaseMemory, TextSummary, Wrong};

/// List what a job is trained on and what is left out, and encode it once.
///
/// Training does it too; this does it alone, to see what a folder holds or on another computer. What
/// is in the cache already is not encoded again. The autoencoder and the text encoders are loaded one
/// after the other, and never more than fits. It may be interrupted at any time and goes on where it
/// was. Texts for a language model become tokens.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth cache job.toml
  hearth cache job.toml --plan
  hearth cache job.toml --resolution 512 --set data.cache=shared-cache --limit 8GB")]
pub struct Arguments {
    #[command(flatten)]
    job: Job,

    /// The most memory to take: 16GB, or 70% of what hearth would take [default: all of that]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<Limit>,

    #[command(flatten)]
    engine: Engine,

    /// List all that is left out and why, then what is missing and the memory of each phase, and stop
    #[arg(long)]
    plan: bool,

    /// Print nothing but warnings and errors
    #[arg(long)]
    quiet: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    let config = arguments.job.resolve("cache")?;
    match config.material {
        Material::Pictures { .. } => of_images(arguments, &config, out),
        Material::Texts { .. } => of_texts(arguments, &config, out),
    }
}

fn of_images(
    arguments: &Arguments,
    config: &RunConfig,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let begun = Instant::now();
    let pipeline = Pipeline::open(&config.base.path, config.base.rest.as_deref())?;
    let encoding = Encoding::begin(arguments.quiet)?;
    let tell = |event| encoding.tell(event);
    let caching = match Caching::new(&pipeline, Request::of(config)?, &tell) {
        Ok(caching) => caching,
        Err(error) => {
            drop(encoding);
            list_unusable(arguments, config, out)?;
            return Err(error.into());
        }
    };
    let (limit, missing) = (arguments.engine.limit_bytes(arguments.limit)?, caching.missing());
    let CachePlan { phases, t5 } = caching.plan(arguments.engine.kind(), limit)?;
    let summary = if arguments.plan {
        CacheSummary::new(config, caching.index(), missing, &phases)
    } else {
        let peak_bytes = phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0);
        let device = arguments.engine.open(peak_bytes)?;
        CacheSummary::new(config, &caching.run(&device, t5, &tell)?, missing, &phases)
    };
    let pictures_per_sec = encoding.pictures_per_sec();
    drop(encoding);
    let secs = begun.elapsed().as_secs_f64();
    let (is_done, is_t5_in_blocks) = (!arguments.plan, t5 == T5Loading::Blocks);
    let summary = CacheSummary {
        limit_bytes: limit,
        is_t5_in_blocks,
        secs,
        pictures_per_sec,
        is_done,
        ..summary
    };
    print(arguments, &summary, &summary.problems, || render::cache::page(&summary), out)
}

/// Of a folder in which nothing can be used, all the same: that is when the reasons matter most.
fn list_unusable(
    arguments: &Arguments,
    config: &RunConfig,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let (data, _) = config.material.pictures()?;
    if let Ok(found) = scan(&data.images)
        && found.items.is_empty()
        && !arguments.json
    {
        let left_out = Findings::of_images(&found.problems, 0).left_out;
        write!(out, "{}", render::cache::problems_page(&left_out, &wrongs(&found.problems)))?;
    }
    Ok(())
}

/// Texts become tokens also for a plan: what is wrong with a record shows only then.
fn of_texts(
    arguments: &Arguments,
    config: &RunConfig,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    let begun = Instant::now();
    let opened = Opened::of(config, false)?;
    let lesson = opened.lesson(config)?;
    let encoding = Encoding::begin(arguments.quiet)?;
    let texts = open_texts(&lesson, config, &|event| encoding.tell(event))?;
    drop(encoding);
    let summary = TextSummary {
        left_out: texts.findings().left_out,
        problems: wrongs(texts.problems()),
        folder: config.cache_folder(),
        files: texts.n_files(),
        documents: texts.n_documents(),
        tokens: texts.n_tokens(),
        length: lesson.text.length,
        sequences: texts.n_train(),
        held_out: texts.n_held_out(),
        secs: begun.elapsed().as_secs_f64(),
    };
    print(arguments, &summary, &summary.problems, || render::cache::text_page(&summary), out)
}

fn print(
    arguments: &Arguments,
    summary: &impl Serialize,
    problems: &[Wrong],
    page: impl FnOnce() -> String,
    out: &mut dyn Write,
) -> Result<Outcome, Failure> {
    if arguments.json {
        serde_json::to_writer_pretty(&mut *out, summary).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else if arguments.quiet {
        for problem in problems.iter().filter(|problem| !problem.is_note) {
            render::warn(&format!("{} {}", problem.path.display(), problem.what));
        }
    } else {
        write!(out, "{}", page())?;
    }
    Ok(Outcome::Done)
}

fn wrongs(problems: &[Problem]) -> Vec<Wrong> {
    let wrong = |problem: &Problem| Wrong {
        path: problem.path.clone(),
        what: problem.kind.to_string(),
        reason: problem.kind.reason(),
        is_skipped: problem.is_skipped,
        is_note: problem.kind.is_note(),
    };
    problems.iter().map(wrong).collect()
}

impl CacheSummary {
    fn new(config: &RunConfig, index: &Index, missing: Missing, phases: &[Phase]) -> Self {
        let mut buckets = BTreeMap::<Bucket, usize>::new();
        for sample in index.train.iter().chain(&index.held_out) {
            *buckets.entry(sample.bucket).or_default() += 1;
        }
        let row = |(bucket, pictures): (Bucket, usize)| BucketRow {
            width: bucket.width,
            height: bucket.height,
            pictures,
        };
        let memory = |phase: &Phase| PhaseMemory { name: phase.name, peak_bytes: phase.peak_bytes };
        Self {
            left_out: index.findings(0).left_out,
            problems: wrongs(&index.problems),
            folder: config.cache_folder(),
            pictures: index.train.len(),
            held_out: index.held_out.len(),
            texts: index.n_texts,
            missing_pictures: missing.pictures,
            missing_texts: missing.texts,
            is_done: false,
            buckets: buckets.into_iter().map(row).collect(),
            phases: phases.iter().map(memory).collect(),
            peak_bytes: phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0),
            limit_bytes: 0,
            is_t5_in_blocks: false,
            bytes: index.bytes(),
            secs: 0.0,
            pictures_per_sec: None,
        }
    }
}
