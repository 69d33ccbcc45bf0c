//! Why something could not be computed: one variant per cause, with the two values that disagree.

use crate::{Dtype, Shape, Tag};

/// Everything that can go wrong here.
#[derive(Debug, thiserror::Error)]
pub enum ComputeError {
    /// The arena has no free block that is large enough for a tensor.
    #[error(
        "out of memory for {tag}: asked {}, in use {} of {}, largest free block {}",
        size(*asked), size(*in_use), size(*limit), size(*largest_free)
    )]
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// Bytes taken already.
        in_use: usize,
        /// The arena's size.
        limit: usize,
        /// The largest request that would have been met.
        largest_free: usize,
        /// What they were asked for.
        tag: Tag,
    },
    /// Somebody asked to stop, and the work could be abandoned.
    #[error("interrupted")]
    Cancelled,
    /// The system refused the arena's address range.
    #[error("cannot reserve an arena of {}", size(*bytes))]
    Reserve {
        /// Its size.
        bytes: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system refused memory that a GPU copies from.
    #[error("cannot pin {} of main memory for offloaded weights: {name}", size(*bytes))]
    Pin {
        /// Of one block.
        bytes: usize,
        /// The driver's name for the reason.
        name: String,
    },
    /// The system refused the worker threads.
    #[error("cannot start {threads} threads")]
    Threads {
        /// How many.
        threads: usize,
        /// The pool's error.
        source: rayon::ThreadPoolBuildError,
    },
    /// One of NVIDIA's libraries is not here.
    #[error("cannot open any of NVIDIA's {names}")]
    CudaLibrary {
        /// The names that were tried.
        names: String,
    },
    /// One of NVIDIA's libraries is too old to have a function.
    #[error("NVIDIA's libraries have no function {name}")]
    CudaFunction {
        /// The function.
        name: &'static str,
    },
    /// There are fewer GPUs than asked for.
    #[error("there is no NVIDIA GPU {index}, the number of GPUs is {count}")]
    CudaIndex {
        /// The GPU's number, from 0.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A GPU is too old.
    #[error("{name} has compute capability {capability}, the oldest supported is {oldest}")]
    CudaCapability {
        /// The GPU.
        name: String,
        /// What it has.
        capability: String,
        /// The oldest supported.
        oldest: String,
    },
    /// A device does not multiply in fp8.
    #[error("{device} does not multiply in fp8: {problem}")]
    Fp8 {
        /// Which.
        device: String,
        /// Why not.
        problem: String,
    },
    /// The driver is too old.
    #[error(
        "NVIDIA's driver supports CUDA {}.{}, the oldest supported is {}.{}",
        found / 1000, found % 1000 / 10, oldest / 1000, oldest % 1000 / 10
    )]
    CudaDriver {
        /// Its version, as it gives it.
        found: i32,
        /// The oldest that would do.
        oldest: i32,
    },
    /// A kernel could not be compiled.
    #[error("cannot compile the kernels of {name}: {message}")]
    CudaKernel {
        /// The text's name.
        name: String,
        /// The compiler's log.
        message: String,
    },
    /// The GPU or one of its libraries refused a call, or failed at work before it.
    #[error("{call} failed with code {code}: {name}")]
    Cuda {
        /// The function.
        call: &'static str,
        /// Its status.
        code: i32,
        /// What the status means.
        name: String,
    },
    /// No GPU has the name that was asked for.
    #[error("no GPU is {asked}, there are: {}", if found.is_empty() { "none" } else { found.as_str() })]
    GpuAdapter {
        /// What was asked for.
        asked: String,
        /// The names of those that are there.
        found: String,
    },
    /// A GPU lacks a feature that kernels need.
    #[error("{name} does not offer {lacks}")]
    GpuLacks {
        /// The GPU.
        name: String,
        /// The feature.
        lacks: &'static str,
    },
    /// A tensor is larger than a buffer binding may be.
    #[error(
        "a tensor of {} is larger than the largest buffer binding of this GPU, {}",
        size(*asked), size(*most)
    )]
    GpuTensor {
        /// Bytes of the tensor.
        asked: usize,
        /// The most there may be.
        most: usize,
    },
    /// A GPU has no memory left.
    #[error("{call} failed: the GPU has no memory left")]
    GpuMemory {
        /// What was done.
        call: &'static str,
    },
    /// A kernel could not be compiled for a GPU.
    #[error("cannot compile the kernel {name}: {message}")]
    GpuKernel {
        /// The kernel.
        name: String,
        /// The compiler's log.
        message: String,
    },
    /// A GPU stopped working.
    #[error("the GPU was lost: {message}")]
    GpuLost {
        /// The driver's message.
        message: String,
    },
    /// A GPU refused a command.
    #[error("{call} failed: {message}")]
    Gpu {
        /// What was done.
        call: &'static str,
        /// The driver's message.
        message: String,
    },
    /// A tensor is not of the shape that the others ask for.
    #[error("{op}: {what} has shape {got}, expected {expected}")]
    Shape {
        /// The op.
        op: &'static str,
        /// Which of its tensors.
        what: &'static str,
        /// The shape that fits.
        expected: Shape,
        /// The shape it has.
        got: Shape,
    },
    /// A tensor has too few or too many dimensions.
    #[error("{op}: {what} of shape {got} has {} dimensions, expected {expected}", got.sizes().len())]
    Rank {
        /// The op.
        op: &'static str,
        /// Which of its tensors.
        what: &'static str,
        /// Dimensions the op works on.
        expected: usize,
        /// The shape it has.
        got: Shape,
    },
    /// A tensor's dtype does not fit.
    #[error("{op}: {what} is {got}, expected {expected}")]
    Dtype {
        /// The op.
        op: &'static str,
        /// Which of its tensors.
        what: &'static str,
        /// The dtypes that fit.
        expected: &'static str,
        /// The dtype it has.
        got: Dtype,
    },
    /// A size does not divide as it must.
    #[error("{op}: {what} {size} is not a multiple of {by}")]
    Indivisible {
        /// The op.
        op: &'static str,
        /// What the size is of.
        what: &'static str,
        /// The size.
        size: usize,
        /// What should divide it.
        by: usize,
    },
    /// A number that an op was given is outside what makes sense.
    #[error("{op}: {what} is {got}, expected {expected}")]
    Range {
        /// The op.
        op: &'static str,
        /// What the number is.
        what: &'static str,
        /// What would make sense.
        expected: String,
        /// The number.
        got: String,
    },
    /// An index points outside the tensor it is meant for.
    #[error("{op}: index {index} is out of range, there are {count} {what}")]
    Index {
        /// The op.
        op: &'static str,
        /// What is counted.
        what: &'static str,
        /// The index.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A mean over nothing.
    #[error("{op}: {what} is empty, its shape is {shape}")]
    Empty {
        /// The op.
        op: &'static str,
        /// Which of its tensors.
        what: &'static str,
        /// Its shape.
        shape: Shape,
    },
    /// Data of another length than the tensor it is meant for.
    #[error("{got} values do not fill a tensor of shape {shape}, which has {}", shape.elements())]
    Length {
        /// The tensor's shape.
        shape: Shape,
        /// Values given.
        got: usize,
    },
    /// Two tensors are on different devices.
    #[error("{op}: {what} is on another device")]
    Device {
        /// The op.
        op: &'static str,
        /// Which of its tensors.
        what: &'static str,
    },
    /// Backward was asked to start from something that is not a scalar.
    #[error("backward starts from a scalar, not from shape {shape}")]
    NotScalar {
        /// The shape it was given.
        shape: Shape,
    },
    /// Backward was asked to start from something that depends on no parameter.
    #[error("nothing to train: the loss does not depend on any parameter")]
    Untracked,
    /// A gradient is wanted through an op that has none.
    #[error("{op}: has no backward, but its input requires a gradient")]
    ForwardOnly {
        /// The op.
        op: &'static str,
    },
    /// A parameter is to be changed while something still reads it.
    #[error("parameter {index} is still held by {readers} other(s)")]
    InUse {
        /// Which parameter.
        index: usize,
        /// How many others hold it.
        readers: usize,
    },
}

