//! `hearth bench predict`: how long steps were to take by the rates of this machine, beside how long
//! they took. Each job is predicted on the meta device before it is run.
//!
//! ```text
//! FOLDER OF THE MEASUREMENT, removed afterwards/
//!   tiny/  mid/          models with random weights; see `trainer::bench::cases::folder`
//!   images/              drawn by hearth
//!   cache-SIZE-PIXELS/   encoded once for all jobs of a size
//!   run/                 of the job at hand
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use compute::{CancelToken, Device, DeviceKind, WorkStats};
use machine::{Machine, ProbeSource};
use trainer::TrainerError;
use trainer::bench::cases::folder::{self, BenchModelSize};
use trainer::cache::{CacheBuilder, CacheRequest};
use trainer::config::{RawConfig, RunConfig};
use trainer::demo::{DemoStyle, draw_set};
use trainer::event::{Event, EventRecord};
use trainer::model::diffusion::Pipeline;
use trainer::model::diffusion::paths::PartPaths;
use trainer::plan::rates::{self, Rates};
use trainer::plan::{self, step_work};
use trainer::task::traits::DatasetSummary;
use trainer::train::diffusion::DiffusionTask;
use trainer::train::{DeviceSetup, TrainOptions, train};

use super::{calibrate, median, private_folder};
use crate::commands::CommandOutcome;
use crate::commands::device::DeviceArgs;
use crate::failure::Failure;
use crate::render;
use crate::render::rates::{PredictedKernel, StepPrediction};

/// Predict the time of training steps, then measure it.
///
/// Uses the rates that `hearth bench calibrate` stored; without them the machine is calibrated first.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench calibrate && hearth bench predict
  hearth bench predict --only mid --json")]
pub struct PredictArgs {
    /// Only jobs whose name contains this
    #[arg(long, default_value = "")]
    only: String,

    /// Measured steps per job
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    /// Folder where rates are stored [default: hearth in the user's cache folder]
    #[arg(long)]
    folder: Option<PathBuf>,

    /// Model folder that text encoders, tokenizers and scheduler are taken from
    #[arg(long, value_name = "FOLDER", default_value = "tests/golden/sd3/pipeline")]
    rest: PathBuf,

    #[command(flatten)]
    engine: DeviceArgs,

    /// Print one JSON object per job
    #[arg(long)]
    json: bool,
}

/// Warm-up steps, which are not measured.
const WARM_UP: usize = 2;
/// The most images in a batch.
const IMAGES: usize = 4;

/// A model's size, pixels along a side, images in a batch, and keys of the job that are not as
/// they are otherwise.
type PredictJob = (BenchModelSize, usize, usize, &'static [&'static str]);

/// Chosen: each of what a plan may choose, at a size where it matters, and little else.
const JOBS: [PredictJob; 11] = [
    (BenchModelSize::Tiny, 128, 1, &["base.dtype=f32"]),
    (BenchModelSize::Tiny, 256, 4, &["base.dtype=f32"]),
    (BenchModelSize::Tiny, 256, 4, &["base.dtype=bf16", "adapter.rank=4", "train.recompute=block"]),
    (BenchModelSize::Mid, 128, 1, &["base.dtype=bf16"]),
    (BenchModelSize::Mid, 256, 1, &["base.dtype=f32"]),
    (BenchModelSize::Mid, 256, 2, &["base.dtype=bf16"]),
    (BenchModelSize::Mid, 256, 2, &["base.dtype=bf16", "base.quantise=int8"]),
    (
        BenchModelSize::Mid,
        256,
        2,
        &["base.dtype=bf16", "base.quantise=nf4", "train.recompute=alternate"],
    ),
    (BenchModelSize::Mid, 256, 4, &["base.dtype=bf16", "train.recompute=block"]),
    (
        BenchModelSize::Mid,
        256,
        1,
        &["base.dtype=bf16", "adapter.rank=64", "optimizer.kind=adamw_8bit"],
    ),
    (BenchModelSize::Mid, 512, 1, &["base.dtype=bf16", "train.recompute=block"]),
];

