//! A run as the page and the metrics need it: `History`, and beside it what that leaves out. Folded once for all who
//! look, one event at a time; sums are kept, so that a look at a long run costs as much as at a short one.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use trainer::config::RawConfig;
use trainer::event::eta::Eta;
use trainer::event::history::History;
use trainer::event::{
    Event, EventRecord, MachineSnapshot, RankShare, RequestAnswer, RunRequest, StepMetrics,
};

use super::log::{LogLine, log_line};

/// Lines of the log that are kept. Chosen: what somebody scrolls through.
const LOG_LINES: usize = 300;
/// Answers that are kept. Chosen: more than a page asks while it is not connected.
const ANSWERS: usize = 50;
/// Seconds that one reading of the machine stands for at most: then nobody knows.
const READING_SECS: f64 = 60.0;

/// A run, folded.
#[derive(Default)]
pub struct RunFold {
    pub history: History,
    /// None before the run has a config.
    pub eta: Option<Eta>,
    pub totals: RunTotals,
    /// Samples that are part of the run, by the line that told of them: their number in URLs.
    pub images: BTreeMap<u64, ImageOfRun>,
    pub texts: BTreeMap<u64, TextOfRun>,
    pub log: VecDeque<LogLine>,
    pub health: Option<Event>,
    /// When a checkpoint was written last, and after which step.
    pub checkpoint: Option<(f64, u64)>,
    /// Whether somebody asked it to stand still.
    pub is_paused: bool,
    /// What was asked of the run and what became of it, the latest last.
    pub answers: VecDeque<RequestAnswer>,
    /// How long ranks waited for others, by rank and the name of its machine.
    pub rank_waits: BTreeMap<(usize, String), RankWait>,
    /// The time of the last event.
    pub time: f64,
    felt: Option<f64>,
}

/// Sums over the steps that count, and over the whole run.
#[derive(Clone, Debug, Default)]
pub struct RunTotals {
    pub not_finite: u64,
    pub wait_secs: f64,
    pub copy_wait_secs: f64,
    pub rest_secs: f64,
    pub secs: f64,
    /// Steps that took at most so long, by [`STEP_BUCKETS`]; not cumulative.
    pub buckets: [u64; STEP_BUCKETS.len() + 1],
    pub peak_bytes: usize,
    pub joules: f64,
    pub throttled_secs: f64,
}

/// How long a rank waited for others, also in steps that were lost with a break.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankWait {
    /// Seconds in the parts of the run that are over, as far as they were told.
    before_secs: f64,
    /// Seconds in the part at hand.
    secs: f64,
}

impl RankWait {
    /// Over the whole run.
    pub fn total_secs(self) -> f64 {
        self.before_secs + self.secs
    }

    /// The run goes on, and ranks count anew.
    fn end_part(&mut self) {
        *self = Self { before_secs: self.total_secs(), secs: 0.0 };
    }
}

/// Bounds of the histogram of step times. Chosen: from a tiny model on a GPU to a large one on a CPU.
pub const STEP_BUCKETS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0];

/// A sample image.
pub struct ImageOfRun {
    pub step: u64,
    pub prompt: String,
    pub seed: u64,
    /// Relative to the run's folder, as the run says. Nothing is opened by it before it is checked.
    pub path: PathBuf,
    pub clip: Option<PathBuf>,
}

/// A sample text.
pub struct TextOfRun {
    pub step: u64,
    pub prompt: String,
    pub text: String,
}

impl RunFold {
    /// Takes in what happened next in the run of a folder.
    pub fn apply(&mut self, folder: &Path, line: u64, record: &EventRecord) {
        let time = record.time.unwrap_or(self.time);
        self.time = time;
        if self.eta.is_none() && matches!(record.event, Event::Begin(_)) {
            self.eta = eta(folder);
        }
        if let Some(eta) = &mut self.eta {
            eta.observe(&record.event, time);
        }
        if let Some(log) = log_line(line, time, &record.event) {
            self.log.push_back(log);
            if self.log.len() > LOG_LINES {
                self.log.pop_front();
            }
        }
        self.note(line, time, &record.event);
        self.history.apply(record.clone());
        if let Event::Begin(_) = record.event {
            self.begun();
        }
    }

    fn note(&mut self, line: u64, time: f64, event: &Event) {
        match event {
            Event::Step(step) => self.totals.add(step),
            Event::Telemetry(felt) => self.feel(time, felt),
            Event::Health { .. } => self.health = Some(event.clone()),
            Event::Checkpoint { step, .. } => self.checkpoint = Some((time, *step)),
            Event::Request(answer) => self.answered(answer),
            Event::ImageSample { step, path, prompt, seed, clip, references: _ } => {
                self.images.retain(|_, other| (other.step, &other.path) != (*step, path));
                let (prompt, path, clip) = (prompt.clone(), path.clone(), clip.clone());
                self.images
                    .insert(line, ImageOfRun { step: *step, prompt, seed: *seed, path, clip });
            }
            Event::TextSample { step, prompt, text, .. } => {
                let (prompt, text) = (prompt.clone(), text.clone());
                self.texts.insert(line, TextOfRun { step: *step, prompt, text });
            }
            Event::Ranks { ranks, .. } => self.wait(ranks),
            _ => {}
        }
    }

