//! Sums of columns on a GPU, which gradients of vectors are.

use super::{GpuBackend, GpuVariant, WgslSource, arguments};
use crate::Tensor;

const KERNELS: WgslSource = WgslSource { name: "columns", text: include_str!("columns.wgsl") };

/// Columns of a workgroup, as in the kernel source.
const COLUMNS: usize = 64;
/// What is summed up.
pub(crate) struct GpuColumnSum<'a> {
    pub a: &'a Tensor,
    /// What each number is multiplied by.
    pub b: Option<&'a Tensor>,
    /// How many rows share a vector.
    pub rows_per_vector: usize,
}

impl GpuColumnSum<'_> {
    /// Writes or adds the sums: those of each vector to the `index`-th part of its row of `out`.
    pub fn run(&self, gpu: &GpuBackend, out: &mut Tensor, index: usize, add: bool) {
        let (width, rows) = (self.a.shape().width(), self.a.shape().rows());
        let is_one = self.rows_per_vector == rows;
        let vectors = if is_one { 1 } else { rows / self.rows_per_vector };
        let out_width = if is_one { width } else { out.shape().width() };
        let variant = GpuVariant::of(&[self.a.dtype(), out.dtype()]);
        let first = index * width;
        let arguments =
            arguments![self.a, self.b, out, self.rows_per_vector, width, out_width, first, add];
        let groups = width.div_ceil(COLUMNS) * vectors;
        gpu.launch(&KERNELS, "sum_columns", &variant, groups, &arguments);
    }
}

/// Rows whose sum is found together, at the least, where sums are found on the way; and how many such sums there are
/// at most. Chosen: for norms the sums are a twelfth of the bytes that are moved or less, and a GPU has enough to do.
pub(crate) const SHARE_ROWS: usize = 32;
const MOST_SHARES: usize = 256;

/// Rows of each share of a vector's, and how many shares there are.
pub(crate) fn row_shares(rows: usize) -> (usize, usize) {
    let each = rows.div_ceil(MOST_SHARES).max(SHARE_ROWS);
    (each, rows.div_ceil(each))
}
