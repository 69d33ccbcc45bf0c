//! A run as it goes: one live line in a terminal, a line now and then in a pipe, and above it what
//! is worth keeping. With `--json` every event is a line on standard output instead.

use std::io::Write;
use std::mem::Discriminant;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use machine::Bytes;
use machine::governor::{Cause, Decision, Pace};
use trainer::config::RunConfig;
use trainer::train::event::{Begin, Best, End, Energy, Event, Paced, Step, Why};
use trainer::train::{Happening, On, Start, train};

use crate::failure::Failure;
use crate::interrupt;
use crate::render::progress::{clear, redraw};
use crate::text::{BOLD, DIM, Page, WARN, bar};

/// Warnings that are shown; the rest is in the report.
const SHOWN: usize = 10;

/// A run being watched.
pub struct Training {
    is_quiet: bool,
    is_json: bool,
    state: Arc<Mutex<State>>,
    interrupted: Arc<AtomicBool>,
}

#[derive(Default)]
struct State {
    begin: Option<Begin>,
    steps: Vec<Step>,
    phase: Option<(String, Instant)>,
    warnings: usize,
    /// How the run is held back, and why.
    pace: Option<(Pace, String)>,
    /// Causes that were said.
    causes: Vec<Discriminant<Cause>>,
    exported: Vec<String>,
    end: Option<End>,
    drawn: Option<Instant>,
}

impl Training {
    /// Begins; from now on Ctrl-C ends the run in order.
    pub fn begin(is_quiet: bool, is_json: bool) -> Result<Self, Failure> {
        let (state, interrupted) = (Arc::<Mutex<State>>::default(), Arc::<AtomicBool>::default());
        let (seen, raised) = (Arc::clone(&state), Arc::clone(&interrupted));
        interrupt::on_first(move || {
            // Held until the run knows, so that nothing is said in between.
            let state = seen.lock().unwrap_or_else(PoisonError::into_inner);
            above(state.stopping());
            raised.store(true, Ordering::Relaxed);
        })?;
        Ok(Self { is_quiet, is_json, state, interrupted })
    }

    /// Runs a job; returns how it ended, and what came of it as a page.
    pub fn watch(
        self,
        config: &RunConfig,
        on: &On<'_>,
        start: Start,
    ) -> Result<(End, String), Failure> {
        let end = train(config, on, start, &|happening| self.tell(&happening));
        // Also of a run that failed: its live line goes away before the error is printed.
        let page = self.finish();
        Ok((end?, page))
    }

    /// Notes what happened; answers whether to go on.
    fn tell(&self, happening: &Happening<'_>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match happening {
            Happening::Event(event) if self.is_json => {
                let line = serde_json::to_string(event).unwrap_or_default();
                _ = writeln!(anstream::stdout().lock(), "{line}");
                state.note(event);
            }
            Happening::Event(event) => {
                let kept = state.note(event);
                if !self.is_quiet {
                    for line in &kept {
                        above(line);
                    }
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

    /// What came of it, as a page.
    fn finish(self) -> String {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_quiet || self.is_json {
            return String::new();
        }
        clear();
        state.page()
    }
}

/// A line that stays, above the live one.
fn above(line: &str) {
    clear();
    _ = writeln!(anstream::stderr().lock(), "{line}");
}

impl State {
    /// What Ctrl-C does now.
    fn stopping(&self) -> &'static str {
        let taken = self.steps.last().map(|step| step.step);
        match &self.begin {
            Some(begin) if self.phase.is_none() => {
                if taken.unwrap_or(begin.from_step) >= begin.steps {
                    return "all steps are taken: saving and writing the result; Ctrl-C again gives \
                            it up";
                }
                "finishing this step, then saving; Ctrl-C again gives it up"
            }
            _ => "stopping, no step has begun; Ctrl-C again ends at once",
        }
    }

    /// Takes an event in; returns the lines that it is worth.
    fn note(&mut self, event: &Event) -> Vec<String> {
        match event {
            Event::Begin(begin) => {
                let lines = beginning(begin);
                self.begin = Some(begin.clone());
                self.phase = None;
                // What was lost is taken again.
                self.steps.retain(|step| step.step <= begin.from_step);
                lines
            }
            Event::Phase { name } => {
                self.phase = Some((name.clone(), Instant::now()));
                Vec::new()
            }
            Event::Step(step) => {
                self.steps.push(step.clone());
                Vec::new()
            }
            Event::Health { .. } | Event::Memory { .. } | Event::Felt(_) => Vec::new(),
            Event::Validation { step, loss } => {
                let is_text = self.begin.as_ref().is_some_and(Begin::is_text);
                let perplexity = is_text.then(|| format!(", perplexity {:.2}", loss.exp()));
                let perplexity = perplexity.unwrap_or_default();
                vec![format!("step {step}: held-out loss {loss:.4}{perplexity}")]
            }
            Event::Sample { step, path, prompt, .. } => {
                vec![format!("step {step}: {} {DIM}{prompt}{DIM:#}", path.display())]
            }
            Event::Written { step, prompt, text, .. } => {
                // On one line: what is live stands below.
                let text = text.escape_debug();
                vec![format!("step {step}: {DIM}{}{DIM:#}{text}", prompt.escape_debug())]
            }
            Event::Checkpoint { step, .. } => vec![format!("{DIM}step {step}: saved{DIM:#}")],
            Event::Warning { text, hint, .. } => self.warn(text, hint.as_deref()),
            Event::LeftOut(left_out) => self.warn(&left_out.to_string(), Some(LISTS)),
            Event::Note { text } => vec![text.clone()],
            Event::Tightened(tightened) => self.warn(&tightened.to_string(), None),
            Event::Lost(lost) => self.warn(&lost.to_string(), None),
            Event::Paced(paced) => self.pace(paced),
            Event::Exported { format, path, layers } => {
                self.exported.push(format!("{format}: {} ({layers} layers)", path.display()));
                Vec::new()
            }
            Event::End(end) => {
                self.end = Some(end.clone());
                Vec::new()
            }
        }
    }

    fn warn(&mut self, text: &str, hint: Option<&str>) -> Vec<String> {
        self.warnings += 1;
        if self.warnings > SHOWN {
            return Vec::new();
        }
        let hint = hint.map(|hint| format!("{DIM}hint: {hint}{DIM:#}"));
        std::iter::once(format!("{WARN}warning:{WARN:#} {text}")).chain(hint).collect()
    }

    /// The pace and its reason stay in the live line; what is new about it is said once.
    fn pace(&mut self, paced: &Paced) -> Vec<String> {
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
            Some((phase, _, 0)) => phase.to_owned(),
            Some((phase, done, total)) => {
                let share = done as f64 / total.max(1) as f64;
                format!("{phase} {} {done} of {total}", bar(share))
            }
            None => self.line(),
        });
        self.drawn = drawn;
    }

