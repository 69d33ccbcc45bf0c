//! Attention on a GPU: by cuDNN where it is and can (`fused.rs`), else by the tensor cores for heads of up
//! to 128 numbers of 16 bits, and for all others in f32.

use super::{Attention, AttentionInputs, AttentionSizes, fused};
use crate::backward::GradientSlot;
use crate::cuda::cudnn::Cudnn;
use crate::cuda::{
    CudaArg, CudaBackend, CudaSource, CudaVariant, CudnnPlanKey, LaunchConfig, THREADS, arguments,
};
use crate::device::DeviceKind;
use crate::{Dtype, Tensor};

const KERNELS: CudaSource = CudaSource {
    name: "attention",
    text: concat!(include_str!("shape.cuh"), include_str!("kernel.cu")),
};
const FLASH: CudaSource = CudaSource {
    name: "flash",
    text: concat!(include_str!("shape.cuh"), include_str!("flash.cu")),
};

/// Shared memory that a block may take. Taken: what every GPU since capability 8.0 grants.
const SHARED_BYTES: usize = 96 << 10;

/// Floats of workspace of forward.
pub fn forward_floats(sizes: AttentionSizes, how: Attention<'_>) -> usize {
    if fused::may_fit(sizes, how) { fused::WORKSPACE / size_of::<f32>() } else { 0 }
}

/// Floats of workspace of backward: cuDNN's own and its sum of the gradient of queries where it may be
/// asked, then a number for each query and head.
pub fn backward_floats(sizes: AttentionSizes, how: Attention<'_>) -> usize {
    let of_fused = || fused::workspace(sizes) / size_of::<f32>() + sizes.d * n_rows(sizes);
    n_rows(sizes) + if fused::may_fit(sizes, how) { of_fused() } else { 0 }
}

/// Queries of all heads.
fn n_rows(sizes: AttentionSizes) -> usize {
    sizes.samples * sizes.queries * sizes.heads
}

pub fn forward(
    cuda: &CudaBackend,
    sizes: AttentionSizes,
    how: Attention<'_>,
    inputs: [&Tensor; 3],
    [out, statistics]: [&mut Tensor; 2],
    workspace: &mut Tensor,
) {
    if fused::is_fit(sizes, how)
        && by_cudnn(cuda, sizes, how.is_causal, inputs, [out, statistics], workspace)
    {
        return;
    }
    let [q, k, v] = inputs;
    let kernel = AttentionKernel::new(sizes, &[q, k, v, out]);
    let arguments = [&arguments![q, k, v, out, statistics][..], &shape(sizes, how)].concat();
    let grid = kernel.forward_grid(sizes);
    kernel.launch(cuda, ["attention", "flash"], sizes, grid, &arguments);
}

fn by_cudnn(
    cuda: &CudaBackend,
    sizes: AttentionSizes,
    is_causal: bool,
    inputs: [&Tensor; 3],
    results: [&mut Tensor; 2],
    workspace: &mut Tensor,
) -> bool {
    let make = |cudnn: &Cudnn| fused::plan_forward(cudnn, sizes, is_causal);
    let workspace = workspace.address_mut();
    cuda.run_cudnn(key("attention", sizes, is_causal), fused::WORKSPACE, make, |cudnn, plan| {
        fused::forward(cudnn, plan, sizes, is_causal, inputs, results, workspace)
    })
}

fn key(name: &'static str, sizes: AttentionSizes, is_causal: bool) -> CudnnPlanKey {
    let AttentionSizes { samples, queries, keys, heads, kv_heads, d, dtype, .. } = sizes;
    (name, dtype, [samples, queries, keys, heads, kv_heads, d, usize::from(is_causal)])
}

