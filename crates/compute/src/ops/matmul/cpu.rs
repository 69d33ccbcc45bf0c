//! Matrix products on the processor, with everything that is done to their result while it is still
//! in the cache. The output is cut into tiles by its shape alone; each is one task for one thread.
#![allow(unsafe_code)]

use super::{MatMul, Matrix};
use crate::Dtype;
use crate::cpu::gemm::gemm_at;
use crate::cpu::grid::{Floats, Grid};
use crate::cpu::rows::{load, store};
use crate::cpu::{Cpu, Room, Shared};
use crate::dtype::{Real, with_real};
use crate::ops::Activation;

/// Rows and columns of a tile, at most. Measured with `bench ops` on 2 cores of a Xeon with AVX-512,
/// 2026-11-15: from 512 x 256 to 2048 x 512 differences drown in the machine's noise. In tests small
/// matrices must have several tiles too.
const TILE_ROWS: usize = if cfg!(test) { 32 } else { 512 };
const TILE_COLUMNS: usize = if cfg!(test) { 32 } else { 256 };
/// Inner length of the blocks that are widened to f32 at a time.
const DEPTH: usize = if cfg!(test) { 16 } else { 512 };
/// Enough tiles for the threads to share, if the matrix is large enough to be cut.
const ENOUGH_TILES: usize = 16;
const SMALLEST_SIDE: usize = 64;

const LEFT: usize = TILE_ROWS * DEPTH;
const RIGHT: usize = TILE_COLUMNS * DEPTH;
const SUMS: usize = TILE_ROWS * TILE_COLUMNS;

/// Floats of workspace for products whose operands or results are not all f32.
pub fn workspace_floats(threads: usize) -> usize {
    threads * (LEFT + RIGHT + SUMS)
}

/// Computes the products. `workspace` may be empty if all formats are f32.
pub fn multiply(cpu: &Cpu, work: MatMul<'_>, workspace: &mut [f32]) {
    let (rows, columns) = (work.rows(), work.columns());
    if rows * columns == 0 {
        return;
    }
    let products: Vec<_> = work
        .products
        .iter()
        .map(|product| Factors {
            left: Grid::from(product.left),
            right: Grid::from(product.right),
            inner: product.left.columns(),
            scale: product.scale,
        })
        .collect();
    with_real!(work.out.dtype(), T => {
        let tiles = Tiles {
            rows,
            columns,
            products: &products,
            bias: work.bias.map(|bias| &bias.data::<f32>()[..columns]),
            activation: work.activation,
            before: work.before_activation.map(|tensor| Shared::new(tensor.data_mut::<T>())),
            out: Shared::new(work.out.data_mut::<T>()),
            add: work.add,
        };
        tiles.compute(cpu, workspace);
    });
}

impl<'a> From<Matrix<'a>> for Grid<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        let width = matrix.tensor.shape().width();
        let data = Floats::from(matrix.tensor);
        let grid = Grid { data, start: 0, row_step: width, column_step: 1 };
        if matrix.transposed { grid.t() } else { grid }
    }
}

#[derive(Clone, Copy)]
struct Factors<'a> {
    left: Grid<'a>,
    right: Grid<'a>,
    inner: usize,
    scale: f32,
}

struct Tiles<'a, T> {
    rows: usize,
    columns: usize,
    products: &'a [Factors<'a>],
    bias: Option<&'a [f32]>,
    activation: Activation,
    before: Option<Shared<'a, T>>,
    out: Shared<'a, T>,
    add: bool,
}

#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
}