    /// The live line.
    fn line(&self) -> String {
        let (Some(begin), Some(step)) = (&self.begin, self.steps.last()) else {
            return self.phase.as_ref().map_or_else(String::new, |(name, _)| name.clone());
        };
        let share = step.step as f64 / begin.steps.max(1) as f64;
        let per_step = self.secs_per_step();
        let left = per_step * begin.steps.saturating_sub(step.step) as f64;
        let pace = self.pace.as_ref().map_or_else(String::new, pace);
        format!(
            "{} {}/{}  loss {:.4}  {}  {}  {} left{pace}",
            bar(share),
            step.step,
            begin.steps,
            self.mean_loss(SMOOTH),
            speed(per_step),
            memory(step.peak_bytes, begin),
            duration(left),
        )
    }

    /// Over the last steps: the machine's speed may change.
    fn secs_per_step(&self) -> f64 {
        let recent = &self.steps[self.steps.len().saturating_sub(SMOOTH)..];
        let secs = recent.iter().map(|step| step.secs + step.rest_secs).sum::<f64>();
        secs / recent.len().max(1) as f64
    }

    fn mean_loss(&self, n: usize) -> f64 {
        let recent = &self.steps[self.steps.len().saturating_sub(n)..];
        recent.iter().map(|step| step.loss).sum::<f64>() / recent.len().max(1) as f64
    }

    fn page(&self) -> String {
        let mut page = Page::new();
        let (Some(end), Some(begin)) = (&self.end, &self.begin) else { return String::new() };
        let why = match end.why {
            Why::Finished => "finished",
            Why::Plateau => "stopped: the held-out loss does not fall any more",
            Why::Interrupted => "interrupted",
            Why::Unhealthy => "stopped: nothing finite is learnt any more",
            Why::Diverged => "diverged, so that nothing was exported,",
        };
        page.line(BOLD, &format!("{why} after step {} of {}", end.step, begin.steps));
        if !self.steps.is_empty() {
            let n = (self.steps.len() / 4).clamp(1, 100);
            let first = self.steps.iter().take(n).map(|step| step.loss).sum::<f64>() / n as f64;
            let last = self.mean_loss(n);
            page.row(
                "loss",
                BOLD,
                &format!("{first:.4} over the first {n} steps, {last:.4} over the last"),
            );
            let waited: f64 = self.steps.iter().map(|step| step.wait_secs).sum();
            let secs = self.steps.iter().map(|step| step.secs).sum::<f64>();
            let rested: f64 = self.steps.iter().map(|step| step.rest_secs).sum();
            let rested = match rested {
                0.0 => String::new(),
                rested => format!(", and {} of rest", duration(rested)),
            };
            let text = format!(
                "{} for {} steps, {waited:.1} s of it waiting{rested}",
                duration(secs),
                self.steps.len()
            );
            page.row("time", BOLD, &text);
        }
        let all = [end.peak_bytes, planned_peak(begin), begin.limit_bytes];
        let [peak, planned, limit] = all.map(|bytes| Bytes(bytes as u64));
        let text = format!("{peak} at its peak, planned {planned}, limit {limit}");
        page.row("memory", BOLD, &text);
        if let Some(energy) = &end.energy {
            page.row("energy", BOLD, &energy_of(energy));
        }
        if self.warnings > SHOWN {
            page.line(WARN, &format!("{} more warnings are in the report", self.warnings - SHOWN));
        }
        if let Some(Best { step, loss, path }) =
            end.best.as_ref().filter(|best| best.step < end.step)
        {
            let text = format!("held-out loss {loss:.4} at step {step}: {}", path.display());
            page.row("best", BOLD, &text);
        }
        for exported in &self.exported {
            page.line(DIM, exported);
        }
        page.finish()
    }
}

