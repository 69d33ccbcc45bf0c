//! Training, from a job to a proven result. [`train`] is the list of its stages; each is a room of its
//! own. The loop is in `run.rs`, and knows neither images nor texts: what jobs differ in is a
//! `task::task`, and `images/` and `texts/` are those there are.

mod begin;
pub mod checkpoint;
mod decision;
mod device;
pub mod diffusion;
mod divergence;
mod evaluation;
mod fallback;
pub(crate) mod folder;
pub mod full;
mod health;
mod identity;
pub mod language;
mod layers;
mod loss_scale;
pub(crate) mod meter;
pub mod output_folder;
mod pacing;
mod preparation;
pub(crate) mod run;
mod step;
#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicBool;

use self::begin::begin;
pub use self::device::DeviceSetup;
use self::device::{MeteredDevice, RunSetup};
use self::diffusion::DiffusionTask;
use self::folder::RunFolder;
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::training_data::TrainingData;
use crate::error::Result;
use crate::event::figures::RunFigures;
use crate::event::history::History;
use crate::event::{Event, EventListener, EventRecord, EventSink, Phase, RunEnd};
use crate::export::card;
use crate::model::diffusion::Pipeline;
use crate::report;
use crate::report::live::LiveReport;
use crate::task::session::{Session, TrainedWeights};
use crate::task::traits::DataLoader;

/// How a run is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainOptions {
    /// Goes on where the folder's last checkpoint is.
    pub resume: bool,
    /// Writes what came of the run also if it diverged.
    pub force: bool,
}

/// Trains: opens the model, prepares what it learns from, plans, runs the loop, writes what came of it.
/// Everybody who listens hears each event; when `stop` is raised, the run saves and ends.
pub fn train(
    config: &RunConfig,
    on: &DeviceSetup<'_>,
    start: TrainOptions,
    listeners: &[EventListener<'_>],
    stop: &AtomicBool,
) -> Result<RunEnd> {
    output_folder::check(config, &[])?;
    let folder = RunFolder::open(&config.output.folder, start)?;
    let end = {
        let report = LiveReport::begin(folder.path.clone());
        let rewrite = |record: &EventRecord| report.observe(&record.event);
        let listeners = [&[&rewrite as EventListener<'_>], listeners].concat();
        let events = EventSink::open(&folder.path, start.resume, &listeners, stop)?;
        train_into(&folder.with_pinned_precision(config), on, (&folder, &events)).inspect_err(
            |error| {
                // The error itself is worse than that it is nowhere written.
                _ = events.fail(error);
            },
        )
    };
    let reported = report::write(&folder.path);
    // Where both failed, the first is the cause.
    let end = end?;
    reported?;
    Ok(end)
}

fn train_into(
    config: &RunConfig,
    on: &DeviceSetup<'_>,
    (folder, events): (&RunFolder, &EventSink<'_>),
) -> Result<RunEnd> {
    events.emit(Event::Phase { name: Phase::Open })?;
    let end = match config.data {
        TrainingData::Images { .. } => train_images(config, on, (folder, events)),
        TrainingData::Texts { .. } => train_texts(config, on, (folder, events)),
    }?;
    let figures = RunFigures::of(&History::open(&folder.path)?);
    let end = RunEnd { loss: figures.and_then(|figures| figures.final_loss), ..end };
    events.emit(Event::End(end.clone()))?;
    if end.why.is_done() && config.adapter.kind != AdapterKind::Full {
        card::write(&folder.path, config)?;
    }
    Ok(end)
}

/// Trains a diffusion model on images.
fn train_images(
    config: &RunConfig,
    on: &DeviceSetup<'_>,
    (folder, events): (&RunFolder, &EventSink<'_>),
) -> Result<RunEnd> {
    let mut pipeline = Pipeline::open(&folder.base(config)?, config.base.rest.as_deref())?;
    let (planned, index, place) = diffusion::prepare(config, &pipeline, on, events)?;
    let task = DiffusionTask::new(&planned.config, &pipeline)?;
    let loader = diffusion::ImageLoader::new(task, &planned.config, index, planned.plan.tiling)?;
    let setup = planned.setup(on);
    // What is written after is made of numbers outside the arena, which is gone by then.
    let (end, trained) =
        run_training(&planned.config, &task, loader, (setup, place), (folder, events))?;
    if end.why.is_done() {
        diffusion::write_result(&planned.config, &mut pipeline, trained, folder, events)?;
    }
    Ok(end)
}

/// Trains a language model on texts.
fn train_texts(
    config: &RunConfig,
    on: &DeviceSetup<'_>,
    (folder, events): (&RunFolder, &EventSink<'_>),
) -> Result<RunEnd> {
    let opened = language::LanguagePipeline::open(config, false)?;
    let (planned, texts) = language::prepare(config, &opened.task(config)?, on, events)?;
    let task = opened.task(&planned.config)?;
    let loader = language::TextLoader::new(task, &planned.config, texts)?;
    let (setup, place) = (planned.setup(on), MeteredDevice::open(on, &planned.plan)?);
    let (end, trained) =
        run_training(&planned.config, &task, loader, (setup, place), (folder, events))?;
    if end.why.is_done() {
        language::write_result(&planned.config, opened, trained, folder, events)?;
    }
    Ok(end)
}

/// Runs the loop, and gives what came of it. What is lost with a GPU is done again from the last
/// checkpoint on: the model is loaded once more, and the same steps follow.
fn run_training<F: DataLoader>(
    config: &RunConfig,
    task: &F::Task,
    mut loader: F,
    (setup, place): (RunSetup<'_>, MeteredDevice),
    (folder, events): (&RunFolder, &EventSink<'_>),
) -> Result<(RunEnd, TrainedWeights)> {
    let (learnt, _) = place.retry_on_gpu_loss(setup, events, |place, events, reached| {
        let mut run = begin(config, task, &mut loader, (setup, place), (folder, events))?;
        let end = run.train_loop();
        *reached = run.progress.step.max(*reached);
        let (end, trained) = (end?, run.session.with_ema(Session::trained_weights)?);
        Ok((run.check_divergence(end, &trained, folder.options.force)?, trained))
    })?;
    Ok(learnt)
}
