//! Matmuls of blocks of matrices on one thread. Operands have any real dtype, transposed or not; sums are
//! f32.
//!
//! Computed by AMX where the CPU has it ([`tiles`]), or by SIMD through the gemm crate ([`plain`]).
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

/// What multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GemmBackend {
    /// The CPU's vector instructions.
    Simd,
    /// Its matrix unit.
    Amx,
}

/// Whether the CPU has AMX. Asks the system for permission at the first call; threads that start later may
/// use it.
pub(crate) fn has_amx() -> bool {
    tiles::is_available()
}

/// The sizes of a matmul [rows, inner] · [inner, columns].
#[derive(Clone, Copy, Debug)]
pub(crate) struct GemmSize {
    pub rows: usize,
    pub columns: usize,
    pub inner: usize,
}

impl GemmSize {
    pub fn new(rows: usize, columns: usize, inner: usize) -> Self {
        Self { rows, columns, inner }
    }
}

/// Where a result goes: rows of f32, `stride` apart.
pub(crate) struct GemmOut<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    /// Whether to add to what is there.
    pub add: bool,
}

/// The same by address: a block of a matrix whose other blocks other threads write to.
#[derive(Clone, Copy)]
pub(crate) struct GemmOutPtr {
    pub start: *mut f32,
    pub stride: usize,
    pub add: bool,
}

impl GemmOutPtr {
    /// The block that starts at a row and a column of this one.
    fn offset_by(self, row: usize, column: usize) -> Self {
        Self { start: self.start.wrapping_add(row * self.stride + column), ..self }
    }

    /// Adds to what is there from now on if so asked.
    fn adding_if(self, add: bool) -> Self {
        Self { add: self.add || add, ..self }
    }
}

/// Rows, columns and inner size of the blocks that are packed at a time. A block then takes up to 384 KiB,
/// so that those of both operands fit into the L2 cache of one core, even if that core is shared. Measured
/// on a Xeon with AMX, 2026-11-15: twice the depth took 5 to 10 % longer, half of it as long. Multiples of
/// 32. In tests small matrices must have several blocks too.
const ROWS: usize = if cfg!(test) { 64 } else { 256 };
const COLUMNS: usize = if cfg!(test) { 32 } else { 256 };
const DEPTH: usize = if cfg!(test) { 64 } else { 256 };

/// Floats of scratch memory for a matmul: each element of both operands' blocks takes up to 6 bytes.
pub(crate) const SCRATCH_FLOATS: usize = (ROWS + COLUMNS) * DEPTH * 3 / 2;

/// Floats of scratch memory for blocks of the left operand alone, when the right one is packed already.
pub(crate) const LEFT_SCRATCH_FLOATS: usize = ROWS * DEPTH * 3 / 2;

/// Floats that rows or columns of an operand take when they are packed for AMX: whole panels of 32, cut
/// along the depth into steps of 32.
pub(crate) fn packed_floats(lines: usize, depth: usize, n_splits: usize) -> usize {
    lines.next_multiple_of(PANEL) * depth.next_multiple_of(STEP) * n_splits / 2
}

/// Rows or columns that are packed together.
pub(crate) const PANEL: usize = 32;
/// Depth that is packed together.
const STEP: usize = 32;

impl GemmBackend {
    /// `out` = (`out` if `add`) + `left` · `right`. `scratch` has [`SCRATCH_FLOATS`] floats.
    pub fn gemm(
        self,
        size: GemmSize,
        out: GemmOut<'_>,
        left: MatrixView<'_>,
        right: MatrixView<'_>,
        scratch: &mut [f32],
    ) {
        let (GemmSize { rows, columns, .. }, GemmOut { data, stride, add }) = (size, out);
        let is_inside = (rows.saturating_sub(1)) * stride + columns <= data.len();
        assert!(rows * columns == 0 || is_inside && columns <= stride);
        let out = GemmOutPtr { start: data.as_mut_ptr(), stride, add };
        // SAFETY: the block lies within `data` (asserted), which is borrowed exclusively.
        unsafe { self.gemm_at(size, out, left, right, 1.0, scratch) };
    }

    /// The same times `scale`, into a block of a matrix whose other blocks other threads write to.
    ///
    /// # Safety
    /// `out` must point to memory that holds the block with its stride, and nobody else may touch the
    /// block meanwhile.
    pub unsafe fn gemm_at(
        self,
        size: GemmSize,
        out: GemmOutPtr,
        left: MatrixView<'_>,
        right: MatrixView<'_>,
        scale: f32,
        scratch: &mut [f32],
    ) {
        // SAFETY: both ask of the caller what this function does.
        unsafe {
            match self {
                Self::Simd => plain::multiply(size, out, left, right, scale, scratch),
                Self::Amx => tiles::multiply(size, out, left, right, scale, scratch),
            }
        }
    }
}