/// What lists every file that is left out.
const LISTS: &str = "`hearth cache JOB --plan` lists them all";

/// Steps that figures of the live line are means of.
const SMOOTH: usize = 20;

/// What a run is about.
fn beginning(begin: &Begin) -> Vec<String> {
    let Begin { unit, samples, held_out, layers, parameters, steps, from_step, .. } = begin;
    let held_out = if *held_out > 0 { format!(", {held_out} held out") } else { String::new() };
    let [peak, limit] = [planned_peak(begin), begin.limit_bytes].map(|bytes| Bytes(bytes as u64));
    let way = match from_step {
        0 => format!("{steps} steps of {} {unit}s", begin.samples_per_step),
        from => format!("on from step {from} of {steps}"),
    };
    vec![
        format!("{BOLD}{samples} {unit}s{held_out}; {way}{BOLD:#}"),
        format!("{layers} layers with {} to train", millions(*parameters)),
        format!("plan: {}; {}", begin.how, speed(begin.step_secs)),
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

/// `  72 % pace (hot: ...)`: why it is not full.
fn pace((pace, cause): &(Pace, String)) -> String {
    let what = match pace {
        Pace { is_paused: true, .. } => "paused".into(),
        Pace { duty, .. } if *duty < 1.0 => format!("{:.0} % pace", 100.0 * duty),
        _ => "tighter".to_owned(),
    };
    format!("  {WARN}{what}{WARN:#} {DIM}({cause}){DIM:#}")
}

fn energy_of(energy: &Energy) -> String {
    let watt_hours = energy.joules / 3600.0;
    let known = match energy.covered {
        0.995.. => String::new(),
        covered => format!(", known for {:.0} % of the time", 100.0 * covered),
    };
    format!("{watt_hours:.2} Wh{known}")
}

fn millions(n: usize) -> String {
    if n < 1_000_000 {
        format!("{n} numbers")
    } else {
        format!("{:.1} million numbers", n as f64 / 1e6)
    }
}

pub fn speed(secs_per_step: f64) -> String {
    if secs_per_step < 1.0 && secs_per_step > 0.0 {
        format!("{:.1} steps/s", 1.0 / secs_per_step)
    } else {
        format!("{secs_per_step:.1} s/step")
    }
}

/// In the two largest units.
pub fn duration(secs: f64) -> String {
    let secs = secs.max(0.0).round() as u64;
    let (hours, minutes) = (secs / 3600, secs / 60 % 60);
    match (hours, minutes) {
        (0, 0) => format!("{secs} s"),
        (0, _) => format!("{minutes} min {:02} s", secs % 60),
        _ => format!("{hours} h {minutes:02} min"),
    }
}

#[cfg(test)]
mod tests {
    use trainer::model::recompute::Recompute;
    use trainer::train::event::{Phase, Tightened};
    use trainer::train::how::How;

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
            state.note(event);
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
        let lines = State::default().note(&Event::Tightened(Tightened {
            step: 12,
            from: how(3),
            to: how(2),
            asked_bytes: 3 << 20,
            in_use_bytes: 10 << 20,
            limit_bytes: 12 << 20,
        }));
        let said = "out of memory: asked 3 MiB, in use 10 MiB of 12 MiB; from here 2 at \
                    once with every second block computed twice instead of 3 at once with \
                    every second block computed twice, which is slower; a higher --limit avoids it";
        assert_eq!(lines, [format!("{WARN}warning:{WARN:#} {said}")]);
    }

    #[test]
    fn a_cause_is_said_once_and_stands_in_the_live_line_while_it_lasts() {
        let mut state = State::default();
        let mut told = |from: f64, to: f64, cause: Cause| {
            let of = |duty| Pace { rung: 0, duty, is_paused: false };
            let decision = Decision { from: of(from), to: of(to), cause };
            let how = How { micro: 1, recompute: Recompute::None };
            let lines = state.note(&Event::Paced(Paced { step: 3, how, decision }));
            (lines.len(), state.pace.as_ref().map_or_else(String::new, pace))
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

    #[test]
    fn durations_have_two_units() {
        assert_eq!(
            [0.4, 59.0, 61.0, 7320.0].map(duration),
            ["0 s", "59 s", "1 min 01 s", "2 h 02 min"]
        );
    }
}
