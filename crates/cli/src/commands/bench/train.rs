//! `hearth bench train`: a whole job, from a folder of images to trained adapters, by hearth and by
//! diffusers with PEFT. Encoding and training are measured apart, each program in a process of its
//! own that keeps what it encoded for its training.
//!
//! ```text
//! FOLDER/
//!   model/               random weights; see `trainer::bench::cases::folder`
//!   images/              drawn by hearth
//!   cache/  run/         hearth's
//!   peer.safetensors     the peer's
//! ```

use compute::{CancelToken, Dtype};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use clap::ValueEnum;
use serde::Serialize;
use trainer::TrainerError;
use trainer::bench::cases::folder::{self, BenchModelSize};
use trainer::cache::{CacheBuilder, CachePlan, CacheRequest};
use trainer::config::{RawConfig, RunConfig};
use trainer::demo::{DemoStyle, draw_set};
use trainer::event::{Event, EventRecord};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;
use trainer::train::{TrainOptions, train};

use super::compare;
use super::{Timing, median, private_folder, remove};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::commands::named_value;
use crate::failure::Failure;
use crate::render;
use crate::render::bench::figures::{BenchProgram, JobPart, JobRow};
use crate::text::name_of;

/// Warm-up steps, which are not measured.
const WARM_UP: usize = 3;

/// Measure a whole training job: encoding its images, and its steps.
///
/// With --python both are compared with diffusers, transformers, PEFT and PyTorch, in turns, each in its own
/// process. Encoding counts from the first byte read to the last written. Weights are random; the VAE has
/// SD3's size.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench train
  python3 -m venv .venv && .venv/bin/pip install torch diffusers transformers peft pillow sentencepiece
  hearth bench train --python .venv/bin/python
  hearth bench train --python .venv/bin/python --size mid --resolution 256 --dtype bf16 --json")]
pub struct BenchTrainArgs {
    /// A Python with torch, diffusers, transformers, peft and pillow, to compare with
    #[arg(long)]
    python: Option<PathBuf>,

    /// Model folder that text encoders, tokenizers and scheduler are taken from
    #[arg(long, value_name = "FOLDER", default_value = "tests/golden/sd3/pipeline")]
    rest: PathBuf,

    /// Size of the transformer: 2 blocks of width 64, or 8 of width 512
    #[arg(long, default_value = "tiny")]
    size: TransformerSize,

    /// Number formats of weights and activations; may be given several times
    #[arg(long, default_values = ["f32", "bf16"], value_parser = named_value::parser::<Dtype>())]
    dtype: Vec<Dtype>,

    /// Images to encode and train on
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    images: u32,

    /// Pixels along a side of an image
    #[arg(long, default_value_t = 128)]
    resolution: u32,

    /// Images per step (batch size)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,

    /// Measured steps per process
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    /// Rounds; medians over all of them count
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Folder for the model, the images and the results [default: a temporary one]
    #[arg(long)]
    folder: Option<PathBuf>,

    /// Measure one part by hearth alone, in a folder that was prepared
    #[arg(long, hide = true, requires = "folder")]
    part: Option<JobPart>,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object per part, format and program
    #[arg(long)]
    json: bool,
}

/// A transformer's size, as it is typed.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum TransformerSize {
    Tiny,
    Mid,
}

/// What one process prints.
#[derive(Serialize)]
struct TrainProcessFigures {
    ms_median: f64,
    cpu_ms_median: f64,
    rss_before_bytes: Option<u64>,
    rss_peak_bytes: Option<u64>,
    /// Time that steps after the first waited for images, in all.
    wait_ms: Option<f64>,
}

pub fn run(arguments: &BenchTrainArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    if let (Some(part), Some(folder)) = (arguments.part, &arguments.folder) {
        let figures = measure(arguments, part, folder)?;
        render::json::line(out, &figures)?;
        return Ok(CommandOutcome::Done);
    }
    let rows = match &arguments.folder {
        Some(folder) => compare(arguments, folder)?,
        None => compare(arguments, private_folder(&std::env::temp_dir())?.path())?,
    };
    if !arguments.json {
        write!(out, "{}", render::bench::training(&rows))?;
        return Ok(CommandOutcome::Done);
    }
    for row in &rows {
        writeln!(out, "{}", serde_json::to_string(row).map_err(std::io::Error::from)?)?;
    }
    Ok(CommandOutcome::Done)
}

fn compare(arguments: &BenchTrainArgs, folder: &Path) -> Result<Vec<JobRow>, Failure> {
    prepare(arguments, folder)?;
    let mut rows = Vec::new();
    for dtype in &arguments.dtype {
        // Training begins with what was encoded.
        for part in [JobPart::Encode, JobPart::Train] {
            let mut programs =
                vec![(BenchProgram::Hearth, hearth(arguments, part, *dtype, folder)?)];
            if let Some(python) = &arguments.python {
                let theirs = peer(arguments, python, part, *dtype, folder);
                programs.push((BenchProgram::PytorchEager, theirs));
            }
            let (dtype, mark) = (named_value::value_name(dtype), part.mark());
            let measured = compare::measure(arguments.rounds, &mut programs)?.into_iter();
            rows.extend(measured.map(|beside| JobRow {
                part,
                dtype: dtype.clone(),
                mark,
                figures: beside,
            }));
        }
    }
    Ok(rows)
}

/// Writes the model and draws the images, unless they are there.
fn prepare(arguments: &BenchTrainArgs, folder: &Path) -> Result<(), Failure> {
    let (model, n_images) = (folder.join("model"), arguments.images as usize);
    if !model.exists() {
        let size = match arguments.size {
            TransformerSize::Tiny => BenchModelSize::Tiny,
            TransformerSize::Mid => BenchModelSize::Mid,
        };
        folder::write(&arguments.rest, size, &model)?;
    }
    draw_set(&folder.join("images"), DemoStyle::Flat, n_images, 1)?;
    Ok(())
}

