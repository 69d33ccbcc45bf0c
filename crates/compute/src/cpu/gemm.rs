//! The one call into the gemm crate: products of f32 blocks on one thread.
#![allow(unsafe_code)]

use gemm_common::Parallelism;

/// A block of numbers to be read, by its steps between rows and between columns.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub data: &'a [f32],
    pub row_step: usize,
    pub column_step: usize,
}

impl<'a> View<'a> {
    /// Rows of `width` numbers, one after the other.
    pub fn rows(data: &'a [f32], width: usize) -> Self {
        Self { data, row_step: width, column_step: 1 }
    }

    /// Rows and columns exchanged.
    pub fn t(self) -> Self {
        Self { data: self.data, row_step: self.column_step, column_step: self.row_step }
    }

    /// A row of a block whose columns lie one after the other.
    #[inline(always)]
    pub fn row(self, row: usize, columns: usize) -> &'a [f32] {
        debug_assert_eq!(self.column_step, 1);
        &self.data[row * self.row_step..][..columns]
    }

    fn holds(self, rows: usize, columns: usize) -> bool {
        rows * columns == 0
            || (rows - 1) * self.row_step + (columns - 1) * self.column_step < self.data.len()
    }
}

/// Rows, columns and inner length of a product.
pub(crate) type Size = (usize, usize, usize);

/// `out` = (`out` if `add`) + `scale` · `a` · `b`, for rows of `out` that are `step` apart.
pub(crate) fn gemm(
    size: Size,
    (out, step): (&mut [f32], usize),
    add: bool,
    a: View<'_>,
    b: View<'_>,
    scale: f32,
) {
    let (rows, columns, _) = size;
    assert!(
        View { data: out, row_step: step, column_step: 1 }.holds(rows, columns) && columns <= step
    );
    // SAFETY: the block lies within `out` (asserted), which is borrowed exclusively.
    unsafe { gemm_at(size, (out.as_mut_ptr(), step), add, a, b, scale) };
}

/// The same into a block of a matrix whose other blocks other threads write to.
///
/// # Safety
/// `out` must point to memory that holds the block with its step, and nobody else may touch the
/// block meanwhile.
pub(crate) unsafe fn gemm_at(
    (rows, columns, inner): Size,
    (out, step): (*mut f32, usize),
    add: bool,
    a: View<'_>,
    b: View<'_>,
    scale: f32,
) {
    assert!(a.holds(rows, inner) && b.holds(inner, columns));
    let signed = |step: usize| isize::try_from(step).expect("an arena is smaller than that");
    let multiply = gemm_f32::gemm::f32::get_gemm_fn();
    // The crate's kernels want the columns of the result to be contiguous, ours are the rows: it
    // gets both factors transposed and exchanged. Its alpha scales what is there, beta the product.
    // SAFETY: the factors were checked above, `out` is up to the caller.
    unsafe {
        multiply(
            columns,
            rows,
            inner,
            out,
            signed(step),
            1,
            add,
            b.data.as_ptr(),
            signed(b.row_step),
            signed(b.column_step),
            a.data.as_ptr(),
            signed(a.row_step),
            signed(a.column_step),
            1.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_of_no_inner_length_writes_zeros_or_leaves_what_is_there() {
        for (add, expected) in [(false, 0.0), (true, 7.0)] {
            let mut out = [7.0; 6];
            let empty = View { data: &[], row_step: 0, column_step: 1 };
            gemm((2, 3, 0), (&mut out, 3), add, empty, empty, 1.0);
            assert_eq!(out, [expected; 6]);
        }
    }

    #[test]
    fn views_may_be_transposed_and_scaled() {
        let a = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut out = [1.0; 4];
        let view = View::rows(&a, 3);
        gemm((2, 2, 3), (&mut out, 2), true, view, view.t(), 0.5);
        assert_eq!(out, [8.0, 17.0, 17.0, 39.5]);
    }

    #[test]
    #[should_panic(expected = "holds")]
    fn a_block_beyond_its_data_is_refused() {
        gemm(
            (2, 2, 3),
            (&mut [0.0; 4], 2),
            false,
            View::rows(&[0.0; 5], 3),
            View::rows(&[0.0; 6], 2),
            1.0,
        );
    }
}
