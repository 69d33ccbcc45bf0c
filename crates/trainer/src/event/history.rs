//! `events.jsonl` to what happened. A run that went on after a break has several parts, and steps
//! that were lost with the break are there twice: what the later part took counts, and what the
//! earlier one did beyond the place where the later began is not part of the model.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::journal::FILE_NAME;
use super::{Begin, End, Event, Felt, Step};
use crate::error::{Result, TrainerError};

/// What happened in a run.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The run from each beginning to its end, in order; at least one.
    pub parts: Vec<Part>,
    /// In order, each once.
    pub steps: Vec<Step>,
    /// Steps taken, and the loss on held-out pictures then.
    pub validations: Vec<(u64, f64)>,
    /// By step, then in the order they were drawn.
    pub samples: Vec<Sample>,
    /// By step, then in the order they were written.
    pub texts: Vec<Written>,
    /// Steps taken, and what was said then, in that order; also by parts whose steps were lost.
    pub warnings: Vec<(u64, String)>,
    /// How the machine felt, with the minutes of training by then.
    pub felt: Vec<(f64, Felt)>,
    /// Steps taken, and what the governor decided then, in words.
    pub paced: Vec<(u64, String)>,
    /// What phases took, in the order in which they first ended.
    pub phases: Vec<Taken>,
    /// The adapter's files, as written last.
    pub exports: Vec<Exported>,
}

/// A run from a beginning to its end.
#[derive(Clone, Debug)]
pub struct Part {
    /// What it was about.
    pub begin: Begin,
    /// How it ended; none if it was killed, or runs still.
    pub end: Option<End>,
    /// Seconds of all its steps, also of those that were lost.
    pub step_secs: f64,
    /// The last step it took.
    pub last_step: u64,
}

/// The memory of a phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its name.
    pub name: String,
    /// Bytes at its peak, as planned.
    pub planned_bytes: usize,
    /// Bytes at its peak, as measured.
    pub peak_bytes: usize,
}

/// A picture that was drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Steps taken by then.
    pub step: u64,
    /// Relative to the run's folder.
    pub path: PathBuf,
    /// What was to be drawn.
    pub prompt: String,
    /// What the noise followed from.
    pub seed: u64,
}

/// A text that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
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
pub struct Exported {
    /// The program it is for.
    pub format: String,
    /// Relative to the run's folder.
    pub path: PathBuf,
    /// Layers found again in it.
    pub layers: usize,
}

impl History {
    /// Reads `events.jsonl` of a run's folder.
    pub fn open(run_folder: &Path) -> Result<Self> {
        let path = run_folder.join(FILE_NAME);
        let failed = |source| TrainerError::Io { what: "read", path: path.clone(), source };
        let mut lines = BufReader::new(File::open(&path).map_err(failed)?);
        let mut reader = Reader::default();
        let mut text = Vec::new();
        for line in 1.. {
            text.clear();
            if lines.read_until(b'\n', &mut text).map_err(failed)? == 0 {
                break;
            }
            match serde_json::from_slice(&text) {
                Ok(event) => reader.take(event),
                // A writer that was killed leaves half a line, and only at the end.
                Err(_) if !text.ends_with(b"\n") => break,
                Err(_) if text.trim_ascii().is_empty() => {}
                Err(error) => {
                    return Err(TrainerError::Event { line, problem: said(&error), path });
                }
            }
        }
        reader.finish().ok_or_else(|| TrainerError::Event {
            line: 1,
            problem: "the run has no beginning".into(),
            path,
        })
    }
}

/// What the parser said, without its own line number: it was given one line.
fn said(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1", "")
}

/// A history that is being read.
#[derive(Default)]
struct Reader {
    parts: Vec<Part>,
    steps: BTreeMap<u64, Step>,
    validations: BTreeMap<u64, f64>,
    samples: BTreeMap<u64, Vec<Sample>>,
    texts: BTreeMap<u64, Vec<Written>>,
    warnings: BTreeSet<(u64, String)>,
    felt: Vec<(f64, Felt)>,
    paced: Vec<(u64, String)>,
    /// Minutes of training before the part that is read.
    minutes_before: f64,
    phases: Vec<Taken>,
    exports: BTreeMap<PathBuf, Exported>,
}

