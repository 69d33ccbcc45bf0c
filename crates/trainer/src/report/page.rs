//! The page: sections from top to bottom, each a function from the history to HTML. Empty sections are left out.
//! All text from files goes through [`escaped`].

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use super::bars::{MemoryBar, bars, shows_limit};
use super::clip_scores::clip_scores;
use super::document::document;
use super::edits::{edit_rows, step_name};
use super::evaluation::evaluation;
use super::format::{bytes, count, date, duration, escaped, link, number, plural, unit};
use super::gallery::{Gallery, GalleryImage};
use super::live::EVERY_SECS;
use super::plot::{PlotSeries, SeriesStyle, plot, plot_over};
use super::ranks::ranks;
use super::timesteps::timesteps;
use crate::event::clip_scores::ClipScores;
use crate::event::evaluation::RunEvaluation;
use crate::event::figures::{RunFigures, smoothed};
use crate::event::history::{Ending, History, PhasePeak, SampleText};
use crate::event::{
    EndReason, MachineSnapshot, PlannedPhase, PolicyMetrics, RewardMetrics, RunFailure, RunStart,
    RunState,
};
use machine::telemetry::ProcessMemory;

/// The data of a page.
pub struct ReportSources<'a> {
    pub state: &'a RunState,
    pub history: &'a History,
    pub figures: &'a RunFigures,
    pub gallery: &'a Gallery,
    pub clip_scores: Option<&'a ClipScores>,
    pub evaluation: Option<&'a RunEvaluation>,
}

/// The whole page.
pub fn page(title: &str, sources: &ReportSources<'_>, settings: Option<&str>) -> String {
    let ReportSources { state, history, figures, gallery, .. } = *sources;
    let sections = [
        headline(state, history),
        figure_list(figures),
        findings(history, gallery),
        curves(history, figures),
        policy(history),
        rewards(history),
        timesteps(history),
        memory(history, figures),
        machine(history),
        ranks(&history.ranks),
        clip_scores(sources.clip_scores, &history.samples),
        evaluation(sources.evaluation),
        images(gallery),
        texts(history),
        exports(history),
        settings.map_or_else(String::new, job),
        footer(history),
    ];
    let refreshes = matches!(state, RunState::Running { .. }).then_some(EVERY_SECS);
    document(title, refreshes, &sections.concat())
}

/// The state of the run, its base and device.
fn headline(state: &RunState, history: &History) -> String {
    let (colour, words) = match state {
        RunState::Running { .. } => ("good", "running"),
        RunState::Ended(EndReason::Finished) => ("good", "finished"),
        RunState::Ended(EndReason::Plateau) => {
            ("good", "ended early: the validation loss stopped falling")
        }
        RunState::Ended(EndReason::Interrupted) => {
            ("warn", "interrupted; it can be resumed from its last checkpoint")
        }
        RunState::Ended(EndReason::Changed) => ("warn", "continuing with changed settings"),
        RunState::Ended(EndReason::Unhealthy) => {
            ("bad", "stopped: losses or gradients were not finite")
        }
        RunState::Ended(EndReason::Diverged) => ("bad", "diverged: the result was not exported"),
        RunState::Failed(_) => ("bad", "failed"),
        RunState::Killed { .. } => {
            ("bad", "killed; it can be resumed from its last checkpoint, if it has one")
        }
    };
    let mut out = format!("<p class=\"state {colour}\">{words}</p>\n");
    if let RunState::Failed(RunFailure { step, text, hint }) = state {
        _ = writeln!(out, "<p>After step {step}: {}<br>{}</p>", escaped(text), escaped(hint));
    }
    if matches!(state, RunState::Running { .. }) {
        _ = writeln!(
            out,
            "<p class=\"faint\">Written {}; refreshes every {EVERY_SECS} seconds. A time long past \
             means that the run was killed.</p>",
            date(now())
        );
    }
    if let (Some(first), Some(last)) = (history.parts.first(), history.parts.last()) {
        let begin = &last.begin;
        _ = writeln!(
            out,
            "<p class=\"faint\">{} · {} · {} · {} per step · started {}</p>",
            escaped(&begin.base),
            plural(begin.layers, "layer"),
            escaped(&begin.engine),
            plural(begin.samples_per_step, &begin.unit),
            first.time.map_or_else(|| "–".into(), |time| date(time as u64))
        );
    }
    out
}

