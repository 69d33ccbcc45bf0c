//! Training, from a job to a proven adapter. [`train`] is the list of its stages; each is a room of
//! its own, and the loop is in `run.rs`.

mod checkpoint;
mod draws;
pub mod event;
mod folder;
mod health;
pub mod how;
mod identity;
pub mod journal;
pub(crate) mod meter;
pub(crate) mod noisy;
mod pacing;
pub(crate) mod pictures;
pub(crate) mod run;
mod scale;
pub(crate) mod session;
mod step;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use compute::{Device, Kind};
use machine::governor::Policy;
use machine::sampler::Sampler;

use self::checkpoint::Checkpoints;
use self::event::{Begin, End, Event, Why};
use self::folder::Folder;
use self::identity::Identity;
use self::journal::Journal;
use self::meter::{LOAD, Meter};
use self::noisy::Mixer;
use self::pacing::Pacing;
use self::pictures::Pictures;
use self::run::Run;
use self::session::{Session, Trained};
use crate::cache::{self, Caching, Index, Request};
use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::train::Length;
use crate::data::Problem;
use crate::error::Result;
use crate::export::{Exported, card, export, model};
use crate::model::adapter::read::Component;
use crate::model::build::Precision;
use crate::model::sd3::pipeline::Pipeline;
use crate::objective::flow::Levels;
use crate::plan::{Job, Outlook, Plan, Rates, Room, Rung, choose, ladder, rehearse};

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
    /// How fast it is.
    pub rates: Rates,
    /// Opens it with an arena of so many bytes.
    pub open: Box<dyn Fn(usize) -> compute::Result<Device> + 'a>,
    /// Begins to feel the machine; nothing where it cannot be, or is not to be.
    pub feel: Box<dyn Fn() -> Option<Sampler> + 'a>,
}

/// What a run is set up with.
#[derive(Clone, Copy)]
struct Setup<'a> {
    device: &'a Device,
    on: &'a On<'a>,
    plan: &'a Plan,
    ladder: &'a [Rung],
}

/// Trains: opens the model, finds and encodes the pictures, plans, runs the loop, writes what came of
/// it. With `resume` it goes on where the folder's last checkpoint is.
pub fn train(config: &RunConfig, on: &On<'_>, resume: bool, tell: Tell<'_>) -> Result<End> {
    let folder = Folder::open(&config.output.folder, resume)?;
    let mut teller = Teller::new(&folder, tell)?;
    let mut pipeline = Pipeline::open(&folder.base(config)?, config.base.rest.as_deref())?;
    let config = &folder.pinned(config, resume);
    let Prepared { config, caching, plan, ladder } = prepare(config, &pipeline, on, &teller)?;
    let config = &config;
    let n_known = caching.index().problems.len();
    teller.warn_of(&caching.index().problems)?;
    let device = (on.open)(plan.peak_bytes())?;
    let (index, meter) = encode(caching, &device, &plan, &teller)?;
    // Those that only showed when a picture was decoded.
    teller.warn_of(&index.problems[n_known..])?;
    let setup = Setup { device: &device, on, plan: &plan, ladder: &ladder };
    let (end, trained) = learn(config, &pipeline, setup, (&index, meter), (&folder, &mut teller))?;
    // What is written now is made of numbers outside the arena.
    drop(device);
    // An interrupted run goes on; of an unhealthy one nothing is worth to be used.
    let is_done = matches!(end.why, Why::Finished | Why::Plateau);
    if is_done {
        write_result(config, &mut pipeline, trained, &folder, &mut teller)?;
    }
    teller.tell(&Event::End(end.clone()))?;
    if is_done && config.adapter.kind != AdapterKind::None {
        card::write(&folder.path, config)?;
    }
    crate::report::write(&folder.path)?;
    Ok(end)
}

/// A job of which all is decided.
struct Prepared<'p> {
    config: RunConfig,
    caching: Caching<'p>,
    plan: Plan,
    ladder: Vec<Rung>,
}

