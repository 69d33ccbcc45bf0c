//! Training, from a job to a proven result. [`train`] is the list of its stages; each is a room of its
//! own. The loop is in `run.rs`, and knows neither pictures nor texts: what jobs differ in is a
//! [`lesson`], and `pictures/` and `texts/` are those there are.

pub mod checkpoint;
pub mod claim;
mod decision;
mod divergence;
mod draws;
mod fallback;
pub(crate) mod folder;
mod health;
mod identity;
mod layers;
pub mod lesson;
mod look;
pub(crate) mod meter;
mod pacing;
pub mod pictures;
pub(crate) mod prefetch;
pub(crate) mod run;
mod scale;
pub(crate) mod session;
mod step;
#[cfg(test)]
mod tests;
pub mod texts;
mod workplace;

use std::sync::atomic::AtomicBool;

use compute::{Device, Kind};
use machine::sampler::Sampler;

use self::checkpoint::Checkpoints;
use self::folder::Folder;
use self::identity::Identity;
use self::lesson::{Feed, Lesson};
use self::pacing::Pacing;
use self::run::Run;
use self::session::{Session, Trained};
use self::workplace::Workplace;
use crate::cache;
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::material::Material;
use crate::data::Findings;
use crate::error::{Result, TrainerError};
use crate::event::figures::Figures;
use crate::event::history::History;
use crate::event::{
    Begin, End, Event, EventRecord, Listener, Phase, ProgressUnit, Repeated, Sink, Times, Warning,
    WarningKind,
};
use crate::export::card;
use crate::plan::{Plan, Rates, Room, Rung};
use crate::report;
use crate::report::live::LiveReport;

/// What computes, and in how much memory.
pub struct On<'a> {
    /// For plans.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// The most that may be taken.
    pub limit_bytes: usize,
    /// Main memory that blocks may stream from; nothing where the engine computes in main memory.
    pub host_bytes: Option<usize>,
    /// How fast it is.
    pub rates: Rates,
    /// Opens it with an arena of so many bytes.
    pub open: Box<dyn Fn(usize) -> compute::Result<Device> + 'a>,
    /// Begins to feel the machine; nothing where it cannot be, or is not to be.
    pub feel: Box<dyn Fn() -> Option<Sampler> + 'a>,
}

/// How a run is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Goes on where the folder's last checkpoint is.
    pub resume: bool,
    /// Writes what came of the run also if it diverged.
    pub force: bool,
}

/// What a run is set up with.
#[derive(Clone, Copy)]
struct Setup<'a> {
    on: &'a On<'a>,
    plan: &'a Plan,
    ladder: &'a [Rung],
}

/// Trains: opens the model, prepares what it learns from, plans, runs the loop, writes what came of it.
/// Everybody who listens hears each event; when `stop` is raised, the run saves and ends.
pub fn train(
    config: &RunConfig,
    on: &On<'_>,
    start: Start,
    listeners: &[Listener<'_>],
    stop: &AtomicBool,
) -> Result<End> {
    claim::check(config, &[])?;
    let folder = Folder::open(&config.output.folder, start)?;
    let end = {
        let report = LiveReport::begin(folder.path.clone());
        let rewrite = |record: &EventRecord| report.observe(&record.event);
        let listeners = [&[&rewrite as Listener<'_>], listeners].concat();
        let events = Sink::open(&folder.path, start.resume, &listeners, stop)?;
        train_into(&folder.pinned(config), on, (&folder, &events)).inspect_err(|error| {
            // The error itself is worse than that it is nowhere written.
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
    on: &On<'_>,
    (folder, events): (&Folder, &Sink<'_>),
) -> Result<End> {
    events.emit(Event::Phase { name: Phase::Open })?;
    let end = match config.material {
        Material::Pictures { .. } => pictures::train(config, on, (folder, events)),
        Material::Texts { .. } => texts::train(config, on, (folder, events)),
    }?;
    let figures = Figures::of(&History::open(&folder.path)?);
    let end = End { loss: figures.and_then(|figures| figures.final_loss), ..end };
    events.emit(Event::End(end.clone()))?;
    if end.why.is_done() && config.adapter.kind != AdapterKind::None {
        card::write(&folder.path, config)?;
    }
    Ok(end)
}

/// Runs the loop, and gives what came of it. What is lost with a GPU is done again from the last
/// checkpoint on: the model is loaded once more, and the same steps follow.
fn learn<F: Feed>(
    config: &RunConfig,
    lesson: &F::Lesson,
    mut feed: F,
    (setup, place): (Setup<'_>, Workplace),
    (folder, events): (&Folder, &Sink<'_>),
) -> Result<(End, Trained)> {
    let (learnt, _) = place.surviving(setup, events, |place, events, reached| {
        let mut run = begin(config, lesson, &mut feed, (setup, place), (folder, events))?;
        let end = run.go();
        *reached = run.progress.step.max(*reached);
        let (end, trained) = (end?, run.session.averaged(Session::trained)?);
        Ok((run.judge_result(end, &trained, folder.start.force)?, trained))
    })?;
    Ok(learnt)
}

/// Loads the model and puts it where it stood.
fn begin<'a, F: Feed>(
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

impl On<'_> {
    /// For plans.
    fn room(&self) -> Room<'_> {
        let Self { kind, limit_bytes, host_bytes, rates, .. } = self;
        Room { kind: *kind, limit_bytes: *limit_bytes, rates, host_bytes: *host_bytes }
    }
}

/// What was found wrong with images or texts, in a line for each reason.
fn tell_findings(events: &Sink<'_>, findings: Findings) -> Result<()> {
    let Findings { left_out, warnings, notes } = findings;
    let warning =
        |problem| Event::Warning(Warning { step: 0, kind: WarningKind::Data { problem } });
    let left_out = left_out.into_iter().map(Event::LeftOut);
    let notes = notes.into_iter().map(|text| Event::Note { text });
    events.emit_all(left_out.chain(warnings.into_iter().map(warning)).chain(notes))
}

/// How far the preparation of images or texts is; answers whether to go on.
fn prepares(events: &Sink<'_>, event: cache::Event) -> bool {
    match event {
        cache::Event::Phase { name, total } => {
            let unit = if total == 0 { ProgressUnit::Bytes } else { ProgressUnit::Samples };
            // What cannot be written now cannot be at the next event, which says so.
            _ = events.phase(name.into(), unit, total as u64);
            events.goes_on()
        }
        cache::Event::Done => events.advance(ProgressUnit::Samples, 1),
        cache::Event::Loaded(bytes) => events.advance(ProgressUnit::Bytes, bytes),
    }
}
