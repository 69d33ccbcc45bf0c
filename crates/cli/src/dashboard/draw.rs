//! The dashboard as it is drawn: a function of what is known of the run. Made for 80 columns and 24 rows; a larger
//! terminal has larger plots and a longer log, a smaller one leaves panels out.

use std::env;

use machine::Bytes;
use machine::telemetry::Telemetry;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::border;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Wrap};
use trainer::event::figures::{loss_window, mean_loss};
use trainer::event::history::History;
use trainer::event::{EndReason, Phase, RankShare, RunState, StepMetrics};
use trainer::report::format::{bytes, count, number};

use super::keys::KEYS;
use super::plot::{Curve, CurveHeight, Plot};
use super::view::{KeyMode, RunView};
use crate::render::progress::duration;
use crate::render::training::{preparing, speed};
use crate::terminal::safe;

/// Columns of the panels on the right.
const SIDE: u16 = 30;
/// Below these a panel is left out.
const NARROW: u16 = 64;
const LOW: u16 = 16;

/// What a terminal can show.
#[derive(Clone, Copy, Debug)]
pub struct Glyphs {
    /// Characters beyond ASCII.
    pub is_unicode: bool,
    pub is_coloured: bool,
}

impl Glyphs {
    /// As its surroundings say.
    pub fn of_terminal() -> Self {
        let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
        let locale = locale.unwrap_or_default().to_uppercase();
        let is_unicode = locale.contains("UTF-8") || locale.contains("UTF8");
        Self { is_unicode, is_coloured: set("NO_COLOR").is_none() }
    }

    fn colour(self, colour: Color) -> Style {
        if self.is_coloured { Style::new().fg(colour) } else { Style::new() }
    }

    fn block(self, title: &str) -> Block<'_> {
        let ascii = border::Set {
            top_left: "+",
            top_right: "+",
            bottom_left: "+",
            bottom_right: "+",
            vertical_left: "|",
            vertical_right: "|",
            horizontal_top: "-",
            horizontal_bottom: "-",
        };
        let set = if self.is_unicode { border::ROUNDED } else { ascii };
        Block::bordered().border_set(set).border_style(DIM).title(Span::styled(title, BOLD))
    }

    /// A text from anybody, as it may be shown.
    fn shown(self, text: &str) -> String {
        let text = safe(text);
        if self.is_unicode {
            return text.into_owned();
        }
        let plain = |c: char| match c {
            '°' => ' ',
            '·' => ',',
            '█' => '#',
            '░' => '-',
            c if c.is_ascii() => c,
            _ => '?',
        };
        text.chars().map(plain).collect()
    }

    fn bar(self, share: f64, width: usize) -> String {
        self.shown(&crate::text::bar_of_width(share, width))
    }
}

const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

/// Draws a run.
pub fn draw(frame: &mut Frame<'_>, view: &RunView, glyphs: Glyphs) {
    let area = frame.area();
    let log_rows = if area.height < LOW { 0 } else { (area.height / 4).max(6) };
    let [title, progress, middle, log, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(log_rows),
        Constraint::Length(1),
    ])
    .areas(area);
    draw_title(frame, title, view, glyphs);
    draw_progress(frame, progress, view, glyphs);
    let side = if area.width < NARROW { 0 } else { SIDE.max(area.width / 4) };
    let [curves, panels] =
        Layout::horizontal([Constraint::Min(20), Constraint::Length(side)]).areas(middle);
    draw_curves(frame, curves, &view.run.history, glyphs);
    if side > 0 {
        draw_panels(frame, panels, view, glyphs);
    }
    if log_rows > 0 {
        draw_log(frame, log, view, glyphs);
    }
    draw_keys(frame, keys, view, glyphs);
    if view.mode == KeyMode::Help {
        draw_help(frame, area, glyphs);
    }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, view: &RunView, glyphs: Glyphs) {
    let (colour, state) = state(view);
    let folder = view.folder.canonicalize().unwrap_or_else(|_| view.folder.clone());
    let name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
    let begin = view.run.history.begin();
    let device = begin.map_or_else(String::new, |begin| format!("  {}", begin.engine));
    let line = Line::from(vec![
        Span::styled(format!(" {} ", glyphs.shown(&name)), BOLD),
        Span::styled(glyphs.shown(&state), glyphs.colour(colour).add_modifier(Modifier::BOLD)),
        Span::styled(glyphs.shown(&device), DIM),
    ]);
    frame.render_widget(line, area);
}

