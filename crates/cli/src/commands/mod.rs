//! One file per verb: its arguments, and one function that runs it.

pub mod bench;
pub mod cache;
pub mod completions;
pub mod convert;
pub mod demo;
pub mod doctor;
pub mod engine;
pub mod export;
pub mod inspect;
pub mod job;
pub mod man;
pub mod output;
pub mod plan;
pub mod sample;
pub mod shard;
pub mod train;
pub mod verify;
mod words;

use trainer::event::Why;

/// How a verb ended when it did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was done.
    Done,
    /// What was compared differs, or a run came to nothing.
    Differs,
    /// The user pressed Ctrl-C.
    Interrupted,
}

impl From<Why> for Outcome {
    fn from(why: Why) -> Self {
        match why {
            Why::Finished | Why::Plateau => Self::Done,
            Why::Unhealthy | Why::Diverged => Self::Differs,
            Why::Interrupted => Self::Interrupted,
        }
    }
}
