//! `hearth runs`: the runs in a folder.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use trainer::event::figures::{loss_window, mean_loss};
use trainer::event::find::find_runs;
use trainer::event::history::History;
use trainer::event::{EndReason, RunState, lock};
use trainer::report::format::number;

use crate::commands::CommandOutcome;
use crate::failure::Failure;
use crate::render;
use crate::render::progress::duration;
use crate::text::TextPage;

/// List the runs in a folder: which one works, which are done, how far each came.
///
/// Told from the runs' folders alone: a run that was killed is shown as such.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth runs
  hearth runs experiments --json")]
pub struct RunsArgs {
    /// Folder to look into, with the folders in it
    #[arg(default_value = ".")]
    folder: PathBuf,

    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// What a list says of a run.
struct RunSummary {
    folder: PathBuf,
    state: &'static str,
    step: u64,
    steps: Option<u64>,
    loss: Option<f64>,
    /// Seconds since its last event.
    age_secs: Option<f64>,
}

pub fn run(arguments: &RunsArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let mut runs: Vec<RunSummary> =
        find_runs(&arguments.folder)?.iter().filter_map(|folder| summary(folder)).collect();
    runs.sort_by(|a, b| a.age_secs.unwrap_or(f64::MAX).total_cmp(&b.age_secs.unwrap_or(f64::MAX)));
    if arguments.json {
        let runs: Vec<Value> = runs.iter().map(as_json).collect();
        render::json::object(out, &runs)?;
    } else if runs.is_empty() {
        writeln!(out, "no runs in {}", arguments.folder.display())?;
    } else {
        write!(out, "{}", page(&runs, &arguments.folder))?;
    }
    Ok(CommandOutcome::Done)
}

fn summary(folder: &Path) -> Option<RunSummary> {
    let is_held = lock::is_held(folder);
    // A file that cannot be read, or has nothing of ours in it, is no run.
    let history = History::read(folder).ok()?;
    let state = state_word(&history.state(is_held)?);
    let steps = history.begin().map(|begin| begin.steps);
    let loss = mean_loss(&history.steps, loss_window(steps.unwrap_or(1)));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let age_secs = history.time.map(|time| (now - time).max(0.0));
    Some(RunSummary {
        folder: folder.into(),
        state,
        step: history.last_step(),
        steps,
        loss,
        age_secs,
    })
}

fn state_word(state: &RunState) -> &'static str {
    match state {
        RunState::Running { phase: None, .. } => "training",
        RunState::Running { phase: Some(_), .. } => "preparing",
        RunState::Ended(EndReason::Finished) => "finished",
        RunState::Ended(EndReason::Plateau) => "ended early",
        RunState::Ended(EndReason::Interrupted | EndReason::Changed) => "stopped",
        RunState::Ended(EndReason::Unhealthy) => "NaN or Inf",
        RunState::Ended(EndReason::Diverged) => "diverged",
        RunState::Failed(_) => "failed",
        RunState::Killed { .. } => "killed",
    }
}

fn page(runs: &[RunSummary], above: &Path) -> String {
    let header = ["run", "state", "steps", "loss", "last event"].map(String::from);
    let row = |run: &RunSummary| {
        let name = run.folder.strip_prefix(above).unwrap_or(&run.folder);
        let name = if name.as_os_str().is_empty() { above } else { name };
        let of = run.steps.map(|steps| format!(" of {steps}")).unwrap_or_default();
        let age = run.age_secs.map(|secs| format!("{} ago", duration(secs)));
        [
            name.display().to_string(),
            run.state.into(),
            format!("{}{of}", run.step),
            run.loss.map(number).unwrap_or_default(),
            age.unwrap_or_default(),
        ]
    };
    let rows: Vec<[String; 5]> = std::iter::once(header).chain(runs.iter().map(row)).collect();
    let mut page = TextPage::new();
    page.table(&rows);
    page.finish()
}

fn as_json(run: &RunSummary) -> Value {
    json!({
        "folder": run.folder,
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss,
        "age_secs": run.age_secs,
    })
}