/// Where the run stands, in a few words.
fn state(view: &RunView) -> (Color, String) {
    match &view.state {
        None => (Color::Yellow, "waiting for the run".into()),
        Some(RunState::Running { .. }) if view.is_paused => (Color::Yellow, "paused".into()),
        Some(RunState::Running { phase: None, .. }) => (Color::Green, "training".into()),
        Some(RunState::Running { phase: Some(phase), .. }) => (Color::Green, phase.to_string()),
        Some(RunState::Ended(reason)) => match reason {
            EndReason::Finished => (Color::Green, "finished".into()),
            EndReason::Plateau => (Color::Green, "ended: the held-out loss stopped falling".into()),
            EndReason::Interrupted => (Color::Yellow, "stopped; --resume continues".into()),
            EndReason::Changed => (Color::Yellow, "restarting with changes".into()),
            EndReason::Unhealthy => (Color::Red, "stopped: NaN or Inf".into()),
            EndReason::Diverged => (Color::Red, "diverged".into()),
        },
        Some(RunState::Failed(_)) => (Color::Red, "failed".into()),
        Some(RunState::Killed { .. }) => (Color::Red, "killed; --resume continues".into()),
    }
}

fn draw_progress(frame: &mut Frame<'_>, area: Rect, view: &RunView, glyphs: Glyphs) {
    let history = &view.run.history;
    let width = usize::from(area.width.saturating_sub(2));
    let line = match (&history.progress, history.begin()) {
        (Some(progress), _) if !matches!(progress.phase, Phase::Save | Phase::Sample) => {
            preparing(progress).fit(width)
        }
        (_, Some(begin)) => {
            let (step, steps) = (history.last_step(), begin.steps.max(1));
            let is_running = matches!(view.state, Some(RunState::Running { .. }));
            let left = view.run.eta.left_secs().filter(|_| is_running && step < steps);
            let left = left.map(|secs| format!("  {} left", duration(secs))).unwrap_or_default();
            let share = step as f64 / steps as f64;
            let words = format!(" {}/{} steps{left}", count(step), count(steps));
            let bar = width.saturating_sub(words.len()).min(60);
            format!("{}{words}", crate::text::bar_of_width(share, bar))
        }
        _ => String::new(),
    };
    let line = anstream::adapter::strip_str(&line).to_string();
    frame.render_widget(Line::from(format!(" {}", glyphs.shown(&line))), area);
}

fn draw_curves(frame: &mut Frame<'_>, area: Rect, history: &History, glyphs: Glyphs) {
    let [loss, speed] = Layout::vertical([Constraint::Fill(3), Constraint::Fill(2)]).areas(area);
    draw_loss(frame, loss, history, glyphs);
    draw_speed(frame, speed, history, glyphs);
}

fn draw_loss(frame: &mut Frame<'_>, area: Rect, history: &History, glyphs: Glyphs) {
    let steps = &history.steps;
    let window = loss_window(history.begin().map_or(1, |begin| begin.steps));
    let mut words = Vec::new();
    if let Some(loss) = mean_loss(steps, window) {
        words.push(format!("{} smoothed", number(loss)));
    }
    if let Some((_, loss)) = history.validations.last() {
        words.push(format!("{} held out", number(*loss)));
    }
    if let Some(norm) = steps.last().and_then(|step| step.grad_norm) {
        words.push(format!("grad {}", number(norm)));
    }
    let not_finite = steps.iter().filter(|step| step.is_skipped || !step.loss.is_finite()).count();
    if not_finite > 0 {
        words.push(format!("{not_finite} steps NaN/Inf"));
    }
    let validations = history.validations.iter().map(|(step, loss)| (*step as f64, *loss));
    let curves = vec![
        Curve {
            points: points(steps, |step| step.loss),
            style: DIM,
            mark: None,
            height: CurveHeight::Most,
        },
        Curve {
            points: smoothed(steps, window, usize::from(area.width)),
            style: glyphs.colour(Color::Cyan),
            mark: (!glyphs.is_unicode).then_some('*'),
            height: CurveHeight::OfOthers,
        },
        Curve {
            points: validations.collect(),
            style: glyphs.colour(Color::Yellow),
            mark: Some('o'),
            height: CurveHeight::Whole,
        },
    ];
    draw_plot(frame, area, " loss ", &words, curves, glyphs);
}

fn points(steps: &[StepMetrics], get: fn(&StepMetrics) -> f64) -> Vec<(f64, f64)> {
    steps.iter().map(|step| (step.step as f64, get(step))).collect()
}

/// The mean of the last losses at as many places as there are columns.
fn smoothed(steps: &[StepMetrics], window: usize, columns: usize) -> Vec<(f64, f64)> {
    let n = (2 * columns).min(steps.len());
    let at = |column: usize| {
        let end = (column + 1) * steps.len() / n;
        Some((steps[end - 1].step as f64, mean_loss(&steps[..end], window)?))
    };
    (0..n).filter_map(at).collect()
}

