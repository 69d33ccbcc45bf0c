//! What a dashboard shows: the run's events taken in as they come, what people typed, and what was answered.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use anstream::adapter::strip_str;
use trainer::config::RawConfig;
use trainer::event::eta::Eta;
use trainer::event::history::History;
use trainer::event::tail::{EventTail, TailedEvents};
use trainer::event::{Event, EventRecord, RunRequest, RunState, lock};

use crate::failure::Failure;
use crate::render::training::{ScreenLine, ScreenState};

/// Lines of the log that are kept. Chosen: more than a terminal has.
const LOG: usize = 500;

/// A run as a dashboard sees it.
pub struct RunView {
    /// Where it is.
    pub folder: PathBuf,
    tail: EventTail,
    /// What happened.
    pub run: ScreenState,
    /// What is worth a line, the latest last.
    pub log: VecDeque<DashboardLine>,
    /// Where the run stands; none if there is none.
    pub state: Option<RunState>,
    /// Whether somebody asked it to stand still.
    pub is_paused: bool,
    /// Joules so far, where power can be read.
    pub joules: Option<f64>,
    /// Seconds since 1970 of the last event.
    pub time: f64,
    /// What keys do now.
    pub mode: KeyMode,
}

/// A line of the log.
pub struct DashboardLine {
    pub is_warning: bool,
    pub text: String,
}

/// What keys do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyMode {
    /// Each is a command.
    Commands,
    /// They write a prompt.
    Prompt(String),
    /// One of them means yes.
    ConfirmStop,
    /// Any of them closes the help.
    Help,
}

impl RunView {
    /// Of the run in a folder, with nothing read yet.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.into(),
            tail: EventTail::new(folder),
            run: ScreenState::new(History::default(), Eta::unknown()),
            log: VecDeque::new(),
            state: None,
            is_paused: false,
            joules: None,
            time: 0.0,
            mode: KeyMode::Commands,
        }
    }

    /// Reads what is new; whether there was anything.
    pub fn update(&mut self) -> Result<bool, Failure> {
        // Before the file is read: a run that ends meanwhile has then written how.
        let is_held = lock::is_held(&self.folder);
        let mut is_new = false;
        loop {
            let TailedEvents { is_restarted, has_more, events } = self.tail.poll()?;
            if is_restarted {
                self.restart();
            }
            is_new |= is_restarted || !events.is_empty();
            for event in events {
                self.take(&event.record);
            }
            if !has_more {
                break;
            }
        }
        let state = self.run.history.state(is_held);
        let is_other = std::mem::replace(&mut self.state, state) != self.state;
        Ok(is_new || is_other)
    }

    /// Forgets all but what somebody is typing.
    fn restart(&mut self) {
        let tail = std::mem::replace(&mut self.tail, EventTail::new(&self.folder));
        *self = Self { tail, mode: self.mode.clone(), ..Self::new(&self.folder) };
    }

    fn take(&mut self, record: &EventRecord) {
        match &record.event {
            Event::Begin(_) => {
                // The plan and the intervals of samples and checkpoints are in the job.
                let job = RawConfig::from_file(&self.folder.join("config.toml"));
                if let Ok(config) = job.and_then(RawConfig::resolve) {
                    self.run.eta = Eta::new(&config);
                }
            }
            Event::Telemetry(now) => {
                let before = self.run.history.snapshots.last();
                let since = before.map_or(0.0, |(_, before)| now.secs - before.secs).max(0.0);
                if let Some(watts) = now.telemetry.watts {
                    *self.joules.get_or_insert_default() += watts * since;
                }
            }
            Event::Request(answer) if answer.refused.is_none() => match answer.asked {
                Some(RunRequest::Pause) => self.is_paused = true,
                Some(RunRequest::Resume) => self.is_paused = false,
                _ => {}
            },
            Event::End(_) | Event::Failed(_) => self.is_paused = false,
            _ => {}
        }
        self.time = record.time.unwrap_or(self.time);
        for line in self.run.note(record, self.time) {
            let (is_warning, text) = match line {
                ScreenLine::Line(text) => (false, text),
                ScreenLine::Warning(text) => (true, text),
            };
            self.add_line(is_warning, &text);
        }
        if let Event::Failed(failed) = &record.event {
            self.add_line(true, &format!("failed: {}", failed.text));
            self.add_line(true, &format!("hint: {}", failed.hint));
        }
    }

    /// Adds a line to the log.
    pub fn add_line(&mut self, is_warning: bool, text: &str) {
        let text = strip_str(text).to_string();
        self.log.push_back(DashboardLine { is_warning, text });
        if self.log.len() > LOG {
            self.log.pop_front();
        }
    }
}
