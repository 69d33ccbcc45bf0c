//! From a job file to a trained model. Emits events and prints nothing. A module uses those above it and none
//! below; `tests/tidy.rs` checks the order:
//!
//! ```text
//! error archive fingerprint kernel_cache suggest hashes pixels objective   small tools, the loss
//! model data progress text config import                         models, datasets, the job's configuration
//! event report                                                   events of a run, and its HTML report
//! cost optim sample caption clip_score evaluate demo cache export optimizers, sampling, the latent cache, file formats
//! task plan train                                                the training task, its plan, the training loop
//! gpu_self_test verify bench                                     self-test results, checks against references, benchmarks
//! ```

// Small tools that every module may use.
pub(crate) mod archive;
pub mod error;
pub mod fingerprint;
pub(crate) mod hashes;
pub mod kernel_cache;
pub mod objective;
pub mod pixels;
pub(crate) mod read_ahead;
pub(crate) mod suggest;
// Models, datasets, and the job's configuration.
pub mod config;
pub mod data;
pub mod import;
pub mod model;
pub mod progress;
pub mod text;
// Events of a run, and its HTML report.
pub mod event;
pub mod report;
// What a run is made of: the task, its plan, the training loop.
pub mod cache;
pub mod caption;
pub mod clip_score;
pub mod cost;
pub mod demo;
pub mod evaluate;
pub mod export;
pub mod optim;
pub mod plan;
pub mod sample;
pub mod task;
pub mod train;
// Self-test results, checks against references, benchmarks.
pub mod bench;
pub mod gpu_self_test;
pub mod verify;

pub use error::{Result, TrainerError};
