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

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use compute::{Device, Kind};
use machine::sampler::Sampler;

use self::checkpoint::Checkpoints;
use self::folder::Folder;
use self::identity::Identity;
use self::lesson::Feed;
use self::meter::LOAD;
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
use crate::event::journal::Journal;
use crate::event::{Begin, End, Event, Repeated, Times};
use crate::export::card;
use crate::plan::{Plan, Rates, Room, Rung};
use crate::report::live::LiveReport;
use crate::report::{self, Stage};

/// What happens, as it is told.
pub enum Happening<'a> {
    /// Something that is written down too.
    Event(&'a Event),
    /// How far a phase is.
    Progress {
        /// The phase.
        phase: &'a str,
        /// So much is done ...
        done: u64,
        /// ... of this.
        total: u64,
    },
    /// Nothing new: only asks whether to go on, in the middle of something long.
    Tick,
}

/// Told what happens; answers whether to go on. Called from several threads.
pub type Tell<'a> = &'a (dyn Fn(Happening<'_>) -> bool + Sync);

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
pub fn train(config: &RunConfig, on: &On<'_>, start: Start, tell: Tell<'_>) -> Result<End> {
    claim::check(config, &[])?;
    let folder = Folder::open(&config.output.folder, start)?;
    let mut teller = Teller::new(&folder, tell)?;
    let config = &folder.pinned(config);
    let end = train_into(config, on, (&folder, &mut teller));
    drop(teller);
    let reported = report::write(&folder.path, Stage::Over);
    // Where both failed, the first is the cause.
    let end = end?;
    reported?;
    Ok(end)
}

fn train_into(
    config: &RunConfig,
    on: &On<'_>,
    (folder, teller): (&Folder, &mut Teller<'_>),
) -> Result<End> {
    let end = match config.material {
        Material::Pictures { .. } => pictures::train(config, on, (folder, teller)),
        Material::Texts { .. } => texts::train(config, on, (folder, teller)),
    }?;
    let figures = Figures::of(&History::open(&folder.path)?);
    let end = End { loss: figures.and_then(|figures| figures.final_loss), ..end };
    teller.tell(&Event::End(end.clone()))?;
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
    (folder, teller): (&Folder, &mut Teller<'_>),
) -> Result<(End, Trained)> {
    let (learnt, _) = place.surviving(setup, teller, |place, teller, reached| {
        let mut run = begin(config, lesson, &mut feed, (setup, place), (folder, teller))?;
        let end = run.go();
        *reached = run.progress.step.max(*reached);
        let (end, trained) = (end?, run.session.averaged(Session::trained)?);
        Ok((run.judge_result(end, &trained, folder.start.force)?, trained))
    })?;
    Ok(learnt)
}

/// Loads the model and puts it where it stood.
fn begin<'a, 't, F: Feed>(
    config: &'a RunConfig,
    lesson: &'a F::Lesson,
    feed: &'a mut F,
    (Setup { on, plan, ladder }, Workplace { device, meter }): (Setup<'a>, &'a mut Workplace),
    (folder, teller): (&'a Folder, &'a mut Teller<'t>),
) -> Result<Run<'a, 't, F>> {
    teller.tell(&Event::Phase { name: "load the model".into() })?;
    meter.begin(LOAD);
    let mut session = Session::new(device, lesson, config, &|_| teller.goes_on())?;
    let identity = Identity::new(config, lesson, feed)?;
    let checkpoints = Checkpoints::new(&folder.path, &config.output);
    let mut warnings = Vec::new();
    let restored = checkpoints.restore(&mut session, &identity, |text| warnings.push(text))?;
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
    teller.tell(&Event::Begin(Begin {
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
        time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }))?;
    // Of what came before and of loading; not before the beginning either.
    teller.tell_each(&meter.end().events)?;
    for text in warnings {
        teller.tell(&Event::Warning { step: progress.step, text, hint: None })?;
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
        teller,
    })
}

/// Writes events down and passes them on; remembers whether somebody asked to stop.
pub struct Teller<'a> {
    journal: Journal,
    report: LiveReport,
    tell: Tell<'a>,
    is_stopped: AtomicBool,
    /// The phase before training that is counted, how much of it is done, and of how much.
    counted: Mutex<(&'static str, u64, u64)>,
}

impl On<'_> {
    /// For plans.
    fn room(&self) -> Room<'_> {
        let Self { kind, limit_bytes, host_bytes, rates, .. } = self;
        Room { kind: *kind, limit_bytes: *limit_bytes, rates, host_bytes: *host_bytes }
    }
}

impl<'a> Teller<'a> {
    fn new(folder: &Folder, tell: Tell<'a>) -> Result<Self> {
        let (is_stopped, counted) = (AtomicBool::new(false), Mutex::new(("", 0, 0)));
        let journal = Journal::open(&folder.path, folder.start.resume)?;
        let report = LiveReport::begin(folder.path.clone());
        Ok(Self { journal, report, tell, is_stopped, counted })
    }

    fn tell(&mut self, event: &Event) -> Result<()> {
        self.journal.write(event)?;
        self.report.observe(event);
        self.pass_on(Happening::Event(event));
        Ok(())
    }

    fn tell_each(&mut self, events: &[Event]) -> Result<()> {
        events.iter().try_for_each(|event| self.tell(event))
    }

    /// What was found wrong with images or texts, in a line for each reason.
    fn tell_findings(&mut self, findings: Findings) -> Result<()> {
        let Findings { left_out, warnings, notes } = findings;
        let warning = |text| Event::Warning { step: 0, text, hint: None };
        let left_out = left_out.into_iter().map(Event::LeftOut);
        let notes = notes.into_iter().map(|text| Event::Note { text });
        let events = left_out.chain(warnings.into_iter().map(warning)).chain(notes);
        self.tell_each(&events.collect::<Vec<_>>())
    }

    /// How far the preparation of pictures or texts is; answers whether to go on.
    fn prepares(&self, event: cache::Event) -> bool {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            cache::Event::Phase { name, total } => *counted = (name, 0, total as u64),
            cache::Event::Done => counted.1 += 1,
            cache::Event::Loaded(_) => {}
        }
        let (phase, done, total) = *counted;
        self.pass_on(Happening::Progress { phase, done, total });
        self.goes_on()
    }

    fn pass_on(&self, happening: Happening<'_>) {
        if !(self.tell)(happening) {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
    }

    /// Whether nobody asked to stop, also just now.
    fn goes_on(&self) -> bool {
        self.pass_on(Happening::Tick);
        !self.is_stopped.load(Ordering::Relaxed)
    }
}
