//! A run for TensorBoard, with `output.tensorboard = true`: a listener that writes numbers, images and texts
//! beside `events.jsonl`, as they come.
//!
//! ```text
//! RUN/tensorboard/events.out.tfevents.SECONDS.hearth.PROCESS     one for each program that worked on the run
//! ```
//!
//! A run that goes on begins a new file with the step that it goes on from. TensorBoard then forgets what an
//! earlier file says of that step and later ones, so that steps that were taken again are shown once.

mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Mutex, PoisonError};

use weights::plain_file::{open_own, read_plain};

use self::record::{ProtoMessage, framed};
use super::figures::{loss_window, mean_loss};
use super::history::History;
use super::{
    Event, EventRecord, MachineSnapshot, PolicyMetrics, RewardMetrics, RunStart, StepMetrics,
};
use crate::error::{Result, TrainerError};

/// The folder in that of a run.
pub const FOLDER_NAME: &str = "tensorboard";

/// What TensorBoard asks of the first record.
const FILE_VERSION: &str = "brain.Event:2";

/// Largest image that is copied. Chosen: a PNG of 2048x2048 pixels of noise has 12 MiB.
const IMAGE_BYTES: usize = 16 << 20;

/// Writes a run's events for TensorBoard.
pub struct TensorBoardLog {
    run_folder: PathBuf,
    state: Mutex<LogState>,
}

#[derive(Default)]
struct LogState {
    /// None before the run begins, and when it could not be written to: `events.jsonl` is on the same disk,
    /// and says why.
    file: Option<File>,
    /// The last steps, at least as many as a loss is the mean of.
    recent: Vec<StepMetrics>,
    loss_window: usize,
}

impl TensorBoardLog {
    /// Of the run in a folder.
    pub fn new(run_folder: &Path) -> Result<Self> {
        let path = run_folder.join(FOLDER_NAME);
        fs::create_dir_all(&path).map_err(|source| TrainerError::Io {
            what: "write",
            path,
            source,
        })?;
        Ok(Self { run_folder: run_folder.into(), state: Mutex::default() })
    }

    /// Writes what an event has for TensorBoard.
    pub fn observe(&self, record: &EventRecord) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let time = record.time.unwrap_or(0.0);
        if let Event::Begin(begin) = &record.event {
            state.begin(&self.run_folder, begin, time);
        }
        let Some((step, values)) = self.values(&mut state, &record.event) else { return };
        let mut summary = ProtoMessage::default();
        for value in values {
            summary = summary.message(1, &value);
        }
        state.write(ProtoMessage::default().double(1, time).int(2, step).message(5, &summary));
    }

    /// The step, and what is to be shown of it.
    fn values(&self, state: &mut LogState, event: &Event) -> Option<(u64, Vec<ProtoMessage>)> {
        Some(match event {
            Event::Step(step) => (step.step, state.step(step)),
            Event::Validation { step, loss } => (*step, vec![scalar("loss/held_out", *loss)]),
            Event::Policy(policy) => (policy.step, policy_scalars(policy)),
            Event::Rewards(RewardMetrics { step, metrics }) => {
                (*step, metrics.iter().map(|(name, value)| scalar(name, *value)).collect())
            }
            Event::Telemetry(felt) => (felt.step, machine_scalars(felt)),
            Event::ImageSample { step, path, prompt, .. } => {
                let bytes = read_plain(&self.run_folder.join(path)).ok()?;
                (*step, vec![image(&format!("samples/{prompt}"), &bytes)?])
            }
            Event::TextSample { step, prompt, text: sample, .. } => {
                (*step, vec![text(&format!("samples/{prompt}"), &indented(sample))])
            }
            Event::Begin(begin) => (begin.from_step, vec![text("run/settings", &about(begin))]),
            _ => return None,
        })
    }
}

impl LogState {
    fn begin(&mut self, run_folder: &Path, begin: &RunStart, time: f64) {
        self.loss_window = loss_window(begin.steps);
        let steps = History::read(run_folder).map(|history| history.steps).unwrap_or_default();
        self.recent = steps[steps.len().saturating_sub(self.loss_window)..].to_vec();
        if self.file.is_none() {
            self.file = open(run_folder, time).ok();
            self.write(ProtoMessage::default().double(1, time).bytes(3, FILE_VERSION));
        }
        // The status of a session that starts. What was said of this step and later ones is void; of the step
        // that a run goes on from there are samples already.
        let start = ProtoMessage::default().int(1, 1);
        let first = begin.from_step + u64::from(begin.from_step > 0);
        self.write(ProtoMessage::default().double(1, time).int(2, first).message(7, &start));
    }

