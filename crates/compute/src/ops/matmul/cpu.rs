//! Matmuls on the CPU, with everything that is done to their result while it is still in the cache. The
//! output is cut into tiles; each is one task for one thread.
#![allow(unsafe_code)]

use super::{FusedMatmul, Matmul, Operand, OperandData};
use crate::cpu::gemm::{self, GemmBackend, GemmOutPtr, GemmSize, MatrixView};
use crate::cpu::rows::{load, store};
use crate::cpu::{CpuBackend, SharedSlice, ThreadScratch};
use crate::dtype::{Real, with_real};
use crate::ops::Activation;
use crate::{Dtype, Tensor};

/// The largest tiles, for AMX and for SIMD. The left operand is packed again for every tile of a row of
/// them, so tiles for AMX are wide; the sums of a wider one would not fit the L2 cache. In tests small
/// matrices must have several tiles too.
const AMX_TILE: TileSize =
    if cfg!(test) { TileSize::new(64, 64) } else { TileSize::new(256, 1024) };
const SIMD_TILE: TileSize =
    if cfg!(test) { TileSize::new(96, 32) } else { TileSize::new(512, 256) };
/// Enough tiles for the threads to share, if the matrix is large enough. Results by SIMD may depend on
/// where tiles begin, so their size must not depend on the threads; AMX sums in the same order wherever a
/// tile begins.
const ENOUGH_TILES: usize = 16;
const TILES_PER_THREAD: usize = 4;
const SMALLEST_SIDE: usize = 64;
/// Floats of right operands that are packed at a time for all threads: 12 MiB, enough for whole tiles of
/// the usual depths.
const PACKED_FLOATS: usize = if cfg!(test) { 1 << 13 } else { 3 << 20 };
/// Results with fewer rows or columns than this are computed by SIMD: packing the long operand would take
/// longer than multiplying it.
const ENOUGH_FOR_AMX: usize = 32;
/// The same where both operands are f32, each of which is split into three bf16. Measured with `bench
/// models`, 2 cores of a Xeon, 2026-11-15, processes in turn: by SIMD, T5 (256 rows) took 0.74 of the time
/// by AMX, the autoencoder (128 to 512 rows) 0.78, CLIP (77 rows) as long.
const ENOUGH_FOR_AMX_F32: usize = if cfg!(test) { 48 } else { 512 };

/// Results with fewer rows or columns than this take as long as reading the long operand does. Chosen:
/// twice a panel; most adapters are narrower, layers are not.
pub(super) const NARROW: usize = 64;

/// How matmuls are cut up.
pub struct MatmulPlan {
    backend: GemmBackend,
    tile: TileSize,
    /// Columns whose right operands are packed at a time.
    chunk: usize,
    /// Floats that takes.
    shared: usize,
    /// Floats of scratch memory for each thread, and how many threads there are.
    own: usize,
    threads: usize,
}

impl MatmulPlan {
    pub fn new(work: &FusedMatmul<'_>, threads: usize, has_amx: bool) -> Self {
        let (rows, columns) = (work.rows(), work.columns());
        let is_f32 = |matrix: Operand<'_>| matrix.tensor().dtype() == Dtype::F32;
        let is_rounded = work.out.dtype() != Dtype::F32;
        let is_split = |matrix: Operand<'_>| is_f32(matrix) && matrix.n_splits > 1;
        let all_split = work.matmuls.iter().all(|p| is_split(p.left) && is_split(p.right));
        let enough = if all_split { ENOUGH_FOR_AMX_F32 } else { ENOUGH_FOR_AMX };
        if !has_amx || rows.min(columns) < enough {
            let tile = SIMD_TILE.fitted(rows, columns, ENOUGH_TILES);
            let widens = work.matmuls.iter().any(|p| !is_f32(p.left) || !is_f32(p.right));
            let sums = if is_rounded { tile.rows * tile.columns } else { 0 };
            let own = if widens { gemm::SCRATCH_FLOATS } else { 0 } + sums;
            return Self {
                backend: GemmBackend::Simd,
                tile,
                chunk: columns,
                shared: 0,
                own,
                threads,
            };
        }
        let tile = AMX_TILE.fitted(rows, columns, TILES_PER_THREAD * threads);
        let panel: usize = work.matmuls.iter().map(|p| packed_floats(p, gemm::PANEL)).sum();
        let panels = columns.div_ceil(gemm::PANEL).min((PACKED_FLOATS / panel.max(1)).max(1));
        let chunk = columns.min((panels * gemm::PANEL / tile.columns).max(1) * tile.columns);
        let shared = work.matmuls.iter().map(|p| packed_floats(p, chunk)).sum();
        let own = gemm::LEFT_SCRATCH_FLOATS + if is_rounded { tile.rows * tile.columns } else { 0 };
        Self { backend: GemmBackend::Amx, tile, chunk, shared, own, threads }
    }

