//! `hearth sample`: images or texts from prompts, depending on the base model.

mod text;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use trainer::TrainerError;
use trainer::data::reference::read_reference;
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::editing::REFERENCE_RESOLUTION;
use trainer::model::diffusion::family::DiffusionFamily;
use trainer::model::diffusion::guidance::{Guidance, GuidanceScales};
use trainer::model::diffusion::text::EncoderLoading;
use trainer::model::{self, OpenModel};
use trainer::sample::clip::{self, Clip, ClipFileFormat};
use trainer::sample::image_file::{self, ImageFileFormat};
use trainer::sample::{ImageRequest, SampleJob, SamplePlan};
use trainer::text::Tokenizer;
use weights::hub::model_name;

use super::device::{COMPUTER, DeviceArgs, FormatArgs, MemoryLimitArg};
use super::model_arg::ModelArg;
use super::named_value;
use super::output;
use super::parts::PartArgs;
use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::sample::{SamplePhase, SampleSummary, SampledImage, SamplingProgress};

/// Generate images from prompts, or continue prompts as text.
///
/// With an image model, text encoders, transformer and VAE decoder are loaded one after the other. Prompt and
/// settings are written into the image (PNG text or JPEG EXIF). A language model continues the prompt on
/// standard output. The memory of each phase is planned before it starts, and no more is taken. The same seed
/// gives the same result on the same device.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth sample --base stable-diffusion-3.5-medium --prompt 'a red fox in the snow'
  hearth sample --base sd3 --adapter fox.safetensors --prompt 'a photo of sks fox' --out fox.png
  hearth sample --base sd3 --prompts prompts.txt --size 768x1024 --out images/
  hearth sample --base FLUX.1-Kontext-dev --reference room.jpg --prompt 'paint the walls green'
  hearth sample --base sd3.5_large.safetensors --rest stable-diffusion-3.5-medium --prompt 'a fox'
  hearth sample --base sd3 --prompt 'a fox' --quantise nf4 --limit 8GB --plan
  hearth sample --base Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers --prompt 'a fox runs' --frames 49 --out fox.webp
  hearth sample --base SmolLM2-135M --prompt 'Once upon a time' --max-tokens 100
  hearth sample --base Qwen3-4B.gguf --adapter notes --prompt 'Why is the sky blue?' --chat")]
pub struct SampleArgs {
    /// Base model: a diffusers or transformers folder, a GGUF file, a single-file checkpoint, or the name of a
    /// fetched model
    #[arg(long, value_name = "MODEL")]
    base: ModelArg,

    /// LoRA or DoRA adapter: the folder of a run, or a file or folder of diffusers, PEFT, kohya or ComfyUI
    #[arg(long, value_name = "PATH")]
    adapter: Option<ModelArg>,

    /// Prompt; may be given several times
    #[arg(long, value_name = "TEXT", required_unless_present = "prompts")]
    prompt: Vec<String>,

    /// File with one prompt per line
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    prompts: Option<PathBuf>,

    /// Seed of the first image or text; each following one takes the next seed
    #[arg(long, default_value_t = 1, allow_negative_numbers = true, value_parser = seed)]
    seed: u64,

    /// Memory limit: 16GB, or 70% of the default limit [default: free memory less a reserve]
    #[arg(long, value_name = "SIZE", help_heading = COMPUTER)]
    limit: Option<MemoryLimitArg>,

    #[command(flatten)]
    formats: FormatArgs,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Show the memory of each phase, and stop
    #[arg(long)]
    plan: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    images: SampleImageArgs,

    #[command(flatten)]
    writing: text::SampleTextArgs,
}

/// How images are generated.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Image models")]
struct SampleImageArgs {
    /// Output: a .png or .jpg file, of a clip a .webp or .mp4, or a folder; several get -1, -2, … [default: image.png, clip.webp]
    #[arg(long, value_name = "PATH")]
    out: Option<PathBuf>,

    /// Width and height in pixels, or one number for both [default: by model family, 1024x1024 for SD3; as a reference]
    #[arg(long, value_name = "WxH", value_parser = size)]
    size: Option<[usize; 2]>,

    /// Frames of a clip, for a model of videos; 1 makes an image [default: by model family]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1025))]
    frames: Option<u32>,

    /// Frames per second of a clip [default: by model family]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=240))]
    fps: Option<u32>,

    /// Denoising steps [default: by model family, 28 for SD3]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
    steps: Option<u32>,

