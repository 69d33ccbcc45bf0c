//! One file per command: its arguments, and one function that runs it.

pub mod bench;
pub mod cache;
pub mod caption;
pub mod chat;
pub mod clip_score;
pub mod completions;
pub mod convert;
pub mod demo;
pub mod device;
pub mod doctor;
pub mod evaluate;
pub mod export;
pub mod fetch;
mod file_format;
pub mod import;
pub mod inspect;
pub mod job;
pub mod man;
mod model_arg;
mod named_value;
mod node_check;
mod nodes;
pub mod output;
mod parts;
pub mod plan;
pub mod render_chat;
mod resume;
pub mod runs;
pub mod sample;
pub mod serve;
pub mod shard;
mod text_stream;
pub mod train;
pub mod verify;
pub mod watch;

use trainer::event::EndReason;

/// How a command ended when it did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    /// All was done.
    Done,
    /// What was compared differs, or a run came to nothing.
    Differs,
    /// The user pressed Ctrl-C.
    Interrupted,
}

impl From<EndReason> for CommandOutcome {
    fn from(why: EndReason) -> Self {
        match why {
            EndReason::Finished | EndReason::Plateau => Self::Done,
            EndReason::Unhealthy | EndReason::Diverged => Self::Differs,
            EndReason::Interrupted | EndReason::Changed => Self::Interrupted,
        }
    }
}
