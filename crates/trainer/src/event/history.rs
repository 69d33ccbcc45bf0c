//! What happened in a run: the one fold of its events, taken in one at a time. The terminal folds them as
//! they come; the report, the model card and other programs fold `events.jsonl`.
//!
//! A run that went on after a break has several parts, and steps that were lost with the break are there
//! twice: what the later part took counts, and what the earlier one did beyond the place where the later
//! began is not part of the model.

use std::io;
use std::path::{Path, PathBuf};

use super::journal::{self, BrokenLines, FILE_NAME};
use super::{
    Event, EventRecord, GpuLoss, MachineSnapshot, Phase, PhaseProgress, PolicyMetrics, RankShare,
    RewardMetrics, RunEnd, RunFailure, RunStart, StepMetrics, TimestepLosses, Warning,
};
use crate::error::{Result, TrainerError};

/// What happened in a run.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The run from each beginning to its end, in order.
    pub parts: Vec<RunPart>,
    /// In order, each once.
    pub steps: Vec<StepMetrics>,
    /// Steps taken, and the loss on held-out samples then.
    pub validations: Vec<(u64, f64)>,
    /// What a policy did in each step.
    pub policy: Vec<PolicyMetrics>,
    /// What preferences or rewards came to, in each step and validation.
    pub rewards: Vec<RewardMetrics>,
    /// Losses by timestep, of each step and validation.
    pub timestep_losses: Vec<TimestepLosses>,
    /// By step, then in the order they were drawn.
    pub samples: Vec<SampleImage>,
    /// By step, then in the order they were written.
    pub texts: Vec<SampleText>,
    /// Steps taken, and what was said then, in that order; also by parts whose steps were lost.
    pub warnings: Vec<(u64, String)>,
    /// How the machine felt, with the minutes of training by then.
    pub snapshots: Vec<(f64, MachineSnapshot)>,
    /// Steps taken, and what the governor decided then, in words.
    pub pace_changes: Vec<(u64, String)>,
    /// How ranks that train together shared the last step that is told of.
    pub ranks: Vec<RankShare>,
    /// What phases took, in the order in which they first ended.
    pub phases: Vec<PhasePeak>,
    /// The adapter's files, as written last, by path.
    pub exports: Vec<ExportRecord>,
    /// The phase that is under way, and how far it is; none while the run trains, and when it is over.
    pub progress: Option<PhaseProgress>,
    /// Seconds since 1970 of the last event, where that is known.
    pub time: Option<f64>,
    /// Minutes of training before the part that is read.
    minutes_before: f64,
    attempt: Attempt,
}

/// What a program that worked on the run came to, the last one that did.
#[derive(Clone, Debug, Default)]
struct Attempt {
    /// Whether anything ever happened.
    is_any: bool,
    /// Whether it began, or went on with, the run.
    has_begun: bool,
    is_over: bool,
    /// How the last one ended that never began.
    unbegun: Option<Ending>,
}

/// How a part of a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// As it should, or as it was asked to.
    End(RunEnd),
    /// With an error.
    Failed(RunFailure),
    /// With its GPU; the same program went on.
    Lost(GpuLoss),
}

/// A run from a beginning to its end.
#[derive(Clone, Debug)]
pub struct RunPart {
    /// What it was about.
    pub begin: RunStart,
    /// Seconds since 1970 at its beginning, where that is known.
    pub time: Option<f64>,
    /// How it ended; none if it was killed, or runs still.
    pub ending: Option<Ending>,
    /// Seconds of all its steps, also of those that were lost.
    pub step_secs: f64,
    /// The last step it took.
    pub last_step: u64,
}

impl RunPart {
    /// How it ended, if it came to an end of its own.
    pub fn end(&self) -> Option<&RunEnd> {
        match &self.ending {
            Some(Ending::End(end)) => Some(end),
            _ => None,
        }
    }
}

/// The memory of a phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhasePeak {
    /// Which.
    pub name: Phase,
    /// Bytes at its peak, as planned.
    pub planned_bytes: usize,
    /// Bytes at its peak, as measured.
    pub peak_bytes: usize,
}

/// An image that was drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleImage {
    /// Steps taken by then.
    pub step: u64,
    /// Relative to the run's folder.
    pub path: PathBuf,
    /// What was to be drawn.
    pub prompt: String,
    /// What the noise followed from.
    pub seed: u64,
    /// The reference images that it was made from, relative to the run's folder.
    pub references: Vec<PathBuf>,
    /// The clip of which `path` shows some frames, relative to the run's folder.
    pub clip: Option<PathBuf>,
}

