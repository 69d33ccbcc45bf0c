//! The start of a run: the model is loaded, and restored from the last checkpoint.

use super::checkpoint::{Checkpoints, TrainProgress};
use super::data_parallel::{self, DataParallel};
use super::device::{MeteredDevice, RunSetup};
use super::folder::{self, RunOutput};
use super::fp8;
use super::identity::Identity;
use super::pacing::Pacing;
use super::run::TrainingRun;
use crate::config::RunConfig;
use crate::error::{Result, TrainerError};
use crate::event::{
    Event, FORMAT, Phase, ProgressUnit, RepeatedTime, RunStart, TimeEstimate, Warning,
};
use crate::task::session::Session;
use crate::task::traits::{DataLoader, Task};

/// Loads the model and restores its state.
pub(super) fn begin<'a, D: DataLoader>(
    config: &'a RunConfig,
    task: &'a D::Task,
    loader: &'a mut D,
    setup: RunSetup<'a>,
    MeteredDevice { device, meter }: &'a mut MeteredDevice,
    RunOutput { folder, events }: RunOutput<'a>,
) -> Result<TrainingRun<'a, D>> {
    let RunSetup { device_setup, plan, .. } = setup;
    events.begin_phase(Phase::Load, ProgressUnit::Bytes, task.file_bytes())?;
    meter.begin(Phase::Load);
    // As in the plan. What prepared the data is gone by now.
    device.set_resident(plan.resident_bytes);
    device.set_limit(plan.training_bytes());
    let tick = |bytes| events.advance(ProgressUnit::Bytes, bytes);
    let stop = events.cancel_token();
    let mut session = device.cancellable(stop, || Session::new(device, task, config, &tick))?;
    let identity = Identity::new(config, task, loader)?;
    let checkpoints = Checkpoints::new(&folder.path, &config.output);
    let inexact = device.cancellable(stop, || fp8::check(config, &session, device, loader))?;
    let mut warnings: Vec<_> = inexact.into_iter().collect();
    let tick = |_| events.should_continue();
    let warn = |kind| warnings.push(kind);
    let restored = checkpoints.restore(&mut session, &identity, &tick, warn)?;
    let saved = restored.as_ref().and_then(TrainProgress::resumable_at);
    let progress = restored.unwrap_or_else(TrainProgress::before_first_step);
    let join =
        |world| DataParallel::join(world, config, &identity, &device_setup.name, progress.step);
    let parallel = device_setup.world.map(join).transpose()?;
    let mut said_of_sums = None;
    if let Some(parallel) = &parallel {
        if config.machine.deterministic {
            session.sum_exactly();
        }
        if !parallel.is_local() {
            said_of_sums = session.sum_over(parallel.world())?;
        }
        if progress.step == 0 {
            parallel.share_weights(&mut session)?;
        }
        parallel.check_weights(&session)?;
    }
    let total_steps = config.train.n_steps(loader.batches_per_epoch());
    if progress.step > total_steps {
        let (taken, path) = (progress.step, folder.path.clone());
        return Err(TrainerError::StepsBeyondJob { taken, steps: total_steps, path });
    }
    // Only now: a job that is refused must not write into another run's folder.
    folder.write(folder::CONFIG, &format!("{}\n{}", folder::CONFIG_HEADER, config.resolved()))?;
    identity.write_inputs(folder)?;
    let filled = device.fill_stats();
    events.emit(Event::Begin(RunStart {
        version: env!("CARGO_PKG_VERSION").into(),
        base: weights::hub::shown(&config.base.path),
        engine: device_setup.name.clone(),
        format: FORMAT,
        from_step: progress.step,
        steps: total_steps,
        unit: config.data.sample_noun().into(),
        samples: loader.n_train(),
        held_out: loader.n_held_out(),
        layers: session.n_layers(),
        parameters: session.n_parameters(),
        samples_per_step: config.train.samples_per_step(),
        tokens_per_step: config
            .data
            .sample_tokens()
            .map(|tokens| tokens * config.train.samples_per_step()),
        phases: plan.phases.clone(),
        settings: plan.choice.to_string(),
        step_secs: plan.step_secs,
        times: TimeEstimate {
            steps: RepeatedTime { times: total_steps, ..plan.times.steps },
            ..plan.times
        },
        limit_bytes: device_setup.limit_bytes,
        loaded_in_place_bytes: filled.in_place,
        loaded_staged_bytes: filled.staged,
    }))?;
    // Memory of preparation and loading, after the event that starts the run.
    events.emit_all(meter.end().events)?;
    events.emit_all(data_parallel::told_local_steps(config))?;
    events.emit_all(said_of_sums.map(|text| Event::Note { text }))?;
    for kind in warnings {
        events.emit(Event::Warning(Warning { step: progress.step, kind }))?;
    }
    Ok(TrainingRun {
        config,
        device,
        pacing: Pacing::of(config, device, setup),
        session,
        parallel,
        loader,
        checkpoints,
        identity,
        folder: &folder.path,
        progress,
        total_steps,
        meter,
        saved,
        is_sampling_warned: false,
        asked: Vec::new(),
        events,
    })
}
