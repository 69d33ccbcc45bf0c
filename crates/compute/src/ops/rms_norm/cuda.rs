//! Root-mean-square norm on a GPU.

use super::{RmsNormInputs, RmsNormSlots};
use crate::Tensor;
use crate::cuda::columns::CudaColumnSum;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "rms_norm", text: include_str!("kernel.cu") };

/// The most shares that a weight's gradient is summed up in. Taken: four blocks for each of an H200's 132
/// SMs, as many as fit there, were fastest.
const SHARES: usize = 528;

pub fn forward(
    cuda: &CudaBackend,
    x: &Tensor,
    weight: Option<&Tensor>,
    epsilon: f32,
    y: &mut Tensor,
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let p = pack(width, &[x, weight.unwrap_or(x), y]);
    let (variant, threads) = CudaVariant::of(&[x.dtype()]).with_pack(p).holding(width);
    let grid = LaunchConfig { threads, ..LaunchConfig::blocks(rows) };
    cuda.launch(&KERNELS, "rms_norm", variant, grid, &arguments![x, weight, y, width, epsilon]);
}

/// Both gradients, each if it is wanted, in one pass over the rows.
pub fn backward(
    cuda: &CudaBackend,
    rows: RmsNormInputs<'_>,
    wanted: RmsNormSlots<'_>,
    workspace: &mut Tensor,
) {
    let RmsNormInputs { x, weight, gradient, epsilon } = rows;
    let (n, width) = (x.shape().rows(), x.shape().width());
    let out = wanted.x.as_ref().map_or(x, |slot| &slot.tensor);
    let p = pack(width, &[x, weight.unwrap_or(x), gradient, out, workspace]);
    let (variant, threads) = CudaVariant::of(&[x.dtype(), out.dtype()]).with_pack(p).holding(width);
    let blocks = if wanted.weight.is_some() { n_shares(n) } else { n };
    let grid = LaunchConfig { threads, ..LaunchConfig::blocks(blocks) };
    let add = wanted.x.as_ref().is_some_and(|slot| slot.add);
    let out = wanted.x.map(|slot| &mut slot.tensor);
    let shares = wanted.weight.is_some().then_some(&mut *workspace);
    let arguments = arguments![x, weight, gradient, out, shares, n, width, epsilon, add];
    let name = match wanted.weight {
        Some(_) => "rms_norm_backward_shares",
        None => "rms_norm_backward",
    };
    cuda.launch(&KERNELS, name, variant, grid, &arguments);
    if let Some(slot) = wanted.weight {
        let each = workspace.reshape([blocks, width]);
        let sum = CudaColumnSum { a: &each, b: None, statistics: None, rows_per_vector: blocks };
        sum.run(cuda, &mut slot.tensor, 0, slot.add);
    }
}

fn n_shares(rows: usize) -> usize {
    rows.clamp(1, SHARES)
}

/// Floats of scratch memory that a weight's gradient takes.
pub fn shares_floats(x: &Tensor) -> usize {
    n_shares(x.shape().rows()) * x.shape().width()
}