/// Bytes in the largest unit of which there is at least one.
fn size(bytes: usize) -> String {
    let units = [("GiB", 30, 2), ("MiB", 20, 1), ("KiB", 10, 1)];
    let unit = units.into_iter().find(|(_, bits, _)| bytes >> bits > 0);
    unit.map_or_else(
        || format!("{bytes} B"),
        |(name, bits, digits)| format!("{:.digits$} {name}", bytes as f64 / (1_u64 << bits) as f64),
    )
}

impl ComputeError {
    /// The same once more: a GPU that failed says so at every call from then on.
    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Cuda { call, code, name } => Self::Cuda { call, code: *code, name: name.clone() },
            Self::CudaKernel { name, message } => {
                Self::CudaKernel { name: name.clone(), message: message.clone() }
            }
            Self::GpuKernel { name, message } => {
                Self::GpuKernel { name: name.clone(), message: message.clone() }
            }
            Self::GpuLost { message } => Self::GpuLost { message: message.clone() },
            Self::GpuMemory { call } => Self::GpuMemory { call },
            Self::Gpu { call, message } => Self::Gpu { call, message: message.clone() },
            other => Self::Cuda { call: "an earlier call", code: 0, name: other.to_string() },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::OutOfMemory { .. } => {
                "plan the run first, use gradient checkpointing, or take a smaller batch"
            }
            Self::Cancelled => "nothing was left half-done; start again to continue",
            Self::Reserve { .. } | Self::GpuMemory { .. } => {
                "close other programs, or give a lower memory limit"
            }
            Self::Pin { .. } => {
                "close other programs, raise the limit of the container, or set machine.offload = \"none\""
            }
            Self::Threads { .. } => "ask for fewer threads, or raise the limit on processes",
            Self::CudaLibrary { .. } | Self::CudaFunction { .. } => {
                "install NVIDIA's driver, and the CUDA toolkit 12 or 13 with cuBLAS and NVRTC, or \
                 compute on the CPU"
            }
            Self::CudaIndex { .. } => "`hearth doctor` lists the GPUs",
            Self::CudaCapability { .. } => "compute on the CPU, or on a newer GPU",
            Self::CudaDriver { .. } => "install a newer driver",
            Self::Fp8 { .. } => {
                "remove base.compute from the job, or train on an NVIDIA GPU of compute capability 8.9 or newer"
            }
            Self::Cuda { .. } => {
                "if memory ran out, close other programs on the GPU; else start again, and look at \
                 the system's log if it happens twice"
            }
            Self::GpuAdapter { .. } => {
                "`hearth doctor` lists the GPUs; on Linux a Vulkan driver must be installed"
            }
            Self::GpuLacks { .. } => "install a newer driver, or compute on the CPU",
            Self::GpuTensor { .. } => "take a smaller batch, or compute on the CPU",
            Self::GpuLost { .. } | Self::Gpu { .. } => {
                "start again; if it happens twice, `hearth doctor --self-test` looks for kernels that give wrong \
                 results on this GPU"
            }
            Self::Shape { .. }
            | Self::Rank { .. }
            | Self::Dtype { .. }
            | Self::Indivisible { .. }
            | Self::Length { .. } => "check that the model's config belongs to its weights",
            Self::Range { .. } => "give a value in the range above",
            Self::Index { .. } => "check that the tokenizer or the data belongs to this model",
            Self::Empty { .. } => "give at least one sample with at least one token",
            Self::Device { .. } => "load all parts of a model to the same device",
            Self::ForwardOnly { .. } => {
                "freeze what comes before it: gradients do not pass through the encoding and decoding of images"
            }
            Self::CudaKernel { .. }
            | Self::GpuKernel { .. }
            | Self::NotScalar { .. }
            | Self::Untracked
            | Self::InUse { .. } => {
                "this is a fault in hearth, please report it with the command you ran"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_have_the_unit_that_people_use() {
        let sizes = [0, 1023, 1536, 5 << 19, (1 << 30) - 1, 45 << 28].map(size);
        assert_eq!(sizes, ["0 B", "1023 B", "1.5 KiB", "2.5 MiB", "1024.0 MiB", "11.25 GiB"]);
    }
}
