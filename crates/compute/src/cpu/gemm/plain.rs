//! Matmuls by the gemm crate, which has SIMD kernels for every CPU, for f32. Other dtypes are widened block
//! by block.
#![allow(unsafe_code)]

use gemm_common::Parallelism;

use super::matrix_view::{FloatSource, with_source};
use super::{COLUMNS, DEPTH, Floats, GemmOutPtr, GemmSize, MatrixView, ROWS};
use crate::cpu::simd::simd;

/// See [`super::GemmBackend::gemm_at`].
///
/// # Safety
/// As there.
pub(super) unsafe fn multiply(
    size: GemmSize,
    out: GemmOutPtr,
    left: MatrixView<'_>,
    right: MatrixView<'_>,
    scale: f32,
    scratch: &mut [f32],
) {
    let GemmSize { rows, columns, inner } = size;
    let is_f32 = |grid: MatrixView<'_>| matches!(grid.data, Floats::F32(_));
    if is_f32(left) && is_f32(right) || rows * columns * inner == 0 {
        let [left, right] = [(left, rows, inner), (right, inner, columns)]
            .map(|(grid, rows, columns)| F32View::within(grid, rows, columns, &mut []));
        // SAFETY: up to the caller.
        return unsafe { multiply_f32(size, out, left, right, scale) };
    }
    let (left_scratch, right_scratch) = scratch.split_at_mut(ROWS * DEPTH);
    for from in (0..inner).step_by(DEPTH) {
        let depth = DEPTH.min(inner - from);
        for column in (0..columns).step_by(COLUMNS) {
            let width = COLUMNS.min(columns - column);
            let right = F32View::within(right.offset_by(from, column), depth, width, right_scratch);
            for row in (0..rows).step_by(ROWS) {
                let height = ROWS.min(rows - row);
                let left = F32View::within(left.offset_by(row, from), height, depth, left_scratch);
                let out = out.offset_by(row, column).adding_if(from > 0);
                let size = GemmSize::new(height, width, depth);
                // SAFETY: a part of the caller's block.
                unsafe { multiply_f32(size, out, left, right, scale) };
            }
        }
    }
}

/// A block of f32 to be read, by its strides.
#[derive(Clone, Copy)]
struct F32View<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> F32View<'a> {
    /// The first rows and columns of `grid`: in place if they are f32, or else widened along
    /// whichever direction is contiguous.
    fn within(grid: MatrixView<'a>, rows: usize, columns: usize, scratch: &'a mut [f32]) -> Self {
        let MatrixView { data, start, row_stride, column_stride, .. } = grid;
        if rows * columns == 0 {
            // An empty matrix may have no first element.
            return Self { data: &[], row_stride: 0, column_stride: 0 };
        }
        if let Floats::F32(data) = data {
            let view = Self { data: &data[start..], row_stride, column_stride };
            assert!((rows - 1) * row_stride + (columns - 1) * column_stride < view.data.len());
            return view;
        }
        let is_row_major = column_stride == 1;
        let (stride, length) =
            if is_row_major { (row_stride, columns) } else { (column_stride, rows) };
        let data_f32 = &mut scratch[..rows * columns];
        with_source!(data, source => widen(source, start, stride, data_f32, length));
        let (row_stride, column_stride) = if is_row_major { (length, 1) } else { (1, length) };
        Self { data: data_f32, row_stride, column_stride }
    }
}

simd! {
    /// Lines that start `stride` apart, one after the other.
    fn widen<S: FloatSource>(source: S, start: usize, stride: usize, to: &mut [f32], length: usize) {
        for (line, to) in to.chunks_exact_mut(length).enumerate() {
            source.load(start + line * stride, to);
        }
    }
}

/// # Safety
/// As for [`multiply`]; and the operands must hold as many elements as the size says.
unsafe fn multiply_f32(
    GemmSize { rows, columns, inner }: GemmSize,
    out: GemmOutPtr,
    a: F32View<'_>,
    b: F32View<'_>,
    scale: f32,
) {
    let signed = |stride: usize| isize::try_from(stride).expect("an arena is smaller than that");
    let multiply = gemm_f32::gemm::f32::get_gemm_fn();
    // The crate is column-major, we are row-major: it gets both operands transposed and exchanged. Its alpha
    // scales what is there, beta the matmul.
    // SAFETY: up to the caller.
    unsafe {
        multiply(
            columns,
            rows,
            inner,
            out.start,
            signed(out.stride),
            1,
            out.add,
            b.data.as_ptr(),
            signed(b.row_stride),
            signed(b.column_stride),
            a.data.as_ptr(),
            signed(a.row_stride),
            signed(a.column_stride),
            1.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}
