//! In which order the vision tower sees the patches of an image. Most of its blocks attend within windows. Windows at the
//! right and lower border may be smaller, so that there are up to four sizes. With all windows of a size one after the other,
//! those of a size are a batch, and attention needs neither padding nor a mask.
//!
//! transformers has windows from left to right and from top to bottom. The order is undone after the last block.

use std::ops::Range;

use super::processor::PatchGrid;

/// Windows of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowBatch {
    /// The tokens that they have together.
    pub tokens: Range<usize>,
    /// How many there are.
    pub n_windows: usize,
}

/// The order of an image's squares of merged patches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowOrder {
    /// The square at each place, counted along rows.
    pub squares: Vec<usize>,
    /// The windows, in patches.
    pub batches: Vec<WindowBatch>,
}

impl WindowOrder {
    /// Of an image of `grid` merged patches, with windows of `side` of them, each of which has `n_patches`.
    pub fn new(grid: PatchGrid, side: usize, n_patches: usize) -> Self {
        let (mut squares, mut batches) = (Vec::with_capacity(grid.len()), Vec::new());
        for rows in same_size(grid.rows, side) {
            for columns in same_size(grid.columns, side) {
                let first = squares.len();
                let mut n_windows = 0;
                for top in rows.clone().step_by(side) {
                    for left in columns.clone().step_by(side) {
                        let down = top..rows.end.min(top + side);
                        let right = left..columns.end.min(left + side);
                        let of_row =
                            |row| right.clone().map(move |column| row * grid.columns + column);
                        squares.extend(down.flat_map(of_row));
                        n_windows += 1;
                    }
                }
                let tokens = first * n_patches..squares.len() * n_patches;
                batches.push(WindowBatch { tokens, n_windows });
            }
        }
        Self { squares, batches }
    }

    /// Rows that were computed in this order, along rows of the image.
    pub fn undo(&self, values: &[f32]) -> Vec<f32> {
        let width = values.len() / self.squares.len().max(1);
        let mut undone = vec![0.0; values.len()];
        for (values, square) in values.chunks_exact(width.max(1)).zip(&self.squares) {
            undone[square * width..][..width].copy_from_slice(values);
        }
        undone
    }

    /// The values of all patches, put into this order.
    pub fn apply_to_values(&self, values: &[f32]) -> Vec<f32> {
        self.apply(values, values.len() / self.squares.len().max(1))
    }

    /// Blocks of `n` items for each square, put into this order.
    pub fn apply<T: Copy>(&self, items: &[T], n: usize) -> Vec<T> {
        let block = |square: &usize| items[square * n..][..n].iter().copied();
        self.squares.iter().flat_map(block).collect()
    }
}

/// Along one side, the part that is cut into whole windows, and the rest.
fn same_size(length: usize, side: usize) -> impl Iterator<Item = Range<usize>> {
    let whole = length / side * side;
    [0..whole, whole..length].into_iter().filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_a_size_follow_each_other() {
        let order = WindowOrder::new(PatchGrid { rows: 3, columns: 5 }, 2, 4);
        assert_eq!(order.squares, [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]);
        let batches: Vec<_> =
            order.batches.iter().map(|b| (b.tokens.clone(), b.n_windows)).collect();
        assert_eq!(batches, [(0..32, 2), (32..40, 1), (40..56, 2), (56..60, 1)]);
        let values: Vec<f32> = order.squares.iter().map(|square| *square as f32).collect();
        let expected: Vec<f32> = (0..15).map(|square| square as f32).collect();
        assert_eq!(order.undo(&values), expected);
        assert_eq!(order.apply(&expected, 1), values);
    }

    #[test]
    fn an_image_smaller_than_a_window_is_one() {
        let order = WindowOrder::new(PatchGrid { rows: 1, columns: 3 }, 4, 1);
        assert_eq!(order.squares, [0, 1, 2]);
        assert_eq!(order.batches, [WindowBatch { tokens: 0..3, n_windows: 1 }]);
    }
}
