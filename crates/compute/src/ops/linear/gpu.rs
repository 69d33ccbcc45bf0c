//! What a linear layer needs on a GPU besides products.

use super::Dropout;
use crate::Tensor;
use crate::gpu::columns::Sum;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs, stream_arguments};

const KERNELS: Source = Source { name: "linear", text: include_str!("kernel.wgsl") };

/// Zeros a share of the numbers, and scales the others up.
pub fn drop_out(gpu: &Gpu, Dropout { share, random }: Dropout, x: &Tensor, out: &mut Tensor) {
    let (n, scale) = (x.shape().elements(), 1.0 / (1.0 - share));
    let numbers = stream_arguments(random);
    let arguments = [&arguments![x, out, n, share, scale][..], &numbers].concat();
    gpu.launch(&KERNELS, "drop_out", &Variant::of(&[x.dtype()]), pairs(n), &arguments);
}

/// The sum of each column.
pub fn column_sums(gpu: &Gpu, matrix: &Tensor, sums: &mut Tensor, add: bool) {
    let rows_per_vector = matrix.shape().rows();
    let sum = Sum { a: matrix, b: None, rows_per_vector };
    sum.run(gpu, sums, 0, add);
}