/// Looks through the pictures and decides how the run is done.
fn prepare<'p>(
    config: &'p RunConfig,
    pipeline: &'p Pipeline,
    on: &On<'_>,
    teller: &Teller<'_>,
) -> Result<Prepared<'p>> {
    let room = Room { kind: on.kind, limit_bytes: on.limit_bytes, rates: &on.rates };
    let look = |encoders| {
        let precision = Precision { dtype: config.base.dtype, base: encoders };
        let request = Request { precision, ..Request::of(config) };
        Caching::new(pipeline, request, &|done| teller.caching(done))
    };
    let caching = look(config.base.quantise_encoders)?;
    let outlook = Outlook::of(&caching);
    let plan = choose(Job { pipeline, config, outlook: &outlook }, room)?;
    let planned = config.with(&plan.choice);
    let ladder = ladder(Job { pipeline, config: &planned, outlook: &outlook }, room)?;
    if planned.base.quantise_encoders == config.base.quantise_encoders {
        return Ok(Prepared { config: planned, caching, plan, ladder });
    }
    // Other encoders make other prompts, which may be in the cache or not.
    let caching = look(planned.base.quantise_encoders)?;
    let outlook = Outlook::of(&caching);
    let again = rehearse(Job { pipeline, config: &planned, outlook: &outlook }, room)?;
    let plan = Plan { considered: plan.considered, ..again };
    Ok(Prepared { config: planned, caching, plan, ladder })
}

/// Encodes what is not in the cache, and measures each encoder.
fn encode(
    caching: Caching<'_>,
    device: &Device,
    plan: &Plan,
    teller: &Teller<'_>,
) -> Result<(Arc<Index>, Meter)> {
    let meter = Mutex::new(Meter::new(device, &plan.phases));
    let index = caching.run(device, &|event| {
        if let cache::Event::Phase { name, .. } = event {
            meter.lock().unwrap_or_else(PoisonError::into_inner).begin(name);
        }
        teller.caching(event)
    })?;
    Ok((Arc::new(index), meter.into_inner().unwrap_or_else(PoisonError::into_inner)))
}

