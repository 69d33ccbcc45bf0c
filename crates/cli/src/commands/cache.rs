//! `hearth cache`: the dataset of a job, checked and encoded once.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use serde::Serialize;
use trainer::cache::{
    CacheBuilder, CacheIndex, CachePlan, CacheRequest, CachedSample, ImportedEntries,
    MissingEntries, media_kinds,
};
use trainer::config::RunConfig;
use trainer::config::preference::PreferenceConfig;
use trainer::config::training_data::TrainingData;
use trainer::cost::StageMemory;
use trainer::data::{Findings, Problem, SampleSize, ScanOptions, scan};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::text::EncoderLoading;
use trainer::train::language::{LanguagePipeline, open_texts};
use trainer::train::preference::{PreferencePipeline, open_preferences};

use super::device::{COMPUTER, DeviceArgs, MemoryLimitArg};
use super::job::JobArgs;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::cache::{
    BucketRow, CacheSummary, EncodingProgress, FileProblem, PhaseMemory, PreferenceSummary,
    TextSummary,
};

/// Check a job's dataset, and cache its latents, text embeddings or tokens.
///
/// Training does this too; here it runs alone, to check a folder or on another computer. What is cached already
/// is not encoded again. VAE and text encoders are loaded one after the other, within the memory limit. It may
/// be interrupted at any time and continues where it was. Texts for a language model are tokenised.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth cache job.toml
  hearth cache job.toml --plan
  hearth cache job.toml --from output/cache
  hearth cache job.toml --resolution 512 --set data.cache=shared-cache --limit 8GB")]
pub struct CacheArgs {
    #[command(flatten)]
    job: JobArgs,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    #[command(flatten)]
    engine: DeviceArgs,

    /// First take what fits from the cache of another trainer: that of FlyMyAI for Qwen-Image, or its output folder
    #[arg(long, value_name = "FOLDER", conflicts_with = "plan")]
    from: Option<PathBuf>,

    /// List all files that are left out and why, what is not cached yet and the memory of each phase, and stop
    #[arg(long)]
    plan: bool,

    /// Print nothing but warnings and errors
    #[arg(long)]
    quiet: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &CacheArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let config = arguments.job.resolve("cache")?;
    match config.data {
        TrainingData::Images { .. } => cache_images(arguments, &config, out),
        TrainingData::Texts { preference: Some(ref preference), .. } => {
            cache_preferences(arguments, &config, preference, out)
        }
        TrainingData::Texts { preference: None, .. } => cache_texts(arguments, &config, out),
    }
}

fn cache_images(
    arguments: &CacheArgs,
    config: &RunConfig,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let begun = Instant::now();
    let pipeline = Pipeline::open(&config.base.path, &config.base.parts())?;
    let encoding = EncodingProgress::begin(arguments.quiet)?;
    let tell = |event| encoding.on_event(event);
    let mut caching = match CacheBuilder::new(&pipeline, CacheRequest::from_config(config)?, &tell)
    {
        Ok(caching) => caching,
        Err(error) => {
            drop(encoding);
            list_unusable(arguments, config, &pipeline, out)?;
            return Err(error.into());
        }
    };
    let imported = match &arguments.from {
        Some(folder) => caching.import(folder, &tell)?,
        None => ImportedEntries::default(),
    };
    let (limit, missing) = (arguments.engine.limit_bytes(arguments.limit)?, caching.missing());
    let engine = &arguments.engine;
    let CachePlan { phases, loading, decoding_bytes } =
        caching.plan(engine.kind(), limit, engine.host_bytes())?;
    let summary = if arguments.plan {
        CacheSummary::new(config, caching.index(), missing, &phases)
    } else {
        let peak_bytes = phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0);
        let device = engine.open(peak_bytes)?;
        let index = caching.run(&device, loading, decoding_bytes, &tell)?;
        CacheSummary::new(config, &index, missing, &phases)
    };
    let images_per_sec = encoding.images_per_sec();
    drop(encoding);
    let secs = begun.elapsed().as_secs_f64();
    let (is_done, is_encoder_in_blocks) = (!arguments.plan, loading == EncoderLoading::Blocks);
    let summary = CacheSummary {
        limit_bytes: limit,
        decoding_bytes,
        is_encoder_in_blocks,
        imported_images: imported.images,
        imported_texts: imported.texts,
        secs,
        images_per_sec,
        is_done,
        ..summary
    };
    print(arguments, &summary, &summary.problems, || render::cache::page(&summary), out)
}

