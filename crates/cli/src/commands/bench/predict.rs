//! `hearth bench predict`: how long steps were to take by the rates of this machine, beside how long
//! they took. Each job is predicted on a device without data before it is run.
//!
//! ```text
//! FOLDER OF THE MEASUREMENT, removed afterwards/
//!   tiny/  mid/          models with random weights; see `trainer::bench::cases::folder`
//!   pictures/            drawn by hearth
//!   cache-SIZE-PIXELS/   encoded once for all jobs of a size
//!   run/                 of the job at hand
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, OnceLock, PoisonError};

use compute::{Device, Kind, Work};
use machine::{Machine, Source};
use trainer::TrainerError;
use trainer::bench::cases::folder::{self, Size};
use trainer::cache::{Caching, Request};
use trainer::config::{RawConfig, RunConfig};
use trainer::demo::{Style, draw_set};
use trainer::event::{Event, EventRecord};
use trainer::model::diffusion::Pipeline;
use trainer::plan::rates::{self, Rates};
use trainer::plan::{self, step_work};
use trainer::task::lesson::Outlook;
use trainer::train::pictures::Drawing;
use trainer::train::{On, Start, train};

use super::{calibrate, median};
use crate::commands::Outcome;
use crate::commands::engine::Engine;
use crate::failure::Failure;
use crate::render;
use crate::render::rates::{PredictedKernel, Prediction};

/// Predict the time of training steps, and measure it.
///
/// Rates are those that `hearth bench calibrate` kept; without them the machine is calibrated first.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth bench calibrate && hearth bench predict
  hearth bench predict --only mid --json")]
pub struct Arguments {
    /// Jobs whose name contains this
    #[arg(long, default_value = "")]
    only: String,

    /// Measured steps of each job
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,

    /// Folder where rates are kept [default: hearth in the user's cache folder]
    #[arg(long)]
    folder: Option<PathBuf>,

    /// Model folder whose text encoders, tokenizers and scheduler are taken
    #[arg(long, value_name = "FOLDER", default_value = "tests/golden/sd3/pipeline")]
    rest: PathBuf,

    #[command(flatten)]
    engine: Engine,

    /// Print one JSON object per job
    #[arg(long)]
    json: bool,
}

/// Steps before the clock counts: memory is touched, caches are warm.
const WARM_UP: usize = 2;
/// The most pictures in a batch.
const PICTURES: usize = 4;

/// A model's size, pixels along a side, pictures in a batch, and keys of the job that are not as
/// they are otherwise.
type Job = (Size, usize, usize, &'static [&'static str]);

/// Chosen: each of what a plan may choose, at a size where it is felt, and little else.
const JOBS: [Job; 11] = [
    (Size::Tiny, 128, 1, &["base.dtype=f32"]),
    (Size::Tiny, 256, 4, &["base.dtype=f32"]),
    (Size::Tiny, 256, 4, &["base.dtype=bf16", "adapter.rank=4", "train.recompute=block"]),
    (Size::Mid, 128, 1, &["base.dtype=bf16"]),
    (Size::Mid, 256, 1, &["base.dtype=f32"]),
    (Size::Mid, 256, 2, &["base.dtype=bf16"]),
    (Size::Mid, 256, 2, &["base.dtype=bf16", "base.quantise=int8"]),
    (Size::Mid, 256, 2, &["base.dtype=bf16", "base.quantise=nf4", "train.recompute=alternate"]),
    (Size::Mid, 256, 4, &["base.dtype=bf16", "train.recompute=block"]),
    (Size::Mid, 256, 1, &["base.dtype=bf16", "adapter.rank=64", "optimizer.kind=adamw_8bit"]),
    (Size::Mid, 512, 1, &["base.dtype=bf16", "train.recompute=block"]),
];

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<Outcome, Failure> {
    if !JOBS.iter().any(|job| name(job).contains(&arguments.only)) {
        let problem = format!("no job's name contains {:?}", arguments.only);
        return Err(
            TrainerError::Request { problem, hint: "leave out --only to see all names" }.into()
        );
    }
    let rates = rates(arguments)?;
    let folder = std::env::temp_dir().join(format!("hearth-predict-{}", std::process::id()));
    let mut all = Vec::new();
    let measured =
        JOBS.iter().filter(|job| name(job).contains(&arguments.only)).try_for_each(|job| {
            let figures = measure(arguments, &rates, &folder, job)?;
            if arguments.json {
                writeln!(
                    out,
                    "{}",
                    serde_json::to_string(&figures).map_err(std::io::Error::from)?
                )?;
            }
            all.push(figures);
            Ok(())
        });
    // It is among temporary files: what cannot be removed goes away with them.
    _ = fs::remove_dir_all(&folder);
    measured.and_then(|()| {
        if !arguments.json {
            write!(out, "{}", render::rates::predicted(&all))?;
        }
        Ok(Outcome::Done)
    })
}