fn figure_list(figures: &RunFigures) -> String {
    let unknown = || "–".to_string();
    let of = |number: u64, whole: u64| {
        if number == whole { String::new() } else { format!("of {}", count(whole)) }
    };
    let kept = figures.best_checkpoint.as_ref();
    let kept =
        kept.map_or_else(String::new, |path| format!(": {}", escaped(&path.display().to_string())));
    let (validation, when) = figures.best_validation.map_or_else(
        || (unknown(), "nothing was held out".to_string()),
        |(step, loss)| (number(loss), format!("at step {}{kept}", count(step))),
    );
    let planned = figures.planned_bytes.map_or_else(unknown, bytes);
    let samples = format!("{}s", escaped(&figures.unit));
    let rows = [
        ("steps", count(figures.steps), of(figures.steps, figures.planned_steps)),
        ("time", duration(figures.secs), String::new()),
        ("seconds per step", figures.secs_per_step.map_or_else(unknown, number), "median".into()),
        ("loss", figures.final_loss.map_or_else(unknown, number), mean_of(figures)),
        ("NaN/Inf steps", count(figures.not_finite_steps as u64), "skipped".into()),
        ("best validation loss", validation, when),
        (&samples, count(figures.samples as u64), format!("{} held out", figures.held_out)),
        ("trainable parameters", count(figures.parameters as u64), String::new()),
        (
            "peak memory",
            figures.peak_bytes.map_or_else(unknown, bytes),
            format!("planned {planned}, limit {}", bytes(figures.limit_bytes)),
        ),
    ];
    let mut out = String::from("<dl class=\"figures\">");
    for (name, value, note) in rows {
        _ = write!(out, "<div><dt>{name}</dt><dd>{value} <small>{note}</small></dd></div>");
    }
    out + "</dl>\n"
}

