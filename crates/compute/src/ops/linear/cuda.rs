//! What a linear layer needs on a GPU besides matmuls.

use super::Dropout;
use crate::Tensor;
use crate::cuda::columns::CudaColumnSum;
use crate::cuda::{
    ALIGNMENT, CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments,
};

const KERNELS: CudaSource = CudaSource { name: "linear", text: include_str!("kernel.cu") };

/// Numbers that tensors which are rounded together begin at multiples of, so that each is aligned.
pub const PIECE: usize = ALIGNMENT / size_of::<u16>();
/// The most that are rounded together, as in the kernel source.
const MOST: usize = 3;

/// Rounds some f32 tensors into one, in which each begins where it is said, and the next where it ends.
pub fn round(cuda: &CudaBackend, all: &[&Tensor], starts: &[usize], rounded: &mut Tensor) {
    let n = starts[all.len()];
    let mut arguments = arguments![&mut *rounded].to_vec();
    for index in 0..MOST {
        let (from, start) = (all.get(index), starts.get(index).copied().unwrap_or(n));
        let count = from.map_or(0, |tensor| tensor.shape().elements());
        arguments.extend([CudaArg::from(from.copied()), start.into(), count.into()]);
    }
    let variant = CudaVariant::of(&[rounded.dtype()]);
    cuda.launch(&KERNELS, "round_all", variant, LaunchConfig::per_element(n), &arguments);
}

/// Dropout: zeros a share of the elements, and scales the others up.
pub fn dropout(
    cuda: &CudaBackend,
    Dropout { share, sequence: random }: Dropout,
    x: &Tensor,
    out: &mut Tensor,
) {
    let (n, [seed, stream, first]) = (x.shape().elements(), random.parts());
    let scale = 1.0 / (1.0 - share);
    let arguments = arguments![x, out, n, share, scale, seed, stream, first];
    let variant = CudaVariant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "dropout", variant, LaunchConfig::per_element(n), &arguments);
}

/// The sum of each column.
pub fn column_sums(cuda: &CudaBackend, matrix: &Tensor, sums: &mut Tensor, add: bool) {
    let rows_per_vector = matrix.shape().rows();
    let sum = CudaColumnSum { a: matrix, b: None, statistics: None, rows_per_vector };
    sum.run(cuda, sums, 0, add);
}
