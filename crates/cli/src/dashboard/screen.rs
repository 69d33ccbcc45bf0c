//! The terminal while a dashboard has it: keys come one by one, and what was on it comes back at the end, however the
//! program ends.

use std::env;
use std::io::{self, IsTerminal, Stdout};
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::{Frame, Terminal};

/// Whether a dashboard has the terminal.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal, taken as long as this lives.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    pub fn open() -> io::Result<Self> {
        IS_TAKEN.store(true, Ordering::SeqCst);
        let taken = enable_raw_mode()
            .and_then(|()| execute!(io::stdout(), EnterAlternateScreen))
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        match taken {
            Ok(terminal) => Ok(Self { terminal }),
            Err(error) => {
                restore();
                Err(error)
            }
        }
    }

    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(draw).map(|_| ())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back, if a dashboard has it.
pub fn restore() {
    if IS_TAKEN.swap(false, Ordering::SeqCst) {
        _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        _ = disable_raw_mode();
    }
}

/// Whether there is a terminal that a dashboard can be drawn on, and somebody to press keys.
pub fn is_possible() -> bool {
    let is_terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    let is_dumb = env::var_os("TERM").is_none_or(|name| name == "dumb" || name.is_empty());
    is_terminal && !is_dumb
}
