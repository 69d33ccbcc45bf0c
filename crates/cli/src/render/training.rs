//! A run as it goes, by its events: the dashboard in a terminal; with `--plain`, or when somebody left that, one live
//! line; a line now and then in a pipe; and above it what is worth keeping. With `--json` every event is a line on
//! standard output instead; with `--quiet` there are warnings and nothing else. `run_summary.rs` has the last lines.

use std::io::Write;
use std::mem::Discriminant;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use machine::Bytes;
use machine::governor::{Cause, Pace, PaceDecision};
use trainer::config::RunConfig;
use trainer::config::training_data::SEQUENCE;
use trainer::event::eta::Eta;
use trainer::event::figures::{loss_window, mean_loss};
use trainer::event::history::History;
use trainer::event::journal::ProgressThrottle;
use trainer::event::{
    Event, EventRecord, PaceChange, Phase, PhaseProgress, ProgressUnit, RankShare, RewardMetrics,
    RunStart, Warning,
};
use trainer::report::format::number;

use crate::dashboard::{self, OpenDashboard};
use crate::render::line::ProgressLine;
use crate::render::progress::{clear, duration, redraw};
use crate::render::screen::ScreenArgs;
use crate::terminal;
use crate::text::{BOLD, DIM, WARN, plural, thousands};

/// Warnings that are shown; the rest is in the report.
const SHOWN: usize = 10;

/// Shows a run as it goes, from its events alone.
pub struct TrainingScreen {
    is_quiet: bool,
    is_json: bool,
    begun: Instant,
    state: Mutex<ScreenState>,
    dashboard: Option<OpenDashboard>,
    /// Warnings that came while the dashboard had the terminal.
    held_back: Mutex<Vec<String>>,
}

/// What is known of a run from its events, for a screen.
pub struct ScreenState {
    /// Also of earlier parts of the run, if it goes on.
    pub history: History,
    /// How long it still takes.
    pub eta: Eta,
    throttle: ProgressThrottle,
    warnings: usize,
    /// The pace if it is below full.
    pace: Option<HeldPace>,
    /// Kinds of causes that were shown.
    causes: Vec<Discriminant<Cause>>,
    drawn: Option<Instant>,
}

/// A pace below full, and why.
struct HeldPace {
    pace: Pace,
    cause: String,
}

/// A line that stays.
#[derive(Debug, PartialEq)]
pub enum ScreenLine {
    /// What happens.
    Line(String),
    /// Shown even with --quiet.
    Warning(String),
}

impl TrainingScreen {
    /// For a job; `resume` if it continues the run in its folder, `page` is its URL if it has one.
    pub fn new(
        config: &RunConfig,
        resume: bool,
        arguments: ScreenArgs,
        page: Option<String>,
    ) -> Self {
        let ScreenArgs { quiet: is_quiet, json: is_json, plain, .. } = arguments;
        let has_dashboard = !is_quiet && !is_json && !plain && dashboard::is_possible();
        let folder = &config.output.folder;
        let dashboard = has_dashboard.then(|| OpenDashboard::begin(folder, page.clone()));
        if let Some(page) = page.filter(|_| !is_json) {
            say(&page);
        }
        let before = resume.then(|| History::read(&config.output.folder));
        // What cannot be read is said by the run itself.
        let history = before.and_then(Result::ok).unwrap_or_default();
        let state = Mutex::new(ScreenState::new(history, Eta::new(config)));
        let held_back = Mutex::new(Vec::new());
        Self { is_quiet, is_json, begun: Instant::now(), state, dashboard, held_back }
    }

    /// Whether text is printed at all.
    pub fn prints_text(&self) -> bool {
        !self.is_quiet && !self.is_json
    }

    /// Says what Ctrl-C does now; `raise` asks the run to stop.
    pub fn stop(&self, raise: impl FnOnce()) {
        // Locked until the run knows, so that nothing is printed in between.
        let state = self.state();
        if !self.is_dashboard_open() {
            say(state.stopping());
        }
        raise();
    }

    /// Takes the live line away, also that of a run that failed: before the error is printed.
    pub fn end(&self) {
        if let Some(dashboard) = &self.dashboard {
            dashboard.close();
        }
        clear();
        let held_back = self.held_back.lock().unwrap_or_else(PoisonError::into_inner);
        held_back.iter().for_each(|line| say(line));
        let warnings = self.state().warnings;
        if warnings > SHOWN && !self.is_json {
            say(&format!("{WARN}{} more warnings are in the report{WARN:#}", warnings - SHOWN));
        }
    }