/// `mean of the last 20 steps, 0.41 at first`.
fn mean_of(figures: &RunFigures) -> String {
    let first = figures.first_loss.map(|loss| format!(", {} at first", number(loss)));
    let not_finite = if figures.final_loss.is_none() { "not finite: " } else { "" };
    format!("{not_finite}{}{}", figures.loss_label(), first.unwrap_or_default())
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Warnings that are shown. Chosen: the loop may warn at every step.
const WARNINGS: usize = 30;

/// Warnings of the loop, and counts of skipped steps.
fn findings(history: &History, gallery: &Gallery) -> String {
    let warnings = history.warnings.iter().take(WARNINGS);
    let mut items: Vec<String> =
        warnings.map(|(step, text)| format!("<b>step {step}</b>: {}", escaped(text))).collect();
    if let Some(more) = history.warnings.len().checked_sub(WARNINGS).filter(|more| *more > 0) {
        items.push(format!("{} more in events.jsonl", plural(more, "warning")));
    }
    for pair in history.parts.windows(2) {
        let (from, reached) = (pair[1].begin.from_step, pair[0].last_step);
        let cause = match &pair[0].ending {
            Some(Ending::End(end)) if end.reason == EndReason::Changed => "was changed on request",
            Some(Ending::End(_)) => "was stopped",
            Some(Ending::Failed(_)) => "failed",
            Some(Ending::Lost(_)) => "lost its GPU",
            None => "was killed",
        };
        let lost = match reached.saturating_sub(from) {
            0 => String::new(),
            steps => format!("; steps lost: {steps}"),
        };
        items.push(format!("the run {cause} at step {reached} and resumed from step {from}{lost}"));
    }
    let skipped = history.steps.iter().filter(|step| step.is_skipped).count();
    if skipped > 0 {
        items.push(format!("steps skipped because a gradient was not finite: {skipped}"));
    }
    let n_not_finite = history.steps.iter().filter(|step| !step.loss.is_finite()).count();
    if n_not_finite > 0 {
        items.push(format!("steps whose loss was not finite: {n_not_finite}"));
    }
    items.extend(gallery.problems.iter().map(|problem| escaped(problem)));
    if items.is_empty() {
        return String::new();
    }
    let list = items.join("</li><li>");
    format!("<h2>Warnings</h2>\n<ul><li>{list}</li></ul>\n")
}

fn curves(history: &History, figures: &RunFigures) -> String {
    let steps = &history.steps;
    let of = |get: fn(&crate::event::StepMetrics) -> f64| {
        steps.iter().map(move |step| (step.step as f64, get(step)))
    };
    let validation = history.validations.iter().map(|(step, loss)| (*step as f64, *loss));
    let mean = smoothed(steps, figures.loss_window).into_iter();
    // The mean of one step is that step.
    let (mark, mean) = match figures.loss_window {
        1 => (SeriesStyle::Beads, mean.take(0)),
        _ => (SeriesStyle::Dots, mean.take(usize::MAX)),
    };
    let loss = plot(
        "Loss",
        false,
        &[
            PlotSeries::new("each step", 1, mark, of(|step| step.loss)),
            PlotSeries::new("smoothed", 1, SeriesStyle::Line, mean),
            PlotSeries::new("held out", 2, SeriesStyle::Beads, validation),
        ],
    );
    let gradient = of(|step| step.grad_norm.unwrap_or(f64::NAN));
    let small = [
        plot(
            "Learning rate",
            true,
            &[PlotSeries::new("per step", 1, SeriesStyle::Line, of(|step| step.learning_rate))],
        ),
        plot(
            "Gradient norm",
            true,
            &[PlotSeries::new("each step", 1, SeriesStyle::Dots, gradient)],
        ),
        plot(
            "Seconds per step",
            true,
            &[
                PlotSeries::new("whole", 1, SeriesStyle::Dots, of(|step| step.secs)),
                PlotSeries::new("waiting", 2, SeriesStyle::Line, of(|step| step.wait_secs)),
            ],
        ),
    ]
    .concat();
    if loss.is_empty() && small.is_empty() {
        return String::new();
    }
    let loss = if loss.is_empty() {
        "<p class=\"note\">No step had a finite loss, so there is no curve.</p>".into()
    } else {
        loss
    };
    format!("<h2>Training</h2>\n{loss}\n<div class=\"plots\">{small}</div>\n")
}

/// What the policy of a compressed model did.
fn policy(history: &History) -> String {
    let of = |get: fn(&PolicyMetrics) -> Option<f64>| {
        let all = history.policy.iter();
        all.map(move |policy| (policy.step as f64, get(policy).unwrap_or(f64::NAN)))
    };
    let line = |name, colour, get| PlotSeries::new(name, colour, SeriesStyle::Line, of(get));
    let entropy = line("entropy, of the largest", 1, |policy| Some(policy.entropy));
    let same = line("same places", 3, |policy| Some(policy.same_places));
    let ends = line("ends of words", 2, |policy| Some(policy.word_ends));
    let reward = line("mean reward", 1, |policy| Some(policy.reward));
    let spread = line("deviation of advantages", 2, |policy| policy.advantage_spread);
    let plots = [
        plot("What is kept, as shares", true, &[entropy, same, ends]),
        plot("Reward of the trunk, nats per token", true, &[reward, spread]),
    ]
    .concat();
    if plots.is_empty() {
        return String::new();
    }
    format!("<h2>Policy</h2>\n<div class=\"plots\">{plots}</div>\n")
}

/// What preferences came to.
fn rewards(history: &History) -> String {
    let line = |(colour, name): (u8, &&'static str)| {
        let of =
            |rewards: &RewardMetrics| Some((rewards.step as f64, *rewards.metrics.get(*name)?));
        let points = history.rewards.iter().filter_map(of);
        PlotSeries::new(name, colour, SeriesStyle::Line, points)
    };
    let plots = REWARD_PLOTS.each_ref().map(|(title, names)| {
        let lines: Vec<_> = (1..).zip(*names).map(line).collect();
        plot(title, true, &lines)
    });
    let plots = plots.concat();
    if plots.is_empty() {
        return String::new();
    }
    format!("<h2>Rewards</h2>\n<div class=\"plots\">{plots}</div>\n")
}

/// What is plotted of them, by the names that TRL logs.
const REWARD_PLOTS: [(&str, &[&str]); 7] = [
    ("Reward of completions", &["reward", "reward_std", "eval_reward"]),
    (
        "Completions cut off, and those with the reward of all others",
        &["completions/clipped_ratio", "frac_reward_zero_std"],
    ),
    ("Tokens of a completion", &["completions/mean_length"]),
    ("Rewards", &["rewards/chosen", "rewards/rejected", "rewards/margins"]),
    (
        "Pairs whose chosen answer has the higher reward",
        &["rewards/accuracies", "eval_rewards/accuracies"],
    ),
    ("Log-probabilities of answers", &["logps/chosen", "logps/rejected"]),
    ("KL from the reference, nats", &["kl"]),
];

/// Memory of every phase, planned and measured, and of every step.
fn memory(history: &History, figures: &RunFigures) -> String {
    let Some(last) = history.parts.last().filter(|part| !part.begin.phases.is_empty()) else {
        return String::new();
    };
    let planned = &last.begin.phases;
    // What was encoded by an earlier part is not in the plan of a later one.
    let earlier =
        history.phases.iter().filter(|taken| planned.iter().all(|of| of.name != taken.name));
    let mut all: Vec<MemoryBar> = earlier.map(bar).collect();
    for PlannedPhase { name, peak_bytes } in planned {
        let taken = history.phases.iter().find(|taken| taken.name == *name);
        let only_planned =
            MemoryBar { name: name.to_string(), planned_bytes: *peak_bytes, taken_bytes: None };
        all.push(taken.map_or(only_planned, bar));
    }
    let bars = bars(&all, figures.limit_bytes);
    let steps = memory_of_steps(history, &last.begin);
    format!("<h2>Memory</h2>\n{bars}<div class=\"plots\">{steps}</div>\n")
}

fn bar(taken: &PhasePeak) -> MemoryBar {
    let PhasePeak { name, planned_bytes, peak_bytes } = taken;
    MemoryBar {
        name: name.to_string(),
        planned_bytes: *planned_bytes,
        taken_bytes: Some(*peak_bytes),
    }
}

/// Memory of each step, with the plan's, and the limit if that is near.
fn memory_of_steps(history: &History, begin: &RunStart) -> String {
    let most = history.steps.iter().map(|step| step.peak_bytes).chain(begin.step_bytes()).max();
    let most = most.unwrap_or(0);
    let (unit, size) = unit(most);
    let taken = history.steps.iter().map(|step| (step.step as f64, step.peak_bytes as f64 / size));
    let ends = || [history.steps.first(), history.steps.last()].into_iter().flatten();
    let level = |bytes: Option<usize>| {
        let bytes = bytes.map_or(f64::NAN, |bytes| bytes as f64 / size);
        ends().map(move |step| (step.step as f64, bytes))
    };
    let limit = Some(begin.limit_bytes).filter(|limit| shows_limit(most, *limit));
    let series = [
        PlotSeries::new("limit", 4, SeriesStyle::Line, level(limit)),
        PlotSeries::new("planned for the largest", 3, SeriesStyle::Band, level(begin.step_bytes())),
        PlotSeries::new("each step", 2, SeriesStyle::Line, taken),
    ];
    plot(&format!("Memory of steps, {unit}"), true, &series)
}

/// Bytes of a gibibyte.
const GIB: f64 = (1_u64 << 30) as f64;

/// Runs shorter than this are shown over seconds.
const SHORT_MINUTES: f64 = 4.0;

/// Telemetry over time, and the governor's decisions.
fn machine(history: &History) -> String {
    // Two points make a curve.
    let [(first, _), .., (last, _)] = &history.snapshots[..] else { return String::new() };
    let (along, unit) =
        if last - first < SHORT_MINUTES { ("second", 60.0) } else { ("minute", 1.0) };
    let of = |get: fn(&MachineSnapshot) -> Option<f64>| {
        history.snapshots.iter().filter_map(move |(at, felt)| Some((unit * at, get(felt)?)))
    };
    let share = |of: fn(ProcessMemory) -> f64| {
        let of = move |felt: &MachineSnapshot| Some(of(felt.telemetry.memory?) / GIB);
        history.snapshots.iter().filter_map(move |(at, felt)| Some((unit * at, of(felt)?)))
    };
    let limit = |felt: &MachineSnapshot| felt.telemetry.temperature.as_ref()?.limit;
    let celsius = |felt: &MachineSnapshot| Some(felt.telemetry.temperature.as_ref()?.celsius);
    let over = |title, series: &[PlotSeries]| plot_over(along, title, true, series);
    let plots = [
        over(
            "Temperature, °C",
            &[
                PlotSeries::new("throttling", 3, SeriesStyle::Band, of(limit)),
                PlotSeries::new("hottest sensor", 2, SeriesStyle::Line, of(celsius)),
            ],
        ),
        over(
            "Pace, %",
            &[PlotSeries::new(
                "duty cycle",
                1,
                SeriesStyle::Line,
                of(|felt| Some(100.0 * felt.duty)),
            )],
        ),
        over(
            "Memory of the whole program, GiB",
            &[
                PlotSeries::new(
                    "available to it",
                    3,
                    SeriesStyle::Band,
                    share(|of| of.held as f64 + of.left as f64),
                ),
                PlotSeries::new("used", 2, SeriesStyle::Line, share(|of| of.held as f64)),
            ],
        ),
        over(
            "Power, W",
            &[PlotSeries::new("drawn", 1, SeriesStyle::Line, of(|felt| felt.telemetry.watts))],
        ),
    ]
    .concat();
    if plots.is_empty() {
        return String::new();
    }
    let decided = decisions(&history.pace_changes);
    format!("<h2>Machine</h2>\n<div class=\"plots\">{plots}</div>\n{decided}")
}

fn decisions(paced: &[(u64, String)]) -> String {
    if paced.is_empty() {
        return String::new();
    }
    let item =
        |(step, text): &(u64, String)| format!("<li><b>step {step}</b>: {}</li>", escaped(text));
    let list: String = paced.iter().take(WARNINGS).map(item).collect();
    let more = match paced.len().saturating_sub(WARNINGS) {
        0 => String::new(),
        more => format!("<li>{} more in events.jsonl</li>", plural(more, "decision")),
    };
    format!("<ul>{list}{more}</ul>\n")
}

fn images(gallery: &Gallery) -> String {
    if gallery.shown.is_empty() {
        return String::new();
    }
    let edits = edit_rows(gallery);
    let mut steps: BTreeMap<u64, String> = BTreeMap::new();
    for GalleryImage { sample, data } in &gallery.shown {
        if edits.iter().any(|row| row.shows(sample)) {
            continue;
        }
        let path = link(sample.clip.as_ref().unwrap_or(&sample.path));
        // A strip of frames is as wide as the page.
        let kind = if sample.clip.is_some() { "card strip" } else { "card" };
        let prompt = escaped(&sample.prompt);
        _ = write!(
            steps.entry(sample.step).or_default(),
            "<figure class=\"{kind}\"><a href=\"{path}\"><img loading=\"lazy\" src=\"{data}\" \
             alt=\"{prompt}\"></a><figcaption>{prompt}<br><span class=\"faint\">seed {}</span>\
             </figcaption></figure>",
            sample.seed
        );
    }
    let mut out = String::from("<h2>Images</h2>\n");
    out.extend(edits.iter().map(|row| row.html(gallery)));
    for (step, figures) in steps {
        let heading = step_name(step);
        _ = writeln!(out, "<h3>{heading}</h3><div class=\"gallery\">{figures}</div>");
    }
    if gallery.n_left_out > 0 {
        _ = writeln!(
            out,
            "<p class=\"note\">{} more images are in samples/.</p>",
            gallery.n_left_out
        );
    }
    out
}

/// Texts of a run with more steps than this are left out but for the first and the last of them.
/// Chosen: as many as one reads.
const TEXT_STEPS: usize = 12;

/// Sample texts, from the first step to the last.
fn texts(history: &History) -> String {
    let mut steps: BTreeMap<u64, String> = BTreeMap::new();
    for SampleText { step, prompt, text, seed } in &history.texts {
        let [prompt, text] = [prompt, text].map(|text| escaped(text));
        _ = write!(
            steps.entry(*step).or_default(),
            "<p class=\"written\"><b>{prompt}</b>{text}<br><span class=\"faint\">seed {seed}\
             </span></p>",
        );
    }
    if steps.is_empty() {
        return String::new();
    }
    let left_out = steps.len().saturating_sub(TEXT_STEPS);
    let mut out = String::from("<h2>Texts</h2>\n");
    for (number, (step, written)) in steps.into_iter().enumerate() {
        if number > 0 && number <= left_out {
            continue;
        }
        _ = writeln!(out, "<h3>{}</h3>{written}", step_name(step));
    }
    if left_out > 0 {
        _ = writeln!(
            out,
            "<p class=\"note\">Texts of {left_out} more steps are in events.jsonl.</p>"
        );
    }
    out
}

fn exports(history: &History) -> String {
    if history.exports.is_empty() {
        return String::new();
    }
    let mut rows = String::new();
    for export in &history.exports {
        _ = write!(
            rows,
            "<tr><td>{}</td><td>{}</td><td class=\"number\">{}</td></tr>",
            escaped(&export.format),
            escaped(&export.path.display().to_string()),
            export.layers
        );
    }
    format!(
        "<h2>Files</h2>\n<div class=\"card wide\"><table><tr><th>format</th><th>file</th>\
         <th class=\"number\">layers</th></tr>{rows}</table></div>\n"
    )
}

fn job(settings: &str) -> String {
    format!(
        "<h2>Settings</h2>\n<details class=\"card\"><summary>config.toml, with the origin of each \
         value</summary><pre>{}</pre></details>\n",
        escaped(settings)
    )
}

fn footer(history: &History) -> String {
    let version = history.parts.last().map_or("", |part| &part.begin.version);
    format!("<footer>Trained with hearth {}.</footer>\n", escaped(version))
}
