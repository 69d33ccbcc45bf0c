//! Matmuls by AMX, the matrix unit of Intel's CPUs, which multiplies tiles of 16 x 32 bf16 values and sums
//! in f32.
//!
//! f32 is multiplied too, and f16 as f32: a value of 24 bits is split exactly into the sum of three bf16 of
//! 8 bits each. Of the nine terms of two such sums multiplied the three smallest lie below half a unit of
//! f32 and are left out; docs/measured.md has what that gains. An infinite operand gives infinity or NaN;
//! values below 1e-38 count as zero.
#![allow(unsafe_code)]

use std::arch::asm;
use std::sync::OnceLock;

use super::kernels::{SumTiles, one_by_one, one_by_three, three_by_one, three_by_three};
use super::pack::{self, OperandSide, Packed, STEP_FLOATS, pack};
use super::{COLUMNS, DEPTH, GemmOutPtr, GemmSize, MatrixView, ROWS};

/// Rows and columns of the result that are summed at a time, in four tiles.
const SIDE: usize = super::PANEL;

/// Whether this CPU has AMX and the system lets us use it. The permission is asked for
/// once, and holds for all threads.
pub(super) fn is_available() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| has_amx() && has_permission())
}

fn has_amx() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    features & AMX_BF16 != 0 && features & AMX_TILE != 0 && pack::has_vectors()
}

/// The state of the tiles is large, so Linux keeps it only for processes that ask for it.
fn has_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: i32 = 0x1023;
    const XFEATURE_XTILEDATA: i32 = 18;
    // SAFETY: a system call that takes two numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

/// Packs `scale` times the first columns of `right`.
pub(crate) fn pack_right(
    right: MatrixView<'_>,
    scale: f32,
    columns: usize,
    inner: usize,
    to: &mut [f32],
) {
    pack(OperandSide::Right, right.t(), columns, inner, scale, to);
}

/// See [`super::GemmBackend::gemm_at`].
///
/// # Safety
/// As there.
pub(super) unsafe fn multiply(
    GemmSize { rows, columns, inner }: GemmSize,
    out: GemmOutPtr,
    left: MatrixView<'_>,
    right: MatrixView<'_>,
    scale: f32,
    scratch: &mut [f32],
) {
    let (right_scratch, left_scratch) = scratch.split_at_mut(COLUMNS * DEPTH * 3 / 2);
    // An empty inner size still has to write its zeros.
    for from in (0..inner.max(1)).step_by(DEPTH) {
        let depth = DEPTH.min(inner - from);
        for column in (0..columns).step_by(COLUMNS) {
            let width = COLUMNS.min(columns - column);
            let right = right.offset_by(from, column).t();
            let right = pack(OperandSide::Right, right, width, depth, scale, right_scratch);
            let (size, left) = (GemmSize::new(rows, width, depth), left.offset_by(0, from));
            let out = out.offset_by(0, column).adding_if(from > 0);
            // SAFETY: a part of the caller's block.
            unsafe { by_rows(size, out, left, right, left_scratch) };
        }
    }
}

/// The same with a right operand that was packed before.
///
/// # Safety
/// As for [`super::GemmBackend::gemm_at`].
pub(crate) unsafe fn multiply_packed(
    size: GemmSize,
    out: GemmOutPtr,
    left: MatrixView<'_>,
    right: &[f32],
    n_splits: usize,
    scratch: &mut [f32],
) {
    // SAFETY: up to the caller.
    unsafe { by_rows(size, out, left, Packed::new(right, size.inner, n_splits), scratch) };
}

/// Packs the left operand block by block, and multiplies.
///
/// # Safety
/// As for [`super::GemmBackend::gemm_at`].
unsafe fn by_rows(
    GemmSize { rows, columns, inner }: GemmSize,
    out: GemmOutPtr,
    left: MatrixView<'_>,
    right: Packed<'_>,
    scratch: &mut [f32],
) {
    let _unit = AmxTiles::start();
    for row in (0..rows).step_by(ROWS) {
        let height = ROWS.min(rows - row);
        for from in (0..inner.max(1)).step_by(DEPTH) {
            let depth = DEPTH.min(inner - from);
            let left = left.offset_by(row, from);
            let left = pack(OperandSide::Left, left, height, depth, 1.0, scratch);
            let out = out.offset_by(row, 0).adding_if(from > 0);
            // SAFETY: a part of the caller's block.
            unsafe { by_squares(height, columns, out, left, right.slab(from, depth)) };
        }
    }
}

