//! A run as it goes: one live line in a terminal, a line now and then in a pipe, and above it what
//! is worth keeping. With `--json` every event is a line on standard output instead; with `--quiet`
//! there are warnings and nothing else. `ending.rs` has the last lines.

use std::io::Write;
use std::mem::Discriminant;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use machine::Bytes;
use machine::governor::{Cause, Decision, Pace};
use trainer::config::RunConfig;
use trainer::event::eta::Eta;
use trainer::event::figures::{loss_window, mean_loss};
use trainer::event::history::History;
use trainer::event::{Begin, End, Event, Paced, Step};
use trainer::report::words::number;
use trainer::train::{Happening, On, Start, train};

use crate::failure::Failure;
use crate::interrupt;
use crate::render::ending;
use crate::render::line::Line;
use crate::render::progress::{clear, duration, redraw};
use crate::text::{BOLD, DIM, WARN, several, thousands};

/// Warnings that are shown; the rest is in the report.
const SHOWN: usize = 10;

/// A run being watched.
pub struct Training {
    is_quiet: bool,
    is_json: bool,
    begun: Instant,
    state: Arc<Mutex<State>>,
    interrupted: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    begin: Option<Begin>,
    /// Also of earlier parts of the run, if it goes on.
    steps: Vec<Step>,
    eta: Option<Eta>,
    phase: String,
    warnings: usize,
    /// How the run is held back, and why.
    pace: Option<(Pace, String)>,
    /// Causes that were said.
    causes: Vec<Discriminant<Cause>>,
    drawn: Option<Instant>,
}

/// A line that stays.
#[derive(Debug, PartialEq)]
enum Kept {
    /// What happens.
    Line(String),
    /// What is shown also to who wants to see nothing.
    Warning(String),
}

impl Training {
    /// Begins; from now on Ctrl-C ends the run in order.
    pub fn begin(is_quiet: bool, is_json: bool) -> Result<Self, Failure> {
        let (state, interrupted) = (Arc::<Mutex<State>>::default(), Arc::<AtomicBool>::default());
        let (seen, raised) = (Arc::clone(&state), Arc::clone(&interrupted));
        interrupt::on_first(move || {
            // Held until the run knows, so that nothing is said in between.
            let state = seen.lock().unwrap_or_else(PoisonError::into_inner);
            say(state.stopping());
            raised.store(true, Ordering::Relaxed);
        })?;
        Ok(Self { is_quiet, is_json, begun: Instant::now(), state, interrupted })
    }

    /// Runs a job; returns how it ended.
    pub fn watch(&self, config: &RunConfig, on: &On<'_>, start: Start) -> Result<End, Failure> {
        self.state().eta = Some(Eta::new(config));
        if start.resume {
            // What cannot be read is said by the run itself.
            let before = History::open(&config.output.folder).map(|history| history.steps);
            self.state().steps = before.unwrap_or_default();
        }
        let end = train(config, on, start, &|happening| self.tell(&happening));
        // Also of a run that failed: its live line goes away before the error is printed.
        clear();
        let warnings = self.state().warnings;
        if warnings > SHOWN && !self.is_json {
            say(&format!("{WARN}{} more warnings are in the report{WARN:#}", warnings - SHOWN));
        }
        Ok(end?)
    }

