//! The models: one folder per family with its config, forward pass and tensor names, and around them
//! what all families share. `README.md` says how to add one.

pub mod adapter;
pub mod build;
pub mod component;
pub mod compress;
pub mod config;
pub mod diffusion;
pub mod encoder;
pub mod files;
pub mod host;
pub mod hub;
pub mod kind;
pub mod layer;
pub mod llama;
pub mod offload;
pub mod recompute;
pub mod scaled_fp8;
pub mod tensor_piece;
pub mod timestep;
pub mod vae;

pub use kind::{OpenModel, open};