/// AMX while it is set up for our tiles: four of sums, and two of each operand.
struct AmxTiles;

impl AmxTiles {
    fn start() -> Self {
        #[repr(C, align(64))]
        struct Setup {
            palette: u8,
            reserved: [u8; 15],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut setup = Setup { palette: 1, reserved: [0; 15], row_bytes: [0; 16], rows: [0; 16] };
        setup.row_bytes[..8].fill(64);
        setup.rows[..8].fill(16);
        // SAFETY: reads the 64 bytes of `setup`; `is_available` found AMX and permission.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const setup, options(nostack, readonly)) };
        Self
    }
}

impl Drop for AmxTiles {
    /// The system need not keep tiles that are not in use.
    fn drop(&mut self) {
        // SAFETY: nobody needs the tiles any more.
        unsafe { asm!("tilerelease", options(nostack)) };
    }
}

/// A matmul of packed blocks.
///
/// # Safety
/// As for [`super::GemmBackend::gemm_at`], and AMX must be set up.
unsafe fn by_squares(
    rows: usize,
    columns: usize,
    out: GemmOutPtr,
    left: Packed<'_>,
    right: Packed<'_>,
) {
    debug_assert_eq!(left.count, right.count);
    for column in (0..columns).step_by(SIDE) {
        let width = SIDE.min(columns - column);
        let (panel, n_splits) = (right.panel(column / SIDE), (left.n_splits, right.n_splits));
        for row in (0..rows).step_by(SIDE) {
            let height = SIDE.min(rows - row);
            let panels = Panels { left: left.panel(row / SIDE), right: panel, n_splits };
            let out = out.offset_by(row, column);
            if height == SIDE && width == SIDE {
                // SAFETY: a whole square within the caller's block.
                unsafe { panels.square(out) };
            } else {
                // SAFETY: its first rows and columns lie within the caller's block.
                unsafe { panels.corner(height, width, out) };
            }
        }
    }
}

/// A panel of each operand, of the same depth.
#[derive(Clone, Copy)]
struct Panels<'a> {
    left: &'a [f32],
    right: &'a [f32],
    n_splits: (usize, usize),
}

impl Panels<'_> {
    /// The sums of one square.
    ///
    /// # Safety
    /// `out` must hold the square, and AMX must be set up.
    unsafe fn square(self, GemmOutPtr { start, stride, add }: GemmOutPtr) {
        let steps = self.left.len() / (STEP_FLOATS * self.n_splits.0);
        debug_assert_eq!(steps, self.right.len() / (STEP_FLOATS * self.n_splits.1));
        let bottom = start.wrapping_add(16 * stride);
        let sums = SumTiles { top: start, bottom, row_bytes: 4 * stride, add };
        let (a, b) = (self.left.as_ptr(), self.right.as_ptr());
        // SAFETY: the panels hold as many steps, of as many splits.
        unsafe {
            match self.n_splits {
                _ if steps == 0 => sums.without_depth(),
                (1, 1) => one_by_one(a, b, steps, sums),
                (3, 1) => three_by_one(a, b, steps, sums),
                (1, 3) => one_by_three(a, b, steps, sums),
                _ => three_by_three(a, b, steps, sums),
            }
        }
    }

    /// A square at the edge, of which `out` has only some rows and columns.
    ///
    /// # Safety
    /// `out` must hold those.
    unsafe fn corner(self, rows: usize, columns: usize, out: GemmOutPtr) {
        let mut sums = [0.0; SIDE * SIDE];
        // SAFETY: `sums` is a whole square.
        unsafe {
            self.square(GemmOutPtr { start: sums.as_mut_ptr(), stride: SIDE, add: false });
        }
        for (row, sums) in sums.chunks_exact(SIDE).take(rows).enumerate() {
            let start = out.start.wrapping_add(row * out.stride);
            // SAFETY: a row that `out` has.
            let to = unsafe { std::slice::from_raw_parts_mut(start, columns) };
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = if out.add { *to + sum } else { *sum };
            }
        }
    }
}