    /// Its kernel class: matmuls whose time grows alike.
    pub fn kernel(&self, work: &FusedMatmul<'_>) -> &'static str {
        let (rows, columns) = (work.rows(), work.columns());
        let is_activated = work.activation != Activation::None;
        match self.backend {
            GemmBackend::Amx if rows.min(columns) < NARROW => "narrow matmul by amx",
            GemmBackend::Amx if is_activated => "activated matmul by amx",
            GemmBackend::Amx => "matmul by amx",
            GemmBackend::Simd if rows < NARROW => "matmul of few rows",
            GemmBackend::Simd if columns < NARROW => "matmul of few columns",
            GemmBackend::Simd if is_activated => "activated matmul by simd",
            GemmBackend::Simd => "matmul by simd",
        }
    }

    /// Floats of workspace.
    pub fn floats(&self) -> usize {
        self.shared + self.threads * self.own
    }
}

/// Floats that some columns of a right operand take when packed.
fn packed_floats(matmul: &Matmul<'_>, columns: usize) -> usize {
    gemm::packed_floats(columns, matmul.left.columns(), right_splits(matmul))
}

/// bf16 values that each value of the right operand is split into for AMX; a scaled one has more digits than
/// one bf16.
fn right_splits(matmul: &Matmul<'_>) -> usize {
    if matmul.scale == 1.0 { matmul.right.n_splits } else { 3 }
}

/// Computes the matmuls.
pub fn multiply(cpu: &CpuBackend, plan: &MatmulPlan, work: FusedMatmul<'_>, workspace: &mut [f32]) {
    let (rows, columns) = (work.rows(), work.columns());
    if rows * columns == 0 {
        return;
    }
    let matmuls: Vec<_> = work
        .matmuls
        .iter()
        .map(|matmul| CpuMatmul {
            left: MatrixView::from(matmul.left),
            right: MatrixView::from(matmul.right),
            inner: matmul.left.columns(),
            scale: matmul.scale,
            n_splits: right_splits(matmul),
        })
        .collect();
    with_real!(work.out.dtype(), T => {
        let tiles = TiledMatmul {
            rows,
            columns,
            matmuls: &matmuls,
            bias: work.bias.map(|bias| &bias.data::<f32>()[..columns]),
            activation: work.activation,
            pre_activation: work.pre_activation.map(|tensor| SharedSlice::new(tensor.data_mut::<T>())),
            out: SharedSlice::new(work.out.data_mut::<T>()),
            add: work.add,
            onto: work.onto.map(Tensor::data::<T>),
            derivative_at: work.derivative_at.map(|at| (at.activation, at.input.data::<T>())),
        };
        tiles.compute(cpu, plan, workspace);
    });
}

impl<'a> From<Operand<'a>> for MatrixView<'a> {
    fn from(matrix: Operand<'a>) -> Self {
        let floats = match matrix.data {
            OperandData::Dense(tensor) => tensor.into(),
            OperandData::Quantised(quantised) => quantised.floats(),
        };
        let whole = MatrixView::rows(floats, matrix.stride()).offset_by(0, matrix.window.0);
        let grid = MatrixView { n_splits: matrix.n_splits, ..whole };
        if matrix.transposed { grid.t() } else { grid }
    }
}

#[derive(Clone, Copy)]
struct CpuMatmul<'a> {
    left: MatrixView<'a>,
    right: MatrixView<'a>,
    inner: usize,
    scale: f32,
    /// bf16 values that each value of the right operand is split into for AMX.
    n_splits: usize,
}