    /// What came of it, as a page, if it is to be printed; `options` follow the command that uses it.
    pub fn page(
        &self,
        config: &RunConfig,
        end: &End,
        options: &[String],
    ) -> Result<String, Failure> {
        if self.is_quiet || self.is_json {
            return Ok(String::new());
        }
        let history = History::open(&config.output.folder)?;
        Ok(ending::page(config, end, &history, options))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what happened; answers whether to go on.
    fn tell(&self, happening: &Happening<'_>) -> bool {
        let mut state = self.state();
        match happening {
            Happening::Event(event) if self.is_json => {
                let line = serde_json::to_string(event).unwrap_or_default();
                _ = writeln!(anstream::stdout().lock(), "{line}");
                state.note(event, self.begun.elapsed().as_secs_f64());
            }
            Happening::Event(event) => {
                for kept in state.note(event, self.begun.elapsed().as_secs_f64()) {
                    match kept {
                        Kept::Line(line) if !self.is_quiet => say(&line),
                        Kept::Line(_) => {}
                        Kept::Warning(line) => say(&line),
                    }
                }
                if !self.is_quiet {
                    state.redraw(None);
                }
            }
            Happening::Progress { phase, done, total } if !self.is_quiet && !self.is_json => {
                state.redraw(Some((phase, *done, *total)));
            }
            Happening::Progress { .. } | Happening::Tick => {}
        }
        !self.interrupted.load(Ordering::Relaxed)
    }
}

/// A line that stays, above the live one.
fn say(line: &str) {
    clear();
    _ = writeln!(anstream::stderr().lock(), "{line}");
}

impl State {
    /// What Ctrl-C does now.
    fn stopping(&self) -> &'static str {
        let taken = self.steps.last().map(|step| step.step);
        match &self.begin {
            Some(begin) if self.phase.is_empty() => {
                if taken.unwrap_or(begin.from_step) >= begin.steps {
                    return "all steps are taken: saving and writing the result; Ctrl-C again gives \
                            it up";
                }
                "finishing this step, then saving; Ctrl-C again gives it up"
            }
            _ => "stopping, no step has begun; Ctrl-C again ends at once",
        }
    }

    /// Takes an event in that came so many seconds after the beginning; returns the lines that it is worth.
    fn note(&mut self, event: &Event, secs: f64) -> Vec<Kept> {
        if let Some(eta) = &mut self.eta {
            eta.observe(event, secs);
        }
        let line = |line| vec![Kept::Line(line)];
        match event {
            Event::Begin(begin) => {
                self.phase.clear();
                // What was lost is taken again.
                self.steps.retain(|step| step.step <= begin.from_step);
                let lines = beginning(begin);
                self.begin = Some(begin.clone());
                lines.into_iter().map(Kept::Line).collect()
            }
            Event::Phase { name } => {
                self.phase.clone_from(name);
                Vec::new()
            }
            Event::Step(step) => {
                self.steps.push(step.clone());
                Vec::new()
            }
            Event::Health { .. }
            | Event::Memory { .. }
            | Event::Felt(_)
            | Event::Exported { .. }
            | Event::End(_) => Vec::new(),
            Event::Validation { step, loss } => {
                let is_text = self.begin.as_ref().is_some_and(Begin::is_text);
                let perplexity = is_text.then(|| format!(", perplexity {:.2}", loss.exp()));
                let perplexity = perplexity.unwrap_or_default();
                line(format!("step {step}: held-out loss {}{perplexity}", number(*loss)))
            }
            Event::Sample { step, path, prompt, .. } => {
                line(format!("step {step}: {} {DIM}{prompt}{DIM:#}", path.display()))
            }
            Event::Written { step, prompt, text, .. } => {
                // On one line: what is live stands below.
                let text = text.escape_debug();
                line(format!("step {step}: {DIM}{}{DIM:#}{text}", prompt.escape_debug()))
            }
            Event::Checkpoint { step, .. } => line(format!("{DIM}step {step}: saved{DIM:#}")),
            Event::Warning { text, hint, .. } => self.warn(text, hint.as_deref()),
            Event::LeftOut(left_out) => self.warn(&left_out.to_string(), Some(LISTS)),
            Event::Note { text } => line(text.clone()),
            Event::Tightened(tightened) => self.warn(&tightened.to_string(), None),
            Event::Lost(lost) => self.warn(&lost.to_string(), None),
            Event::Paced(paced) => self.pace(paced),
        }
    }

    fn warn(&mut self, text: &str, hint: Option<&str>) -> Vec<Kept> {
        self.warnings += 1;
        if self.warnings > SHOWN {
            return Vec::new();
        }
        let hint = hint.map(|hint| format!("{DIM}hint: {hint}{DIM:#}"));
        let text = format!("{WARN}warning:{WARN:#} {text}");
        std::iter::once(text).chain(hint).map(Kept::Warning).collect()
    }

