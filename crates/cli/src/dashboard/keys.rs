//! What keys do: most ask something of the run. Leaving never stops it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use trainer::event::RunRequest;
use trainer::event::request::send;

use super::view::{KeyMode, RunView};

/// Keys and what they do, for the last line and the help.
pub const KEYS: [(&str, &str, &str); 7] = [
    ("s", "sample", "sample now, after the step at hand"),
    ("n", "new prompt", "type a prompt, and sample it now and from now on"),
    ("c", "checkpoint", "save a checkpoint now"),
    ("p", "pause", "pause, or go on"),
    ("x", "stop", "save and end; --resume continues"),
    ("q", "leave", "leave this view; the run goes on"),
    ("?", "help", "this help"),
];

/// What becomes of the dashboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    Stay,
    Leave,
    Interrupt,
}

impl RunView {
    /// Does what a key asks for.
    pub fn press(&mut self, key: KeyEvent) -> KeyOutcome {
        if key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c') {
            return KeyOutcome::Interrupt;
        }
        match std::mem::replace(&mut self.mode, KeyMode::Commands) {
            KeyMode::Commands => return self.command(key.code),
            KeyMode::ConfirmStop if key.code == KeyCode::Char('y') => self.ask(&RunRequest::Stop),
            KeyMode::ConfirmStop | KeyMode::Help => {}
            KeyMode::Prompt(prompt) => self.write_prompt(prompt, key.code),
        }
        KeyOutcome::Stay
    }

    fn command(&mut self, key: KeyCode) -> KeyOutcome {
        match key {
            KeyCode::Char('q') => return KeyOutcome::Leave,
            KeyCode::Char('?' | 'h') => self.mode = KeyMode::Help,
            KeyCode::Char('s') => self.ask(&RunRequest::Sample { prompt: None }),
            KeyCode::Char('n') => self.mode = KeyMode::Prompt(String::new()),
            KeyCode::Char('c') => self.ask(&RunRequest::Save),
            KeyCode::Char('p') if self.is_paused => self.ask(&RunRequest::Resume),
            KeyCode::Char('p') => self.ask(&RunRequest::Pause),
            KeyCode::Char('x') => self.mode = KeyMode::ConfirmStop,
            _ => {}
        }
        KeyOutcome::Stay
    }

    fn write_prompt(&mut self, mut prompt: String, key: KeyCode) {
        match key {
            KeyCode::Esc => return,
            KeyCode::Enter if prompt.trim().is_empty() => return,
            KeyCode::Enter => {
                return self.ask(&RunRequest::Sample { prompt: Some(prompt.trim().into()) });
            }
            KeyCode::Backspace => _ = prompt.pop(),
            KeyCode::Char(c) => prompt.push(c),
            _ => {}
        }
        self.mode = KeyMode::Prompt(prompt);
    }

    /// Asks the run; what became of it comes as an event.
    fn ask(&mut self, request: &RunRequest) {
        match send(&self.folder, request) {
            Ok(_) => self.add_line(false, &format!("asked to {request}")),
            Err(error) => self.add_line(true, &error.to_string()),
        }
    }
}
