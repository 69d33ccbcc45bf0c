//! Matrix products on the processor, with everything that is done to their result while it is still
//! in the cache. The output is cut into tiles; each is one task for one thread.
#![allow(unsafe_code)]

use super::{Data, MatMul, Matrix, Product};
use crate::cpu::gemm::{self, Grid, Way};
use crate::cpu::rows::{load, store};
use crate::cpu::{Cpu, Room, Shared};
use crate::dtype::{Real, with_real};
use crate::ops::Activation;
use crate::{Dtype, Tensor};

/// Rows and columns of a tile, at most, for the matrix unit and for vectors. The left factor is laid out
/// anew for every tile of a row of them, so tiles for the unit are wide; a wider one's sums would leave
/// the second level of the cache. In tests small matrices must have several tiles too.
const UNIT_TILE: (usize, usize) = if cfg!(test) { (64, 64) } else { (256, 1024) };
const VECTOR_TILE: (usize, usize) = if cfg!(test) { (96, 32) } else { (512, 256) };
/// Enough tiles for the threads to share, if the matrix is large enough to be cut. What vectors give
/// may depend on how it is cut, so that must not depend on the threads; the matrix unit sums in the
/// same order wherever a tile begins.
const ENOUGH_TILES: usize = 16;
const TILES_PER_THREAD: usize = 4;
const SMALLEST_SIDE: usize = 64;
/// Floats of right factors that are laid out at a time for all threads: 12 MiB, enough for whole tiles
/// of the usual depths.
const LAID_OUT: usize = if cfg!(test) { 1 << 13 } else { 3 << 20 };
/// Results with fewer rows or columns than this are left to vectors: laying out the long factor would
/// take longer than multiplying it.
const ENOUGH_FOR_UNIT: usize = 32;
/// The same where both factors are f32, of which laying out makes three numbers each. Measured with
/// `bench models`, 2 cores of a Xeon, 2026-11-15, processes in turn: T5 (256 rows) took 0.74 of the
/// unit's time with vectors, the autoencoder (128 to 512 rows) 0.78, CLIP (77 rows) as long.
const ENOUGH_FOR_UNIT_F32: usize = if cfg!(test) { 48 } else { 512 };

/// Results with fewer rows or columns than this take as long as reading the long factor does. Chosen:
/// twice a panel; most adapters are narrower, layers are not.
pub(super) const NARROW: usize = 64;

/// How products are cut up.
pub struct Plan {
    way: Way,
    tile: (usize, usize),
    /// Columns whose right factors are laid out at a time.
    chunk: usize,
    /// Floats that takes.
    shared: usize,
    /// Floats of room for each thread, and how many there are.
    own: usize,
    threads: usize,
}

impl Plan {
    pub fn new(work: &MatMul<'_>, threads: usize, has_tiles: bool) -> Self {
        let (rows, columns) = (work.rows(), work.columns());
        let is_f32 = |matrix: Matrix<'_>| matrix.tensor().dtype() == Dtype::F32;
        let goes_aside = work.out.dtype() != Dtype::F32;
        let is_split = |matrix: Matrix<'_>| is_f32(matrix) && matrix.parts > 1;
        let all_split = work.products.iter().all(|p| is_split(p.left) && is_split(p.right));
        let enough = if all_split { ENOUGH_FOR_UNIT_F32 } else { ENOUGH_FOR_UNIT };
        if !has_tiles || rows.min(columns) < enough {
            let tile = tile_size(VECTOR_TILE, (rows, columns), ENOUGH_TILES);
            let widens = work.products.iter().any(|p| !is_f32(p.left) || !is_f32(p.right));
            let sums = if goes_aside { tile.0 * tile.1 } else { 0 };
            let own = if widens { gemm::ROOM } else { 0 } + sums;
            return Self { way: Way::Vectors, tile, chunk: columns, shared: 0, own, threads };
        }
        let tile = tile_size(UNIT_TILE, (rows, columns), TILES_PER_THREAD * threads);
        let panel: usize = work.products.iter().map(|p| laid_out(p, gemm::PANEL)).sum();
        let panels = columns.div_ceil(gemm::PANEL).min((LAID_OUT / panel.max(1)).max(1));
        let chunk = columns.min((panels * gemm::PANEL / tile.1).max(1) * tile.1);
        let shared = work.products.iter().map(|p| laid_out(p, chunk)).sum();
        let own = gemm::LEFT_ROOM + if goes_aside { tile.0 * tile.1 } else { 0 };
        Self { way: Way::Tiles, tile, chunk, shared, own, threads }
    }