    /// The pace and its reason stay in the live line; what is new about it is said once.
    fn pace(&mut self, paced: &Paced) -> Vec<Kept> {
        let Decision { to, cause, .. } = &paced.decision;
        let is_held = to.duty < 1.0 || to.is_paused || to.rung > 0;
        self.pace = is_held.then(|| (*to, cause.to_string()));
        let kind = std::mem::discriminant(cause);
        if self.causes.contains(&kind) || cause.hint().is_none() {
            return Vec::new();
        }
        self.causes.push(kind);
        self.warn(&paced.to_string(), cause.hint())
    }

    fn redraw(&mut self, progress: Option<(&str, u64, u64)>) {
        let mut drawn = self.drawn;
        redraw(&mut drawn, || match progress {
            // Nobody knows how much it will be.
            Some((phase, _, 0)) => Line::new(phase),
            Some((phase, done, total)) => Line::new(phase)
                .bar(done as f64 / total.max(1) as f64)
                .part(0, format!("{done} of {total}")),
            None => self.line(),
        });
        self.drawn = drawn;
    }

    /// The live line.
    fn line(&self) -> Line {
        let (Some(begin), Some(step)) = (&self.begin, self.steps.last()) else {
            return Line::new(&self.phase);
        };
        let loss = mean_loss(&self.steps, loss_window(begin.steps));
        let left = self.eta.as_ref().and_then(Eta::left_secs);
        let (pace, cause) = self.pace.as_ref().map(pace).unwrap_or_default();
        Line::new("")
            .bar(step.step as f64 / begin.steps.max(1) as f64)
            .part(0, format!("{}/{}", step.step, begin.steps))
            .part(1, loss.map_or("loss not finite".into(), |loss| format!("loss {}", number(loss))))
            .part(4, speed(self.secs_per_step()))
            .part(5, memory(step.peak_bytes, begin))
            .part(2, left.map(|left| format!("{} left", duration(left))).unwrap_or_default())
            .part(3, pace)
            .part(6, cause)
    }

    /// Over the last steps: the machine's speed may change.
    fn secs_per_step(&self) -> f64 {
        let recent = &self.steps[self.steps.len().saturating_sub(RECENT_STEPS)..];
        let secs = recent.iter().map(|step| step.secs + step.rest_secs).sum::<f64>();
        secs / recent.len().max(1) as f64
    }
}

/// What lists every file that is left out.
const LISTS: &str = "`hearth cache JOB --plan` lists them all";

/// Steps that the speed in the live line is the mean of.
const RECENT_STEPS: usize = 20;

/// What a run is about.
fn beginning(begin: &Begin) -> Vec<String> {
    let Begin { unit, samples, held_out, layers, parameters, steps, from_step, .. } = begin;
    let held_out = if *held_out > 0 { format!(", {held_out} held out") } else { String::new() };
    let [peak, limit] = [planned_peak(begin), begin.limit_bytes].map(|bytes| Bytes(bytes as u64));
    let steps = several(*steps as usize, "step");
    let way = match from_step {
        0 => format!("{steps} of {}", several(begin.samples_per_step, unit)),
        from => format!("on from step {} of {steps}", thousands(*from as usize)),
    };
    let (samples, layers) = (several(*samples, unit), several(*layers, "layer"));
    vec![
        format!("{BOLD}{samples}{held_out}; {way}{BOLD:#}"),
        format!("{} in {layers}", several(*parameters, "trainable parameter")),
        format!("plan: {}; about {}", begin.how, speed(begin.step_secs)),
        format!("memory: {peak} at its peak as planned, limit {limit}"),
    ]
}

/// What the largest phase takes, as planned.
fn planned_peak(begin: &Begin) -> usize {
    begin.phases.iter().map(|phase| phase.peak_bytes).max().unwrap_or(0)
}