pub fn backward(
    cuda: &CudaBackend,
    sizes: AttentionSizes,
    how: Attention<'_>,
    kind: DeviceKind,
    inputs: AttentionInputs<'_>,
    slots: &mut [GradientSlot],
    workspace: &mut Tensor,
) {
    let is_fit = fused::is_fit(sizes, how) && slots.iter().all(|slot| !slot.add);
    let floats = backward_floats(sizes, how) - n_rows(sizes);
    let start = workspace.address_mut();
    let delta = start + (floats * size_of::<f32>()) as u64;
    let is_done = is_fit && {
        let (is_causal, workspace) = (how.is_causal, fused::workspace(sizes));
        let make = |cudnn: &Cudnn| fused::plan_backward(cudnn, sizes, is_causal);
        let addresses = [delta, start + workspace as u64, start];
        let key = key("attention backward", sizes, is_causal);
        cuda.run_cudnn(key, workspace, make, |cudnn, plan| {
            fused::backward(cudnn, plan, sizes, is_causal, inputs, slots, addresses)
        })
    };
    let own = CudaAttentionGrad { cuda, sizes, shape: shape(sizes, how), inputs, delta };
    if !is_done {
        own.delta();
        own.keys_and_values(slots);
    }
    // That of cuDNN's differs from run to run.
    if !is_done || kind.is_deterministic() {
        own.queries(slots);
    }
}

/// Gradients by kernels of our own.
struct CudaAttentionGrad<'a> {
    cuda: &'a CudaBackend,
    sizes: AttentionSizes,
    shape: [CudaArg; 10],
    inputs: AttentionInputs<'a>,
    /// Where Σ out·gradient lies, for each query and head.
    delta: u64,
}

impl CudaAttentionGrad<'_> {
    fn delta(&self) {
        let (n, AttentionInputs { out, gradient, .. }) = (n_rows(self.sizes), self.inputs);
        let arguments = [&arguments![out, gradient, self.delta, n][..], &self.shape].concat();
        let variant = CudaVariant { size: 32, ..CudaVariant::of(&[self.sizes.dtype]) };
        self.cuda.launch(
            &KERNELS,
            "attention_delta",
            variant,
            LaunchConfig::per_row(n),
            &arguments,
        );
    }

    fn queries(&self, slots: &mut [GradientSlot]) {
        let (sizes, kernel) = (self.sizes, self.kernel(slots));
        let dq = &mut slots[0];
        let written = arguments![&mut dq.tensor, dq.add];
        let grid = kernel.backward_grid(sizes, sizes.queries, sizes.heads);
        self.launch(kernel, ["attention_dq", "flash_dq"], grid, &written);
    }

    fn keys_and_values(&self, slots: &mut [GradientSlot]) {
        let (sizes, kernel) = (self.sizes, self.kernel(slots));
        let [_, dk, dv] = slots else { unreachable!("three gradients") };
        let written = arguments![&mut dk.tensor, &mut dv.tensor, dk.add, dv.add];
        let grid = kernel.backward_grid(sizes, sizes.keys, sizes.kv_heads);
        self.launch(kernel, ["attention_dkv", "flash_dkv"], grid, &written);
    }

    fn kernel(&self, slots: &[GradientSlot]) -> AttentionKernel {
        let AttentionInputs { q, k, v, gradient, .. } = self.inputs;
        let mut tensors = vec![q, k, v, gradient];
        tensors.extend(slots.iter().map(|slot| &slot.tensor));
        AttentionKernel::new(self.sizes, &tensors)
    }

    fn launch(
        &self,
        kernel: AttentionKernel,
        names: [&'static str; 2],
        grid: LaunchConfig,
        written: &[CudaArg],
    ) {
        let AttentionInputs { q, k, v, gradient, logsumexp, .. } = self.inputs;
        let read = arguments![q, k, v, gradient, logsumexp, self.delta];
        let arguments = [&read[..], written, &self.shape].concat();
        kernel.launch(self.cuda, names, self.sizes, grid, &arguments);
    }
}

/// What all kernels are told last.
fn shape(sizes: AttentionSizes, how: Attention<'_>) -> [CudaArg; 10] {
    let AttentionSizes { queries, keys, heads, kv_heads, d, scale, .. } = sizes;
    let Attention { is_causal, key_lengths, first_keys, relative_bias: relative, .. } = how;
    let (causal, lengths, first) = (is_causal, key_lengths, first_keys);
    arguments![queries, keys, heads, kv_heads, d, scale, causal, lengths, first, relative]
}