pub fn run(arguments: &PredictArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    if !JOBS.iter().any(|job| name(job).contains(&arguments.only)) {
        let problem = format!("no job's name contains {:?}", arguments.only);
        return Err(
            TrainerError::Request { problem, hint: "leave out --only to see all names" }.into()
        );
    }
    let rates = rates(arguments)?;
    let folder = private_folder(&std::env::temp_dir())?;
    let mut all = Vec::new();
    let measured =
        JOBS.iter().filter(|job| name(job).contains(&arguments.only)).try_for_each(|job| {
            let figures = measure(arguments, &rates, folder.path(), job)?;
            if arguments.json {
                render::json::line(out, &figures)?;
            }
            all.push(figures);
            Ok(())
        });
    measured.and_then(|()| {
        if !arguments.json {
            write!(out, "{}", render::rates::predicted(&all))?;
        }
        Ok(CommandOutcome::Done)
    })
}

/// Those that were kept, or measured now.
fn rates(arguments: &PredictArgs) -> Result<Rates, Failure> {
    let machine = Machine::probe(&mut ProbeSource::live());
    let folder = arguments.folder.clone().or_else(rates::folder);
    if let Some(rates) = arguments.engine.kept_rates(&machine, folder) {
        return Ok(rates);
    }
    calibrate::measure(&arguments.engine, false)
}

/// As it is printed.
fn name((size, pixels, batch, keys): &PredictJob) -> String {
    let size = format!("{size:?}").to_lowercase();
    let values = keys.iter().map(|key| key.split_once('.').map_or(*key, |(_, key)| key));
    format!("{size} {pixels} px x {batch}, {}", values.collect::<Vec<_>>().join(", "))
}

fn measure(
    arguments: &PredictArgs,
    rates: &Rates,
    folder: &Path,
    job: &PredictJob,
) -> Result<StepPrediction, Failure> {
    prepare(&arguments.rest, folder, job.0)?;
    let config = config(folder, job, arguments.steps as usize)?;
    let work = predict(arguments, &config)?;
    let seconds = |(times, work): &(usize, WorkStats)| *times as f64 * rates.seconds(work);
    let predicted_ms = 1e3 * work.iter().map(seconds).sum::<f64>();
    let (ms, done) = run_training(arguments, &config)?;
    let ms_best = ms.iter().copied().fold(f64::INFINITY, f64::min);
    let (job, ratio) = (name(job), predicted_ms / ms_best);
    let parts = parts(rates, &work, &done, arguments.steps);
    Ok(StepPrediction {
        job,
        predicted_ms,
        ms_median: median(ms.into_iter()),
        ms_best,
        ratio,
        parts,
    })
}

/// What was to be done in a step, beside what was done in so many.
fn parts(
    rates: &Rates,
    foreseen: &[(usize, WorkStats)],
    done: &WorkStats,
    steps: u32,
) -> Vec<PredictedKernel> {
    let mut sums = BTreeMap::<String, [f64; 2]>::new();
    for (times, work) in foreseen {
        for (class, calls) in &work.calls {
            let ms = 1e3 * *times as f64 * rates.seconds_of(class, calls);
            sums.entry(class.to_string()).or_default()[0] += ms;
        }
    }
    for (class, calls) in &done.calls {
        let ms = 1e-6 * calls.nanos as f64 / f64::from(steps);
        sums.entry(class.to_string()).or_default()[1] += ms;
    }
    let part = |(kernel, [predicted_ms, ms_mean]): (String, [f64; 2])| PredictedKernel {
        kernel,
        predicted_ms,
        ms_mean,
    };
    let mut parts: Vec<_> = sums.into_iter().map(part).collect();
    parts.sort_by(|a, b| b.ms_mean.total_cmp(&a.ms_mean));
    parts
}

/// Writes the model and draws the images, unless they are there.
fn prepare(rest: &Path, folder: &Path, size: BenchModelSize) -> Result<(), Failure> {
    let model = folder.join(folder_of(size));
    if !model.exists() {
        folder::write(rest, size, &model)?;
    }
    draw_set(&folder.join("images"), DemoStyle::Flat, IMAGES, 1)?;
    Ok(())
}

