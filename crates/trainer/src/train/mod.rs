//! Training: what happens in a run, and the run itself.

pub mod event;
