//! `hearth caption`: a caption for every image of a folder that has none, by a vision-language model.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use trainer::caption::captioner::{
    CaptionRequest, Captioner, DEFAULT_MAX_PIXELS, DEFAULT_PROMPT, LoadedCaptioner,
};
use trainer::caption::folder::{CaptionFolderOptions, CaptionTask, CaptionTasks};
use trainer::sample::token_sampler::TokenSampler;

use super::device::{COMPUTER, DeviceArgs, FormatArgs, MemoryLimitArg};
use super::model_arg::ModelArg;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::caption::{
    CaptionPlan, CaptionRow, CaptionSummary, PlannedCaption, UncaptionedImage,
};
use crate::render::image_progress::ImageProgress;
use crate::render::progress::clear;

/// Write captions for a folder of images, with Qwen2.5-VL.
///
/// Each image gets a .txt file of the same name, in one line. Images with a caption, in a file or in metadata, are left
/// alone. It may be interrupted at any time and continues where it was: a caption is there as a whole or not at all. Images
/// are seen one after the other. The memory is planned before the model is loaded, and no more is taken.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth fetch Qwen/Qwen2.5-VL-3B-Instruct
  hearth caption my-cat --base Qwen/Qwen2.5-VL-3B-Instruct --trigger 'ohwx cat'
  hearth caption my-cat --base Qwen/Qwen2.5-VL-7B-Instruct --quantise nf4 --max-pixels 500000
  hearth caption my-cat --base Qwen/Qwen-Image --dry-run      the images without a caption, and the memory that it takes
  hearth caption scans --base Qwen/Qwen2.5-VL-3B-Instruct --prompt 'List what is to be seen as comma-separated tags.'")]
pub struct CaptionArgs {
    /// Folder of images, with all folders below
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,

    /// Vision-language model: Qwen2.5-VL as a transformers folder, the name of a fetched one, or a Qwen-Image folder
    #[arg(long, value_name = "MODEL")]
    base: ModelArg,

    /// What the model is asked of each image [default: a plain description, as training needs it]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,

    /// Trigger word: put in front of every caption that does not have it
    #[arg(long, value_name = "WORD")]
    trigger: Option<String>,

    /// Ending of caption files
    #[arg(long, value_name = "ENDING", default_value = "txt", value_parser = ["txt", "caption"])]
    extension: String,

    /// Write captions anew that are in files already; those in metadata stay
    #[arg(long)]
    overwrite: bool,

    /// Scale larger images down to so many pixels for the model [default: 1003520, or fewer if the model takes fewer]
    #[arg(long, value_name = "N")]
    max_pixels: Option<u64>,

    /// Maximum number of tokens of a caption
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_tokens: usize,

    /// Sampling temperature; 0 is greedy decoding
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,

    /// Divide the logits of tokens that occurred by this; 1 is off [default: as the model's `generation_config.json` says]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,

    /// Seed of the first caption, where --temperature is not 0; each following one takes the next seed
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Use images that links in the folder point to
    #[arg(long)]
    follow_links: bool,

    /// List the images without a caption and the memory that it takes, and stop
    #[arg(long, visible_alias = "plan")]
    dry_run: bool,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    #[command(flatten)]
    formats: FormatArgs,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object per image, and one at the end
    #[arg(long)]
    json: bool,
}

pub fn run(arguments: &CaptionArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let begun = Instant::now();
    let captioner = Captioner::open(&arguments.base, arguments.request())?;
    let progress = ImageProgress::begin("captioning", captioner.model_bytes())?;
    let options = CaptionFolderOptions {
        extension: arguments.extension.clone(),
        overwrites: arguments.overwrite,
        follow_links: arguments.follow_links,
    };
    let found = CaptionTasks::find(&arguments.folder, &options, &|_| progress.go_on())?;
    let CaptionTasks { tasks, n_captioned, n_in_metadata, problems } = found;
    let mut job = CaptionJob { arguments, captioner: &captioner, progress: &progress, out };
    for problem in problems.iter().filter(|problem| !problem.kind.is_note()) {
        job.leave_out(&UncaptionedImage::new(&problem.path, &problem.kind, problem.is_skipped))?;
    }
    let n_skipped = problems.iter().filter(|it| it.is_skipped && !it.kind.is_note()).count();
    let (tasks, n_unseen) = job.seen(tasks)?;
    let mut summary = CaptionSummary {
        n_captioned,
        n_in_metadata,
        n_left_out: n_skipped + n_unseen,
        ..CaptionSummary::default()
    };
    if !tasks.is_empty() || arguments.dry_run {
        job.plan(&tasks, &mut summary)?;
    }
    if arguments.dry_run {
        return job.show_plan(&tasks, &summary);
    }
    if !tasks.is_empty() {
        job.caption_all(&tasks, &mut summary)?;
    }
    summary.secs = begun.elapsed().as_secs_f64();
    job.finish(&summary)
}

impl CaptionArgs {
    fn request(&self) -> CaptionRequest {
        CaptionRequest {
            prompt: self.prompt.clone().unwrap_or_else(|| DEFAULT_PROMPT.into()),
            trigger: self.trigger.clone(),
            max_pixels: self.max_pixels.unwrap_or(DEFAULT_MAX_PIXELS),
            max_tokens: self.max_tokens,
            sampler: TokenSampler {
                temperature: self.temperature,
                seed: self.seed,
                ..TokenSampler::greedy()
            },
            repetition_penalty: self.repetition_penalty,
        }
    }
}