fn folder_of(size: BenchModelSize) -> &'static str {
    match size {
        BenchModelSize::Tiny => "tiny",
        BenchModelSize::Mid => "mid",
    }
}

fn config(folder: &Path, job: &PredictJob, steps: usize) -> Result<RunConfig, Failure> {
    let (size, pixels, batch, keys) = job;
    let size = folder_of(*size);
    let resolve = || {
        let mut raw = RawConfig::empty();
        raw.set_path("base.path", &folder.join(size))?;
        raw.set_path("data.images", &folder.join("images"))?;
        raw.set_path("data.cache", &folder.join(format!("cache-{size}-{pixels}")))?;
        raw.set_path("output.folder", &folder.join("run"))?;
        raw.set(&format!("data.resolution={pixels}"))?;
        raw.set("data.bucket_step=16")?;
        raw.set(&format!("train.batch_size={batch}"))?;
        // Nothing is left to the plan: what is predicted is what is done.
        raw.set(&format!("train.micro_batch={batch}"))?;
        raw.set("train.recompute=none")?;
        raw.set("base.quantise=none")?;
        raw.set("optimizer.kind=adamw")?;
        raw.set(&format!("train.steps={}", steps + WARM_UP))?;
        raw.set("output.save_every=off")?;
        for key in *keys {
            raw.set(key)?;
        }
        raw.resolve()
    };
    resolve().map_err(|error| Failure::Trainer(TrainerError::Job(error)))
}

fn predict(
    arguments: &PredictArgs,
    config: &RunConfig,
) -> Result<Vec<(usize, WorkStats)>, Failure> {
    let pipeline = Pipeline::open(&config.base.path, &PartPaths::default())?;
    let caching = CacheBuilder::new(&pipeline, CacheRequest::from_config(config)?, &|_| true)?;
    // All images are drawn in one size.
    let dataset = DatasetSummary::from_caching(&caching);
    let bucket = dataset.train.keys().next().expect("images were drawn just now");
    let task = &DiffusionTask::new(config, &pipeline)?;
    let job = plan::PlanRequest { task, config, dataset: &dataset };
    Ok(step_work(job, arguments.engine.kind(), *bucket)?)
}

/// Milliseconds of steps, and what was done in them.
fn run_training(
    arguments: &PredictArgs,
    config: &RunConfig,
) -> Result<(Vec<f64>, WorkStats), Failure> {
    if config.output.folder.exists() {
        let path = config.output.folder.clone();
        fs::remove_dir_all(&path).map_err(|error| Failure::Write { path, error })?;
    }
    let (steps, device) = (Mutex::new(Vec::new()), OnceLock::<Device>::new());
    let on = arguments.engine.device_setup(None)?;
    let open = |bytes| {
        let opened = (on.open)(bytes)?;
        // Elsewhere, waiting for every call would be what is measured.
        opened.time_calls(matches!(arguments.engine.kind(), DeviceKind::Cpu { .. }));
        Ok(device.get_or_init(|| opened).clone())
    };
    let listener = |record: &EventRecord| {
        if let (Event::Step(step), Some(device)) = (&record.event, device.get()) {
            let computed = 1e3 * (step.secs - step.wait_secs);
            steps.lock().unwrap_or_else(PoisonError::into_inner).push((computed, device.work()));
        }
    };
    let (on, stop) = (DeviceSetup { open: Box::new(open), ..on }, CancelToken::default());
    train(config, &on, TrainOptions::default(), &[&listener], &stop)?;
    let steps = steps.into_inner().unwrap_or_else(PoisonError::into_inner);
    let done = match (steps.get(WARM_UP - 1), steps.last()) {
        (Some((_, before)), Some((_, after))) => after.since(before),
        _ => WorkStats::default(),
    };
    Ok((steps.into_iter().skip(WARM_UP).map(|(ms, _)| ms).collect(), done))
}