fn draw_speed(frame: &mut Frame<'_>, area: Rect, history: &History, glyphs: Glyphs) {
    let steps = &history.steps;
    let mut words = Vec::new();
    let recent = &steps[steps.len().saturating_sub(20)..];
    if !recent.is_empty() {
        let secs = recent.iter().map(|step| step.secs).sum::<f64>() / recent.len() as f64;
        words.push(speed(secs));
        let planned = history.begin().map_or(0.0, |begin| begin.step_secs);
        if planned > 0.0 {
            words.push(format!("planned {}", speed(planned)));
        }
        let waited = recent.iter().map(|step| step.wait_secs).sum::<f64>() / recent.len() as f64;
        if waited > 0.05 * secs {
            words.push(format!("{:.0} % waiting for data", 100.0 * waited / secs));
        }
        let copies = recent.iter().filter_map(|step| step.copy_wait_secs).sum::<f64>();
        let copies = copies / recent.len() as f64;
        if copies > 0.01 * secs {
            words.push(format!("{:.0} % waiting for copies", 100.0 * copies / secs));
        }
    }
    let points = points(steps, |step| step.secs);
    let style = glyphs.colour(Color::Magenta);
    let mark = (!glyphs.is_unicode).then_some('*');
    let curve = Curve { points, style, mark, height: CurveHeight::Most };
    draw_plot(frame, area, " seconds per step ", &words, vec![curve], glyphs);
}

fn draw_plot(
    frame: &mut Frame<'_>,
    area: Rect,
    title: &str,
    words: &[String],
    curves: Vec<Curve>,
    glyphs: Glyphs,
) {
    let block = glyphs.block(title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [first, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(inner);
    frame.render_widget(Line::from(glyphs.shown(&words.join(" · "))), first);
    let plot = Plot { curves, is_braille: glyphs.is_unicode, axis: DIM };
    frame.render_widget(&plot, rest);
}

fn draw_panels(frame: &mut Frame<'_>, area: Rect, view: &RunView, glyphs: Glyphs) {
    let n_ranks = view.run.history.ranks.len();
    let nodes = if n_ranks > 1 { n_ranks as u16 + 2 } else { 0 };
    let machine = machine_lines(view);
    let [place, memory, nodes] = Layout::vertical([
        Constraint::Length(machine.len() as u16 + 2),
        Constraint::Min(3),
        Constraint::Length(nodes.min(area.height / 3)),
    ])
    .areas(area);
    frame.render_widget(panel(" machine ", &machine, glyphs), place);
    let rows = usize::from(memory.height.saturating_sub(2));
    let width = usize::from(memory.width.saturating_sub(2));
    frame.render_widget(
        panel(" memory, of plan ", &memory_lines(&view.run.history, rows, width, glyphs), glyphs),
        memory,
    );
    if nodes.height > 0 {
        let lines: Vec<String> = view.run.history.ranks.iter().map(node).collect();
        frame.render_widget(panel(" nodes ", &lines, glyphs), nodes);
    }
}

fn panel<'a>(title: &'a str, lines: &[String], glyphs: Glyphs) -> Paragraph<'a> {
    let lines: Vec<Line<'_>> = lines.iter().map(|line| Line::from(glyphs.shown(line))).collect();
    Paragraph::new(lines).block(glyphs.block(title))
}

/// Temperature, power, energy, pace and the program's memory, as far as they are known.
fn machine_lines(view: &RunView) -> Vec<String> {
    let history = &view.run.history;
    let Some((_, snapshot)) = history.snapshots.last() else {
        return vec!["no reading yet".into()];
    };
    let telemetry = &snapshot.telemetry;
    let mut lines = Vec::new();
    if let Some(heat) = &telemetry.temperature {
        let limit = heat.limit.map(|limit| format!(" of {limit:.0}")).unwrap_or_default();
        lines.push(format!("{:.0}{limit} °C  {}", heat.celsius, heat.sensor));
    }
    let watts = telemetry.watts.map(|watts| format!("{watts:.0} W"));
    let energy = view.joules.filter(|joules| *joules > 0.0).map(energy);
    let power: Vec<String> = watts.into_iter().chain(energy).collect();
    if !power.is_empty() {
        lines.push(power.join("  "));
    }
    lines.extend(utilisation(telemetry));
    let held = view.run.pace_words();
    lines.push(if held.is_empty() { "full pace".into() } else { held });
    if let Some(memory) = telemetry.memory {
        let all = memory.held.saturating_add_signed(memory.left.max(0));
        lines.push(format!("{} held of {}", Bytes(memory.held), Bytes(all)));
    }
    lines
}

