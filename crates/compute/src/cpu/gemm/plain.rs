//! Products by the gemm crate, which knows the vectors of every CPU, for f32. Other formats
//! are widened block by block.
#![allow(unsafe_code)]

use gemm_common::Parallelism;

use super::matrix_view::{FloatSource, with_source};
use super::{COLUMNS, DEPTH, Floats, GemmSize, MatrixView, ROWS};
use crate::cpu::simd::simd;

/// See [`super::Way::gemm_at`].
///
/// # Safety
/// As there.
pub(super) unsafe fn multiply(
    (rows, columns, inner): GemmSize,
    (out, step): (*mut f32, usize),
    add: bool,
    (left, right): (MatrixView<'_>, MatrixView<'_>),
    scale: f32,
    room: &mut [f32],
) {
    let is_f32 = |grid: MatrixView<'_>| matches!(grid.data, Floats::F32(_));
    if is_f32(left) && is_f32(right) || rows * columns * inner == 0 {
        let size = (rows, columns, inner);
        let [left, right] = [(left, rows, inner), (right, inner, columns)]
            .map(|(grid, rows, columns)| F32View::within(grid, rows, columns, &mut []));
        // SAFETY: up to the caller.
        return unsafe { multiply_f32(size, (out, step), add, left, right, scale) };
    }
    let (left_room, right_room) = room.split_at_mut(ROWS * DEPTH);
    for from in (0..inner).step_by(DEPTH) {
        let depth = DEPTH.min(inner - from);
        for column in (0..columns).step_by(COLUMNS) {
            let width = COLUMNS.min(columns - column);
            let right = F32View::within(right.offset_by(from, column), depth, width, right_room);
            for row in (0..rows).step_by(ROWS) {
                let height = ROWS.min(rows - row);
                let left = F32View::within(left.offset_by(row, from), height, depth, left_room);
                let out = out.wrapping_add(row * step + column);
                let size = (height, width, depth);
                // SAFETY: a part of the caller's block.
                unsafe { multiply_f32(size, (out, step), add || from > 0, left, right, scale) };
            }
        }
    }
}

/// A block of numbers to be read, by its steps between rows and between columns.
#[derive(Clone, Copy)]
struct F32View<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> F32View<'a> {
    /// The first rows and columns of `grid`: in place if they are f32, or else widened along
    /// whichever direction is contiguous.
    fn within(grid: MatrixView<'a>, rows: usize, columns: usize, room: &'a mut [f32]) -> Self {
        let MatrixView { data, start, row_stride: row_step, column_stride: column_step, .. } = grid;
        if rows * columns == 0 {
            // Of nothing there may not even be a start.
            return Self { data: &[], row_stride: 0, column_stride: 0 };
        }
        if let Floats::F32(data) = data {
            let view =
                Self { data: &data[start..], row_stride: row_step, column_stride: column_step };
            assert!((rows - 1) * row_step + (columns - 1) * column_step < view.data.len());
            return view;
        }
        let (step, length) =
            if column_step == 1 { (row_step, columns) } else { (column_step, rows) };
        let room = &mut room[..rows * columns];
        with_source!(data, source => widen(source, start, step, room, length));
        let (row_step, column_step) = if column_step == 1 { (length, 1) } else { (1, length) };
        Self { data: room, row_stride: row_step, column_stride: column_step }
    }
}

simd! {
    /// Lines that start `step` apart, one after the other.
    fn widen<S: FloatSource>(source: S, start: usize, step: usize, to: &mut [f32], length: usize) {
        for (line, to) in to.chunks_exact_mut(length).enumerate() {
            source.load(start + line * step, to);
        }
    }
}

/// # Safety
/// As for [`multiply`]; and the factors must hold as many numbers as the size says.
unsafe fn multiply_f32(
    (rows, columns, inner): GemmSize,
    (out, step): (*mut f32, usize),
    add: bool,
    a: F32View<'_>,
    b: F32View<'_>,
    scale: f32,
) {
    let signed = |step: usize| isize::try_from(step).expect("an arena is smaller than that");
    let multiply = gemm_f32::gemm::f32::get_gemm_fn();
    // The crate's kernels want the columns of the result to be contiguous, ours are the rows: it
    // gets both factors transposed and exchanged. Its alpha scales what is there, beta the product.
    // SAFETY: up to the caller.
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
