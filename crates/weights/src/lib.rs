//! Model files: safetensors and its shards, PyTorch archives, GGUF. Reads headers without data and
//! data into buffers the caller owns; writes atomically. Knows nothing of tensors or training.
//!
//! [`Catalog::open`] tells what a file or folder holds, [`load::load`] brings values into memory,
//! [`mod@write`] puts them on disk.

pub mod catalog;
pub mod checksum;
pub mod convert;
pub mod copy;
mod disk;
pub mod dtype;
pub mod error;
pub mod folder;
pub mod gguf;
pub mod hub;
pub mod load;
pub mod mmap;
pub mod pickle;
pub mod plain_file;
pub mod safetensors;
pub mod survey;
pub mod tensor;
#[cfg(test)]
mod testing;
pub mod torch;
pub mod write;

pub use crate::catalog::Catalog;
pub use crate::dtype::FileDtype;
pub use crate::error::{Result, WeightsError};
pub use crate::tensor::{TensorEncoding, TensorInfo};

/// Told how many bytes were done since it was last told; answers whether to go on. Called from
/// several threads.
pub type BytesDoneFn<'a> = &'a (dyn Fn(u64) -> bool + Sync);
