//! What a linear layer needs on a GPU besides matmuls.

use super::Dropout;
use crate::Tensor;
use crate::gpu::columns::GpuColumnSum;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs, sequence_args};

const KERNELS: WgslSource = WgslSource { name: "linear", text: include_str!("kernel.wgsl") };

/// Dropout: zeros a share of the elements, and scales the others up.
pub fn dropout(
    gpu: &GpuBackend,
    Dropout { share, sequence: random }: Dropout,
    x: &Tensor,
    out: &mut Tensor,
) {
    let (n, scale) = (x.shape().elements(), 1.0 / (1.0 - share));
    let numbers = sequence_args(random);
    let arguments = [&arguments![x, out, n, share, scale][..], &numbers].concat();
    gpu.launch(&KERNELS, "dropout", &GpuVariant::of(&[x.dtype()]), pairs(n), &arguments);
}

/// The sum of each column.
pub fn column_sums(gpu: &GpuBackend, matrix: &Tensor, sums: &mut Tensor, add: bool) {
    let rows_per_vector = matrix.shape().rows();
    let sum = GpuColumnSum { a: matrix, b: None, rows_per_vector };
    sum.run(gpu, sums, 0, add);
}
