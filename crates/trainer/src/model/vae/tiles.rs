//! Tiled VAE decoding: overlapping tiles, blended where they meet, so that memory depends on the tile and
//! not on the image. Norms and attention see one tile only, so that colours may differ slightly; used when
//! the whole does not fit.

use compute::Tape;

use super::VaeDecoder;
use crate::error::Result;
use crate::model::host::to_vec;

/// How a latent is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Side of a tile, in pixels of the latent.
    pub tile: usize,
    /// Pixels that neighbours share.
    pub overlap: usize,
}

impl Tiling {
    /// The first tile sizes to try, from large to small, each with a quarter of overlap. Chosen: 64
    /// is what models were trained on at the least; below 24 seams show.
    pub fn candidates() -> impl Iterator<Item = Self> {
        [96, 64, 48, 32, 24].into_iter().map(|tile| Self { tile, overlap: tile / 4 })
    }

    /// Where tiles begin along a side.
    fn starts(self, side: usize) -> Vec<usize> {
        let step = self.tile - self.overlap;
        let last = side.saturating_sub(self.tile);
        (0..last).step_by(step).chain([last]).collect()
    }
}

/// A latent [channels, height, width] and its sizes.
#[derive(Clone, Copy)]
pub struct LatentView<'a> {
    /// Its values, as the decoder takes them.
    pub values: &'a [f32],
    /// Channels, height, width.
    pub sizes: [usize; 3],
}

/// The image [3, height, width] of a latent, tile by tile; `reduction` pixels of it to one.
pub fn decode_tiled(
    tape: &Tape<'_>,
    decoder: &VaeDecoder,
    latent: LatentView<'_>,
    reduction: usize,
    tiling: Tiling,
) -> Result<Vec<f32>> {
    let [_, height, width] = latent.sizes;
    let (rows, columns) = (tiling.starts(height), tiling.starts(width));
    let mut canvas = Canvas::new(height * reduction, width * reduction);
    let is_meta = tape.device().is_meta();
    for top in rows {
        for left in &columns {
            let (tile, sizes) = crop_latent(latent, [top, *left], tiling.tile);
            let [channels, tile_height, tile_width] = sizes;
            let tile = tape.device().upload([1, channels, tile_height, tile_width], &tile)?;
            let image = decoder.forward(tape, &tile)?;
            // A dry run has no pixels to blend.
            if is_meta {
                continue;
            }
            canvas.add(
                &to_vec(image.tensor())?,
                [top, *left].map(|at| at * reduction),
                [tile_height, tile_width].map(|side| side * reduction),
                tiling.overlap * reduction,
            );
        }
    }
    Ok(if is_meta { canvas.sums } else { canvas.finish() })
}

fn crop_latent(
    latent: LatentView<'_>,
    [top, left]: [usize; 2],
    tile: usize,
) -> (Vec<f32>, [usize; 3]) {
    let [channels, height, width] = latent.sizes;
    let (rows, columns) = (tile.min(height - top), tile.min(width - left));
    let row = |index: usize| {
        let (channel, row) = (index / rows, index % rows);
        let first = (channel * height + top + row) * width + left;
        latent.values[first..first + columns].to_vec()
    };
    ((0..channels * rows).flat_map(row).collect(), [channels, rows, columns])
}

/// Sums of weighted tiles, and of the weights.
struct Canvas {
    height: usize,
    width: usize,
    sums: Vec<f32>,
    weights: Vec<f32>,
}

impl Canvas {
    fn new(height: usize, width: usize) -> Self {
        let pixels = height * width;
        Self { height, width, sums: vec![0.0; COLOURS * pixels], weights: vec![0.0; pixels] }
    }

    /// Adds a tile whose weight falls off towards its borders over `overlap` pixels. At the
    /// image's own border it does so too; there is nothing else there, so it does not matter.
    fn add(
        &mut self,
        tile: &[f32],
        [top, left]: [usize; 2],
        [rows, columns]: [usize; 2],
        overlap: usize,
    ) {
        let ramp = |at: usize, side: usize| {
            let distance = at.min(side - 1 - at) as f32 + 0.5;
            (distance / overlap.max(1) as f32).min(1.0)
        };
        for row in 0..rows {
            for column in 0..columns {
                let weight = ramp(row, rows) * ramp(column, columns);
                let at = (top + row) * self.width + left + column;
                self.weights[at] += weight;
                for colour in 0..COLOURS {
                    let from = (colour * rows + row) * columns + column;
                    self.sums[colour * self.height * self.width + at] += weight * tile[from];
                }
            }
        }
    }

    fn finish(mut self) -> Vec<f32> {
        for (index, sum) in self.sums.iter_mut().enumerate() {
            *sum /= self.weights[index % self.weights.len()];
        }
        self.sums
    }
}

const COLOURS: usize = 3;