    /// Guidance scale [default: by model family, 7 for SD3, 3.5 for FLUX.1 dev]
    ///
    /// SD3: classifier-free guidance (CFG); 1 is without guidance, and twice as fast. FLUX.1 dev takes the scale as
    /// an input of the model, FLUX.1 schnell takes none.
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true, value_parser = guidance)]
    guidance: Option<f32>,

    /// FLUX.1: classifier-free guidance with the negative prompt on top, at half the speed [default: 1, off]
    #[arg(long, value_name = "SCALE", allow_negative_numbers = true, value_parser = guidance)]
    true_cfg: Option<f32>,

    /// Negative prompt
    #[arg(long, value_name = "TEXT")]
    negative: Option<String>,

    /// Reference image of an editing model (FLUX.1 Kontext, FLUX.2 klein, Qwen-Image-Edit); several times for several
    #[arg(long, value_name = "IMAGE")]
    reference: Vec<PathBuf>,

    /// References are scaled to the area of a square with this side [default: 1024, as the models' own pipelines]
    #[arg(long, value_name = "PIXELS", requires = "reference", value_parser = clap::value_parser!(u32).range(32..=8192))]
    reference_resolution: Option<u32>,

    /// Start from the tensor `latents` of a file instead of noise from the seed
    #[arg(long, value_name = "FILE")]
    latents: Option<PathBuf>,

    #[command(flatten)]
    parts: PartArgs,
}

impl SampleImageArgs {
    /// The first of them that was typed, for a model that has no use for it.
    fn first_typed(&self) -> Option<&'static str> {
        let Self { out, size, steps, guidance, true_cfg, negative, .. } = self;
        let Self { reference, reference_resolution, latents, parts, frames, fps, .. } = self;
        let typed = [
            ("--out", out.is_some()),
            ("--size", size.is_some()),
            ("--frames", frames.is_some()),
            ("--fps", fps.is_some()),
            ("--steps", steps.is_some()),
            ("--guidance", guidance.is_some()),
            ("--true-cfg", true_cfg.is_some()),
            ("--negative", negative.is_some()),
            ("--reference", !reference.is_empty()),
            ("--reference-resolution", reference_resolution.is_some()),
            ("--latents", latents.is_some()),
        ];
        let typed = typed.into_iter().find(|(_, is_typed)| *is_typed).map(|(name, _)| name);
        typed.or_else(|| parts.first_typed())
    }

    /// Where an image goes, or a clip.
    fn out(&self, frames: usize) -> PathBuf {
        let name = if frames > 1 { "clip.webp" } else { "image.png" };
        match &self.out {
            None => name.into(),
            Some(folder) if output::is_folder(folder) => folder.join(name),
            Some(file) => file.clone(),
        }
    }
}

impl SampleArgs {
    /// All prompts, wherever they were given.
    fn prompts(&self) -> Result<Vec<String>, Failure> {
        let Some(path) = &self.prompts else { return Ok(self.prompt.clone()) };
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::Read { path: path.clone(), error })?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let prompts: Vec<String> = lines.map(str::to_owned).collect();
        if prompts.is_empty() {
            let problem = format!("no prompt in {}", path.display());
            return Err(TrainerError::Request { problem, hint: "write one per line" }.into());
        }
        Ok(prompts)
    }
}

/// The largest that a job file can hold too; the seeds of several images are counted on from it.
fn seed(text: &str) -> Result<u64, String> {
    let parsed: Option<i64> = text.parse().ok();
    let parsed = parsed.and_then(|seed| u64::try_from(seed).ok());
    parsed.ok_or_else(|| format!("accepted is a whole number from 0 to {}", i64::MAX))
}

fn size(text: &str) -> Result<[usize; 2], String> {
    let (w, h) = text.split_once(['x', 'X', '×']).unwrap_or((text, text));
    let side = |text: &str| text.trim().parse().ok();
    side(w).zip(side(h)).map(|(w, h)| [w, h]).ok_or_else(|| {
        "accepted is a width and a height such as 1024x768, or one number for both".to_owned()
    })
}

fn guidance(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(guidance) if (0.0..=100.0).contains(&guidance) => Ok(guidance),
        _ => Err("accepted is a number from 0 to 100".to_owned()),
    }
}

pub fn run(arguments: &SampleArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    match model::open(&arguments.base, &arguments.images.parts.paths())? {
        OpenModel::Language(mut base) => {
            if let Some(adapter) = &arguments.adapter {
                base.add_adapter(adapter)?;
            }
            let tokenizer = Tokenizer::open(&arguments.base)?;
            text::run(arguments, &*base, &tokenizer, out)
        }
        OpenModel::Compressed(base) => text::run_compressed(arguments, &base, out),
        OpenModel::Image(pipeline) => sample_images(arguments, *pipeline, out),
    }
}

