//! Products of blocks of matrices on one thread, the heart of the engine. Factors come in any real
//! format and either direction; sums are f32.
//!
//! Two ways to compute them: the matrix unit of the CPU where there is one ([`tiles`]), or
//! vectors by the gemm crate ([`plain`]).
#![allow(unsafe_code)]

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod kernels;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod load16;
mod matrix_view;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod pack;
mod plain;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles;
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[path = "no_tiles.rs"]
mod tiles;

pub(crate) use matrix_view::{FloatSource, Floats, MatrixView};
pub(crate) use tiles::{multiply_packed, pack_right};

/// Who multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GemmBackend {
    /// The CPU's vectors.
    Simd,
    /// Its matrix unit.
    Amx,
}

/// Whether there is a matrix unit. Asks the system for it at the first call; threads that start
/// later may use it.
pub(crate) fn has_amx() -> bool {
    tiles::is_available()
}

/// Rows, columns and inner length of a product.
pub(crate) type GemmSize = (usize, usize, usize);

/// Rows, columns and inner length of the blocks that are laid out at a time. A block then takes up to
/// 384 KiB, so that both factors' fit into the second-level cache of one core, even if that core is
/// shared. Measured on a Xeon with AMX, 2026-11-15: twice the depth took 5 to 10 % longer, half of
/// it as long. Multiples of 32. In tests small
/// matrices must have several blocks too.
const ROWS: usize = if cfg!(test) { 64 } else { 256 };
const COLUMNS: usize = if cfg!(test) { 32 } else { 256 };
const DEPTH: usize = if cfg!(test) { 64 } else { 256 };

/// Floats of room that a product needs: each number of both factors' blocks takes up to 6 bytes.
pub(crate) const SCRATCH_FLOATS: usize = (ROWS + COLUMNS) * DEPTH * 3 / 2;

/// Floats of room for blocks of the left factor alone, when the right one is laid out already.
pub(crate) const LEFT_SCRATCH_FLOATS: usize = ROWS * DEPTH * 3 / 2;

/// Floats that rows or columns of a factor take when they are laid out for the matrix unit: whole
/// panels of 32, cut along the depth into steps of 32.
pub(crate) fn packed_floats(lines: usize, depth: usize, n_splits: usize) -> usize {
    lines.next_multiple_of(PANEL) * depth.next_multiple_of(STEP) * n_splits / 2
}

/// Rows or columns that are laid out together.
pub(crate) const PANEL: usize = 32;
/// Depth that is laid out together.
const STEP: usize = 32;

impl GemmBackend {
    /// `out` = (`out` if `add`) + `scale` · `left` · `right`, for rows of `out` that are `step`
    /// apart. `room` is [`SCRATCH_FLOATS`] floats.
    pub fn gemm(
        self,
        size: GemmSize,
        (out, step): (&mut [f32], usize),
        add: bool,
        (left, right): (MatrixView<'_>, MatrixView<'_>),
        room: &mut [f32],
    ) {
        let (rows, columns, _) = size;
        assert!(rows * columns == 0 || (rows - 1) * step + columns <= out.len() && columns <= step);
        // SAFETY: the block lies within `out` (asserted), which is borrowed exclusively.
        unsafe { self.gemm_at(size, (out.as_mut_ptr(), step), add, (left, right), 1.0, room) };
    }

    /// The same with a factor, and into a block of a matrix whose other blocks other threads write
    /// to.
    ///
    /// # Safety
    /// `out` must point to memory that holds the block with its step, and nobody else may touch the
    /// block meanwhile.
    pub unsafe fn gemm_at(
        self,
        size: GemmSize,
        out: (*mut f32, usize),
        add: bool,
        factors: (MatrixView<'_>, MatrixView<'_>),
        scale: f32,
        room: &mut [f32],
    ) {
        // SAFETY: both ask of the caller what this function does.
        unsafe {
            match self {
                Self::Simd => plain::multiply(size, out, add, factors, scale, room),
                Self::Amx => tiles::multiply(size, out, add, factors, scale, room),
            }
        }
    }
}
