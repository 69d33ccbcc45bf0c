//! Sums of columns on a GPU, which gradients of vectors are, and the statistics of rows that some of
//! them need.

use super::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};
use crate::Tensor;

const KERNELS: CudaSource = CudaSource { name: "columns", text: include_str!("columns.cu") };

/// Columns of a block, and its threads.
const COLUMNS: usize = 32;
const THREADS: u32 = 1024;

/// What is summed up.
pub(crate) struct CudaColumnSum<'a> {
    pub a: &'a Tensor,
    /// What each number is multiplied by.
    pub b: Option<&'a Tensor>,
    /// Normalises `b`, row by row; from [`statistics`].
    pub statistics: Option<&'a Tensor>,
    /// How many rows share a vector.
    pub rows_per_vector: usize,
}

impl CudaColumnSum<'_> {
    /// Writes or adds the sums: those of each vector to the `index`-th part of its row of `out`.
    pub fn run(&self, cuda: &CudaBackend, out: &mut Tensor, index: usize, add: bool) {
        let (width, rows) = (self.a.shape().width(), self.a.shape().rows());
        let is_one = self.rows_per_vector == rows;
        let vectors = if is_one { 1 } else { rows / self.rows_per_vector };
        let out_width = if is_one { width } else { out.shape().width() };
        let variant = CudaVariant::of(&[self.a.dtype(), out.dtype()]);
        let blocks = [width.div_ceil(COLUMNS) as u32, vectors as u32, 1];
        let grid = LaunchConfig { blocks, threads: THREADS, shared_bytes: 0 };
        let first = index * width;
        let arguments = arguments![
            self.a,
            self.b,
            self.statistics,
            out,
            self.rows_per_vector,
            width,
            out_width,
            first,
            add
        ];
        cuda.launch(&KERNELS, "sum_columns", variant, grid, &arguments);
    }
}

/// Floats of workspace that [`statistics`] fills.
pub(crate) fn statistics_floats(x: &Tensor) -> usize {
    2 * x.shape().rows()
}

/// The mean and 1 / std of each row.
pub(crate) fn statistics(cuda: &CudaBackend, x: &Tensor, epsilon: f32, to: &mut Tensor) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let arguments = arguments![x, to, rows, width, epsilon];
    let variant = CudaVariant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "row_statistics", variant, LaunchConfig::per_row(rows), &arguments);
}