/// Of a block of the tensor cores: rows of one band of its warps, and of what it meets at a time. As in the
/// kernel source.
const FLASH_THREADS: usize = 128;
const FLASH_BAND: usize = 64;
const FLASH_TILE: usize = 64;
/// Bytes that gradients of keys take to know of a query.
const FLASH_KNOWN: usize = 16;

/// Which kernels, and with what tiles.
#[derive(Clone, Copy)]
enum AttentionKernel {
    /// In f32, so many rows at a time.
    Plain(usize),
    /// By the tensor cores, for heads of up to so many numbers.
    Flash(usize),
}

impl AttentionKernel {
    /// The tensor cores read eight numbers at a time.
    fn new(sizes: AttentionSizes, tensors: &[&Tensor]) -> Self {
        let is_fit =
            |tensor: &&Tensor| tensor.dtype() == sizes.dtype && tensor.address().is_multiple_of(16);
        let is_wide = sizes.dtype != Dtype::F32 && sizes.d.is_multiple_of(8) && sizes.d <= 128;
        if is_wide && tensors.iter().all(is_fit) {
            return Self::Flash(if sizes.d <= 64 { 64 } else { 128 });
        }
        let scores = |rows: usize| 2 * rows * (rows + 4) * size_of::<f32>();
        let fits = |rows: &usize| plain_bytes(sizes, 6, *rows) + scores(*rows) <= SHARED_BYTES;
        Self::Plain([32, 16, 8, 4].into_iter().find(fits).unwrap_or(2))
    }

    fn forward_grid(self, sizes: AttentionSizes) -> LaunchConfig {
        let (rows, threads, bytes) = match self {
            Self::Plain(rows) => (rows, THREADS, plain_bytes(sizes, 4, rows)),
            Self::Flash(d) => {
                let rows = 2 * FLASH_BAND;
                // The queries, and two tiles of keys and of values.
                (rows, FLASH_THREADS, (rows + 4 * FLASH_TILE) * d * size_of::<u16>())
            }
        };
        grid(sizes, sizes.queries.div_ceil(rows), sizes.heads, threads, bytes)
    }

    /// For gradients of so many queries or keys.
    fn backward_grid(self, sizes: AttentionSizes, count: usize, heads: usize) -> LaunchConfig {
        let (rows, threads, bytes) = match self {
            Self::Plain(rows) => (rows, THREADS, plain_bytes(sizes, 6, rows)),
            Self::Flash(d) => {
                let rows = if d == 64 { 2 * FLASH_BAND } else { FLASH_BAND };
                // Two tiles of two tensors each, through which two tensors' own rows pass first.
                let tiles = 4 * FLASH_TILE * d * size_of::<u16>();
                (rows, FLASH_THREADS, tiles + 2 * FLASH_TILE * FLASH_KNOWN)
            }
        };
        grid(sizes, count.div_ceil(rows), heads, threads, bytes)
    }

    /// Starts the one of two kernels that is meant.
    fn launch(
        self,
        cuda: &CudaBackend,
        [plain, flash]: [&'static str; 2],
        sizes: AttentionSizes,
        grid: LaunchConfig,
        arguments: &[CudaArg],
    ) {
        let of = |size| CudaVariant { size, ..CudaVariant::of(&[sizes.dtype]) };
        match self {
            Self::Plain(rows) => cuda.launch(&KERNELS, plain, of(rows), grid, arguments),
            Self::Flash(d) => cuda.launch(&FLASH, flash, of(d), grid, arguments),
        }
    }
}

fn grid(
    sizes: AttentionSizes,
    blocks: usize,
    heads: usize,
    threads: usize,
    shared_bytes: usize,
) -> LaunchConfig {
    let blocks = [blocks as u32, heads as u32, sizes.samples as u32];
    LaunchConfig { blocks, threads: threads as u32, shared_bytes: shared_bytes as u32 }
}

/// Of shared memory for `n` blocks of rows in f32.
fn plain_bytes(sizes: AttentionSizes, n: usize, rows: usize) -> usize {
    n * rows * (sizes.d + 1) * size_of::<f32>()
}
