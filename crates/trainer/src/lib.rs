//! The data's way, from a job to a trained model. Emits events and prints nothing. Each room uses those before it and none
//! behind it; `tests/tidy.rs` holds the order:
//!
//! ```text
//! error fingerprint nearest hashes objective     words and tools
//! model data progress text config                what a model is, what it learns from, what a job says
//! event report                                   what happens in a run, and the page about it
//! cost optim sample demo cache export            what a run is made of
//! task plan train                                what a task is, how it will be done, doing it
//! trust verify bench                             aside: trust in a machine, proofs, measurements
//! ```

// Words and tools that every room may use.
pub mod error;
pub mod fingerprint;
pub(crate) mod hashes;
pub mod kernel_cache;
pub mod objective;
pub(crate) mod suggest;
// What a model is, what it learns from, and what a job says.
pub mod config;
pub mod data;
pub mod model;
pub mod progress;
pub mod text;
// What happens in a run, and the page about it.
pub mod event;
pub mod report;
// What a run is made of.
pub mod cache;
pub mod cost;
pub mod demo;
pub mod export;
pub mod optim;
pub mod plan;
pub mod sample;
pub mod task;
pub mod train;
// Aside: whether a machine can be trusted, proofs and measurements.
pub mod bench;
pub mod gpu_self_test;
pub mod verify;

pub use error::{Result, TrainerError};
