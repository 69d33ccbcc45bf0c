//! Why a command failed, and the one place where that is printed.

use std::borrow::Cow;
use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;

use anstyle::{AnsiColor, Style};
use cluster::supervisor;
use compute::ComputeError;
use hub::HubError;
use machine::RecordingError;
use trainer::TrainerError;
use weights::WeightsError;

use crate::dashboard;

/// Everything a command can fail with.
#[derive(Debug)]
pub enum Failure {
    /// Standard output is gone or full.
    Output(io::Error),
    /// A machine file could not be read or written.
    Recording(RecordingError),
    /// A file could not be read.
    Read { path: PathBuf, error: io::Error },
    /// A generated file could not be written.
    Write { path: PathBuf, error: io::Error },
    /// A model file could not be read or written.
    Weights(WeightsError),
    /// A model could not be downloaded.
    Hub(HubError),
    /// Something could not be computed.
    Compute(ComputeError),
    /// A model could not be put together or run.
    Trainer(TrainerError),
    /// What was typed is not enough, or not understood.
    Usage { problem: String, hint: String },
    /// Ctrl-C cannot be caught.
    Signal(ctrlc::Error),
    /// A program run beside ours failed.
    Peer { what: String, said: String },
}

/// A panic is a bug, and ends the program when it is told. That of a decoder is an error like others, and is caught.
pub fn end_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !trainer::data::is_decoding() {
            dashboard::restore();
            tell(panic);
            std::process::abort();
        }
    }));
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}

impl From<RecordingError> for Failure {
    fn from(error: RecordingError) -> Self {
        Self::Recording(error)
    }
}

impl From<WeightsError> for Failure {
    fn from(error: WeightsError) -> Self {
        Self::Weights(error)
    }
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Self::Hub(error)
    }
}

impl From<ComputeError> for Failure {
    fn from(error: ComputeError) -> Self {
        Self::Compute(error)
    }
}

impl From<TrainerError> for Failure {
    fn from(error: TrainerError) -> Self {
        match error {
            TrainerError::Compute(error) => Self::Compute(error),
            TrainerError::Weights(error) => Self::Weights(error),
            error => Self::Trainer(error),
        }
    }
}

/// What the parser of the command line says, in our form: one sentence, and a hint.
impl From<clap::Error> for Failure {
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        let end = ["\n\nUsage:", "\n\nFor more information"]
            .iter()
            .filter_map(|end| text.find(end))
            .min();
        let said = text[..end.unwrap_or(text.len())].trim_start_matches("error: ");
        let (tips, said): (Vec<_>, Vec<_>) = said
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .partition(|line| line.starts_with("tip: "));
        let tips = tips.iter().map(|tip| format!("{}; ", tip.trim_start_matches("tip: ")));
        let hint = format!(
            "{}`{} --help` lists what it takes",
            tips.collect::<String>(),
            crate::args::command_line()
        );
        Self::Usage { problem: said.join(" "), hint }
    }
}

impl Failure {
    /// Prints what failed, each cause below it, and what to do.
    pub fn report(&self, out: &mut dyn Write) -> io::Result<()> {
        const RED: Style = AnsiColor::Red.on_default().bold();
        const CYAN: Style = AnsiColor::Cyan.on_default().bold();
        if self.is_rank_lost() && supervisor::is_supervised() {
            // The supervisor has told.
            return Ok(());
        }
        let (what, mut cause) = self.what();
        writeln!(out, "{RED}error:{RED:#} {what}")?;
        while let Some(error) = cause {
            writeln!(out, "  {}", error.to_string().trim_end().replace('\n', "\n  "))?;
            cause = error.source();
        }
        writeln!(out, "{CYAN}hint:{CYAN:#} {}", self.hint())
    }

    /// Whether Ctrl-C ended the work.
    pub fn is_cancelled(&self) -> bool {
        matches!(
            self,
            Self::Weights(WeightsError::Cancelled)
                | Self::Compute(ComputeError::Cancelled)
                | Self::Hub(HubError::Cancelled)
        )
    }

    /// Whether a rank of the job is gone.
    pub fn is_rank_lost(&self) -> bool {
        matches!(self, Self::Trainer(error) if error.is_rank_lost())
    }

    fn what(&self) -> (String, Option<&dyn Error>) {
        match self {
            Self::Output(error) => ("cannot write to standard output".into(), Some(error)),
            Self::Recording(error) => (error.to_string(), error.source()),
            Self::Read { path, error } => (format!("cannot read {}", path.display()), Some(error)),
            Self::Write { path, error } => {
                (format!("cannot write {}", path.display()), Some(error))
            }
            Self::Weights(error) => (error.to_string(), error.source()),
            Self::Hub(error) => (error.to_string(), error.source()),
            Self::Compute(error) => (error.to_string(), error.source()),
            Self::Trainer(error) => (error.to_string(), error.source()),
            Self::Usage { problem, .. } => (problem.clone(), None),
            Self::Signal(error) => ("cannot catch Ctrl-C".into(), Some(error)),
            Self::Peer { what, said } => {
                (format!("{what}\n  {}", said.trim_end().replace('\n', "\n  ")), None)
            }
        }
    }

    fn hint(&self) -> Cow<'_, str> {
        let fixed = match self {
            Self::Output(_) => "check that the disk of the redirected output has space",
            Self::Recording(error) => error.hint(),
            Self::Read { .. } => "check that the file exists and may be read",
            Self::Write { .. } => "give an existing folder you may write to",
            Self::Weights(error) => error.hint(),
            Self::Hub(error) => return error.hint(),
            Self::Compute(error) => error.hint(),
            Self::Trainer(error) => return error.hint(),
            Self::Usage { hint, .. } => hint,
            Self::Signal(_) => "start hearth from a shell of its own",
            Self::Peer { .. } => {
                "give --python an interpreter that has torch, safetensors and fastsafetensors"
            }
        };
        fixed.into()
    }
}
