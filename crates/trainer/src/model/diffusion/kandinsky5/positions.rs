//! Where tokens are: a prompt's in a row, those of images and clips by frame, row and column.

use compute::ops::{RopeAxis, rope_table};
use compute::{Tape, Tensor};

use crate::error::Result;

/// θ of the rotary embedding.
const THETA: f64 = 10_000.0;

/// Image pixels along the side of a latent pixel, in the VAEs of both tasks.
const VAE_SCALE: usize = 8;

/// The sides of clips, in pixels, that count as standard definition.
const STANDARD_SIDES: std::ops::RangeInclusive<usize> = 480..=854;

/// By what positions are divided: frame, row, column. `size` is the height and width of latents.
pub fn scale_factor(is_video: bool, size: [usize; 2]) -> [f64; 3] {
    let is_standard = || size.iter().all(|side| STANDARD_SIDES.contains(&(side * VAE_SCALE)));
    match is_video {
        false => [1.0; 3],
        true if is_standard() => [1.0, 2.0, 2.0],
        true => [1.0, 3.16, 3.16],
    }
}

/// The rotary table of a prompt of so many tokens.
pub fn text_table(tape: &Tape<'_>, n: usize, head_dim: usize) -> Result<Tensor> {
    let places: Vec<f32> = (0..n).map(|at| at as f32).collect();
    let axes = [RopeAxis::new(head_dim, THETA)];
    Ok(tape.device().upload_with([n, head_dim], || rope_table(&axes, &places))?)
}

/// The rotary table of a grid of tokens: frames, rows, columns.
pub fn grid_table(
    tape: &Tape<'_>,
    grid: [usize; 3],
    axes_dims: [usize; 3],
    scale: [f64; 3],
) -> Result<Tensor> {
    let n = grid.iter().product();
    let sizes = [n, axes_dims.iter().sum()];
    Ok(tape.device().upload_with(sizes, || grid_values(grid, axes_dims, scale))?)
}

/// Angles of an axis are computed once, not for every token: a clip has 47,616 of them.
fn grid_values(grid: [usize; 3], axes_dims: [usize; 3], scale: [f64; 3]) -> Vec<f32> {
    let of_axis = |axis: usize| {
        let RopeAxis { mut frequencies } = RopeAxis::new(axes_dims[axis], THETA);
        for frequency in &mut frequencies {
            *frequency /= scale[axis];
        }
        let places: Vec<f32> = (0..grid[axis]).map(|at| at as f32).collect();
        rope_table(&[RopeAxis { frequencies }], &places)
    };
    let tables = [0, 1, 2].map(of_axis);
    let angles = |axis: usize, at: usize| &tables[axis][at * axes_dims[axis]..][..axes_dims[axis]];
    let [frames, rows, columns] = grid;
    let mut all = Vec::with_capacity(frames * rows * columns * axes_dims.iter().sum::<usize>());
    for frame in 0..frames {
        for row in 0..rows {
            for column in 0..columns {
                all.extend_from_slice(angles(0, frame));
                all.extend_from_slice(angles(1, row));
                all.extend_from_slice(angles(2, column));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As diffusers' `_get_scale_factor` says for these sizes in pixels.
    #[test]
    fn clips_have_a_scale_by_their_size() {
        for (height, width, expected) in [
            (512, 768, 2.0),
            (480, 848, 2.0),
            (480, 864, 3.16),
            (472, 768, 3.16),
            (1024, 1024, 3.16),
            (256, 256, 3.16),
        ] {
            let size = [height / 8, width / 8];
            assert_eq!(scale_factor(true, size), [1.0, expected, expected], "{height} {width}");
            assert_eq!(scale_factor(false, size), [1.0; 3]);
        }
    }

    #[test]
    fn a_token_has_the_angles_of_its_frame_row_and_column() {
        let (axes, scale) = ([4, 6, 2], [1.0, 2.0, 3.16]);
        let table = grid_values([2, 3, 2], axes, scale);
        // The last token.
        let last = &table[table.len() - 12..];
        let angle =
            |width: usize, pair: usize, at: f64| at * THETA.powf(-2.0 * pair as f64 / width as f64);
        let expected = [
            angle(4, 0, 1.0),
            angle(4, 1, 1.0),
            angle(6, 0, 1.0),
            angle(6, 1, 1.0),
            angle(6, 2, 1.0),
            angle(2, 0, 1.0 / 3.16),
        ];
        for (pair, expected) in last.chunks(2).zip(expected) {
            assert_eq!(pair, [expected.cos() as f32, expected.sin() as f32]);
        }
        assert_eq!(table.len(), 12 * 12);
    }
}