fn hearth(
    arguments: &BenchTrainArgs,
    part: JobPart,
    dtype: Dtype,
    folder: &Path,
) -> Result<Command, Failure> {
    let mut command = compare::hearth(&["bench", "train", "--part", &name_of(&part)])?;
    command.arg("--folder").arg(folder).args(["--dtype", &named_value::value_name(&dtype)]);
    for (name, value) in [
        ("--images", arguments.images),
        ("--resolution", arguments.resolution),
        ("--batch", arguments.batch),
        ("--steps", arguments.steps),
    ] {
        command.args([name, &value.to_string()]);
    }
    command.args(["--threads", &arguments.engine.threads().to_string()]);
    Ok(command)
}

fn peer(
    arguments: &BenchTrainArgs,
    python: &Path,
    part: JobPart,
    dtype: Dtype,
    folder: &Path,
) -> Command {
    let threads = arguments.engine.threads();
    let job = serde_json::json!({
        "part": name_of(&part), "folder": folder, "dtype": named_value::value_name(&dtype),
        "resolution": arguments.resolution, "batch": arguments.batch, "steps": arguments.steps,
        "threads": threads,
    });
    let script = include_str!("../../../../../benches/peers/train.py");
    compare::python(python, script, &job, threads)
}

/// One part by hearth, in this process.
fn measure(
    arguments: &BenchTrainArgs,
    part: JobPart,
    folder: &Path,
) -> Result<TrainProcessFigures, Failure> {
    let config = job(arguments, folder)?;
    match part {
        JobPart::Encode => encode(arguments, &config),
        JobPart::Train => run_training(arguments, &config),
    }
}

fn job(arguments: &BenchTrainArgs, folder: &Path) -> Result<RunConfig, Failure> {
    let resolve = || {
        let mut raw = RawConfig::empty();
        for (key, name) in [
            ("base.path", "model"),
            ("data.images", "images"),
            ("data.cache", "cache"),
            ("output.folder", "run"),
        ] {
            raw.set_path(key, &folder.join(name))?;
        }
        let dtype = arguments.dtype.first().map_or_else(String::new, named_value::value_name);
        for (key, value) in [
            ("base.dtype", dtype),
            ("data.resolution", arguments.resolution.to_string()),
            ("data.bucket_step", "16".into()),
            ("train.batch_size", arguments.batch.to_string()),
            ("train.steps", (arguments.steps as usize + WARM_UP).to_string()),
            ("output.save_every", "off".into()),
        ] {
            raw.set(&format!("{key}={value}"))?;
        }
        raw.resolve()
    };
    resolve().map_err(|error| Failure::Trainer(TrainerError::Job(error)))
}

fn encode(arguments: &BenchTrainArgs, config: &RunConfig) -> Result<TrainProcessFigures, Failure> {
    remove(&config.cache_folder())?;
    let rss_before_bytes = machine::process::peak_resident();
    let (engine, limit) = (&arguments.engine, arguments.engine.limit_bytes(None)?);
    let (time, ()) = Timing::measure(engine.threads(), || -> Result<(), Failure> {
        let pipeline = Pipeline::open(&config.base.path, &PartPaths::default())?;
        let caching = CacheBuilder::new(&pipeline, CacheRequest::from_config(config)?, &|_| true)?;
        let plan = caching.plan(engine.kind(), limit, engine.host_bytes())?;
        let CachePlan { phases, loading, decoding_bytes } = plan;
        let peak = phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0);
        caching.run(&engine.open(peak)?, loading, decoding_bytes, &|_| true)?;
        Ok(())
    })?;
    let n_images = f64::from(arguments.images);
    Ok(TrainProcessFigures {
        ms_median: time.wall_ms / n_images,
        cpu_ms_median: time.cpu_ms / n_images,
        rss_before_bytes,
        rss_peak_bytes: machine::process::peak_resident(),
        wait_ms: None,
    })
}

fn run_training(
    arguments: &BenchTrainArgs,
    config: &RunConfig,
) -> Result<TrainProcessFigures, Failure> {
    remove(&config.output.folder)?;
    let rss_before_bytes = machine::process::peak_resident();
    let engine = &arguments.engine;
    let steps = Mutex::new(Vec::new());
    let listener = |record: &EventRecord| {
        if let Event::Step(step) = &record.event {
            let cpu_ms = machine::process::cpu_time().as_secs_f64() * 1e3;
            let mut steps = steps.lock().unwrap_or_else(PoisonError::into_inner);
            steps.push((step.secs * 1e3, step.wait_secs * 1e3, cpu_ms));
        }
    };
    let (on, stop) = (engine.device_setup(None)?, CancelToken::default());
    train(config, &on, TrainOptions::default(), &[&listener], &stop)?;
    let steps = steps.into_inner().unwrap_or_else(PoisonError::into_inner);
    let threads = engine.threads() as f64;
    let pairs = steps.windows(2).skip(WARM_UP - 1);
    Ok(TrainProcessFigures {
        ms_median: median(steps.iter().skip(WARM_UP).map(|(wall, ..)| *wall)),
        cpu_ms_median: median(pairs.map(|pair| (pair[1].2 - pair[0].2) / threads)),
        rss_before_bytes,
        rss_peak_bytes: machine::process::peak_resident(),
        wait_ms: Some(steps.iter().skip(1).map(|(_, wait, _)| wait).sum()),
    })
}