/// `98 % GPU, 41 % its memory`.
fn utilisation(telemetry: &Telemetry) -> Option<String> {
    let percent =
        |share: Option<f64>, of: &str| share.map(|share| format!("{:.0} % {of}", 100.0 * share));
    let known = [
        percent(telemetry.gpu_utilisation, "GPU"),
        percent(telemetry.memory_utilisation, "its memory"),
    ];
    let known: Vec<String> = known.into_iter().flatten().collect();
    (!known.is_empty()).then(|| known.join(", "))
}

fn energy(joules: f64) -> String {
    if joules < 3.6e5 {
        format!("{:.1} kJ", joules / 1e3)
    } else {
        format!("{:.2} kWh", joules / 3.6e6)
    }
}

/// Each phase's peak against its plan, the latest last.
fn memory_lines(history: &History, rows: usize, width: usize, glyphs: Glyphs) -> Vec<String> {
    let limit = history.begin().map(|begin| format!("limit {}", bytes(begin.limit_bytes)));
    let shown = rows.saturating_sub(usize::from(limit.is_some())).max(1);
    let peaks = &history.phases[history.phases.len().saturating_sub(shown)..];
    let bar = width.saturating_sub(22).clamp(4, 16);
    let line = |name: String, taken: usize, planned: usize| {
        let share = taken as f64 / planned.max(1) as f64;
        format!("{name:11.11} {} {}", glyphs.bar(share, bar), bytes(taken))
    };
    let peaks =
        peaks.iter().map(|peak| line(peak.name.to_string(), peak.peak_bytes, peak.planned_bytes));
    peaks.chain(limit).collect()
}

/// `spark  12 of a step  0.82 s`.
fn node(rank: &RankShare) -> String {
    let heat = rank.celsius.map(|celsius| format!("  {celsius:.0} °C")).unwrap_or_default();
    let RankShare { node, samples, compute_secs, wait_secs, .. } = rank;
    format!("{node:10.10} {samples:>3}  {compute_secs:.2} s +{wait_secs:.2}{heat}")
}

fn draw_log(frame: &mut Frame<'_>, area: Rect, view: &RunView, glyphs: Glyphs) {
    let rows = usize::from(area.height.saturating_sub(2));
    let first = view.log.len().saturating_sub(rows);
    let line = |line: &super::view::DashboardLine| {
        let style = if line.is_warning { glyphs.colour(Color::Yellow) } else { Style::new() };
        Line::styled(glyphs.shown(&line.text.replace(['\n', '\t'], " ")), style)
    };
    let lines: Vec<Line<'_>> = view.log.iter().skip(first).map(line).collect();
    frame.render_widget(Paragraph::new(lines).block(glyphs.block(" events ")), area);
}

fn draw_keys(frame: &mut Frame<'_>, area: Rect, view: &RunView, glyphs: Glyphs) {
    let line = match &view.mode {
        KeyMode::Prompt(prompt) => Line::from(vec![
            Span::styled(" prompt: ", BOLD),
            Span::raw(glyphs.shown(prompt)),
            Span::styled("_   Enter samples it, Esc gives up", DIM),
        ]),
        KeyMode::ConfirmStop => Line::from(vec![
            Span::styled(" stop the run? ", glyphs.colour(Color::Yellow)),
            Span::raw("y saves and ends it, any other key goes on"),
        ]),
        KeyMode::Commands | KeyMode::Help => Line::from(
            KEYS.iter()
                .flat_map(|(key, name, _)| {
                    let name = if *key == "p" && view.is_paused { "resume" } else { name };
                    [Span::styled(format!(" {key}"), BOLD), Span::styled(format!(" {name} "), DIM)]
                })
                .collect::<Vec<_>>(),
        ),
    };
    frame.render_widget(line, area);
}

fn draw_help(frame: &mut Frame<'_>, area: Rect, glyphs: Glyphs) {
    let lines: Vec<Line<'_>> = KEYS
        .iter()
        .map(|(key, _, what)| {
            Line::from(vec![Span::styled(format!(" {key}  "), BOLD), Span::raw(*what)])
        })
        .chain([Line::raw(""), Line::styled(" any key closes this", DIM)])
        .collect();
    let [width, height] = [58.min(area.width), (lines.len() as u16 + 2).min(area.height)];
    let popup = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, popup);
    let help = Paragraph::new(lines).wrap(Wrap { trim: false });
    frame.render_widget(help.block(glyphs.block(" keys ")), popup);
}
