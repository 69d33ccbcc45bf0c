//! Training a diffusion model on images: the stages that come before and after the loop.

pub(crate) mod batch;
pub(crate) mod dataset;
mod loader;
mod model;
mod noise;
mod samples;
mod task;

use std::sync::{Arc, Mutex, PoisonError};

pub(crate) use self::loader::ImageLoader;
pub use self::task::DiffusionTask;
use self::task::TimestepLog;
use super::data_parallel::{first_rank_first, is_first};
use super::device::{DeviceSetup, MeteredDevice, PlannedRun, RunSetup};
use super::folder::{RunFolder, RunOutput};
use super::pacing::{PacedProgress, Pacer, Pacing};
use super::preparation::{emit_findings, emit_progress};
use super::{checkpoint, full, run_training};
use crate::cache::{CacheBuilder, CacheIndex, CacheRequest};
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::error::{Result, TrainerError};
use crate::event::{Event, EventSink, Phase, RunEnd, Warning, WarningKind};
use crate::export::fuse::{check_dora, check_lokr};
use crate::export::{ExportedFile, export};
use crate::export::{check_form, check_norms};
use crate::model::adapter::read::{AdapterFile, TargetModule};
use crate::model::adapter::{AdapterForm, AdapterFormat};
use crate::model::build::Precision;
use crate::model::diffusion::Pipeline;
use crate::plan::{Plan, PlanRequest, choose, dry_run, memory_levels};
use crate::progress;
use crate::task::traits::DatasetSummary;

/// Trains a diffusion model on images: the stages that come before and after the loop.
pub(super) fn train(
    config: &RunConfig,
    device_setup: &DeviceSetup<'_>,
    output: RunOutput<'_>,
) -> Result<RunEnd> {
    let RunOutput { folder, events } = output;
    let mut pipeline = Pipeline::open(&folder.base(config)?, &config.base.parts())?;
    let prepared = || prepare(config, &pipeline, device_setup, events);
    let (planned, index, device) = first_rank_first(device_setup.world, prepared)?;
    let log = TimestepLog::default();
    let task = DiffusionTask::new(&planned.config, &pipeline)?.with_log(&log);
    let loader = ImageLoader::new(task, &planned.config, index, planned.plan.tiling)?;
    let setup = planned.setup(device_setup);
    let end = run_training(&planned.config, &task, loader, setup, device, output)?;
    if end.reason.is_done() && is_first(device_setup.world) {
        write_result(&planned.config, &mut pipeline, end.step, folder, events)?;
    }
    Ok(end)
}

/// Finds the images, plans the run, and encodes what is not in the cache.
fn prepare(
    config: &RunConfig,
    pipeline: &Pipeline,
    device_setup: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, Arc<CacheIndex>, MeteredDevice)> {
    check_formats(config, pipeline)?;
    warn_of_distillation(config, pipeline, events)?;
    let (planned, caching) = plan(config, pipeline, device_setup, events)?;
    let n_known = caching.index().problems.len();
    emit_findings(events, caching.index().findings(0))?;
    let setup = planned.setup(device_setup);
    let (index, device) = encode(&planned.config, caching, setup, events)?;
    // Problems that only show when an image is decoded.
    emit_findings(events, index.findings(n_known))?;
    Ok((planned, index, device))
}

/// Training a distilled model as it is undoes what it was distilled for.
fn warn_of_distillation(
    config: &RunConfig,
    pipeline: &Pipeline,
    events: &EventSink<'_>,
) -> Result<()> {
    let family = pipeline.family();
    let Some(advice) = family.distilled.filter(|_| config.base.training_adapter.is_none()) else {
        return Ok(());
    };
    let kind = WarningKind::Distilled { model: family.title.into(), advice: advice.into() };
    events.emit(Event::Warning(Warning { step: 0, kind }))
}

/// Checks that every format of the job can hold the adapter.
fn check_formats(config: &RunConfig, pipeline: &Pipeline) -> Result<()> {
    let (formats, Some(target)) = (&config.output.formats, config.adapter.targets.first()) else {
        return Ok(());
    };
    for format in formats {
        check_form(target.form, *format)?;
    }
    let has_encoders = !config.adapter.text_encoders.is_empty();
    if has_encoders && formats.contains(&AdapterFormat::Peft) {
        return Err(TrainerError::Request {
            problem: "the files of PEFT hold the adapter of one model, and adapter.text_encoders trains others with it"
                .into(),
            hint: "leave peft out of output.formats: diffusers, kohya and comfyui hold both",
        });
    }
    let has = |wanted: &[AdapterFormat]| formats.iter().any(|format| wanted.contains(format));
    let base = &pipeline.transformer.config;
    let specs = base.tensor_specs()?;
    let modules = specs.iter().filter_map(|spec| spec.name.strip_suffix(".weight"));
    let adapted = modules.filter(|module| config.adapter.names(module));
    if config.adapter.trains_norms {
        let norms = TargetModule::with_norms(&specs, |_| Vec::new()).into_iter();
        let mut norms = norms.filter_map(TargetModule::into_norm);
        let are_weights = norms.all(|norm| base.original_norm(&norm).is_some());
        formats.iter().try_for_each(|format| check_norms(*format, are_weights))?;
    }
    let original = |module: &str| base.original_module(module);
    match target.form {
        AdapterForm::Dora if has(&[AdapterFormat::Kohya, AdapterFormat::Comfyui]) => {
            check_dora(adapted, original)
        }
        AdapterForm::Lokr(_) if has(&[AdapterFormat::Kohya]) => check_lokr(adapted, original),
        _ => Ok(()),
    }
}

