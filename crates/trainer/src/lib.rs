//! The data's way: config, plan, data, model, objective, optimizer, training loop, export, in
//! folders of that order. Emits events and prints nothing.

pub mod cache;
pub mod cases;
pub mod config;
pub mod data;
pub mod demo;
pub mod error;
pub mod event;
pub mod export;
pub mod fingerprint;
pub mod kernels;
pub mod model;
pub mod objective;
pub mod optim;
pub mod plan;
pub mod report;
pub mod sample;
pub mod text;
pub mod train;
pub mod trust;
pub mod verify;
pub mod workload;

pub use error::{Result, TrainerError};