impl<T: Real> Tiles<'_, T> {
    fn compute(&self, cpu: &Cpu, workspace: &mut [f32]) {
        let (height, width) = tile_size(self.rows, self.columns);
        let across = self.columns.div_ceil(width);
        let count = self.rows.div_ceil(height) * across;
        let floats = if workspace.is_empty() { 0 } else { LEFT + RIGHT + SUMS };
        cpu.with_room(workspace, floats, count, |index, room| {
            let (row, column) = (index / across * height, index % across * width);
            let (rows, columns) = (height.min(self.rows - row), width.min(self.columns - column));
            let tile = Tile { row, column, rows, columns };
            if T::DTYPE == Dtype::F32 {
                self.tile_in_place(tile, room);
            } else {
                self.tile_aside(tile, room);
            }
        });
    }

    /// Sums go straight to the result, which is f32.
    fn tile_in_place(&self, tile: Tile, room: Room<'_>) {
        let extent = (tile.rows - 1) * self.columns + tile.columns;
        let out = self.out.pointer(tile.row * self.columns + tile.column, extent).cast::<f32>();
        self.multiply(tile, (out, self.columns), room);
        for row in 0..tile.rows {
            let numbers = out.wrapping_add(row * self.columns);
            // SAFETY: a row of this tile within the result (checked by `pointer` above), which no
            // other task touches.
            let numbers = unsafe { std::slice::from_raw_parts_mut(numbers, tile.columns) };
            self.finish(tile, row, numbers);
        }
    }

    /// Sums are taken in f32 first, and rounded into the result.
    fn tile_aside(&self, tile: Tile, mut room: Room<'_>) {
        let sums = room.take(tile.rows * tile.columns);
        if self.add {
            for (row, sums) in sums.chunks_exact_mut(tile.columns).enumerate() {
                load(self.row_of(self.out, tile, row), sums);
            }
        }
        self.multiply(tile, (sums.as_mut_ptr(), tile.columns), room);
        for (row, sums) in sums.chunks_exact_mut(tile.columns).enumerate() {
            self.finish(tile, row, sums);
            store(sums, self.row_of(self.out, tile, row), false);
        }
    }

    /// What is done to a row of sums while it is at hand.
    #[inline(always)]
    fn finish(&self, tile: Tile, row: usize, numbers: &mut [f32]) {
        if let Some(bias) = self.bias {
            let bias = &bias[tile.column..tile.column + tile.columns];
            numbers.iter_mut().zip(bias).for_each(|(number, bias)| *number += bias);
        }
        if let Some(before) = self.before {
            store(numbers, self.row_of(before, tile, row), false);
        }
        self.activation.apply(numbers);
    }

    #[inline(always)]
    fn row_of<'b>(&self, of: Shared<'b, T>, tile: Tile, row: usize) -> &'b mut [T] {
        let from = (tile.row + row) * self.columns + tile.column;
        // SAFETY: a row of this tile, which no other task touches, and which this one takes for
        // one loop over it at a time.
        unsafe { of.slice(from, tile.columns) }
    }

    /// All products for one tile, into `out` with its step between rows.
    fn multiply(&self, tile: Tile, out: (*mut f32, usize), mut room: Room<'_>) {
        let widens = !room.0.is_empty();
        let left = room.take(if widens { LEFT } else { 0 });
        let right = room.take(if widens { RIGHT } else { 0 });
        let mut add = self.add;
        for factors in self.products {
            let inner = factors.inner;
            let is_f32 = factors.left.is_f32() && factors.right.is_f32();
            let depth = if is_f32 { inner.max(1) } else { DEPTH };
            // An empty inner length still has to write its zeros.
            for from in (0..inner.max(1)).step_by(depth) {
                let depth = depth.min(inner - from);
                let a = factors.left.block((tile.row, tile.rows), (from, depth), left);
                let b = factors.right.block((from, depth), (tile.column, tile.columns), right);
                let size = (tile.rows, tile.columns, depth);
                // SAFETY: both callers give a block of this tile's size that no other task touches.
                unsafe { gemm_at(size, out, add, a, b, factors.scale) };
                add = true;
            }
        }
    }
}

/// Halves the longer side until there are enough tiles, as far as that leaves them worth the effort.
fn tile_size(rows: usize, columns: usize) -> (usize, usize) {
    let (mut height, mut width) = (TILE_ROWS.min(rows), TILE_COLUMNS.min(columns));
    while rows.div_ceil(height) * columns.div_ceil(width) < ENOUGH_TILES {
        let longer = if height > width { &mut height } else { &mut width };
        if *longer <= SMALLEST_SIDE {
            break;
        }
        *longer = longer.div_ceil(2).next_multiple_of(16);
    }
    (height, width)
}
