//! The beginning of a run: the model is loaded, and put where the last checkpoint left it.

use super::checkpoint::Checkpoints;
use super::folder::{self, Folder};
use super::identity::Identity;
use super::pacing::Pacing;
use super::run::Run;
use super::workplace::{Setup, Workplace};
use crate::config::RunConfig;
use crate::error::{Result, TrainerError};
use crate::event::{Begin, Event, Phase, ProgressUnit, Repeated, Sink, Times, Warning};
use crate::task::lesson::{Feed, Lesson};
use crate::task::session::Session;

/// Loads the model and puts it where it stood.
pub(super) fn begin<'a, F: Feed>(
    config: &'a RunConfig,
    lesson: &'a F::Lesson,
    feed: &'a mut F,
    (Setup { on, plan, ladder }, Workplace { device, meter }): (Setup<'a>, &'a mut Workplace),
    (folder, events): (&'a Folder, &'a Sink<'a>),
) -> Result<Run<'a, F>> {
    events.phase(Phase::Load, ProgressUnit::Bytes, lesson.file_bytes())?;
    meter.begin(Phase::Load);
    let tick = |bytes| events.advance(ProgressUnit::Bytes, bytes);
    let mut session = Session::new(device, lesson, config, &tick)?;
    let identity = Identity::new(config, lesson, feed)?;
    let checkpoints = Checkpoints::new(&folder.path, &config.output);
    let mut warnings = Vec::new();
    let restored = checkpoints.restore(&mut session, &identity, |kind| warnings.push(kind))?;
    let progress = restored.unwrap_or_default();
    let total_steps = config.train.n_steps(feed.batches_per_epoch());
    if progress.step > total_steps {
        let (taken, path) = (progress.step, folder.path.clone());
        return Err(TrainerError::TooFar { taken, steps: total_steps, path });
    }
    // Not before: a job that is refused leaves no trace in another one's folder.
    folder.write(folder::CONFIG, &format!("{}\n{}", folder::CONFIG_HEADER, config.resolved()))?;
    identity.write_inputs(folder)?;
    let filled = device.filled();
    events.emit(Event::Begin(Begin {
        version: env!("CARGO_PKG_VERSION").into(),
        base: config.base.path.display().to_string(),
        engine: on.name.clone(),
        from_step: progress.step,
        steps: total_steps,
        unit: config.material.word().into(),
        samples: feed.n_train(),
        held_out: feed.n_held_out(),
        layers: session.n_layers(),
        parameters: session.n_parameters(),
        samples_per_step: config.train.batch * config.train.accumulation,
        phases: plan.phases.clone(),
        how: plan.choice.to_string(),
        step_secs: plan.step_secs,
        times: Times { steps: Repeated { times: total_steps, ..plan.times.steps }, ..plan.times },
        limit_bytes: on.limit_bytes,
        loaded_in_place_bytes: filled.in_place,
        loaded_staged_bytes: filled.staged,
    }))?;
    // Of what came before and of loading; not before the beginning either.
    events.emit_all(meter.end().events)?;
    for kind in warnings {
        events.emit(Event::Warning(Warning { step: progress.step, kind }))?;
    }
    Ok(Run {
        config,
        device,
        pacing: Pacing::of(config, on, plan, ladder),
        session,
        feed,
        checkpoints,
        identity,
        folder: &folder.path,
        progress,
        total_steps,
        meter,
        is_showing_warned: false,
        events,
    })
}