/// Of a folder in which nothing can be used, all the same: that is when the reasons matter most.
fn list_unusable(
    arguments: &CacheArgs,
    config: &RunConfig,
    pipeline: &Pipeline,
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let (sets, _) = config.data.images()?;
    for data in sets {
        let (media, follow_links) = (media_kinds(pipeline), data.follow_links);
        let options = ScanOptions { media, follow_links };
        if let Ok(found) = scan(&data.images, &data.references.0, options, &|_| true)
            && found.items.is_empty()
            && !arguments.json
        {
            let left_out = Findings::of_images(&found.problems, 0).left_out;
            write!(
                out,
                "{}",
                render::cache::problems_page(&left_out, &file_problems(&found.problems))
            )?;
        }
    }
    Ok(())
}

/// Texts become tokens also for a plan: what is wrong with a record shows only then.
fn cache_texts(
    arguments: &CacheArgs,
    config: &RunConfig,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let begun = Instant::now();
    let opened = LanguagePipeline::open(config, false)?;
    let task = opened.task(config)?;
    let encoding = EncodingProgress::begin(arguments.quiet)?;
    let texts = open_texts(&task, config, &|event| encoding.on_event(event))?;
    drop(encoding);
    let summary = TextSummary {
        left_out: texts.findings().left_out,
        problems: file_problems(texts.problems()),
        folder: config.cache_folder(),
        files: texts.n_files(),
        documents: texts.n_documents(),
        tokens: texts.n_tokens(),
        length: task.text.length,
        sequences: texts.n_train(),
        held_out: texts.n_held_out(),
        secs: begun.elapsed().as_secs_f64(),
    };
    print(arguments, &summary, &summary.problems, || render::cache::text_page(&summary), out)
}

/// The same of preferences.
fn cache_preferences(
    arguments: &CacheArgs,
    config: &RunConfig,
    preference: &PreferenceConfig,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let begun = Instant::now();
    let opened = PreferencePipeline::open(config, false)?;
    let task = opened.task(config, preference)?;
    let encoding = EncodingProgress::begin(arguments.quiet)?;
    let preferences = open_preferences(&task, config, &|event| encoding.on_event(event))?;
    drop(encoding);
    let summary = PreferenceSummary {
        left_out: preferences.findings().left_out,
        problems: file_problems(preferences.problems()),
        folder: config.cache_folder(),
        files: preferences.n_files(),
        unit: preference.record_noun(),
        train: preferences.n_train(),
        held_out: preferences.n_held_out(),
        tokens: preferences.n_tokens(),
        cut: preferences.n_cut(),
        length: task.language.text.length,
        secs: begun.elapsed().as_secs_f64(),
    };
    let page = || render::cache::preference_page(&summary);
    print(arguments, &summary, &summary.problems, page, out)
}

fn print(
    arguments: &CacheArgs,
    summary: &impl Serialize,
    problems: &[FileProblem],
    page: impl FnOnce() -> String,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    if arguments.json {
        render::json::object(out, summary)?;
    } else if arguments.quiet {
        for problem in problems.iter().filter(|problem| !problem.is_note) {
            render::warn(&format!("{} {}", problem.path.display(), problem.what));
        }
    } else {
        write!(out, "{}", page())?;
    }
    Ok(CommandOutcome::Done)
}

fn file_problems(problems: &[Problem]) -> Vec<FileProblem> {
    let wrong = |problem: &Problem| FileProblem {
        path: problem.path.clone(),
        what: problem.kind.to_string(),
        reason: problem.kind.reason(),
        is_skipped: problem.is_skipped,
        is_note: problem.kind.is_note(),
    };
    problems.iter().map(wrong).collect()
}

impl CacheSummary {
    fn new(
        config: &RunConfig,
        index: &CacheIndex,
        missing: MissingEntries,
        phases: &[StageMemory],
    ) -> Self {
        let mut buckets = BTreeMap::<SampleSize, usize>::new();
        for sample in index.train.iter().chain(&index.held_out) {
            let size = SampleSize::from(sample.bucket).with_frames(sample.frames());
            *buckets.entry(size).or_default() += 1;
        }
        let row = |(size, images): (SampleSize, usize)| BucketRow {
            width: size.bucket.width,
            height: size.bucket.height,
            frames: size.frames,
            images,
        };
        let clips = index.train.iter().filter(|sample| CachedSample::is_clip(sample)).count();
        let memory =
            |phase: &StageMemory| PhaseMemory { name: phase.name, peak_bytes: phase.peak_bytes };
        Self {
            left_out: index.findings(0).left_out,
            problems: file_problems(&index.problems),
            folder: config.cache_folder(),
            images: index.train.len() - clips,
            clips,
            held_out: index.held_out.len(),
            texts: index.n_texts,
            missing_images: missing.images,
            missing_texts: missing.texts,
            imported_images: 0,
            imported_texts: 0,
            is_done: false,
            buckets: buckets.into_iter().map(row).collect(),
            phases: phases.iter().map(memory).collect(),
            peak_bytes: phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0),
            decoding_bytes: 0,
            limit_bytes: 0,
            is_encoder_in_blocks: false,
            bytes: index.bytes(),
            secs: 0.0,
            images_per_sec: None,
        }
    }
}
