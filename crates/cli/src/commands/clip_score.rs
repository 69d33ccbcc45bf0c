//! `hearth clip-score`: how near the samples of a run are to their prompts and to the images it trains on, by a CLIP model.

use std::io::Write;
use std::path::{Path, PathBuf};

use compute::Dtype;
use trainer::clip_score::SampleScorer;
use trainer::clip_score::model::ClipModel;
use trainer::clip_score::tasks::{ClipScoreTasks, ComparedImages};
use trainer::event::clip_scores::ClipScores;
use trainer::model::build::Precision;
use trainer::report;

use super::device::{COMPUTER, DeviceArgs, MemoryLimitArg};
use super::model_arg::ModelArg;
use super::named_value;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::clip_score::ClipScorePage;
use crate::render::image_progress::ImageProgress;
use crate::render::progress::clear;

/// Measure how near the samples of a run are to their prompts and to the training images, with CLIP.
///
/// The scores are cosines between embeddings, over the steps of the run: the first tells whether samples still follow their
/// prompts, the second whether they look like what is learnt. They are written to clip-scores.json in the run's folder and
/// shown in its report. The run may be at work, or over.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth fetch openai/clip-vit-large-patch14
  hearth clip-score my-cat --clip openai/clip-vit-large-patch14
  hearth clip-score my-cat --clip openai/clip-vit-base-patch32 --images other-photos
  hearth clip-score my-cat --clip openai/clip-vit-base-patch32 --most-images 0      prompts only
  hearth clip-score my-cat --clip openai/clip-vit-base-patch32 --json")]
pub struct ClipScoreArgs {
    /// Folder of the run
    #[arg(value_name = "RUN")]
    run: PathBuf,

    /// CLIP model: a transformers folder, or the name of a fetched one
    #[arg(long, value_name = "MODEL")]
    clip: ModelArg,

    /// Folder of images to compare with [default: those that the run trains on]
    #[arg(long, value_name = "FOLDER")]
    images: Option<PathBuf>,

    /// Maximum number of images to compare with, evenly chosen; 0 compares with prompts only
    #[arg(long, value_name = "N", default_value_t = 200)]
    most_images: usize,

    /// Number format of weights and activations
    #[arg(long, default_value = "f32", value_parser = named_value::parser::<Dtype>())]
    dtype: Dtype,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &ClipScoreArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let ClipScoreArgs { run, clip, images, most_images, dtype, limit, engine, json } = arguments;
    let model = ClipModel::open(clip)?;
    let progress = ImageProgress::begin("scoring", model.n_bytes())?;
    let compared = ComparedImages { folder: images.clone(), most: *most_images };
    let tasks = ClipScoreTasks::find(run, &compared, &|_| progress.go_on())?;
    let precision = Precision::plain(*dtype);
    let limit_bytes = engine.limit_bytes(*limit)?;
    let peak_bytes = model.plan(precision, engine.kind(), limit_bytes)?;
    let device = engine.open(peak_bytes)?;
    let loaded = model.load(&device, precision, &|bytes| progress.on_loaded(bytes))?;
    let scored = score(run, &tasks, SampleScorer::new(&loaded), &progress)?;
    clear();
    let Some(scores) = scored else { return Ok(CommandOutcome::Interrupted) };
    let scores = ClipScores { model: clip.display().to_string(), ..scores };
    let path = scores.write(run)?;
    let report = report::write(run)?;
    let by_step = scores.by_step(&tasks.samples);
    let page = ClipScorePage { by_step, scores, path, report, peak_bytes, limit_bytes };
    if *json {
        render::json::line(out, &page)?;
    } else {
        write!(out, "{}", render::clip_score::page(&page))?;
    }
    Ok(CommandOutcome::Done)
}

/// The scores of all samples that can be read; none if it was interrupted.
fn score(
    run: &Path,
    tasks: &ClipScoreTasks,
    mut scorer: SampleScorer<'_>,
    progress: &ImageProgress,
) -> Result<Option<ClipScores>, Failure> {
    let warn = |text: &str| {
        clear();
        render::warn(text);
    };
    tasks.notes.iter().for_each(|note| warn(note));
    progress.begin_images(tasks.images.len() + tasks.samples.len());
    for path in &tasks.images {
        if !progress.go_on() {
            return Ok(None);
        }
        if let Err(problem) = scorer.add_image(path)? {
            warn(&format!("{} {problem}", path.display()));
        }
        progress.on_image();
    }
    let mut scores = ClipScores { n_images: scorer.n_images(), ..ClipScores::default() };
    for sample in &tasks.samples {
        if !progress.go_on() {
            return Ok(None);
        }
        match scorer.score(run, sample)? {
            Ok(score) => scores.samples.push(score),
            Err(problem) => warn(&format!("{} {problem}", sample.path.display())),
        }
        progress.on_image();
    }
    Ok(Some(scores))
}