fn sample_images(
    arguments: &SampleArgs,
    mut pipeline: Pipeline,
    out: &mut dyn Write,
) -> Result<CommandOutcome, Failure> {
    let begun = Instant::now();
    if let Some(name) = arguments.writing.first_typed() {
        let problem = format!(
            "{name} is for language models, this is an image model: {}",
            arguments.base.display()
        );
        return Err(TrainerError::Request { problem, hint: "leave it out" }.into());
    }
    if let Some(adapter) = &arguments.adapter {
        pipeline.add_adapter(adapter)?;
    }
    let request = request(arguments, pipeline.family())?;
    let file = arguments.images.out(request.frames);
    match request.frames {
        1 => ImageFileFormat::from_path(&file).map(drop)?,
        _ => ClipFileFormat::from_path(&file).map(drop)?,
    }
    warn_truncated(&pipeline, &request);
    let job = SampleJob::new(&pipeline, request.clone())?;
    let limit = arguments.engine.limit_bytes(arguments.limit)?;
    let plan = job.plan(arguments.engine.kind(), limit)?;
    let mut drawn = SampleSummary::planned(&plan, limit, &pipeline);
    if !arguments.plan {
        output::check_file(&file)?;
        let device = arguments.engine.open(plan.peak_bytes())?;
        let drawing = SamplingProgress::begin(request.prompts.len(), request.steps)?;
        let clips = job.run(&device, &plan, &|event| drawing.on_event(event))?;
        drop(drawing);
        for (index, clip) in clips.iter().enumerate() {
            let mut written = name(arguments, &request, index);
            let texts = parameters(arguments, &request, &written);
            match &clip.frames[..] {
                [image] => image_file::write(&written.path, image, &texts)?,
                _ => written.more = write_clip(arguments, &written.path, clip, &texts)?,
            }
            drawn.images.push(written);
        }
    }
    drawn.secs = begun.elapsed().as_secs_f64();
    if arguments.json {
        render::json::object(out, &drawn)?;
    } else {
        write!(out, "{}", render::sample::page(&drawn))?;
    }
    Ok(CommandOutcome::Done)
}

/// Writes a clip; into a folder also its frames, and an MP4 where `ffmpeg` is installed. Returns what else was written.
fn write_clip(
    arguments: &SampleArgs,
    path: &Path,
    clip: &Clip,
    texts: &[(&str, String)],
) -> Result<Vec<PathBuf>, Failure> {
    clip::write(path, clip)?;
    let is_named = arguments.images.out.as_ref().is_some_and(|out| !output::is_folder(out));
    if is_named {
        return Ok(Vec::new());
    }
    let frames = path.with_extension("");
    clip::write_frames(&frames, clip, texts)?;
    Ok(std::iter::once(frames).chain(clip::write_mp4_beside(path, clip)).collect())
}

impl SampleSummary {
    fn planned(plan: &SamplePlan, limit_bytes: usize, pipeline: &Pipeline) -> Self {
        let phase = |phase: &trainer::cost::StageMemory| SamplePhase {
            name: phase.name,
            peak_bytes: phase.peak_bytes,
        };
        Self {
            peak_bytes: plan.peak_bytes(),
            limit_bytes,
            phases: plan.phases.iter().map(phase).collect(),
            is_cfg_batched: plan.is_cfg_batched,
            is_encoder_in_blocks: plan.encoder_loading == EncoderLoading::Blocks,
            tile_pixels: plan.tiling.map(|tiling| tiling.tile * pipeline.vae.vae_scale_factor()),
            images: Vec::new(),
            secs: 0.0,
        }
    }
}

fn request(arguments: &SampleArgs, family: &DiffusionFamily) -> Result<ImageRequest, Failure> {
    let SampleImageArgs { size, steps, guidance, true_cfg, negative, latents, .. } =
        &arguments.images;
    refuse_idle_scales(&arguments.images, family)?;
    let SampleImageArgs { reference: references, reference_resolution, .. } = &arguments.images;
    let SampleImageArgs { frames, fps, .. } = &arguments.images;
    let (usual, video) = (family.sampling, family.video);
    let edited = edited_size(references, family);
    Ok(ImageRequest {
        prompts: arguments.prompts()?,
        negative: negative.clone().unwrap_or_else(|| usual.negative_prompt.to_owned()),
        size: size.or(edited).unwrap_or([usual.resolution; 2]),
        frames: frames.map_or(video.map_or(1, |video| video.frames), |frames| frames as usize),
        fps: fps.map_or(video.map_or(1, |video| video.fps), |fps| fps as usize),
        steps: steps.map_or(usual.steps, |steps| steps as usize),
        guidance: GuidanceScales {
            guidance: guidance.unwrap_or(usual.guidance as f32),
            true_cfg: true_cfg.unwrap_or(1.0),
        },
        seed: arguments.seed,
        latents: latents.clone(),
        references: references.clone(),
        reference_resolution: reference_resolution.unwrap_or(REFERENCE_RESOLUTION) as usize,
        precision: arguments.formats.precision(),
    })
}

