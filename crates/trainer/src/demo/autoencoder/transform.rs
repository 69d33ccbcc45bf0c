//! Blocks of pixels as few numbers: the directions in which blocks of the demo's images differ
//! most (Pearson, "On lines and planes of closest fit to systems of points in space", 1901), found
//! by Jacobi's rotations.

use super::{BLOCK, LATENT};
use crate::sample::Image;

/// Numbers of a block: three colours of its pixels.
pub const BLOCK_VALUES: usize = 3 * BLOCK * BLOCK;

/// How much of a direction's deviation is taken off its numbers. Chosen: with all of it, what is
/// hardly seen would be as loud to the model as what makes the image; with none, it would drown in
/// the noise that images are drawn from.
const WHITENING: f64 = 0.7;

/// A block to a latent's pixel: gain · (direction · (block - mean)) for each channel.
pub struct BlockTransform {
    /// The block that all others are compared with.
    pub mean: Vec<f64>,
    /// A direction for each channel, the one with the largest deviation first.
    pub directions: Vec<Vec<f64>>,
    /// What brings channels to deviations near 1.
    pub gains: Vec<f64>,
}

impl BlockTransform {
    /// That of some images.
    pub fn fit(images: &[Image]) -> Self {
        let blocks: Vec<Vec<f32>> = images.iter().flat_map(blocks).collect();
        let count = blocks.len() as f64;
        let mut mean = vec![0.0; BLOCK_VALUES];
        let mut covariance = vec![vec![0.0; BLOCK_VALUES]; BLOCK_VALUES];
        for block in &blocks {
            for (row, a) in block.iter().enumerate() {
                mean[row] += f64::from(*a) / count;
                for (column, b) in block.iter().enumerate() {
                    covariance[row][column] += f64::from(*a) * f64::from(*b) / count;
                }
            }
        }
        for row in 0..BLOCK_VALUES {
            for column in 0..BLOCK_VALUES {
                covariance[row][column] -= mean[row] * mean[column];
            }
        }
        let mut found = directions(covariance);
        found.truncate(LATENT);
        let deviations = found.iter().map(|(variance, _)| variance.sqrt());
        let gains: Vec<f64> = deviations.map(|deviation| deviation.powf(-WHITENING)).collect();
        let variances =
            found.iter().zip(&gains).map(|((variance, _), gain)| variance * gain * gain);
        let level = (variances.sum::<f64>() / LATENT as f64).sqrt();
        let gains = gains.into_iter().map(|gain| gain / level).collect();
        let directions = found.into_iter().map(|(_, direction)| direction).collect();
        Self { mean, directions, gains }
    }

    /// An image's latent, pixel by pixel: [pixels, channels].
    pub fn latent(&self, image: &Image) -> Vec<f32> {
        let channel = |block: &[f32], channel: usize| {
            let terms = self.directions[channel].iter().zip(block).zip(&self.mean);
            let sum: f64 = terms.map(|((d, x), mean)| d * (f64::from(*x) - mean)).sum();
            (self.gains[channel] * sum) as f32
        };
        let pixel = |block: Vec<f32>| -> Vec<f32> {
            (0..LATENT).map(|index| channel(&block, index)).collect()
        };
        blocks(image).flat_map(pixel).collect()
    }
}

/// An image's blocks, row by row, each colour after the other, -1 to 1.
fn blocks(image: &Image) -> impl Iterator<Item = Vec<f32>> {
    let [width, height] = image.size;
    let number = move |block: usize, at: usize| {
        let (colour, row, column) = (at / (BLOCK * BLOCK), at / BLOCK % BLOCK, at % BLOCK);
        let across = width / BLOCK;
        let (row, column) = (block / across * BLOCK + row, block % across * BLOCK + column);
        image.values[(colour * height + row) * width + column] * 2.0 - 1.0
    };
    let n_blocks = width / BLOCK * (height / BLOCK);
    (0..n_blocks).map(move |block| (0..BLOCK_VALUES).map(|at| number(block, at)).collect())
}

/// Rotations until nothing is left beside the diagonal. Chosen: ten rounds over all pairs are more
/// than any matrix of this size was seen to need.
const ROUNDS: usize = 10;

/// Eigenvalues of a symmetric matrix with their directions, the largest first.
fn directions(mut matrix: Vec<Vec<f64>>) -> Vec<(f64, Vec<f64>)> {
    let size = matrix.len();
    let unit = |row| (0..size).map(|column| f64::from(u8::from(row == column))).collect();
    let mut turned: Vec<Vec<f64>> = (0..size).map(unit).collect();
    for _ in 0..ROUNDS {
        for p in 0..size {
            for q in p + 1..size {
                rotate(&mut matrix, &mut turned, p, q);
            }
        }
    }
    let direction = |index: usize| {
        let direction: Vec<f64> = turned.iter().map(|row| row[index]).collect();
        // Either sign would do; always the same one makes the same model.
        let sign = direction.iter().sum::<f64>().signum();
        direction.into_iter().map(|number| sign * number).collect()
    };
    let mut found: Vec<_> =
        (0..size).map(|index| (matrix[index][index], direction(index))).collect();
    found.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    found
}

/// Turns the plane of two axes so that they are no longer mixed.
fn rotate(matrix: &mut [Vec<f64>], turned: &mut [Vec<f64>], p: usize, q: usize) {
    if matrix[p][q] == 0.0 {
        return;
    }
    let angle = (matrix[q][q] - matrix[p][p]) / (2.0 * matrix[p][q]);
    let tangent = angle.signum() / (angle.abs() + angle.hypot(1.0));
    let cos = 1.0 / tangent.hypot(1.0);
    let sin = tangent * cos;
    let turn = |row: &mut Vec<f64>| {
        (row[p], row[q]) = (cos * row[p] - sin * row[q], sin * row[p] + cos * row[q]);
    };
    matrix.iter_mut().for_each(turn);
    let (upper, lower) = matrix.split_at_mut(q);
    for (a, b) in upper[p].iter_mut().zip(&mut lower[0]) {
        (*a, *b) = (cos * *a - sin * *b, sin * *a + cos * *b);
    }
    turned.iter_mut().for_each(turn);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_are_those_of_a_known_matrix() {
        // Of 2 on the diagonal and 1 beside it the eigenvalues are 2 + 2 cos(k·π / 4).
        let matrix = vec![vec![2.0, 1.0, 0.0], vec![1.0, 2.0, 1.0], vec![0.0, 1.0, 2.0]];
        let found = directions(matrix.clone());
        for ((value, direction), expected) in
            found.iter().zip([2.0 + 2f64.sqrt(), 2.0, 2.0 - 2f64.sqrt()])
        {
            assert!((value - expected).abs() < 1e-12, "{value}");
            for (row, own) in matrix.iter().zip(direction) {
                let projection: f64 = row.iter().zip(direction).map(|(a, b)| a * b).sum();
                assert!((projection - value * own).abs() < 1e-12, "{projection}");
            }
        }
    }
}