    fn is_dashboard_open(&self) -> bool {
        self.dashboard.as_ref().is_some_and(OpenDashboard::is_open)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, ScreenState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows what happened.
    pub fn on_event(&self, record: &EventRecord) {
        let mut state = self.state();
        let lines = state.note(record, self.begun.elapsed().as_secs_f64());
        if self.is_json {
            if state.throttle.keeps(record) {
                let line = serde_json::to_string(record).unwrap_or_default();
                _ = terminal::stdout().write_all(format!("{line}\n").as_bytes());
            }
            return;
        }
        if self.is_dashboard_open() {
            let warnings = lines.into_iter().filter_map(|line| match line {
                ScreenLine::Warning(text) => Some(text),
                ScreenLine::Line(_) => None,
            });
            let mut held_back = self.held_back.lock().unwrap_or_else(PoisonError::into_inner);
            return held_back.extend(warnings);
        }
        for kept in lines {
            match kept {
                ScreenLine::Line(line) if !self.is_quiet => say(&line),
                ScreenLine::Line(_) => {}
                ScreenLine::Warning(line) => say(&line),
            }
        }
        if !self.is_quiet {
            state.redraw();
        }
    }
}

/// A line that stays, above the live one.
pub fn say(line: &str) {
    clear();
    _ = terminal::stderr().write_all(format!("{line}\n").as_bytes());
}

impl ScreenState {
    /// Of a run with this history so far.
    pub fn new(history: History, eta: Eta) -> Self {
        Self {
            history,
            eta,
            throttle: ProgressThrottle::default(),
            warnings: 0,
            pace: None,
            causes: Vec::new(),
            drawn: None,
        }
    }

    /// What Ctrl-C does now.
    fn stopping(&self) -> &'static str {
        match self.history.begin() {
            Some(begin) if self.history.is_training() => {
                if self.history.last_step() >= begin.steps {
                    return "all steps are taken: saving and writing the result; Ctrl-C again gives \
                            it up";
                }
                "stopping, then saving; Ctrl-C again gives it up"
            }
            _ => "stopping, no step has begun; Ctrl-C again ends at once",
        }
    }

    /// Takes an event in that came so many seconds after the beginning; returns the lines that it is worth.
    pub fn note(&mut self, record: &EventRecord, secs: f64) -> Vec<ScreenLine> {
        self.eta.observe(&record.event, secs);
        let ranks_before = self.history.ranks.clone();
        self.history.apply(record.clone());
        let line = |line| vec![ScreenLine::Line(line)];
        match &record.event {
            Event::Begin(begin) => beginning(begin).into_iter().map(ScreenLine::Line).collect(),
            Event::Rewards(rewards) if rewards.is_held_out() => {
                line(format!("step {}: held-out {}", rewards.step, reward_words(rewards)))
            }
            Event::Phase { .. }
            | Event::Progress(_)
            | Event::Step(_)
            | Event::Health { .. }
            | Event::Policy(_)
            | Event::Rewards(_)
            | Event::Timesteps(_)
            | Event::Memory { .. }
            | Event::Telemetry(_)
            | Event::Exported { .. }
            | Event::End(_)
            | Event::Failed(_) => Vec::new(),
            Event::Validation { step, loss } => {
                // The loss of preferences is no cross entropy.
                let is_text = self.history.begin().is_some_and(|begin| begin.unit == SEQUENCE);
                let perplexity = is_text.then(|| format!(", perplexity {:.2}", loss.exp()));
                let perplexity = perplexity.unwrap_or_default();
                line(format!("step {step}: held-out loss {}{perplexity}", number(*loss)))
            }
            Event::ImageSample { step, path, prompt, .. } => {
                line(format!("step {step}: {} {DIM}{prompt}{DIM:#}", path.display()))
            }
            Event::TextSample { step, prompt, text, .. } => {
                // On one line: what is live stands below.
                let text = text.escape_debug();
                line(format!("step {step}: {DIM}{}{DIM:#}{text}", prompt.escape_debug()))
            }
            Event::Checkpoint { step, .. } => line(format!("{DIM}step {step}: saved{DIM:#}")),
            Event::Warning(Warning { kind, .. }) => {
                self.warn(&kind.to_string(), kind.hint().as_deref())
            }
            Event::LeftOut(left_out) => self.warn(&left_out.to_string(), Some(LISTS)),
            Event::Note { text } => line(text.clone()),
            Event::Request(answer) => line(format!("{DIM}step {}: {answer}{DIM:#}", answer.step)),
            Event::MemoryFallback(tightened) => self.warn(&tightened.to_string(), None),
            Event::Ranks { step, ranks } => {
                // They move a little with every step; the report has the latest.
                let is_new = *step % SHARES_SHOWN == 1 && !is_shared_alike(ranks, &ranks_before);
                is_new.then(|| ScreenLine::Line(shares(*step, ranks))).into_iter().collect()
            }
            Event::GpuLost(lost) => self.warn(&lost.to_string(), None),
            Event::Pace(paced) => self.pace(paced),
        }
    }

