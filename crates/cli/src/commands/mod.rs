//! One file per verb: its arguments, and one function that runs it.

pub mod completions;
pub mod doctor;
pub mod man;

/// How a verb ended when it did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All was done.
    Done,
    /// The user pressed Ctrl-C.
    Interrupted,
}