/// The size of an edited image where none is asked for: that in which the model sees one of its references.
fn edited_size(references: &[PathBuf], family: &DiffusionFamily) -> Option<[usize; 2]> {
    let editing = family.editing?;
    let image = read_reference(editing.sizing_reference(references)?).ok()?;
    let size = editing.vae_size(image.size, REFERENCE_RESOLUTION);
    Some(size.map(|side| side as usize))
}

/// A scale, or a negative prompt, that nothing would use is refused.
fn refuse_idle_scales(typed: &SampleImageArgs, family: &DiffusionFamily) -> Result<(), Failure> {
    let is_own = family.guidance.is_classifier_free();
    let is_cfg = is_own || typed.true_cfg.is_some_and(|scale| scale > 1.0);
    let (name, hint) = if typed.guidance.is_some() && family.guidance == Guidance::None {
        ("--guidance", "leave it out; --true-cfg guides it at half the speed")
    } else if typed.true_cfg.is_some() && is_own {
        ("--true-cfg", "give the scale as --guidance")
    } else if typed.negative.is_some() && !is_cfg {
        ("--negative", "add --true-cfg 2 or leave it out")
    } else {
        return Ok(());
    };
    let problem = format!("{name} has no effect on {} model", family.title);
    Err(TrainerError::Request { problem, hint }.into())
}

/// Tokens beyond an encoder's maximum length are cut off, which the user should know.
fn warn_truncated(pipeline: &Pipeline, request: &ImageRequest) {
    for (index, prompt) in request.prompts.iter().enumerate() {
        for (encoder, cut) in pipeline.encoders.truncations(prompt) {
            let n = cut.n_tokens - cut.max_tokens;
            let text =
                format!("prompt {}: {} cuts off its last {n} tokens", index + 1, encoder.name);
            render::warn(&text);
        }
    }
}

fn name(arguments: &SampleArgs, request: &ImageRequest, index: usize) -> SampledImage {
    let mut path = arguments.images.out(request.frames);
    if request.prompts.len() > 1 {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let end = path.extension().unwrap_or("png".as_ref()).to_string_lossy().into_owned();
        path.set_file_name(format!("{stem}-{}.{end}", index + 1));
    }
    let (prompt, seed) = (request.prompts[index].clone(), request.seed + index as u64);
    SampledImage { path, more: Vec::new(), prompt, seed }
}

/// What an image was made from, for other programs and for hearth.
fn parameters(
    arguments: &SampleArgs,
    request: &ImageRequest,
    written: &SampledImage,
) -> [(&'static str, String); 2] {
    let base = model_name(&arguments.base);
    let adapter = arguments.adapter.as_deref().map(model_name);
    let ([width, height], seed) = (request.size, written.seed);
    let version = env!("CARGO_PKG_VERSION");
    let negative = match request.negative.as_str() {
        "" => String::new(),
        negative => format!("\nNegative prompt: {negative}"),
    };
    let adapted = adapter.as_ref().map_or_else(String::new, |adapter| format!(", Lora: {adapter}"));
    let GuidanceScales { guidance, true_cfg } = request.guidance;
    let true_scale =
        if true_cfg > 1.0 { format!(", True CFG scale: {true_cfg}") } else { String::new() };
    let text = format!(
        "{}{negative}\nSteps: {}, Sampler: Euler, CFG scale: {guidance}{true_scale}, Seed: {seed}, Size: {width}x{height}, \
         Model: {base}{adapted}, Version: hearth {version}",
        written.prompt, request.steps
    );
    let json = serde_json::json!({
        "hearth": version,
        "prompt": written.prompt,
        "negative": request.negative,
        "size": request.size,
        "frames": request.frames,
        "steps": request.steps,
        "guidance": guidance,
        "true_cfg": true_cfg,
        "seed": seed,
        "base": base,
        "adapter": adapter,
        "latents": request.latents.as_deref().map(model_name),
        "dtype": named_value::value_name(&arguments.formats.dtype),
        "quantise": arguments.formats.quantise.as_ref().map(named_value::value_name),
    });
    [("parameters", text), ("hearth", json.to_string())]
}
