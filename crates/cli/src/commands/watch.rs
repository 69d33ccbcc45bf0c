//! `hearth watch`: a run of another process, or one that is over, as it goes.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use trainer::TrainerError;
use trainer::config::RawConfig;
use trainer::event::eta::Eta;
use trainer::event::history::History;
use trainer::event::journal::has_any;
use trainer::event::tail::EventTail;
use trainer::event::{RunState, lock};

use super::serve;
use crate::commands::CommandOutcome;
use crate::dashboard::{self, DashboardEnd};
use crate::failure::Failure;
use crate::interrupt;
use crate::render::screen::ScreenArgs;
use crate::render::training::{ScreenLine, ScreenState, say};

/// Show a run: one that works, in this or another terminal, one that is over, or one that was copied here.
///
/// In a terminal it is the dashboard of `hearth train`, with its keys: sample now, save, pause, stop. Closing it leaves
/// the run as it is. In a pipe, or with --plain, it prints lines until the run is over.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  hearth watch cat
  hearth watch cat --plain
  hearth watch cat --json | jq .loss")]
pub struct WatchArgs {
    /// Folder of the run
    run: PathBuf,

    #[command(flatten)]
    screen: ScreenArgs,
}

/// How often the run is looked at.
const EVERY: Duration = Duration::from_millis(200);

pub fn run(arguments: &WatchArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let folder = &arguments.run;
    if !has_any(folder) && !lock::is_held(folder) {
        return Err(TrainerError::NoRun { path: folder.clone() }.into());
    }
    let ScreenArgs { quiet, json, plain, .. } = arguments.screen;
    let page = serve::beside(arguments.screen, folder)?;
    if !quiet && !json && !plain && dashboard::is_possible() {
        return Ok(match dashboard::watch(folder, page.as_deref(), &AtomicBool::new(false))? {
            DashboardEnd::Left | DashboardEnd::Closed => CommandOutcome::Done,
            DashboardEnd::Interrupted => CommandOutcome::Interrupted,
        });
    }
    if let Some(page) = page {
        say(&page);
    }
    follow(arguments, out)
}

/// Prints lines until the run is over.
fn follow(arguments: &WatchArgs, out: &mut dyn Write) -> Result<CommandOutcome, Failure> {
    let WatchArgs { run: folder, screen: ScreenArgs { quiet, json, .. } } = arguments;
    let interrupted = interrupt::flag()?;
    let job = RawConfig::from_file(&folder.join("config.toml")).and_then(RawConfig::resolve);
    let new = || {
        let eta = job.as_ref().map_or_else(|_| Eta::unknown(), Eta::new);
        ScreenState::new(History::default(), eta)
    };
    let (mut tail, mut state, mut now) = (EventTail::new(folder), new(), 0.0);
    while !interrupted.load(Ordering::Relaxed) {
        let is_held = lock::is_held(folder);
        let added = tail.poll()?;
        if added.is_restarted {
            state = new();
        }
        for event in added.events {
            let record = event.record;
            now = record.time.unwrap_or(now);
            let lines = state.note(&record, now);
            if *json {
                let line = serde_json::to_string(&record).unwrap_or_default();
                writeln!(out, "{line}")?;
            } else {
                for line in lines {
                    show(&line, *quiet);
                }
            }
        }
        if added.has_more {
            continue;
        }
        if !*json && !*quiet {
            state.redraw();
        }
        if !matches!(state.history.state(is_held), Some(RunState::Running { .. })) {
            crate::render::progress::clear();
            return Ok(CommandOutcome::Done);
        }
        thread::sleep(EVERY);
    }
    crate::render::progress::clear();
    Ok(CommandOutcome::Interrupted)
}

fn show(line: &ScreenLine, is_quiet: bool) {
    match line {
        ScreenLine::Line(_) if is_quiet => {}
        ScreenLine::Line(text) | ScreenLine::Warning(text) => say(text),
    }
}