    fn warn(&mut self, text: &str, hint: Option<&str>) -> Vec<ScreenLine> {
        self.warnings += 1;
        if self.warnings > SHOWN {
            return Vec::new();
        }
        let hint = hint.map(|hint| format!("{DIM}hint: {hint}{DIM:#}"));
        let text = format!("{WARN}warning:{WARN:#} {text}");
        std::iter::once(text).chain(hint).map(ScreenLine::Warning).collect()
    }

    /// The pace and its reason stay in the live line; what is new about it is said once.
    fn pace(&mut self, paced: &PaceChange) -> Vec<ScreenLine> {
        let PaceDecision { to, cause, .. } = &paced.decision;
        let is_held = to.duty < 1.0 || to.is_paused || to.level > 0;
        self.pace =
            is_held.then(|| HeldPace { pace: *to, cause: cause.to_string() + &paced.freed() });
        let kind = std::mem::discriminant(cause);
        if self.causes.contains(&kind) || cause.hint().is_none() {
            return Vec::new();
        }
        self.causes.push(kind);
        self.warn(&paced.to_string(), cause.hint())
    }

    /// The pace if it is below full: `72 % pace`.
    pub fn pace_words(&self) -> String {
        let words = self.pace.as_ref().map(pace).unwrap_or_default().0;
        anstream::adapter::strip_str(&words).to_string()
    }

    /// Draws the live line, unless that was done a moment ago.
    pub fn redraw(&mut self) {
        let mut drawn = self.drawn;
        redraw(&mut drawn, || match &self.history.progress {
            Some(progress) => preparing(progress),
            None => self.line(),
        });
        self.drawn = drawn;
    }

    /// The live line of training.
    fn line(&self) -> ProgressLine {
        let (Some(begin), Some(step)) = (self.history.begin(), self.history.steps.last()) else {
            return ProgressLine::new("");
        };
        let loss = mean_loss(&self.history.steps, loss_window(begin.steps));
        let left = self.eta.left_secs();
        let (pace, cause) = self.pace.as_ref().map(pace).unwrap_or_default();
        ProgressLine::new("")
            .bar(step.step as f64 / begin.steps.max(1) as f64)
            .part(0, format!("{}/{}", step.step, begin.steps))
            .part(1, loss.map_or("loss not finite".into(), |loss| format!("loss {}", number(loss))))
            .part(4, self.last_rewards())
            .part(4, speed(self.secs_per_step()))
            .part(5, memory(step.peak_bytes, begin))
            .part(2, left.map(|left| format!("{} left", duration(left))).unwrap_or_default())
            .part(3, pace)
            .part(6, cause)
    }

    /// What the last step's preferences came to, if it had any.
    fn last_rewards(&self) -> String {
        let of_steps = self.history.rewards.iter().rev().find(|it| !it.is_held_out());
        of_steps.map_or_else(String::new, reward_words)
    }

    /// Over the last steps: the machine's speed may change.
    fn secs_per_step(&self) -> f64 {
        let steps = &self.history.steps;
        let recent = &steps[steps.len().saturating_sub(RECENT_STEPS)..];
        let secs = recent.iter().map(|step| step.secs + step.rest_secs).sum::<f64>();
        secs / recent.len().max(1) as f64
    }
}

/// The margin between chosen and rejected answers, and how often it is on the right side; or the reward of completions.
fn reward_words(RewardMetrics { metrics, .. }: &RewardMetrics) -> String {
    let of = |name: &str| {
        let found = metrics.get(name).or_else(|| metrics.get(&format!("eval_{name}")))?;
        Some(format!("{name} {}", number(*found)))
    };
    let words = ["rewards/margins", "rewards/accuracies", "reward", "completions/mean_length"];
    let words = words.into_iter().filter_map(of);
    words.collect::<Vec<_>>().join(", ")
}