    /// What it is called in the tally: kinds of products whose time grows alike.
    pub fn kernel(&self, work: &MatMul<'_>) -> &'static str {
        let (rows, columns) = (work.rows(), work.columns());
        let is_activated = work.activation != Activation::None;
        match self.way {
            Way::Tiles if rows.min(columns) < NARROW => "narrow product by tiles",
            Way::Tiles if is_activated => "activated product by tiles",
            Way::Tiles => "product by tiles",
            Way::Vectors if rows < NARROW => "product of few rows",
            Way::Vectors if columns < NARROW => "product of few columns",
            Way::Vectors if is_activated => "activated product by vectors",
            Way::Vectors => "product by vectors",
        }
    }

    /// Floats of workspace.
    pub fn floats(&self) -> usize {
        self.shared + self.threads * self.own
    }
}

/// Floats that some columns of a right factor take when laid out.
fn laid_out(product: &Product<'_>, columns: usize) -> usize {
    gemm::laid_out_floats(columns, product.left.columns(), right_parts(product))
}

/// bf16 numbers that each of the right factor becomes on the matrix unit; a scale leaves more digits
/// than one has.
fn right_parts(product: &Product<'_>) -> usize {
    if product.scale == 1.0 { product.right.parts } else { 3 }
}

/// Computes the products.
pub fn multiply(cpu: &Cpu, plan: &Plan, work: MatMul<'_>, workspace: &mut [f32]) {
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
            parts: right_parts(product),
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
            onto: work.onto.map(Tensor::data::<T>),
            slope: work.slope.map(|slope| (slope.activation, slope.before.data::<T>())),
        };
        tiles.compute(cpu, plan, workspace);
    });
}

impl<'a> From<Matrix<'a>> for Grid<'a> {
    fn from(matrix: Matrix<'a>) -> Self {
        let (floats, width) = match matrix.data {
            Data::Dense(tensor) => (tensor.into(), tensor.shape().width()),
            Data::Quantised(quantised) => (quantised.floats(), quantised.shape().width()),
        };
        let grid = Grid { parts: matrix.parts, ..Grid::rows(floats, width) };
        if matrix.transposed { grid.t() } else { grid }
    }
}

#[derive(Clone, Copy)]
struct Factors<'a> {
    left: Grid<'a>,
    right: Grid<'a>,
    inner: usize,
    scale: f32,
    /// bf16 numbers that one of the right factor becomes for the matrix unit.
    parts: usize,
}

/// Right factors of some columns, as they are laid out for the matrix unit.
#[derive(Clone, Copy)]
struct Chunk<'a> {
    column: usize,
    columns: usize,
    /// Those of all products, one after the other; empty if vectors multiply.
    laid_out: &'a [f32],
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
    onto: Option<&'a [T]>,
    slope: Option<(Activation, &'a [T])>,
}

#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    column: usize,
    rows: usize,
    columns: usize,
}