/// A folder at work.
struct CaptionJob<'a> {
    arguments: &'a CaptionArgs,
    captioner: &'a Captioner,
    progress: &'a ImageProgress,
    out: &'a mut dyn Write,
}

impl CaptionJob<'_> {
    /// Those that the model can see, and how many it cannot.
    fn seen(&mut self, tasks: Vec<CaptionTask>) -> Result<(Vec<CaptionTask>, usize), Failure> {
        let n_before = tasks.len();
        let mut seen = Vec::with_capacity(n_before);
        for task in tasks {
            match self.captioner.check_size(task.size) {
                Ok(()) => seen.push(task),
                Err(error) => {
                    self.leave_out(&UncaptionedImage::new(&task.image, &error, true))?;
                }
            }
        }
        let n_unseen = n_before - seen.len();
        Ok((seen, n_unseen))
    }

    /// Tells why an image gets no caption, or what is odd about it.
    fn leave_out(&mut self, image: &UncaptionedImage) -> Result<(), Failure> {
        clear();
        if self.arguments.json {
            return self.print_json(image);
        }
        render::warn(&format!("{} {}", image.image.display(), image.problem));
        Ok(())
    }

    fn print_json(&mut self, row: &impl serde::Serialize) -> Result<(), Failure> {
        render::json::line(self.out, row)?;
        Ok(self.out.flush()?)
    }

    fn plan(&self, tasks: &[CaptionTask], summary: &mut CaptionSummary) -> Result<(), Failure> {
        let CaptionArgs { engine, formats, limit, .. } = self.arguments;
        summary.limit_bytes = engine.limit_bytes(*limit)?;
        let (kind, limit_bytes) = (engine.kind(), summary.limit_bytes);
        summary.peak_bytes = self.captioner.plan(tasks, formats.precision(), kind, limit_bytes)?;
        Ok(())
    }

    fn show_plan(
        &mut self,
        tasks: &[CaptionTask],
        summary: &CaptionSummary,
    ) -> Result<CommandOutcome, Failure> {
        let planned = |task: &CaptionTask| PlannedCaption {
            image: task.image.clone(),
            caption_file: task.to.clone(),
        };
        let plan = CaptionPlan { images: tasks.iter().map(planned).collect(), summary };
        if self.arguments.json {
            self.print_json(&plan)?;
        } else {
            write!(self.out, "{}", render::caption::plan_page(&plan))?;
        }
        Ok(CommandOutcome::Done)
    }

    fn caption_all(
        &mut self,
        tasks: &[CaptionTask],
        summary: &mut CaptionSummary,
    ) -> Result<(), Failure> {
        let device = self.arguments.engine.open(summary.peak_bytes)?;
        let precision = self.arguments.formats.precision();
        let tick = |bytes| self.progress.on_loaded(bytes);
        let mut loaded = self.captioner.load(&device, precision, tasks, &tick)?;
        self.progress.begin_images(tasks.len());
        for (task, seed) in tasks.iter().zip(self.arguments.seed..) {
            if !self.progress.go_on() {
                break;
            }
            self.caption(&mut loaded, task, seed, summary)?;
            self.progress.on_image();
        }
        summary.is_interrupted = !self.progress.go_on();
        summary.n_left = tasks.len() - summary.n_written - summary.n_failed;
        Ok(())
    }

    fn caption(
        &mut self,
        loaded: &mut LoadedCaptioner<'_>,
        task: &CaptionTask,
        seed: u64,
        summary: &mut CaptionSummary,
    ) -> Result<(), Failure> {
        let begun = Instant::now();
        let mut fail = |problem: &dyn std::fmt::Display| {
            summary.n_failed += 1;
            UncaptionedImage::new(&task.image, problem, true)
        };
        let pixels = match task.pixels() {
            Ok(pixels) => pixels,
            Err(problem) => return self.leave_out(&fail(&problem)),
        };
        let written = loaded.caption(pixels, seed, &|| self.progress.go_on())?;
        let Some(caption) = written else { return Ok(()) };
        if caption.text.is_empty() {
            return self.leave_out(&fail(&"got no caption: the model answered nothing"));
        }
        if !task.write(&caption.text)? {
            return self.leave_out(&fail(&"got a caption from somebody else meanwhile"));
        }
        summary.n_written += 1;
        summary.n_cut_off += usize::from(!caption.is_whole);
        let row = CaptionRow {
            image: task.image.clone(),
            caption_file: task.to.clone(),
            n_tokens: caption.tokens.len(),
            caption: caption.text,
            is_whole: caption.is_whole,
            secs: begun.elapsed().as_secs_f64(),
        };
        clear();
        if self.arguments.json {
            return self.print_json(&row);
        }
        write!(self.out, "{}", render::caption::line(&row))?;
        Ok(self.out.flush()?)
    }

    fn finish(&mut self, summary: &CaptionSummary) -> Result<CommandOutcome, Failure> {
        clear();
        if self.arguments.json {
            self.print_json(summary)?;
        } else {
            write!(self.out, "{}", render::caption::page(summary))?;
        }
        let is_interrupted = summary.is_interrupted;
        Ok(if is_interrupted { CommandOutcome::Interrupted } else { CommandOutcome::Done })
    }
}
