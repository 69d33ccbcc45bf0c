//! Training, from a job to a proven result. [`train`] is the list of its stages; each is a room of its
//! own. The loop is in `run.rs`, and knows neither images nor texts: what jobs differ in is a
//! `task::lesson`, and `pictures/` and `texts/` are those there are.

mod begin;
pub mod checkpoint;
pub mod claim;
mod decision;
mod divergence;
mod fallback;
pub(crate) mod folder;
pub mod full;
mod health;
mod identity;
mod layers;
mod look;
pub(crate) mod meter;
mod pacing;
pub mod pictures;
mod preparation;
pub(crate) mod run;
mod scale;
mod step;
#[cfg(test)]
mod tests;
pub mod texts;
mod workplace;

use std::sync::atomic::AtomicBool;

use self::begin::begin;
use self::folder::Folder;
use self::pictures::Drawing;
pub use self::workplace::On;
use self::workplace::{Setup, Workplace};
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::material::Material;
use crate::error::Result;
use crate::event::figures::Figures;
use crate::event::history::History;
use crate::event::{End, Event, EventRecord, Listener, Phase, Sink};
use crate::export::card;
use crate::model::diffusion::Pipeline;
use crate::report;
use crate::report::live::LiveReport;
use crate::task::lesson::Feed;
use crate::task::session::{Session, Trained};

/// How a run is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Goes on where the folder's last checkpoint is.
    pub resume: bool,
    /// Writes what came of the run also if it diverged.
    pub force: bool,
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
        Material::Pictures { .. } => train_images(config, on, (folder, events)),
        Material::Texts { .. } => train_texts(config, on, (folder, events)),
    }?;
    let figures = Figures::of(&History::open(&folder.path)?);
    let end = End { loss: figures.and_then(|figures| figures.final_loss), ..end };
    events.emit(Event::End(end.clone()))?;
    if end.why.is_done() && config.adapter.kind != AdapterKind::None {
        card::write(&folder.path, config)?;
    }
    Ok(end)
}

/// Trains a diffusion model on images.
fn train_images(
    config: &RunConfig,
    on: &On<'_>,
    (folder, events): (&Folder, &Sink<'_>),
) -> Result<End> {
    let mut pipeline = Pipeline::open(&folder.base(config)?, config.base.rest.as_deref())?;
    let (planned, index, place) = pictures::prepare(config, &pipeline, on, events)?;
    let lesson = Drawing::of(&planned.config, &pipeline)?;
    let feed = pictures::Feed::new(lesson, &planned.config, index, planned.plan.tiling)?;
    let setup = planned.setup(on);
    // What is written after is made of numbers outside the arena, which is gone by then.
    let (end, trained) = learn(&planned.config, &lesson, feed, (setup, place), (folder, events))?;
    if end.why.is_done() {
        pictures::write_result(&planned.config, &mut pipeline, trained, folder, events)?;
    }
    Ok(end)
}

/// Trains a language model on texts.
fn train_texts(
    config: &RunConfig,
    on: &On<'_>,
    (folder, events): (&Folder, &Sink<'_>),
) -> Result<End> {
    let opened = texts::Opened::of(config, false)?;
    let (planned, texts) = texts::prepare(config, &opened.lesson(config)?, on, events)?;
    let lesson = opened.lesson(&planned.config)?;
    let feed = texts::Feed::new(lesson, &planned.config, texts)?;
    let (setup, place) = (planned.setup(on), Workplace::open(on, &planned.plan)?);
    let (end, trained) = learn(&planned.config, &lesson, feed, (setup, place), (folder, events))?;
    if end.why.is_done() {
        texts::write_result(&planned.config, opened, trained, folder, events)?;
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