    fn step(&mut self, step: &StepMetrics) -> Vec<ProtoMessage> {
        self.recent.push(step.clone());
        if self.recent.len() > 2 * self.loss_window {
            self.recent.drain(..self.loss_window);
        }
        let numbers = [
            ("loss/train", Some(step.loss)),
            ("loss/smoothed", mean_loss(&self.recent, self.loss_window)),
            ("optimizer/learning_rate", Some(step.learning_rate)),
            ("optimizer/gradient_norm", step.grad_norm),
            ("speed/seconds_per_step", Some(step.secs)),
            ("speed/copy_wait_seconds", step.copy_wait_secs),
            ("memory/peak_gib", Some(step.peak_bytes as f64 / GIB)),
        ];
        scalars(&numbers)
    }

    fn write(&mut self, event: ProtoMessage) {
        if let Some(file) = &mut self.file
            && file.write_all(&framed(&event.into_bytes())).is_err()
        {
            self.file = None;
        }
    }
}

const GIB: f64 = (1_u64 << 30) as f64;

/// A new file. Never one that is there: half a record of a program that was killed would hide what follows.
fn open(run_folder: &Path, time: f64) -> io::Result<File> {
    let name = format!("events.out.tfevents.{:010}.hearth.{}", time as u64, process::id());
    let mut options = OpenOptions::new();
    options.append(true).create_new(true);
    open_own(&run_folder.join(FOLDER_NAME).join(name), &mut options)
}

/// What the policy of a compressed model did.
fn policy_scalars(policy: &PolicyMetrics) -> Vec<ProtoMessage> {
    let PolicyMetrics { entropy, same_places, word_ends, reward, advantage_spread, .. } = policy;
    let numbers = [
        ("policy/entropy", Some(*entropy)),
        ("policy/same_places", Some(*same_places)),
        ("policy/word_ends", Some(*word_ends)),
        ("policy/reward", Some(*reward)),
        ("policy/advantage_spread", *advantage_spread),
    ];
    numbers.into_iter().filter_map(|(name, value)| Some(scalar(name, value?))).collect()
}

fn machine_scalars(felt: &MachineSnapshot) -> Vec<ProtoMessage> {
    let MachineSnapshot { duty, telemetry, .. } = felt;
    scalars(&[
        ("device/pace", Some(*duty)),
        ("device/temperature_celsius", telemetry.temperature.as_ref().map(|of| of.celsius)),
        ("device/power_watts", telemetry.watts),
        ("device/gpu_utilisation", telemetry.gpu_utilisation),
        ("device/memory_utilisation", telemetry.memory_utilisation),
        ("memory/process_gib", telemetry.memory.map(|memory| memory.held as f64 / GIB)),
    ])
}

/// Those that are known.
fn scalars(numbers: &[(&str, Option<f64>)]) -> Vec<ProtoMessage> {
    let known = |(tag, number): &(&str, Option<f64>)| Some(scalar(tag, (*number)?));
    numbers.iter().filter_map(known).collect()
}

fn scalar(tag: &str, number: f64) -> ProtoMessage {
    ProtoMessage::default().bytes(1, tag).float(2, number as f32)
}

/// A PNG file; its sizes stand at a fixed place.
fn image(tag: &str, png: &[u8]) -> Option<ProtoMessage> {
    let size = |at: usize| Some(u32::from_be_bytes(png.get(at..at + 4)?.try_into().ok()?).into());
    if !png.starts_with(b"\x89PNG\r\n\x1a\n") || png.len() > IMAGE_BYTES {
        return None;
    }
    let (width, height, rgb) = (size(16)?, size(20)?, 3);
    let image = ProtoMessage::default().int(1, height).int(2, width).int(3, rgb).bytes(4, png);
    Some(ProtoMessage::default().bytes(1, tag).message(4, &image))
}

/// Markdown.
fn text(tag: &str, markdown: &str) -> ProtoMessage {
    let (string, tensor) = (7, 2);
    let value = ProtoMessage::default().int(1, string).bytes(8, markdown);
    let plugin = ProtoMessage::default().bytes(1, "text");
    let about = ProtoMessage::default().message(1, &plugin).int(4, tensor);
    ProtoMessage::default().bytes(1, tag).message(8, &value).message(9, &about)
}

/// As code, so that what a model wrote is not taken for markup.
fn indented(text: &str) -> String {
    text.lines().flat_map(|line| ["    ", line, "\n"]).collect()
}

