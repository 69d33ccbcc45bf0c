//! Attention on a card: by the matrix units for heads of 64 or 128 numbers of 16 bits, and for all
//! others in f32.

use super::{Attention, Inputs, Sizes};
use crate::backward::Slot;
use crate::cuda::{Argument, Cuda, Grid, Source, Variant, arguments};
use crate::{Dtype, Tensor};

const KERNELS: Source = Source { name: "attention", text: include_str!("kernel.cu") };
const FLASH: Source = Source { name: "flash", text: include_str!("flash.cu") };

/// Shared memory that a block may take. Taken: what every card since capability 8.0 grants.
const SHARED_BYTES: usize = 96 << 10;

/// Floats of workspace of backward: one for each query and head.
pub fn backward_floats(sizes: Sizes) -> usize {
    sizes.samples * sizes.queries * sizes.heads
}

pub fn forward(
    cuda: &Cuda,
    sizes: Sizes,
    how: Attention<'_>,
    [q, k, v]: [&Tensor; 3],
    out: &mut Tensor,
    statistics: &mut Tensor,
) {
    let way = Way::new(sizes, &[q, k, v, out]);
    let arguments = [&arguments![q, k, v, out, statistics][..], &shape(sizes, how)].concat();
    let grid = way.grid(sizes, sizes.queries, sizes.heads, way.forward_bytes(sizes));
    way.launch(cuda, ["attention", "flash"], sizes, grid, &arguments);
}

pub fn backward(
    cuda: &Cuda,
    sizes: Sizes,
    how: Attention<'_>,
    inputs: Inputs<'_>,
    slots: &mut [Slot],
    delta: &mut Tensor,
) {
    let Inputs { q, k, v, out, gradient, denominators } = inputs;
    let [dq, dk, dv] = slots else { unreachable!("three gradients") };
    let way = Way::new(sizes, &[q, k, v, gradient, &dq.tensor, &dk.tensor, &dv.tensor]);
    let (shape, n) = (shape(sizes, how), backward_floats(sizes));
    let arguments = [&arguments![out, gradient, &mut *delta, n][..], &shape].concat();
    let variant = Variant { size: 32, ..Variant::of(&[sizes.dtype]) };
    cuda.launch(&KERNELS, "attention_delta", variant, Grid::rows(n), &arguments);
    let read = arguments![q, k, v, gradient, denominators, &*delta];
    let bytes = way.backward_bytes(sizes);
    let arguments = [&read[..], &arguments![&mut dq.tensor, dq.add], &shape].concat();
    let grid = way.grid(sizes, sizes.queries, sizes.heads, bytes);
    way.launch(cuda, ["attention_dq", "flash_dq"], sizes, grid, &arguments);
    let written = arguments![&mut dk.tensor, &mut dv.tensor, dk.add, dv.add];
    let arguments = [&read[..], &written, &shape].concat();
    let grid = way.grid(sizes, sizes.keys, sizes.kv_heads, bytes);
    way.launch(cuda, ["attention_dkv", "flash_dkv"], sizes, grid, &arguments);
}

/// What all kernels are told last.
fn shape(sizes: Sizes, how: Attention<'_>) -> [Argument; 9] {
    let Sizes { queries, keys, heads, kv_heads, d, scale, .. } = sizes;
    let (causal, lengths, relative) = (how.is_causal, how.key_lengths, how.relative);
    arguments![queries, keys, heads, kv_heads, d, scale, causal, lengths, relative]
}

/// Rows of a block of the matrix units, its warps, and rows of what it meets at a time: forward, and
/// backward for heads of 64 and of 128. As in the kernels' text.
const FLASH_ROWS: usize = 64;
const FLASH_THREADS: u32 = 128;
const FLASH_TILE: usize = 64;

/// Which kernels, and with what tiles.
#[derive(Clone, Copy)]
enum Way {
    /// In f32, so many rows at a time.
    Plain(usize),
    Flash,
}

impl Way {
    /// The matrix units read eight numbers at a time.
    fn new(sizes: Sizes, tensors: &[&Tensor]) -> Self {
        let is_fit =
            |tensor: &&Tensor| tensor.dtype() == sizes.dtype && tensor.address().is_multiple_of(16);
        let is_wide = sizes.dtype != Dtype::F32 && [64, 128].contains(&sizes.d);
        if is_wide && tensors.iter().all(is_fit) {
            return Self::Flash;
        }
        let products = |rows: usize| 2 * rows * (rows + 4) * size_of::<f32>();
        let fits = |rows: &usize| plain_bytes(sizes, 6, *rows) + products(*rows) <= SHARED_BYTES;
        Self::Plain([32, 16, 8, 4].into_iter().find(fits).unwrap_or(2))
    }

    fn forward_bytes(self, sizes: Sizes) -> usize {
        match self {
            Self::Plain(rows) => plain_bytes(sizes, 4, rows),
            // Two tiles of keys and of values, or before them the queries.
            Self::Flash => 4 * FLASH_TILE * sizes.d * size_of::<u16>(),
        }
    }

    fn backward_bytes(self, sizes: Sizes) -> usize {
        match self {
            Self::Plain(rows) => plain_bytes(sizes, 6, rows),
            // Two tensors' own rows, and two tiles of two others.
            Self::Flash => {
                let tile = if sizes.d == 64 { FLASH_TILE } else { FLASH_TILE / 2 };
                (2 * FLASH_ROWS + 4 * tile) * sizes.d * size_of::<u16>()
            }
        }
    }

    fn grid(self, sizes: Sizes, rows: usize, heads: usize, shared_bytes: usize) -> Grid {
        let (tile, threads) = match self {
            Self::Plain(tile) => (tile, 256),
            Self::Flash => (FLASH_ROWS, FLASH_THREADS),
        };
        let blocks = [rows.div_ceil(tile) as u32, heads as u32, sizes.samples as u32];
        Grid { blocks, threads, shared_bytes: shared_bytes as u32 }
    }

    /// Starts the one of two kernels that is meant.
    fn launch(
        self,
        cuda: &Cuda,
        [plain, flash]: [&'static str; 2],
        sizes: Sizes,
        grid: Grid,
        arguments: &[Argument],
    ) {
        let of = |size| Variant { size, ..Variant::of(&[sizes.dtype]) };
        match self {
            Self::Plain(rows) => cuda.launch(&KERNELS, plain, of(rows), grid, arguments),
            Self::Flash => cuda.launch(&FLASH, flash, of(sizes.d), grid, arguments),
        }
    }
}

/// Of shared memory for `n` blocks of rows in f32.
fn plain_bytes(sizes: Sizes, n: usize, rows: usize) -> usize {
    n * rows * (sizes.d + 1) * size_of::<f32>()
}
