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
pub mod plan;
pub mod sample;
pub mod shard;
pub mod train;
pub mod verify;

/// How a verb ended when it did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was done.
    Done,
    /// What was compared differs.
    Differs,
    /// The user pressed Ctrl-C.
    Interrupted,
}