fn about(begin: &RunStart) -> String {
    let RunStart { base, engine, steps, samples, unit, layers, parameters, settings, .. } = begin;
    indented(&format!(
        "base: {base}\ndevice: {engine}\nsteps: {steps}\nsamples: {samples} ({unit})\nlayers: {layers}\n\
         parameters: {parameters}\nplan: {settings}"
    ))
}

#[cfg(test)]
mod tests {
    use super::record::tests::records;
    use super::*;
    use crate::event::journal;

    fn step(step: u64, loss: f64) -> String {
        format!(
            r#"{{"event":"step","step":{step},"loss":{loss},"grad_norm":null,"learning_rate":0.5,"secs":2.0,
            "wait_secs":0.0,"peak_bytes":1073741824,"time":{step}.0}}"#
        )
    }

    fn begin(from: u64) -> String {
        format!(
            r#"{{"event":"begin","version":"","base":"b","engine":"cpu","from_step":{from},"steps":4,
            "samples":1,"held_out":0,"layers":1,"parameters":1,"samples_per_step":1,"phases":[],
            "limit_bytes":1,"time":{}.0}}"#,
            100 + from
        )
    }

    /// Writes lines as a run does: to its journal, then to listeners.
    fn run(folder: &Path, lines: &[String]) {
        let log = TensorBoardLog::new(folder).unwrap();
        let mut journal = journal::Journal::open(folder, true).unwrap();
        for line in lines {
            let record = serde_json::from_str(line).unwrap();
            journal.write(&record).unwrap();
            log.observe(&record);
        }
    }

    fn files(folder: &Path) -> Vec<Vec<Vec<u8>>> {
        let found = fs::read_dir(folder.join(FOLDER_NAME)).unwrap();
        let mut paths: Vec<_> = found.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.iter().map(|path| records(&fs::read(path).unwrap())).collect()
    }

    fn has(record: &[u8], part: &[u8]) -> bool {
        record.windows(part.len()).any(|window| window == part)
    }

    #[test]
    fn a_run_that_goes_on_begins_a_file_with_the_step_after_the_last_that_counts() {
        let folder = tempfile::tempdir().unwrap();
        run(folder.path(), &[begin(0), step(1, 3.0), step(2, 1.0), step(3, 9.0)]);
        run(folder.path(), &[begin(2), step(3, 5.0)]);
        let [first, second] = &files(folder.path())[..] else { panic!("a file each") };
        // Version, start, settings, steps.
        assert_eq!([first.len(), second.len()], [6, 4]);
        assert!(
            has(&first[0], FILE_VERSION.as_bytes()) && has(&second[0], FILE_VERSION.as_bytes())
        );
        let start = |step: u8| [0x10, step, 0x3a, 2, 0x08, 1];
        assert!(has(&first[1], &start(0)) && has(&second[1], &start(3)));
        // The mean goes on where it was: a window of 1 step here.
        let loss = scalar("loss/smoothed", 5.0).into_bytes();
        assert!(has(&second[3], &loss), "{:?}", second[3]);
        assert!(!has(&second[3], b"gradient_norm"), "what is not known is not there");
    }

    #[test]
    fn what_is_no_image_or_cannot_be_written_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.png"), "no PNG").unwrap();
        let png = [&b"\x89PNG\r\n\x1a\n"[..], &[0; 8], &[0, 0, 0, 7, 0, 0, 0, 5]].concat();
        fs::write(folder.path().join("b.png"), png).unwrap();
        let sample = |path: &str| {
            format!(
                r#"{{"event":"image_sample","step":1,"path":"{path}","prompt":"fox","seed":1}}"#
            )
        };
        let text = r#"{"event":"text_sample","step":1,"prompt":"a","text":"<b>\nb","seed":1}"#;
        let lines = [begin(0), sample("a.png"), sample("none.png"), sample("b.png"), text.into()];
        run(folder.path(), &lines);
        let file = files(folder.path()).remove(0);
        assert_eq!(file.len(), 5, "version, start, settings, image, text");
        assert!(has(&file[3], b"samples/fox") && has(&file[3], &[0x08, 5, 0x10, 7, 0x18, 3]));
        assert!(has(&file[4], b"    <b>\n    b\n"));
        // A file in the place of the folder.
        let other = tempfile::tempdir().unwrap();
        fs::write(other.path().join(FOLDER_NAME), "").unwrap();
        assert!(TensorBoardLog::new(other.path()).is_err());
    }
}