/// Runs the loop, and gives what came of it.
fn learn(
    config: &RunConfig,
    pipeline: &Pipeline,
    setup: Setup<'_>,
    from: (&Arc<Index>, Meter),
    into: (&Folder, &mut Teller<'_>),
) -> Result<(End, Trained)> {
    let mut run = begin(config, pipeline, setup, from, into)?;
    let end = run.go()?;
    let trained = run.session.averaged(Session::trained)?;
    Ok((end, trained))
}

/// Loads the model and puts it where it stood.
fn begin<'a, 't>(
    config: &'a RunConfig,
    pipeline: &'a Pipeline,
    Setup { device, on, plan, ladder }: Setup<'a>,
    (index, mut meter): (&Arc<Index>, Meter),
    (folder, teller): (&'a Folder, &'a mut Teller<'t>),
) -> Result<Run<'a, 't>> {
    teller.tell(&Event::Phase { name: "load the model".into() })?;
    meter.begin(LOAD);
    let mut session = Session::new(device, pipeline, config, &|_| teller.goes_on())?;
    let identity = Identity::new(config, pipeline, index)?;
    let checkpoints = Checkpoints::new(&folder.path, config.output.keep);
    let mut passed_over = Vec::new();
    let restored = checkpoints.restore(&mut session, &identity, |text| passed_over.push(text))?;
    let progress = restored.unwrap_or_default();
    // Not before: a job that is refused leaves no trace in another one's folder.
    folder.write(folder::CONFIG, &config.resolved())?;
    let order = index.order(config.train.batch, config.train.seed);
    let total_steps = total_steps(config, order.batches_per_epoch());
    teller.tell(&Event::Begin(Begin {
        version: env!("CARGO_PKG_VERSION").into(),
        base: config.base.path.display().to_string(),
        engine: on.name.clone(),
        from_step: progress.step,
        steps: total_steps,
        pictures: index.train.len(),
        held_out: index.held_out.len(),
        layers: session.n_layers(),
        parameters: session.n_parameters(),
        samples_per_step: config.train.batch * config.train.accumulation,
        phases: plan.phases.clone(),
        how: plan.choice.to_string(),
        step_secs: plan.step_secs,
        limit_bytes: on.limit_bytes,
        time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    }))?;
    // Of encoding and loading; not before the beginning either.
    teller.tell_each(&meter.end().events)?;
    for text in passed_over {
        teller.tell(&Event::Warning { step: progress.step, text, hint: None })?;
    }
    let mixer = Mixer {
        vae: pipeline.vae.config.clone(),
        levels: Levels::new(&pipeline.schedule),
        scheme: config.train.scheme,
        seed: config.train.seed,
    };
    Ok(Run {
        config,
        device,
        pacing: pacing(config, on, plan, ladder),
        session,
        index: Arc::clone(index),
        order,
        mixer,
        pictures: Pictures::new(pipeline, config, plan.tiling)?,
        checkpoints,
        identity,
        folder: &folder.path,
        progress,
        total_steps,
        meter,
        is_drawing_warned: false,
        teller,
    })
}

/// From the plan's pace on. In every way there is room to measure, which cannot be done tighter.
fn pacing(config: &RunConfig, on: &On<'_>, plan: &Plan, ladder: &[Rung]) -> Pacing {
    let measured = plan.phases.iter().filter(|phase| phase.name.starts_with(meter::VALIDATE));
    let least = measured.map(|phase| phase.peak_bytes).max().unwrap_or(0);
    let roomy = |rung: &Rung| Rung { peak_bytes: rung.peak_bytes.max(least), ..*rung };
    let ladder = (ladder.iter().map(roomy).collect(), plan.host_bytes);
    let policy = Policy {
        mode: config.machine.mode,
        max_celsius: config.machine.max_temp,
        is_calibrated: on.rates.is_measured,
    };
    Pacing::new(policy, ladder, on.rates.clone(), (on.feel)())
}

/// Steps that a run takes.
fn total_steps(config: &RunConfig, batches_per_epoch: u64) -> u64 {
    match config.train.length {
        Length::Steps(steps) => steps,
        Length::Epochs(epochs) => {
            (epochs * batches_per_epoch).div_ceil(config.train.accumulation as u64).max(1)
        }
    }
}

/// Writes what was trained for every program that was asked for.
fn write_result(
    config: &RunConfig,
    pipeline: &mut Pipeline,
    trained: Trained,
    folder: &Folder,
    teller: &mut Teller<'_>,
) -> Result<()> {
    let layers = match trained {
        Trained::Adapter(layers) => layers,
        Trained::Own(own) => {
            model::write(pipeline, &own, config.base.dtype, &folder.path.join("model"))?;
            let (format, path) = ("model".into(), "model".into());
            return teller.tell(&Event::Exported { format, path, layers: own.len() });
        }
    };
    pipeline.set_adapter(vec![(Component::Transformer, layers)]);
    for format in &config.output.formats {
        let (name, into) = (config.output.name.as_str(), folder.path.join("adapter"));
        let Exported { path, n_layers, .. } = export(pipeline, *format, &into, name)?;
        let path = path.strip_prefix(&folder.path).unwrap_or(&path).into();
        let format = format!("{format:?}").to_lowercase();
        teller.tell(&Event::Exported { format, path, layers: n_layers })?;
    }
    Ok(())
}

/// Writes events down and passes them on; remembers whether somebody asked to stop.
pub struct Teller<'a> {
    journal: Journal,
    tell: Tell<'a>,
    is_stopped: AtomicBool,
    /// The phase of encoding, and how much of it is done.
    counted: Mutex<(&'static str, u64, u64)>,
}

impl<'a> Teller<'a> {
    fn new(folder: &Folder, tell: Tell<'a>) -> Result<Self> {
        let (is_stopped, counted) = (AtomicBool::new(false), Mutex::new(("", 0, 0)));
        Ok(Self { journal: Journal::open(&folder.path)?, tell, is_stopped, counted })
    }

    fn tell(&mut self, event: &Event) -> Result<()> {
        self.journal.write(event)?;
        self.pass_on(Happening::Event(event));
        Ok(())
    }

    fn tell_each(&mut self, events: &[Event]) -> Result<()> {
        events.iter().try_for_each(|event| self.tell(event))
    }

    fn warn_of(&mut self, problems: &[Problem]) -> Result<()> {
        problems.iter().try_for_each(|problem| {
            let text = format!("{} {}", problem.path.display(), problem.kind);
            self.tell(&Event::Warning { step: 0, text, hint: None })
        })
    }

    /// How far the encoding is; answers whether to go on.
    fn caching(&self, event: cache::Event) -> bool {
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
