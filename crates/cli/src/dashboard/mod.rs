//! The terminal dashboard of a run, for `hearth train` in a terminal and `hearth watch` beside it. Made from the run's
//! folder alone: the run does not know that it is watched. What keys ask for goes through that folder too.
//!
//! ```text
//! RUN/events.jsonl ──▶ view.rs ──▶ draw.rs + plot.rs ──▶ screen.rs
//! keys.rs ──▶ RUN/requests/
//! ```

mod draw;
mod keys;
mod open;
mod plot;
mod screen;
#[cfg(test)]
mod tests;
mod view;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyEventKind};

use self::draw::{Glyphs, draw};
use self::keys::KeyOutcome;
pub use self::open::OpenDashboard;
use self::screen::Screen;
pub use self::screen::{is_possible, restore};
use self::view::RunView;
use crate::failure::Failure;

/// Between two drawings. Chosen: what a slow connection takes.
const REDRAW: Duration = Duration::from_millis(200);
/// A clock that nobody draws stands still.
const AT_LEAST: Duration = Duration::from_secs(1);

/// Why a dashboard was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DashboardEnd {
    /// Somebody leaves it; the run goes on.
    Left,
    /// Ctrl-C.
    Interrupted,
    /// Whoever opened it closed it.
    Closed,
}

/// Shows the run in a folder, and the URL of its page if it has one, until somebody leaves, or `is_closed` is set.
pub fn watch(
    run_folder: &Path,
    page: Option<&str>,
    is_closed: &AtomicBool,
) -> Result<DashboardEnd, Failure> {
    let mut screen = Screen::open()?;
    let glyphs = Glyphs::of_terminal();
    let mut view = RunView::new(run_folder);
    if let Some(page) = page {
        view.add_line(false, page);
    }
    let mut drawn: Option<Instant> = None;
    loop {
        let is_old = drawn.is_none_or(|drawn| drawn.elapsed() >= AT_LEAST);
        if view.update()? || is_old {
            screen.draw(|frame| draw(frame, &view, glyphs))?;
            drawn = Some(Instant::now());
        }
        if is_closed.load(Ordering::Relaxed) {
            return Ok(DashboardEnd::Closed);
        }
        if event::poll(REDRAW)? {
            match event::read()? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match view.press(key) {
                    KeyOutcome::Stay => {}
                    KeyOutcome::Leave => return Ok(DashboardEnd::Left),
                    KeyOutcome::Interrupt => return Ok(DashboardEnd::Interrupted),
                },
                Event::Resize(..) => {}
                _ => continue,
            }
            drawn = None;
        }
    }
}