impl<T: Real> Tiles<'_, T> {
    fn compute(&self, cpu: &Cpu, plan: &Plan, workspace: &mut [f32]) {
        let (shared, own) = workspace.split_at_mut(plan.shared);
        for column in (0..self.columns).step_by(plan.chunk) {
            let columns = plan.chunk.min(self.columns - column);
            if plan.way == Way::Tiles {
                self.lay_out(cpu, column, columns, shared);
            }
            let chunk = Chunk { column, columns, laid_out: shared };
            self.compute_chunk(cpu, plan, chunk, own);
        }
    }

    /// Right factors, one panel per task.
    fn lay_out(&self, cpu: &Cpu, first: usize, columns: usize, mut to: &mut [f32]) {
        for Factors { right, inner, scale, parts, .. } in self.products {
            let floats = gemm::laid_out_floats(columns, *inner, *parts);
            let (now, later) = std::mem::take(&mut to).split_at_mut(floats);
            to = later;
            cpu.samples(now, gemm::laid_out_floats(gemm::PANEL, *inner, *parts), |panel, to| {
                let column = panel * gemm::PANEL;
                let width = gemm::PANEL.min(columns - column);
                gemm::lay_out(right.beyond(0, first + column), *scale, width, *inner, to);
            });
        }
    }

    fn compute_chunk(&self, cpu: &Cpu, plan: &Plan, chunk: Chunk<'_>, workspace: &mut [f32]) {
        let (height, width) = plan.tile;
        let across = chunk.columns.div_ceil(width);
        let count = self.rows.div_ceil(height) * across;
        cpu.with_room(workspace, plan.own, count, |index, room| {
            let (row, within) = (index / across * height, index % across * width);
            let rows = height.min(self.rows - row);
            let columns = width.min(chunk.columns - within);
            let tile = Tile { row, column: chunk.column + within, rows, columns };
            if T::DTYPE == Dtype::F32 {
                self.tile_in_place(plan.way, tile, chunk, room.0);
            } else {
                self.tile_aside(plan.way, tile, chunk, room);
            }
        });
    }

    /// Sums go straight to the result, which is f32.
    fn tile_in_place(&self, way: Way, tile: Tile, chunk: Chunk<'_>, room: &mut [f32]) {
        let extent = (tile.rows - 1) * self.columns + tile.columns;
        let out = self.out.pointer(tile.row * self.columns + tile.column, extent).cast::<f32>();
        self.multiply(way, tile, chunk, (out, self.columns), room);
        for row in 0..tile.rows {
            let numbers = out.wrapping_add(row * self.columns);
            // SAFETY: a row of this tile within the result (checked by `pointer` above), which no
            // other task touches.
            let numbers = unsafe { std::slice::from_raw_parts_mut(numbers, tile.columns) };
            self.finish(tile, row, numbers);
        }
    }

    /// Sums are taken in f32 first, and rounded into the result.
    fn tile_aside(&self, way: Way, tile: Tile, chunk: Chunk<'_>, mut room: Room<'_>) {
        let sums = room.take(tile.rows * tile.columns);
        if self.add {
            for (row, sums) in sums.chunks_exact_mut(tile.columns).enumerate() {
                load(self.row_of(self.out, tile, row), sums);
            }
        }
        self.multiply(way, tile, chunk, (sums.as_mut_ptr(), tile.columns), room.0);
        for (row, sums) in sums.chunks_exact_mut(tile.columns).enumerate() {
            self.finish(tile, row, sums);
            store(sums, self.row_of(self.out, tile, row), false);
        }
    }

    /// What is done to a row of sums while it is at hand.
    #[inline(always)]
    fn finish(&self, tile: Tile, row: usize, numbers: &mut [f32]) {
        let at = (tile.row + row) * self.columns + tile.column;
        if let Some(bias) = self.bias {
            let bias = &bias[tile.column..tile.column + tile.columns];
            numbers.iter_mut().zip(bias).for_each(|(number, bias)| *number += bias);
        }
        if let Some(onto) = self.onto {
            numbers.iter_mut().zip(&onto[at..]).for_each(|(number, onto)| *number += onto.to_f32());
        }
        if let Some(before) = self.before {
            store(numbers, self.row_of(before, tile, row), false);
        }
        self.activation.apply(numbers);
        if let Some((activation, before)) = self.slope {
            let mut slopes = vec![0.0; tile.columns];
            load(&before[at..], &mut slopes);
            activation.apply_slope(&mut slopes);
            numbers.iter_mut().zip(&slopes).for_each(|(number, slope)| *number *= slope);
        }
    }

    #[inline(always)]
    fn row_of<'b>(&self, of: Shared<'b, T>, tile: Tile, row: usize) -> &'b mut [T] {
        let from = (tile.row + row) * self.columns + tile.column;
        // SAFETY: a row of this tile, which no other task touches, and which this one takes for
        // one loop over it at a time.
        unsafe { of.slice(from, tile.columns) }
    }

    /// All products for one tile, into `out` with its step between rows.
    fn multiply(
        &self,
        way: Way,
        tile: Tile,
        chunk: Chunk<'_>,
        out: (*mut f32, usize),
        room: &mut [f32],
    ) {
        let mut laid_out = chunk.laid_out;
        for (index, factors) in self.products.iter().enumerate() {
            let Factors { left, right, inner, scale, parts } = *factors;
            let (size, add) = ((tile.rows, tile.columns, inner), self.add || index > 0);
            let left = left.beyond(tile.row, 0);
            if way == Way::Vectors {
                let right = right.beyond(0, tile.column);
                // SAFETY: both callers give a block of this tile's size that no other task touches.
                unsafe { way.gemm_at(size, out, add, (left, right), scale, room) };
                continue;
            }
            let floats = |columns| gemm::laid_out_floats(columns, inner, parts);
            let right = &laid_out[floats(tile.column - chunk.column)..];
            laid_out = &laid_out[floats(chunk.columns)..];
            // SAFETY: as above.
            unsafe { gemm::multiply_laid_out(size, out, add, left, (right, parts), room) };
        }
    }
}

/// Halves the longer side until there are enough tiles, as far as that leaves them worth the effort.
fn tile_size(
    most: (usize, usize),
    (rows, columns): (usize, usize),
    enough: usize,
) -> (usize, usize) {
    let whole = |side: usize| side.max(1).next_multiple_of(gemm::PANEL);
    let (mut height, mut width) = (most.0.min(whole(rows)), most.1.min(whole(columns)));
    while rows.div_ceil(height) * columns.div_ceil(width) < enough {
        let longer = if height > width { &mut height } else { &mut width };
        if *longer <= SMALLEST_SIDE {
            break;
        }
        *longer = whole(longer.div_ceil(2));
    }
    (height, width)
}