/// The live line of what comes before training.
pub fn preparing(progress: &PhaseProgress) -> ProgressLine {
    let PhaseProgress { phase, done, total, unit } = progress;
    let name = match phase {
        Phase::Open => "open the model".into(),
        Phase::Load => "load the model".into(),
        phase => phase.to_string(),
    };
    // Nobody knows how much it will be.
    if *total == 0 {
        return ProgressLine::new(name);
    }
    let words = match unit {
        ProgressUnit::Samples => format!("{done} of {total}"),
        ProgressUnit::Bytes => format!("{} of {}", Bytes(*done), Bytes(*total)),
    };
    ProgressLine::new(name).bar(*done as f64 / *total as f64).part(0, words)
}

/// What lists every file that is left out.
const LISTS: &str = "`hearth cache JOB --plan` lists them all";

/// Steps that the speed in the live line is the mean of.
const RECENT_STEPS: usize = 20;

/// What a run is about.
fn beginning(begin: &RunStart) -> Vec<String> {
    let RunStart { unit, samples, held_out, layers, parameters, steps, from_step, .. } = begin;
    let held_out = if *held_out > 0 { format!(", {held_out} held out") } else { String::new() };
    let [peak, limit] = [planned_peak(begin), begin.limit_bytes].map(|bytes| Bytes(bytes as u64));
    let steps = plural(*steps as usize, "step");
    let way = match from_step {
        0 => format!("{steps} of {}", plural(begin.samples_per_step, unit)),
        from => format!("on from step {} of {steps}", thousands(*from as usize)),
    };
    let (samples, layers) = (plural(*samples, unit), plural(*layers, "layer"));
    vec![
        format!("{BOLD}{samples}{held_out}; {way}{BOLD:#}"),
        format!("{} in {layers}", plural(*parameters, "trainable parameter")),
        format!("plan: {}; about {}", begin.settings, speed(begin.step_secs)),
        format!("memory: {peak} at its peak as planned, limit {limit}"),
    ]
}

/// What the largest phase takes, as planned.
fn planned_peak(begin: &RunStart) -> usize {
    begin.phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
}

/// `1.2 of 1.3 GiB planned`. The limit stands above, once: a line has to fit a narrow terminal.
fn memory(taken_bytes: usize, begin: &RunStart) -> String {
    let taken = Bytes(taken_bytes as u64).to_string();
    let Some(planned) = begin.step_bytes() else { return taken };
    let planned = Bytes(planned as u64).to_string();
    // The unit once, if it is the same.
    let unit = planned.split_once(' ').map_or("", |(_, unit)| unit);
    let taken = taken.strip_suffix(unit).unwrap_or(&taken).trim_end();
    format!("{taken} of {planned} planned")
}

/// `72 % pace`, and `(hot: ...)`: why it is not full.
fn pace(HeldPace { pace, cause }: &HeldPace) -> (String, String) {
    let what = match pace {
        Pace { is_paused: true, .. } => "paused".into(),
        Pace { duty, .. } if *duty < 1.0 => format!("{:.0} % pace", 100.0 * duty),
        _ => "less memory".to_owned(),
    };
    (format!("{WARN}{what}{WARN:#}"), format!("{DIM}({cause}){DIM:#}"))
}

pub fn speed(secs_per_step: f64) -> String {
    if secs_per_step < 1.0 && secs_per_step > 0.0 {
        format!("{:.1} steps/s", 1.0 / secs_per_step)
    } else {
        format!("{secs_per_step:.1} s/step")
    }
}

/// Steps after which new shares are shown again.
const SHARES_SHOWN: u64 = 50;

fn is_shared_alike(ranks: &[RankShare], before: &[RankShare]) -> bool {
    ranks.len() == before.len()
        && ranks.iter().zip(before).all(|(now, before)| now.samples == before.samples)
}

