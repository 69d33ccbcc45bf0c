//! Groups mixed on a GPU.

use super::{MixSizes, MixWeight, SHARE_ROWS};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cuda::columns::CudaColumnSum;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "mix_groups", text: include_str!("kernel.cu") };

/// Groups of the result that a thread finds, as in the kernel source.
const TILE: usize = 4;
/// Numbers of a row and of a column of the weight whose gradient a block finds, as in the kernel source.
const BLOCK: usize = 16;

pub fn mix(
    cuda: &CudaBackend,
    x: &Tensor,
    w: MixWeight<'_>,
    sizes: MixSizes,
    y: &mut Tensor,
    add: bool,
) {
    let MixSizes { rows, from, to, width, scale } = sizes;
    let p = pack(width, &[x, y]);
    let variant = CudaVariant::of(&[x.dtype(), y.dtype()]).with_pack(p);
    let n = rows * to.div_ceil(TILE) * (width / p);
    let [step, row_step] = w.steps;
    let arguments = arguments![x, w.values, y, n, from, to, width, step, row_step, scale, add];
    cuda.launch(&KERNELS, "mix_groups", variant, LaunchConfig::per_element(n), &arguments);
}

pub fn weight_gradient(
    cuda: &CudaBackend,
    x: &Tensor,
    gradient: &Tensor,
    sizes: MixSizes,
    partial: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let MixSizes { rows, from, to, width, scale } = sizes;
    let tiles = [to.div_ceil(BLOCK) as u32, from.div_ceil(BLOCK) as u32];
    let blocks = [rows.div_ceil(SHARE_ROWS) as u32, tiles[0], tiles[1]];
    let grid = LaunchConfig { blocks, threads: (BLOCK * BLOCK) as u32, shared_bytes: 0 };
    let share = SHARE_ROWS;
    let arguments = arguments![x, gradient, &mut *partial, rows, share, from, to, width, scale];
    let variant = CudaVariant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "mix_groups_weight", variant, grid, &arguments);
    let rows_per_vector = partial.shape().rows();
    let sum = CudaColumnSum { a: partial, b: None, statistics: None, rows_per_vector };
    sum.run(cuda, &mut slot.tensor, 0, slot.add);
}
