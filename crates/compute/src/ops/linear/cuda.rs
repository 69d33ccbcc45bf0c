//! What a linear layer needs on a card besides products.

use super::Dropout;
use crate::Tensor;
use crate::cuda::columns::Sum;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments};

const KERNELS: Source = Source { name: "linear", text: include_str!("kernel.cu") };

/// Zeros a share of the numbers, and scales the others up.
pub fn drop_out(cuda: &Cuda, Dropout { share, random }: Dropout, x: &Tensor, out: &mut Tensor) {
    let (n, [seed, stream, first]) = (x.shape().elements(), random.parts());
    let scale = 1.0 / (1.0 - share);
    let arguments = arguments![x, out, n, share, scale, seed, stream, first];
    let variant = Variant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "drop_out", variant, Grid::numbers(n), &arguments);
}

/// The sum of each column.
pub fn column_sums(cuda: &Cuda, matrix: &Tensor, sums: &mut Tensor, add: bool) {
    let rows_per_vector = matrix.shape().rows();
    let sum = Sum { a: matrix, b: None, statistics: None, rows_per_vector };
    sum.run(cuda, sums, 0, add);
}