/// Those that were kept, or measured now.
fn rates(arguments: &Arguments) -> Result<Rates, Failure> {
    let machine = Machine::probe(&mut Source::live());
    let folder = arguments.folder.clone().or_else(rates::folder);
    if let Some(rates) = arguments.engine.kept_rates(&machine, folder) {
        return Ok(rates);
    }
    calibrate::measure(&arguments.engine, false)
}

/// As it is printed.
fn name((size, pixels, batch, keys): &Job) -> String {
    let size = format!("{size:?}").to_lowercase();
    let values = keys.iter().map(|key| key.split_once('.').map_or(*key, |(_, key)| key));
    format!("{size} {pixels} px x {batch}, {}", values.collect::<Vec<_>>().join(", "))
}

fn measure(
    arguments: &Arguments,
    rates: &Rates,
    folder: &Path,
    job: &Job,
) -> Result<Prediction, Failure> {
    prepare(&arguments.rest, folder, job.0)?;
    let config = config(folder, job, arguments.steps as usize)?;
    let work = predict(arguments, &config)?;
    let seconds = |(times, work): &(usize, Work)| *times as f64 * rates.seconds(work);
    let predicted_ms = 1e3 * work.iter().map(seconds).sum::<f64>();
    let (ms, done) = learn(arguments, &config)?;
    let ms_best = ms.iter().copied().fold(f64::INFINITY, f64::min);
    let (job, ratio) = (name(job), predicted_ms / ms_best);
    let parts = parts(rates, &work, &done, arguments.steps);
    Ok(Prediction { job, predicted_ms, ms_median: median(ms.into_iter()), ms_best, ratio, parts })
}

/// What was to be done in a step, beside what was done in so many.
fn parts(
    rates: &Rates,
    foreseen: &[(usize, Work)],
    done: &Work,
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

/// Writes the model and draws the pictures, unless they are there.
fn prepare(rest: &Path, folder: &Path, size: Size) -> Result<(), Failure> {
    let model = folder.join(folder_of(size));
    if !model.exists() {
        folder::write(rest, size, &model)?;
    }
    draw_set(&folder.join("pictures"), Style::Flat, PICTURES, 1)?;
    Ok(())
}

fn folder_of(size: Size) -> &'static str {
    match size {
        Size::Tiny => "tiny",
        Size::Mid => "mid",
    }
}

fn config(folder: &Path, job: &Job, steps: usize) -> Result<RunConfig, Failure> {
    let (size, pixels, batch, keys) = job;
    let size = folder_of(*size);
    let resolve = || {
        let mut raw = RawConfig::empty();
        raw.set_path("base.path", &folder.join(size))?;
        raw.set_path("data.images", &folder.join("pictures"))?;
        raw.set_path("data.cache", &folder.join(format!("cache-{size}-{pixels}")))?;
        raw.set_path("output.folder", &folder.join("run"))?;
        raw.set(&format!("data.resolution={pixels}"))?;
        raw.set("data.bucket_step=16")?;
        raw.set(&format!("train.batch={batch}"))?;
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

fn predict(arguments: &Arguments, config: &RunConfig) -> Result<Vec<(usize, Work)>, Failure> {
    let pipeline = Pipeline::open(&config.base.path, None)?;
    let caching = Caching::new(&pipeline, Request::of(config)?, &|_| true)?;
    // All pictures are drawn in one size.
    let outlook = Outlook::of(&caching);
    let bucket = outlook.train.keys().next().expect("pictures were drawn just now");
    let lesson = &Drawing::of(config, &pipeline)?;
    let job = plan::Job { lesson, config, outlook: &outlook };
    Ok(step_work(job, arguments.engine.kind(), *bucket)?)
}

/// Milliseconds of steps, and what was done in them.
fn learn(arguments: &Arguments, config: &RunConfig) -> Result<(Vec<f64>, Work), Failure> {
    if config.output.folder.exists() {
        let path = config.output.folder.clone();
        fs::remove_dir_all(&path).map_err(|error| Failure::Write { path, error })?;
    }
    let (steps, device) = (Mutex::new(Vec::new()), OnceLock::<Device>::new());
    let on = arguments.engine.on(None)?;
    let open = |bytes| {
        let opened = (on.open)(bytes)?;
        // Elsewhere, waiting for every call would be what is measured.
        opened.time_calls(matches!(arguments.engine.kind(), Kind::Cpu { .. }));
        Ok(device.get_or_init(|| opened).clone())
    };
    let listener = |record: &EventRecord| {
        if let (Event::Step(step), Some(device)) = (&record.event, device.get()) {
            let computed = 1e3 * (step.secs - step.wait_secs);
            steps.lock().unwrap_or_else(PoisonError::into_inner).push((computed, device.work()));
        }
    };
    let (on, stop) = (On { open: Box::new(open), ..on }, AtomicBool::new(false));
    train(config, &on, Start::default(), &[&listener], &stop)?;
    let steps = steps.into_inner().unwrap_or_else(PoisonError::into_inner);
    let done = match (steps.get(WARM_UP - 1), steps.last()) {
        (Some((_, before)), Some((_, after))) => after.since(before),
        _ => Work::default(),
    };
    Ok((steps.into_iter().skip(WARM_UP).map(|(ms, _)| ms).collect(), done))
}
