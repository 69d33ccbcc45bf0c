//! Tensors, ops and autograd in memory we own: one arena per device, contiguous tensors, about thirty ops, a
//! tape, and the backends behind them (CPU, CUDA, wgpu, meta). Knows no layer's name and reads no file.
//!
//! A model calls ops on a [`Tape`]; an op allocates its result in the [`Device`]'s arena, lets the backend
//! compute it, and records on the tape what its gradient needs. On a meta device the same calls take the same
//! bytes from an imaginary arena, which is how a run is planned.

mod arena;
mod backward;
mod block_swap;
mod cancel;
mod codebook;
mod cpu;
mod cuda;
mod device;
mod dtype;
mod error;
mod fill;
pub mod gpu;
mod op;
pub mod ops;
mod params;
mod quantised;
mod random;
mod recompute;
mod recording;
pub mod self_test;
mod shape;
mod tape;
mod tensor;
#[cfg(test)]
mod testing;
mod var;
mod work;

pub use arena::{Tag, Usage};
pub use backward::LeafGradients;
pub use block_swap::BlockSwap;
pub use cancel::CancelToken;
pub use cuda::{
    CudaStream, HostMemoryTrial, KernelCache, PieceSpeeds, TrialSpeeds, host_memory_trial,
};
pub use device::{Device, DeviceKind, FillStats};
pub use dtype::{Dtype, Element};
pub use error::ComputeError;
pub use fill::{FillPart, fill_all};
pub use params::{CompletionHook, GradientHook, Gradients, ParamKey, Params};
pub use quantised::{Quantisation, Quantised, check_fp8_matmuls};
pub use random::RandomSequence;
pub use recording::{MemoryRecording, MemorySnapshot};
pub use shape::Shape;
pub use tape::Tape;
pub use tensor::Tensor;
pub use var::{Chunk, Var};
pub use work::{CallTotals, KernelClass, OffloadInterval, StorageFormat, WorkStats};

/// What every fallible function here returns.
pub type Result<T> = std::result::Result<T, ComputeError>;
