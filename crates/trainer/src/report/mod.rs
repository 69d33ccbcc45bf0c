//! The HTML report of a run: one page that opens in any browser, without a network. Made from the run's folder
//! alone, so it can be made again at any time: `live.rs` does so during the run. It judges nothing: warnings come
//! from the loop, and `event::state` has the run's state.
//!
//! ```text
//! OUT/
//!   events.jsonl   ──▶ History ──▶ RunFigures ─┐
//!   samples/*.png  ────────────────────────────┼──▶ report.html
//!   config.toml    ────────────────────────────┤
//!   clip-scores.json, evaluation.json ─────────┘  if they were measured
//! ```

pub(crate) mod bars;
mod clip_scores;
pub(crate) mod document;
mod edits;
mod evaluation;
pub mod format;
mod gallery;
pub(crate) mod live;
mod page;
pub(crate) mod plot;
mod ranks;
#[cfg(test)]
mod tests;
mod timesteps;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use weights::write::write_whole;

use crate::error::{Result, TrainerError};
use crate::event::clip_scores::ClipScores;
use crate::event::evaluation::RunEvaluation;
use crate::event::figures::RunFigures;
use crate::event::history::History;
use crate::event::lock;
use page::ReportSources;

/// Writes `report.html` of a run into its folder.
pub fn write(run_folder: &Path) -> Result<PathBuf> {
    let is_held = lock::is_held(run_folder);
    let history = History::open(run_folder)?;
    let settings = optional(&run_folder.join("config.toml"))?;
    let figures = RunFigures::of(&history).expect("an open history has a beginning");
    let state = history.state(is_held).expect("a run that has begun has a state");
    let gallery = gallery::gallery(run_folder, &history.samples);
    let clip_scores = ClipScores::read(run_folder)?;
    let evaluation = RunEvaluation::read(run_folder)?;
    let sources = ReportSources {
        state: &state,
        history: &history,
        figures: &figures,
        gallery: &gallery,
        clip_scores: clip_scores.as_ref(),
        evaluation: evaluation.as_ref(),
    };
    let page = page::page(&title(run_folder), &sources, settings.as_deref());
    let path = run_folder.join("report.html");
    write_text(&path, &page)?;
    Ok(path)
}

/// Writes a text file atomically.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<()> {
    Ok(write_whole(path, text.as_bytes())?)
}

/// The folder's name, also if it was given as `.`.
fn title(run_folder: &Path) -> String {
    let whole = run_folder.canonicalize().unwrap_or_else(|_| run_folder.into());
    whole.file_name().map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned())
}

/// The text of an optional file.
fn optional(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TrainerError::Io { what: "read", path: path.into(), source }),
    }
}