    fn answered(&mut self, answer: &RequestAnswer) {
        match answer.asked {
            _ if answer.refused.is_some() => {}
            Some(RunRequest::Pause) => self.is_paused = true,
            Some(RunRequest::Resume) => self.is_paused = false,
            _ => {}
        }
        self.answers.push_back(answer.clone());
        if self.answers.len() > ANSWERS {
            self.answers.pop_front();
        }
    }

    fn wait(&mut self, ranks: &[RankShare]) {
        for (rank, share) in ranks.iter().enumerate() {
            if let Some(secs) = share.waited_secs {
                self.rank_waits.entry((rank, share.node.clone())).or_default().secs = secs;
            }
        }
    }

    /// What is not part of the run any more is no longer counted.
    fn begun(&mut self) {
        let from = self.history.begin().map_or(0, |begin| begin.from_step);
        self.images.retain(|_, image| image.step <= from);
        self.texts.retain(|_, text| text.step <= from);
        let RunTotals { joules, throttled_secs, peak_bytes, .. } = self.totals;
        self.totals = RunTotals { peak_bytes, joules, throttled_secs, ..RunTotals::default() };
        self.history.steps.iter().for_each(|step| self.totals.add(step));
        self.rank_waits.values_mut().for_each(RankWait::end_part);
        (self.felt, self.is_paused, self.health) = (None, false, None);
    }

    fn feel(&mut self, time: f64, felt: &MachineSnapshot) {
        let secs = self.felt.map_or(0.0, |before| (time - before).clamp(0.0, READING_SECS));
        self.felt = Some(time);
        self.totals.joules += felt.telemetry.watts.unwrap_or(0.0) * secs;
        self.totals.throttled_secs += if felt.telemetry.throttled.is_some() { secs } else { 0.0 };
    }
}

impl RunTotals {
    fn add(&mut self, step: &StepMetrics) {
        self.not_finite += u64::from(step.is_skipped || !step.loss.is_finite());
        self.wait_secs += step.wait_secs;
        self.copy_wait_secs += step.copy_wait_secs.unwrap_or(0.0);
        self.rest_secs += step.rest_secs;
        self.secs += step.secs;
        self.buckets[STEP_BUCKETS.partition_point(|bound| *bound < step.secs)] += 1;
        self.peak_bytes = self.peak_bytes.max(step.peak_bytes);
    }
}

/// The time left depends on what the job does how often.
fn eta(folder: &Path) -> Option<Eta> {
    let raw = RawConfig::from_file(&folder.join("config.toml")).ok()?;
    Some(Eta::new(&raw.resolve().ok()?))
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub const BEGIN: &str = r#"{"event":"begin","version":"1","base":"model","engine":"cpu","from_step":0,"steps":9,
        "samples":4,"held_out":1,"layers":2,"parameters":30,"samples_per_step":2,"phases":[{"name":"load",
        "peak_bytes":5},{"name":"train 64x64","peak_bytes":50}],"settings":"recompute","limit_bytes":100,"time":10.0}"#;

    pub fn step(step: u64, loss: &str) -> String {
        format!(
            r#"{{"event":"step","step":{step},"loss":{loss},"grad_norm":0.25,"learning_rate":0.001,"secs":0.3,
            "wait_secs":0.1,"peak_bytes":{},"time":{}.0}}"#,
            40 + step,
            10 + step
        )
    }

    /// A fold of these lines.
    pub fn folded(lines: &[&str]) -> RunFold {
        let mut fold = RunFold::default();
        for (at, line) in lines.iter().enumerate() {
            let record = serde_json::from_str(&line.replace('\n', "")).unwrap();
            fold.apply(Path::new("nowhere"), at as u64 + 1, &record);
        }
        fold
    }

    #[test]
    fn what_was_lost_with_a_break_is_not_counted() {
        let sample =
            r#"{"event":"image_sample","step":3,"path":"samples/a.png","prompt":"fox","seed":1}"#;
        let again = BEGIN.replace("\"from_step\":0", "\"from_step\":2");
        let steps = [step(1, "1.0"), step(2, "null"), step(3, "2.0")];
        let fold = folded(&[BEGIN, &steps[0], &steps[1], &steps[2], sample, &again, &steps[2]]);
        assert_eq!(fold.totals.buckets[6], 3, "one of the two times that step 3 was taken");
        assert_eq!([fold.totals.not_finite, fold.totals.peak_bytes as u64], [1, 43]);
        assert!((fold.totals.wait_secs - 0.3).abs() < 1e-9);
        assert!(fold.images.is_empty(), "a sample of a step that was lost");
    }

    #[test]
    fn energy_is_power_times_the_time_that_is_known() {
        let felt = |time: f64, watts: f64| {
            format!(
                r#"{{"event":"telemetry","step":1,"secs":1.0,"duty":1.0,"memory":null,"memory_stall":null,
                "pressure_level":null,"temperature":null,"throttled":"heat","watts":{watts},"on_battery":null,"time":{time}}}"#
            )
        };
        let fold = folded(&[BEGIN, &felt(20.0, 50.0), &felt(30.0, 100.0), &felt(9000.0, 1.0)]);
        assert_eq!(fold.totals.joules, 10.0 * 100.0 + READING_SECS * 1.0);
        assert_eq!(fold.totals.throttled_secs, 10.0 + READING_SECS);
    }
}