/// Finds the images and plans the run.
fn plan<'p>(
    config: &'p RunConfig,
    pipeline: &'p Pipeline,
    device_setup: &DeviceSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(PlannedRun, CacheBuilder<'p>)> {
    let budget = device_setup.budget();
    let task = &DiffusionTask::new(config, pipeline)?;
    let find_images = |encoders| {
        let precision = Precision { base: encoders, ..Precision::plain(config.base.dtype) };
        let request = CacheRequest { precision, ..CacheRequest::from_config(config)? };
        CacheBuilder::new(pipeline, request, &|done| emit_progress(events, done))
    };
    let caching = find_images(config.base.quantise_encoders)?;
    let dataset = DatasetSummary::from_caching(&caching);
    let plan = choose(PlanRequest { task, config, dataset: &dataset }, budget)?;
    let planned = config.with_choice(&plan.choice);
    let levels = memory_levels(PlanRequest { task, config: &planned, dataset: &dataset }, budget)?;
    if planned.base.quantise_encoders == config.base.quantise_encoders {
        return Ok((PlannedRun { config: planned, plan, levels }, caching));
    }
    // Encoders in another format have other cache entries.
    let caching = find_images(planned.base.quantise_encoders)?;
    let dataset = DatasetSummary::from_caching(&caching);
    let again = dry_run(PlanRequest { task, config: &planned, dataset: &dataset }, budget)?;
    let plan = Plan { candidates: plan.candidates, ..again };
    Ok((PlannedRun { config: planned, plan, levels }, caching))
}

/// Encodes what is not in the cache, and measures each encoder. What is encoded stays when a GPU is lost.
fn encode(
    config: &RunConfig,
    mut caching: CacheBuilder<'_>,
    setup: RunSetup<'_>,
    events: &EventSink<'_>,
) -> Result<(Arc<CacheIndex>, MeteredDevice)> {
    let device = MeteredDevice::open(config, setup.device_setup, setup.plan)?;
    let ((), device) =
        device.retry_on_gpu_loss(setup, events, |MeteredDevice { device, meter }, _| {
            let meter = Mutex::new(meter);
            let mut pacing = Pacing::of_encoding(config, device, setup);
            let pace = PacedProgress::new(Pacer { pacing: &mut pacing, device, events, step: 0 });
            let on_progress = |event| {
                if let progress::ProgressEvent::Phase { name, .. } = event {
                    meter.lock().unwrap_or_else(PoisonError::into_inner).begin(name.into());
                }
                let is_wanted = emit_progress(events, event);
                let is_done = matches!(event, progress::ProgressEvent::Done);
                is_wanted && (!is_done || pace.should_continue())
            };
            let Plan { encoder_loading, decoding_bytes, .. } = *setup.plan;
            device.cancellable(events.cancel_token(), || {
                caching.encode(device, encoder_loading, decoding_bytes, &on_progress)
            })
        })?;
    Ok((Arc::new(caching.finish()?), device))
}

/// Exports what was trained from the checkpoint of the last step, in every format of the job.
fn write_result(
    config: &RunConfig,
    pipeline: &mut Pipeline,
    step: u64,
    folder: &RunFolder,
    events: &EventSink<'_>,
) -> Result<()> {
    let checkpoint = folder.path.join(checkpoint::path(step));
    if config.adapter.kind == AdapterKind::Full {
        return full::export_result(config, &checkpoint, events, |full, tick| {
            full.write_image_model(pipeline, &folder.path.join(full::MODEL), tick)
        });
    }
    events.emit(Event::Phase { name: Phase::Export })?;
    // Whether its values can be used was judged before.
    pipeline.take_adapter(AdapterFile::open(&checkpoint)?.with_any_values(true))?;
    for format in &config.output.formats {
        let (name, into) = (config.output.name.as_str(), folder.path.join("adapter"));
        let ExportedFile { path, n_layers, .. } = export(pipeline, *format, &into, name)?;
        let path = path.strip_prefix(&folder.path).unwrap_or(&path).into();
        let format = format!("{format:?}").to_lowercase();
        events.emit(Event::Exported { format, path, layers: n_layers })?;
    }
    Ok(())
}