/// Right operands of some columns, packed for AMX.
#[derive(Clone, Copy)]
struct PackedChunk<'a> {
    column: usize,
    columns: usize,
    /// Those of all matmuls, one after the other; empty with SIMD.
    packed: &'a [f32],
}

struct TiledMatmul<'a, T> {
    rows: usize,
    columns: usize,
    matmuls: &'a [CpuMatmul<'a>],
    bias: Option<&'a [f32]>,
    activation: Activation,
    pre_activation: Option<SharedSlice<'a, T>>,
    out: SharedSlice<'a, T>,
    add: bool,
    onto: Option<&'a [T]>,
    derivative_at: Option<(Activation, &'a [T])>,
}

#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
}

impl<T: Real> TiledMatmul<'_, T> {
    fn compute(&self, cpu: &CpuBackend, plan: &MatmulPlan, workspace: &mut [f32]) {
        let (shared, own) = workspace.split_at_mut(plan.shared);
        for column in (0..self.columns).step_by(plan.chunk) {
            let columns = plan.chunk.min(self.columns - column);
            if plan.backend == GemmBackend::Amx {
                self.pack_right(cpu, column, columns, shared);
            }
            let chunk = PackedChunk { column, columns, packed: shared };
            self.compute_chunk(cpu, plan, chunk, own);
        }
    }

    /// Right operands, one panel per task.
    fn pack_right(&self, cpu: &CpuBackend, first: usize, columns: usize, mut to: &mut [f32]) {
        for CpuMatmul { right, inner, scale, n_splits, .. } in self.matmuls {
            let floats = gemm::packed_floats(columns, *inner, *n_splits);
            let (now, later) = std::mem::take(&mut to).split_at_mut(floats);
            to = later;
            cpu.par_chunks(
                now,
                gemm::packed_floats(gemm::PANEL, *inner, *n_splits),
                |panel, to| {
                    let column = panel * gemm::PANEL;
                    let width = gemm::PANEL.min(columns - column);
                    gemm::pack_right(right.offset_by(0, first + column), *scale, width, *inner, to);
                },
            );
        }
    }

    fn compute_chunk(
        &self,
        cpu: &CpuBackend,
        plan: &MatmulPlan,
        chunk: PackedChunk<'_>,
        workspace: &mut [f32],
    ) {
        let TileSize { rows: height, columns: width } = plan.tile;
        let across = chunk.columns.div_ceil(width);
        let count = self.rows.div_ceil(height) * across;
        cpu.with_scratch(workspace, plan.own, count, |index, scratch| {
            let (row, within) = (index / across * height, index % across * width);
            let rows = height.min(self.rows - row);
            let columns = width.min(chunk.columns - within);
            let tile = Tile { row, column: chunk.column + within, rows, columns };
            if T::DTYPE == Dtype::F32 {
                self.tile_in_place(plan.backend, tile, chunk, scratch.0);
            } else {
                self.tile_aside(plan.backend, tile, chunk, scratch);
            }
        });
    }

    /// Sums go straight to the result, which is f32.
    fn tile_in_place(
        &self,
        backend: GemmBackend,
        tile: Tile,
        chunk: PackedChunk<'_>,
        scratch: &mut [f32],
    ) {
        let extent = (tile.rows - 1) * self.columns + tile.columns;
        let out = self.out.pointer(tile.row * self.columns + tile.column, extent).cast::<f32>();
        let to = GemmOutPtr { start: out, stride: self.columns, add: self.add };
        self.multiply(backend, tile, chunk, to, scratch);
        for row in 0..tile.rows {
            let values = out.wrapping_add(row * self.columns);
            // SAFETY: a row of this tile within the result (checked by `pointer` above), which no
            // other task touches.
            let values = unsafe { std::slice::from_raw_parts_mut(values, tile.columns) };
            self.finish(tile, row, values);
        }
    }

    /// Sums are taken in f32 first, and rounded into the result.
    fn tile_aside(
        &self,
        backend: GemmBackend,
        tile: Tile,
        chunk: PackedChunk<'_>,
        mut scratch: ThreadScratch<'_>,
    ) {
        let sums = scratch.take(tile.rows * tile.columns);
        if self.add {
            for (row, sums) in sums.chunks_exact_mut(tile.columns).enumerate() {
                load(self.row_of(self.out, tile, row), sums);
            }
        }
        let to = GemmOutPtr { start: sums.as_mut_ptr(), stride: tile.columns, add: self.add };
        self.multiply(backend, tile, chunk, to, scratch.0);
        for (row, sums) in sums.chunks_exact_mut(tile.columns).enumerate() {
            self.finish(tile, row, sums);
            store(sums, self.row_of(self.out, tile, row), false);
        }
    }

    /// What is done to a row of sums while it is at hand.
    #[inline(always)]
    fn finish(&self, tile: Tile, row: usize, values: &mut [f32]) {
        let at = (tile.row + row) * self.columns + tile.column;
        if let Some(bias) = self.bias {
            let bias = &bias[tile.column..tile.column + tile.columns];
            values.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
        }
        if let Some(onto) = self.onto {
            values.iter_mut().zip(&onto[at..]).for_each(|(value, onto)| *value += onto.to_f32());
        }
        if let Some(before) = self.pre_activation {
            store(values, self.row_of(before, tile, row), false);
        }
        self.activation.apply(values);
        if let Some((activation, before)) = self.derivative_at {
            let mut derivatives = vec![0.0; tile.columns];
            load(&before[at..], &mut derivatives);
            activation.apply_derivative(&mut derivatives);
            values
                .iter_mut()
                .zip(&derivatives)
                .for_each(|(value, derivative)| *value *= derivative);
        }
    }

    #[inline(always)]
    fn row_of<'b>(&self, of: SharedSlice<'b, T>, tile: Tile, row: usize) -> &'b mut [T] {
        let from = (tile.row + row) * self.columns + tile.column;
        // SAFETY: a row of this tile, which no other task touches, and which this one takes for
        // one loop over it at a time.
        unsafe { of.slice(from, tile.columns) }
    }

    /// All matmuls for one tile, into `out`.
    fn multiply(
        &self,
        backend: GemmBackend,
        tile: Tile,
        chunk: PackedChunk<'_>,
        out: GemmOutPtr,
        scratch: &mut [f32],
    ) {
        let mut packed = chunk.packed;
        for (index, matmul) in self.matmuls.iter().enumerate() {
            let CpuMatmul { left, right, inner, scale, n_splits } = *matmul;
            let size = GemmSize::new(tile.rows, tile.columns, inner);
            let out = GemmOutPtr { add: out.add || index > 0, ..out };
            let left = left.offset_by(tile.row, 0);
            if backend == GemmBackend::Simd {
                let right = right.offset_by(0, tile.column);
                // SAFETY: both callers give a block of this tile's size that no other task touches.
                unsafe { backend.gemm_at(size, out, left, right, scale, scratch) };
                continue;
            }
            let floats = |columns| gemm::packed_floats(columns, inner, n_splits);
            let right = &packed[floats(tile.column - chunk.column)..];
            packed = &packed[floats(chunk.columns)..];
            // SAFETY: as above.
            unsafe { gemm::multiply_packed(size, out, left, right, n_splits, scratch) };
        }
    }
}

/// How large tiles of a result are.
#[derive(Clone, Copy)]
struct TileSize {
    rows: usize,
    columns: usize,
}

impl TileSize {
    const fn new(rows: usize, columns: usize) -> Self {
        Self { rows, columns }
    }

    /// Halves the longer side until a result of this size has enough tiles, but not below
    /// [`SMALLEST_SIDE`].
    fn fitted(self, rows: usize, columns: usize, enough: usize) -> Self {
        let whole = |side: usize| side.max(1).next_multiple_of(gemm::PANEL);
        let mut tile = Self::new(self.rows.min(whole(rows)), self.columns.min(whole(columns)));
        while rows.div_ceil(tile.rows) * columns.div_ceil(tile.columns) < enough {
            let longer = if tile.rows > tile.columns { &mut tile.rows } else { &mut tile.columns };
            if *longer <= SMALLEST_SIDE {
                break;
            }
            *longer = whole(longer.div_ceil(2));
        }
        tile
    }
}