/// Who computes how many samples of a step.
fn shares(step: u64, ranks: &[RankShare]) -> String {
    let share = |rank: &RankShare| format!("{} {} {}", rank.node, rank.device, rank.samples);
    let all: Vec<String> = ranks.iter().map(share).collect();
    format!("{DIM}step {step}: samples per step: {}{DIM:#}", all.join(", "))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use trainer::config::RawConfig;
    use trainer::config::batch::BatchSettings;
    use trainer::event::{MemoryFallback, PlannedPhase};
    use trainer::model::recompute::Recompute;

    use super::*;

    fn begin() -> RunStart {
        let phase =
            |name: &str, mib: usize| PlannedPhase { name: name.into(), peak_bytes: mib << 20 };
        RunStart {
            version: String::new(),
            base: String::new(),
            engine: String::new(),
            format: trainer::event::FORMAT,
            from_step: 0,
            steps: 1,
            unit: "image".into(),
            samples: 1,
            held_out: 0,
            layers: 1,
            parameters: 1,
            samples_per_step: 1,
            tokens_per_step: None,
            phases: vec![phase("t5", 900), phase("train 64x64", 700), phase("train 64x96", 800)],
            settings: String::new(),
            step_secs: 1.0,
            times: trainer::event::TimeEstimate::default(),
            limit_bytes: 8 << 30,
            loaded_in_place_bytes: 0,
            loaded_staged_bytes: 0,
        }
    }

    fn shown() -> ScreenState {
        let job = "[base]\npath = '/b'\n[data]\nimages = '/d'\n";
        let config = RawConfig::from_text(job, Path::new("/job.toml")).unwrap().resolve().unwrap();
        ScreenState::new(History::default(), Eta::new(&config))
    }

    fn record(event: &Event) -> EventRecord {
        EventRecord { event: event.clone(), time: Some(0.0) }
    }

    #[test]
    fn memory_is_held_against_the_plan_of_steps() {
        let mut begin = begin();
        assert_eq!(memory(790 << 20, &begin), "790 of 800 MiB planned");
        assert_eq!(memory(7 << 10, &begin), "7 KiB of 800 MiB planned");
        begin.phases.truncate(1);
        assert_eq!(memory(790 << 20, &begin), "790 MiB");
    }

    #[test]
    fn ctrl_c_says_what_is_true_then() {
        let mut state = shown();
        let mut says = |event: &Event, part: &str| {
            state.note(&record(event), 0.0);
            assert!(state.stopping().starts_with(part), "{}", state.stopping());
        };
        let load = Event::Phase { name: Phase::Load };
        let begin = RunStart { steps: 2, ..begin() };
        says(&load, "stopping, no step has begun");
        says(&Event::Begin(begin.clone()), "stopping, then saving");
        // A GPU that was lost is opened again.
        says(&load, "stopping, no step has begun");
        says(&Event::Begin(RunStart { from_step: 1, ..begin.clone() }), "stopping, then saving");
        says(&Event::Begin(RunStart { from_step: 2, ..begin }), "all steps are taken");
    }

    #[test]
    fn a_memory_fallback_is_one_warning_with_its_figures() {
        let how = |micro_batch| BatchSettings { micro_batch, recompute: Recompute::Alternate };
        let tightened = Event::MemoryFallback(MemoryFallback {
            step: 12,
            from: how(3),
            to: how(2),
            asked_bytes: 3 << 20,
            in_use_bytes: 10 << 20,
            limit_bytes: 12 << 20,
        });
        let lines = shown().note(&record(&tightened), 0.0);
        let Event::MemoryFallback(fallback) = &tightened else { unreachable!("made above") };
        assert_eq!(lines, [ScreenLine::Warning(format!("{WARN}warning:{WARN:#} {fallback}"))]);
        let text = fallback.to_string();
        assert!(text.contains("asked 3 MiB, in use 10 MiB of 12 MiB"), "{text}");
        assert!(text.contains(&format!("{} instead of {}", how(2), how(3))), "{text}");
    }

    #[test]
    fn a_cause_is_said_once_and_stands_in_the_live_line_while_it_lasts() {
        let mut state = shown();
        let mut told = |from: f64, to: f64, cause: Cause| {
            let of = |duty| Pace { level: 0, duty, is_paused: false };
            let decision = PaceDecision { from: of(from), to: of(to), cause };
            let settings = BatchSettings { micro_batch: 1, recompute: Recompute::None };
            let paced = Event::Pace(PaceChange { step: 3, settings, freed_bytes: None, decision });
            let lines = state.note(&record(&paced), 0.0);
            let (pace, cause) = state.pace.as_ref().map(pace).unwrap_or_default();
            (lines.len(), pace + &cause)
        };
        let hot = |celsius| Cause::Hot { sensor: "cpu".into(), celsius, limit: 80.0 };
        let (n_lines, line) = told(1.0, 0.7, hot(84.0));
        assert_eq!(n_lines, 2, "a warning and its hint");
        assert!(
            line.contains("70 % pace") && line.contains("hot: cpu at 84 °C, limit 80 °C"),
            "{line}"
        );
        assert_eq!(told(0.7, 0.6, hot(85.0)).0, 0, "it was said");
        let cool = Cause::Cool { sensor: "cpu".into(), celsius: 70.0, limit: 80.0 };
        assert_eq!(told(0.6, 1.0, cool), (0, String::new()));
    }
}
