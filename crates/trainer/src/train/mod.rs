//! Training, from a job to the exported result. [`train`] is the list of its stages; each is a module of its
//! own. The loop is in `run.rs`, and knows neither images nor texts: what jobs differ in is the
//! [`Task`](crate::task::traits::Task), implemented in `diffusion/`, `language/` and
//! `preference/`; `compress/` is a language task with another model.

mod begin;
pub mod checkpoint;
pub mod compress;
mod data_parallel;
mod decision;
mod device;
pub mod diffusion;
mod divergence;
mod evaluation;
mod fallback;
pub(crate) mod folder;
mod fp8;
pub mod full;
mod health;
mod health_events;
mod identity;
pub mod language;
mod layers;
mod listeners;
mod loss_scale;
pub(crate) mod meter;
pub mod output_folder;
mod pacing;
pub mod preference;
mod preparation;
mod progress_file;
mod requests;
pub(crate) mod run;
mod step;
#[cfg(test)]
pub(crate) mod tests;

use compute::CancelToken;

use self::begin::begin;
use self::data_parallel::is_first;
pub use self::device::DeviceSetup;
use self::device::{MeteredDevice, RunSetup};
use self::folder::RunOutput;
use self::language::LanguagePipeline;
use self::listeners::OwnListeners;
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::training_data::TrainingData;
use crate::error::Result;
use crate::event::figures::RunFigures;
use crate::event::history::History;
use crate::event::{EndReason, Event, EventListener, EventRecord, EventSink, Phase, RunEnd};
use crate::export::card;
use crate::report;
use crate::task::traits::DataLoader;

/// How a run is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrainOptions {
    /// Resumes from the folder's last checkpoint.
    pub resume: bool,
    /// Exports the result also if the run diverged.
    pub force: bool,
}

/// Trains: opens the model, prepares the dataset, plans, runs the loop, exports the result. Every listener
/// gets each event; when `stop` is cancelled, the run saves and ends.
pub fn train(
    config: &RunConfig,
    device_setup: &DeviceSetup<'_>,
    options: TrainOptions,
    listeners: &[EventListener<'_>],
    stop: &CancelToken,
) -> Result<RunEnd> {
    let folder = data_parallel::open_folder(device_setup.world, config, options)?;
    let end = {
        let own = OwnListeners::begin(&folder, config, device_setup.world)?;
        let rewrite = |record: &EventRecord| own.observe(record);
        let listeners = [&[&rewrite as EventListener<'_>], listeners].concat();
        let events = EventSink::open(&folder.path, folder.options.resume, &listeners, stop)?;
        let output = RunOutput { folder: &folder, events: &events };
        train_into(&folder.resumed_job(config), device_setup, output).inspect_err(|error| {
            // Returned as well, so that failing to write it is not fatal.
            _ = events.fail(error);
        })
    };
    let reported = report::write(&folder.path);
    // Where both failed, the first is the cause.
    let end = end?;
    reported?;
    Ok(end)
}

fn train_into(
    config: &RunConfig,
    device_setup: &DeviceSetup<'_>,
    output: RunOutput<'_>,
) -> Result<RunEnd> {
    let RunOutput { folder, events } = output;
    events.emit(Event::Phase { name: Phase::Open })?;
    let end = match &config.data {
        TrainingData::Images { .. } => diffusion::train(config, device_setup, output),
        TrainingData::Texts { preference: Some(preference), .. } => {
            preference::train(config, preference, device_setup, output)
        }
        TrainingData::Texts { compress: None, .. } => {
            language::train(config, LanguagePipeline::open(config, false)?, device_setup, output)
        }
        TrainingData::Texts { compress: Some(compress), .. } => {
            language::train(config, compress::open(config, compress, false)?, device_setup, output)
        }
    }?;
    let figures = RunFigures::of(&History::open(&folder.path)?);
    let end = RunEnd { loss: figures.and_then(|figures| figures.final_loss), ..end };
    events.emit(Event::End(end.clone()))?;
    if end.reason == EndReason::Changed {
        return requests::go_on_changed(config, device_setup, output);
    }
    let is_done = end.reason.is_done() && is_first(device_setup.world);
    if is_done && config.adapter.kind != AdapterKind::Full {
        card::write(&folder.path, config)?;
    }
    Ok(end)
}

/// Runs the loop. After the loss of a GPU it continues from the last checkpoint: the model is loaded again, and the
/// same steps follow. A run that is done has a checkpoint of its last step, and its device is closed: the result is
/// exported from there, in memory that training does not hold any more.
fn run_training<D: DataLoader>(
    config: &RunConfig,
    task: &D::Task,
    mut loader: D,
    setup: RunSetup<'_>,
    device: MeteredDevice,
    output: RunOutput<'_>,
) -> Result<RunEnd> {
    let (end, _) = device.retry_on_gpu_loss(setup, output.events, |device, reached| {
        let mut run = begin(config, task, &mut loader, setup, device, output)?;
        let end = run.train_loop();
        *reached = run.progress.step.max(*reached);
        run.check_divergence(end?, output.folder.options.force)
    })?;
    Ok(end)
}
