//! Sums of columns on a card, which gradients of vectors are, and the statistics of rows that some of
//! them need.

use super::{Cuda, Grid, Source, Variant, WARP, arguments, pack};
use crate::Tensor;

const KERNELS: Source = Source { name: "columns", text: include_str!("columns.cu") };

/// Columns of a block, and its threads.
const COLUMNS: usize = 32;
const THREADS: u32 = 1024;

/// What is summed up.
pub(crate) struct Sum<'a> {
    pub a: &'a Tensor,
    /// What each number is multiplied by.
    pub b: Option<&'a Tensor>,
    /// Normalises `b`, row by row; from [`statistics`].
    pub statistics: Option<&'a Tensor>,
    /// How many rows share a vector.
    pub rows_per_vector: usize,
}

impl Sum<'_> {
    /// Writes or adds the sums: those of each vector to the `index`-th part of its row of `out`.
    pub fn run(&self, cuda: &Cuda, out: &mut Tensor, index: usize, add: bool) {
        let (width, rows) = (self.a.shape().width(), self.a.shape().rows());
        let is_one = self.rows_per_vector == rows;
        let vectors = if is_one { 1 } else { rows / self.rows_per_vector };
        let out_width = if is_one { width } else { out.shape().width() };
        let variant = Variant::of(&[self.a.dtype(), out.dtype()]);
        let blocks = [width.div_ceil(COLUMNS) as u32, vectors as u32, 1];
        let grid = Grid { blocks, threads: THREADS, shared_bytes: 0 };
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

    /// The same for the one vector of very many rows, whose shares are summed up first.
    pub fn run_in_shares(&self, cuda: &Cuda, room: &mut Tensor, out: &mut Tensor, add: bool) {
        let (width, rows) = (self.a.shape().width(), self.a.shape().rows());
        let (shares, p) = (n_shares(rows), pack(width, &[self.a, self.b.unwrap_or(self.a)]));
        let threads = (width / p).next_multiple_of(WARP).clamp(WARP, THREADS_OF_SHARE);
        let blocks = [(width / p).div_ceil(threads) as u32, shares as u32, 1];
        let grid = Grid { blocks, threads: threads as u32, shared_bytes: 0 };
        let variant = Variant::of(&[self.a.dtype()]).by(p);
        let arguments = arguments![self.a, self.b, self.statistics, &mut *room, rows, width];
        cuda.launch(&KERNELS, "sum_shares", variant, grid, &arguments);
        let each = room.reshape([shares, width]);
        let sum = Sum { a: &each, b: None, statistics: None, rows_per_vector: shares };
        sum.run(cuda, out, 0, add);
    }
}

const THREADS_OF_SHARE: usize = 256;

/// Shares of the rows that are summed up each by itself, at most, and rows of a share at the least. Chosen:
/// enough to keep a large card busy, and few beside the rows.
const SHARES: usize = 256;
const SHARE_ROWS: usize = 16;

fn n_shares(rows: usize) -> usize {
    rows.div_ceil(SHARE_ROWS).clamp(1, SHARES)
}

/// Floats of workspace of [`Sum::run_in_shares`].
pub(crate) fn shares_floats(a: &Tensor) -> usize {
    n_shares(a.shape().rows()) * a.shape().width()
}

/// Floats of workspace that [`statistics`] fills.
pub(crate) fn statistics_floats(x: &Tensor) -> usize {
    2 * x.shape().rows()
}

/// The mean and 1 / deviation of each row; about zero if not centered.
pub(crate) fn statistics(cuda: &Cuda, x: &Tensor, epsilon: f32, centered: bool, to: &mut Tensor) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let arguments = arguments![x, to, rows, width, epsilon, centered];
    let variant = Variant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "row_statistics", variant, Grid::rows(rows), &arguments);
}