/// `1.2 of 1.3 GiB planned`. The limit stands above, once: a line has to fit a narrow terminal.
fn memory(taken_bytes: usize, begin: &Begin) -> String {
    let taken = Bytes(taken_bytes as u64).to_string();
    let Some(planned) = begin.step_bytes() else { return taken };
    let planned = Bytes(planned as u64).to_string();
    // The unit once, if it is the same.
    let unit = planned.split_once(' ').map_or("", |(_, unit)| unit);
    let taken = taken.strip_suffix(unit).unwrap_or(&taken).trim_end();
    format!("{taken} of {planned} planned")
}

/// `72 % pace`, and `(hot: ...)`: why it is not full.
fn pace((pace, cause): &(Pace, String)) -> (String, String) {
    let what = match pace {
        Pace { is_paused: true, .. } => "paused".into(),
        Pace { duty, .. } if *duty < 1.0 => format!("{:.0} % pace", 100.0 * duty),
        _ => "tighter".to_owned(),
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

#[cfg(test)]
mod tests {
    use trainer::config::how::How;
    use trainer::event::{Phase, Tightened};
    use trainer::model::recompute::Recompute;

    use super::*;

    fn begin() -> Begin {
        let phase = |name: &str, mib: usize| Phase { name: name.into(), peak_bytes: mib << 20 };
        Begin {
            version: String::new(),
            base: String::new(),
            engine: String::new(),
            from_step: 0,
            steps: 1,
            unit: "picture".into(),
            samples: 1,
            held_out: 0,
            layers: 1,
            parameters: 1,
            samples_per_step: 1,
            phases: vec![phase("t5", 900), phase("train 64x64", 700), phase("train 64x96", 800)],
            how: String::new(),
            step_secs: 1.0,
            times: trainer::event::Times::default(),
            limit_bytes: 8 << 30,
            loaded_in_place_bytes: 0,
            loaded_staged_bytes: 0,
            time: 0,
        }
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
        let mut state = State::default();
        let mut says = |event: &Event, part: &str| {
            state.note(event, 0.0);
            assert!(state.stopping().starts_with(part), "{}", state.stopping());
        };
        let load = Event::Phase { name: "load the model".into() };
        let begin = Begin { steps: 2, ..begin() };
        says(&load, "stopping, no step has begun");
        says(&Event::Begin(begin.clone()), "finishing this step, then saving");
        // A GPU that was lost is opened again.
        says(&load, "stopping, no step has begun");
        says(&Event::Begin(Begin { from_step: 1, ..begin.clone() }), "finishing this step");
        says(&Event::Begin(Begin { from_step: 2, ..begin }), "all steps are taken");
    }

    #[test]
    fn a_tighter_way_is_one_warning_with_its_figures() {
        let how = |micro| How { micro, recompute: Recompute::Alternate };
        let tightened = Event::Tightened(Tightened {
            step: 12,
            from: how(3),
            to: how(2),
            asked_bytes: 3 << 20,
            in_use_bytes: 10 << 20,
            limit_bytes: 12 << 20,
        });
        let said = "out of memory: asked 3 MiB, in use 10 MiB of 12 MiB; from here 2 at \
                    once with every second block computed twice instead of 3 at once with \
                    every second block computed twice, which is slower; a higher --limit avoids it";
        let lines = State::default().note(&tightened, 0.0);
        assert_eq!(lines, [Kept::Warning(format!("{WARN}warning:{WARN:#} {said}"))]);
    }

    #[test]
    fn a_cause_is_said_once_and_stands_in_the_live_line_while_it_lasts() {
        let mut state = State::default();
        let mut told = |from: f64, to: f64, cause: Cause| {
            let of = |duty| Pace { rung: 0, duty, is_paused: false };
            let decision = Decision { from: of(from), to: of(to), cause };
            let how = How { micro: 1, recompute: Recompute::None };
            let lines = state.note(&Event::Paced(Paced { step: 3, how, decision }), 0.0);
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