impl Reader {
    fn take(&mut self, event: Event) {
        match event {
            Event::Begin(begin) => self.begin(begin),
            Event::Step(step) => self.step(step),
            Event::Validation { step, loss } => _ = self.validations.insert(step, loss),
            Event::Sample { step, path, prompt, seed } => {
                let drawn = self.samples.entry(step).or_default();
                drawn.retain(|sample| sample.path != path);
                drawn.push(Sample { step, path, prompt, seed });
            }
            Event::Written { step, prompt, text, seed } => {
                let written = self.texts.entry(step).or_default();
                written.retain(|other| (&other.prompt, other.seed) != (&prompt, seed));
                written.push(Written { step, prompt, text, seed });
            }
            Event::Warning { step, text, hint } => {
                let hint = hint.map_or_else(String::new, |hint| format!("; {hint}"));
                _ = self.warnings.insert((step, text + &hint));
            }
            Event::LeftOut(left_out) => _ = self.warnings.insert((0, left_out.to_string())),
            Event::Felt(felt) => self.felt.push((self.minutes_before + felt.secs / 60.0, felt)),
            Event::Paced(paced) => self.paced.push((paced.step, paced.to_string())),
            Event::Tightened(tightened) => {
                _ = self.warnings.insert((tightened.step, tightened.to_string()));
            }
            Event::Lost(lost) => _ = self.warnings.insert((lost.step, lost.to_string())),
            Event::Memory { phase, planned_bytes, peak_bytes } => {
                self.memory(Taken { name: phase, planned_bytes, peak_bytes });
            }
            Event::Exported { format, path, layers } => {
                _ = self.exports.insert(path.clone(), Exported { format, path, layers });
            }
            Event::End(end) => {
                if let Some(part) = self.parts.last_mut() {
                    part.end = Some(end);
                }
            }
            Event::Phase { .. }
            | Event::Note { .. }
            | Event::Checkpoint { .. }
            | Event::Health { .. } => {}
        }
    }

    /// What lies beyond the place from which a run goes on is no longer part of it.
    fn begin(&mut self, begin: Begin) {
        let lost = begin.from_step + 1;
        self.steps.split_off(&lost);
        self.validations.split_off(&lost);
        self.samples.split_off(&lost);
        self.texts.split_off(&lost);
        self.minutes_before = self.felt.last().map_or(0.0, |(minutes, _)| *minutes);
        let last_step = begin.from_step;
        self.parts.push(Part { begin, end: None, step_secs: 0.0, last_step });
    }

    /// A phase that was planned anew, since the job was changed, is another one.
    fn memory(&mut self, taken: Taken) {
        let Some(known) = self.phases.iter_mut().find(|known| known.name == taken.name) else {
            return self.phases.push(taken);
        };
        let is_same = known.planned_bytes == taken.planned_bytes;
        let most = if is_same { known.peak_bytes.max(taken.peak_bytes) } else { taken.peak_bytes };
        *known = Taken { peak_bytes: most, ..taken };
    }

    fn step(&mut self, step: Step) {
        if let Some(part) = self.parts.last_mut() {
            part.step_secs += step.secs;
            part.last_step = part.last_step.max(step.step);
        }
        self.steps.insert(step.step, step);
    }

    /// None if nothing ever began.
    fn finish(self) -> Option<History> {
        (!self.parts.is_empty()).then(|| History {
            steps: self.steps.into_values().collect(),
            validations: self.validations.into_iter().collect(),
            samples: self.samples.into_values().flatten().collect(),
            texts: self.texts.into_values().flatten().collect(),
            warnings: self.warnings.into_iter().collect(),
            felt: self.felt,
            paced: self.paced,
            phases: self.phases,
            exports: self.exports.into_values().collect(),
            parts: self.parts,
        })
    }
}