/// A text that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampleText {
    /// Steps taken by then.
    pub step: u64,
    /// What it begins with.
    pub prompt: String,
    /// What the model added.
    pub text: String,
    /// What the choices followed from.
    pub seed: u64,
}

/// A file of the adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportRecord {
    /// The program it is for.
    pub format: String,
    /// Relative to the run's folder.
    pub path: PathBuf,
    /// Layers found again in it.
    pub layers: usize,
}

impl History {
    /// Reads `events.jsonl` of a run that has begun.
    pub fn open(run_folder: &Path) -> Result<Self> {
        let path = run_folder.join(FILE_NAME);
        let mut history = Self::default();
        let broken = journal::read(&path, |record| history.apply(record))?;
        history.warn_broken(&broken);
        if history.parts.is_empty() {
            let problem = "the run has no beginning".into();
            return Err(TrainerError::Event { line: 1, problem, path });
        }
        Ok(history)
    }

    /// The same of any folder, also where nothing has happened yet.
    pub fn read(run_folder: &Path) -> Result<Self> {
        let mut history = Self::default();
        let read = journal::read(&run_folder.join(FILE_NAME), |record| history.apply(record));
        match read {
            Err(TrainerError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
            read => history.warn_broken(&read?),
        }
        Ok(history)
    }

    /// Says which lines were left out.
    fn warn_broken(&mut self, BrokenLines { lines }: &BrokenLines) {
        if let Some(first) = lines.first() {
            let n = lines.len();
            self.warn(
                0,
                format!("{n} broken lines of {FILE_NAME} are left out, the first is line {first}"),
            );
        }
    }

    /// What the part is about that was begun last.
    pub fn begin(&self) -> Option<&RunStart> {
        self.parts.last().map(|part| &part.begin)
    }

    /// Steps taken.
    pub fn last_step(&self) -> u64 {
        let from = self.begin().map_or(0, |begin| begin.from_step);
        self.steps.last().map_or(from, |step| step.step)
    }

    /// Whether it takes steps, or saves what they gave: it has begun, and nothing else is done.
    pub fn is_training(&self) -> bool {
        let phase = self.progress.as_ref().map(|progress| &progress.phase);
        let is_at_it = matches!(phase, None | Some(Phase::Save | Phase::Export));
        self.attempt.has_begun && !self.attempt.is_over && is_at_it
    }

    /// Whether anything ever happened.
    pub(super) fn is_any(&self) -> bool {
        self.attempt.is_any
    }

    /// Whether the last program that worked on it has said how that ended.
    pub(super) fn is_over(&self) -> bool {
        self.attempt.is_over
    }

    /// How the run ended, if it said so. A program that failed before it could go on with a run leaves that
    /// as it was.
    pub(super) fn ending(&self) -> Option<&Ending> {
        match self.parts.last() {
            Some(part) => part.ending.as_ref(),
            None => self.attempt.unbegun.as_ref(),
        }
    }

    /// Takes in what happened next.
    pub fn apply(&mut self, EventRecord { event, time }: EventRecord) {
        self.start_attempt(&event);
        self.time = time.or(self.time);
        match event {
            Event::Begin(begin) => self.begun(begin, time),
            Event::Phase { name } => self.progress = Some(PhaseProgress::begun(name)),
            Event::Progress(progress) => self.progress = Some(progress),
            Event::Step(step) => self.step(step),
            Event::Validation { step, loss } => {
                renew(&mut self.validations, (step, loss), |(step, _)| *step, |_, _| true);
            }
            Event::Policy(policy) => {
                renew(&mut self.policy, policy, |policy| policy.step, |_, _| true);
            }
            Event::Rewards(rewards) => {
                let is_same =
                    |a: &RewardMetrics, b: &RewardMetrics| a.is_held_out() == b.is_held_out();
                renew(&mut self.rewards, rewards, |rewards| rewards.step, is_same);
            }
            Event::Timesteps(losses) => {
                let is_same =
                    |a: &TimestepLosses, b: &TimestepLosses| a.is_held_out == b.is_held_out;
                renew(&mut self.timestep_losses, losses, |losses| losses.step, is_same);
            }
            Event::ImageSample { step, path, prompt, seed, references, clip } => {
                self.samples.retain(|other| (other.step, &other.path) != (step, &path));
                self.samples.push(SampleImage { step, path, prompt, seed, references, clip });
            }
            Event::TextSample { step, prompt, text, seed } => {
                let is_other = |other: &SampleText| {
                    (other.step, &other.prompt, other.seed) != (step, &prompt, seed)
                };
                self.texts.retain(is_other);
                self.texts.push(SampleText { step, prompt, text, seed });
            }
            Event::Warning(Warning { step, kind }) => {
                let hint = kind.hint().map_or_else(String::new, |hint| format!("; {hint}"));
                self.warn(step, format!("{kind}{hint}"));
            }
            Event::LeftOut(left_out) => self.warn(0, left_out.to_string()),
            Event::MemoryFallback(tightened) => self.warn(tightened.step, tightened.to_string()),
            Event::GpuLost(lost) => {
                self.warn(lost.step, lost.to_string());
                self.end(Ending::Lost(lost));
            }
            Event::Telemetry(felt) => {
                self.snapshots.push((self.minutes_before + felt.secs / 60.0, felt));
            }
            Event::Ranks { ranks, .. } => self.ranks = ranks,
            Event::Pace(paced) => self.pace_changes.push((paced.step, paced.to_string())),
            Event::Memory { phase, planned_bytes, peak_bytes } => {
                self.add_phase(PhasePeak { name: phase, planned_bytes, peak_bytes });
            }
            Event::Exported { format, path, layers } => {
                self.exports.retain(|other| other.path != path);
                let at = self.exports.partition_point(|other| other.path < path);
                self.exports.insert(at, ExportRecord { format, path, layers });
            }
            Event::End(end) => self.over(Ending::End(end)),
            Event::Failed(failed) => self.over(Ending::Failed(failed)),
            Event::Checkpoint { .. } => self.progress = None,
            Event::Note { .. } | Event::Health { .. } | Event::Request(_) => {}
        }
    }

    /// A program begins to work on the run: by its first event, or, of before there was one, by anything
    /// that comes after an end.
    fn start_attempt(&mut self, event: &Event) {
        let is_first = matches!(event, Event::Phase { name: Phase::Open });
        if is_first || self.attempt.is_over || !self.attempt.is_any {
            (self.attempt.is_any, self.attempt.has_begun) = (true, false);
            self.attempt.is_over = false;
        }
    }

    fn over(&mut self, ending: Ending) {
        self.progress = None;
        self.attempt.is_over = true;
        if self.attempt.has_begun {
            self.end(ending);
        } else {
            self.attempt.unbegun = Some(ending);
        }
    }

    fn end(&mut self, ending: Ending) {
        if let Some(part) = self.parts.last_mut() {
            part.ending = Some(ending);
        }
    }

    /// What lies beyond the place from which a run goes on is no longer part of it.
    fn begun(&mut self, begin: RunStart, time: Option<f64>) {
        let from = begin.from_step;
        self.steps.retain(|step| step.step <= from);
        self.validations.retain(|(step, _)| *step <= from);
        self.policy.retain(|policy| policy.step <= from);
        self.rewards.retain(|rewards| rewards.step <= from);
        self.timestep_losses.retain(|losses| losses.step <= from);
        self.samples.retain(|sample| sample.step <= from);
        self.texts.retain(|text| text.step <= from);
        self.minutes_before = self.snapshots.last().map_or(0.0, |(minutes, _)| *minutes);
        self.progress = None;
        self.attempt.has_begun = true;
        self.parts.push(RunPart { begin, time, ending: None, step_secs: 0.0, last_step: from });
    }

    /// A phase that was planned anew, since the job was changed, is another one.
    fn add_phase(&mut self, taken: PhasePeak) {
        let Some(known) = self.phases.iter_mut().find(|known| known.name == taken.name) else {
            return self.phases.push(taken);
        };
        let is_same = known.planned_bytes == taken.planned_bytes;
        let most = if is_same { known.peak_bytes.max(taken.peak_bytes) } else { taken.peak_bytes };
        *known = PhasePeak { peak_bytes: most, ..taken };
    }

    fn step(&mut self, step: StepMetrics) {
        if let Some(part) = self.parts.last_mut() {
            part.step_secs += step.secs;
            part.last_step = part.last_step.max(step.step);
        }
        renew(&mut self.steps, step, |step| step.step, |_, _| true);
    }

    /// What was said before at this step is not said again.
    fn warn(&mut self, step: u64, text: String) {
        if !self.warnings.iter().any(|(at, said)| *at == step && *said == text) {
            let at = self.warnings.partition_point(|(at, _)| *at <= step);
            self.warnings.insert(at, (step, text));
        }
    }
}

/// Adds an item to a list in the order of steps. Those like it of its step and of later ones were lost with a break.
fn renew<T>(
    items: &mut Vec<T>,
    item: T,
    step_of: impl Fn(&T) -> u64,
    is_like: impl Fn(&T, &T) -> bool,
) {
    let from = items.partition_point(|other| step_of(other) < step_of(&item));
    let others = items.split_off(from).into_iter().filter(|other| !is_like(other, &item));
    items.extend(others);
    items.push(item);
}
