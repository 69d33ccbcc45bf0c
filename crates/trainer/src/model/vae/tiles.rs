//! Tiled VAE encoding and decoding: overlapping tiles, blended where they meet, so that memory depends on the tile and
//! not on the image or clip. Norms and attention see one tile only, so that colours may differ slightly; used when
//! the whole does not fit.
//!
//! Tiles of a clip are cut in time, too. A video VAE takes the first frame of what it sees for the first of a clip, one
//! frame to one latent frame, so of every later tile the first latent frame is computed and left out: neighbours share
//! at least that one. Where they are cut and how they are blended is diffusers', so that long clips have its latents.

use compute::{Device, Shape, Tape, Tensor};

use super::{VaeDecoder, VaeEncoder};
use crate::error::Result;
use crate::model::diffusion::vae::LatentShape;
use crate::model::host::to_vec;

/// How a latent is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Side of a tile, in pixels of the latent.
    pub tile: usize,
    /// Pixels that neighbours share.
    pub overlap: usize,
    /// Frames of a tile, in frames of the latent.
    pub frames: usize,
    /// Frames that neighbours share, one of which is left out.
    pub frame_overlap: usize,
}

impl Tiling {
    /// One tile as large as a latent is the latent.
    pub const WHOLE: Self =
        Self { tile: usize::MAX, overlap: 0, frames: usize::MAX, frame_overlap: 1 };

    /// The largest tiles of a latent: all of it, but for a long clip, which is always cut in time. Taken: diffusers, which
    /// cuts every one, so that memory and the time of the attention do not grow with its length.
    pub fn largest(latent: LatentShape) -> Self {
        if latent.frames > FRAMES {
            return Self { frames: FRAMES, frame_overlap: FRAME_OVERLAP, ..Self::WHOLE };
        }
        Self::WHOLE
    }

    /// The tilings to try for a latent after the largest, from large tiles to small ones, each with a quarter of overlap:
    /// those of which a tile is smaller than the latent.
    pub fn candidates(latent: LatentShape) -> impl Iterator<Item = Self> {
        let (most, longest) = (Self::largest(latent), latent.height.max(latent.width));
        let sides = SIDES.into_iter().filter(move |side| *side < longest);
        sides.map(move |tile| Self { tile, overlap: tile / 4, ..most })
    }
}

/// Sides of tiles. Chosen: 64 is what models were trained on at the least; below 24 seams show.
const SIDES: [usize; 5] = [96, 64, 48, 32, 24];
/// Latent frames of a tile, and how many neighbours share. Taken: diffusers' `AutoencoderKLHunyuanVideo`, which cuts
/// every clip into tiles of 17 frames, 12 apart.
const FRAMES: usize = 5;
const FRAME_OVERLAP: usize = 2;

/// How much larger images and clips are than their latents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VaeScale {
    /// Pixels per latent pixel, along a side.
    pub side: usize,
    /// Frames per latent frame after the first; 1 of a VAE of images.
    pub frames: usize,
}

impl VaeScale {
    /// No larger at all.
    pub const SAME: Self = Self { side: 1, frames: 1 };

    /// Frames of a clip whose latent has so many.
    fn clip_frames(self, latent_frames: usize) -> usize {
        (latent_frames - 1) * self.frames + 1
    }

    /// Frames of the latent of a clip of so many.
    pub fn latent_frames(self, frames: usize) -> usize {
        (frames.max(1) - 1) / self.frames + 1
    }

    /// The shape of a VAE's input or output: VAEs of images have no dimension for frames.
    pub fn batch(self, samples: usize, [channels, frames, height, width]: [usize; 4]) -> Shape {
        if self.frames > 1 {
            return Shape::new(&[samples, channels, frames, height, width]);
        }
        assert_eq!(frames, 1, "a VAE of images takes one frame");
        Shape::new(&[samples, channels, height, width])
    }
}

/// A latent [channels, frames, height, width] and its shape.
#[derive(Clone, Copy)]
pub struct LatentView<'a> {
    /// Its values, as the decoder takes them.
    pub values: &'a [f32],
    /// Its shape.
    pub shape: LatentShape,
}

/// The image or clip [3, frames, height, width] of a latent, tile by tile.
pub fn decode_tiled(
    tape: &Tape<'_>,
    decoder: &VaeDecoder,
    latent: LatentView<'_>,
    tiling: Tiling,
) -> Result<Vec<f32>> {
    let scale = decoder.scale();
    let source = Volume::of_latent(latent);
    let [frames, rows, columns] = axes(tiling, latent.shape, scale, BlendTarget::Pixels);
    let mut canvas = Canvas::new(COLOURS, [&frames, &rows, &columns]);
    canvas.fill(tape.device(), [&frames, &rows, &columns], |tile| {
        let (values, sizes) = source.crop(tile.map(|axis| axis.latent));
        let tile = tape.device().upload(scale.batch(1, sizes), &values)?;
        Ok(decoder.forward(tape, &tile)?.into_tensor())
    })?;
    Ok(canvas.values)
}

/// The moments of the latent of an image or clip [3, frames, height, width], tile by tile, the largest if none are given:
/// means, then log variances.
pub fn encode_tiled(
    tape: &Tape<'_>,
    encoder: &VaeEncoder,
    pixels: &[f32],
    [frames, height, width]: [usize; 3],
    tiling: Option<Tiling>,
) -> Result<(Vec<f32>, LatentShape)> {
    let scale = encoder.scale();
    let shape = LatentShape {
        channels: encoder.latent_channels(),
        frames: scale.latent_frames(frames),
        height: height / scale.side,
        width: width / scale.side,
    };
    let tiling = tiling.unwrap_or(Tiling::largest(shape));
    let source = Volume { values: pixels, sizes: [COLOURS, frames, height, width] };
    let [frames, rows, columns] = axes(tiling, shape, scale, BlendTarget::Latent);
    let mut canvas = Canvas::new(2 * shape.channels, [&frames, &rows, &columns]);
    canvas.fill(tape.device(), [&frames, &rows, &columns], |tile| {
        let (values, sizes) = source.crop(tile.map(|axis| axis.pixels));
        let tile = tape.device().upload(scale.batch(1, sizes), &values)?;
        Ok(encoder.forward(tape, &tile)?.into_tensor())
    })?;
    Ok((canvas.values, shape))
}

/// First and number along an axis.
type Span = [usize; 2];

/// A tile along one axis.
struct AxisTile {
    latent: Span,
    pixels: Span,
    /// Where it begins in the result, and what each of its values there counts. Those of all tiles add up to 1.
    begin: usize,
    weights: Vec<f32>,
}

/// What tiles are blended to.
#[derive(Clone, Copy, PartialEq)]
enum BlendTarget {
    Pixels,
    Latent,
}

/// The tiles along frames, rows and columns.
fn axes(
    tiling: Tiling,
    shape: LatentShape,
    scale: VaeScale,
    target: BlendTarget,
) -> [Vec<AxisTile>; 3] {
    let factor = |factor: usize| if target == BlendTarget::Pixels { factor } else { 1 };
    let side = |n: usize| {
        let tiles = starts(n, tiling.tile, tiling.overlap).into_iter().map(|first| {
            let latent = [first, tiling.tile.min(n - first)];
            let pixels = latent.map(|at| at * scale.side);
            let [begin, length] = latent.map(|at| at * factor(scale.side));
            let weights = ramp(length, tiling.overlap * factor(scale.side));
            AxisTile { latent, pixels, begin, weights }
        });
        normalised(tiles.collect())
    };
    let shared = tiling.frame_overlap.max(1);
    let fade = (shared - 1) * factor(scale.frames);
    let starts = frame_starts(shape.frames, tiling.frames, shared);
    let tiles = starts.iter().enumerate().map(|(index, first)| {
        let n = tiling.frames.min(shape.frames - first);
        let (clip, latent) = ([first * scale.frames, scale.clip_frames(n)], [*first, n]);
        let [begin, length] = if target == BlendTarget::Pixels { clip } else { latent };
        let next = starts.get(index + 1).map(|next| (next - first) * factor(scale.frames));
        let weights = frame_weights(length, *first > 0, next, fade);
        AxisTile { latent, pixels: clip, begin, weights }
    });
    [tiles.collect(), side(shape.height), side(shape.width)]
}

/// Where tiles begin in time: at even distances, so that the last may be shorter, but has more than the frame that is left
/// out.
fn frame_starts(n: usize, tile: usize, shared: usize) -> Vec<usize> {
    let later = (0..n.saturating_sub(1)).step_by(tile.saturating_sub(shared).max(1)).skip(1);
    std::iter::once(0).chain(later).collect()
}

/// What the frames of a tile count: from the first that is not left out they fade in over `fade` frames, and out where the
/// tile that begins at `next` fades in.
fn frame_weights(length: usize, is_later: bool, next: Option<usize>, fade: usize) -> Vec<f32> {
    let faded = |at: usize| if at < fade { at as f32 / fade as f32 } else { 1.0 };
    let fade_in = |at: usize| match at.checked_sub(1) {
        _ if !is_later => 1.0,
        Some(at) => faded(at),
        None => 0.0,
    };
    let fade_out = |at: usize| {
        let shared = next.and_then(|next| at.checked_sub(next + 1));
        1.0 - shared.map_or(0.0, faded)
    };
    (0..length).map(|at| fade_in(at) * fade_out(at)).collect()
}

/// Where tiles begin along an axis.
fn starts(length: usize, tile: usize, overlap: usize) -> Vec<usize> {
    let last = length.saturating_sub(tile);
    (0..last).step_by(tile - overlap).chain([last]).collect()
}

/// Weights that fall off towards both ends over `overlap` values. They do so at the ends of the whole, too; there is
/// nothing else there, so it does not matter.
fn ramp(length: usize, overlap: usize) -> Vec<f32> {
    let weight = |at: usize| {
        let distance = at.min(length - 1 - at) as f32 + 0.5;
        (distance / overlap.max(1) as f32).min(1.0)
    };
    (0..length).map(weight).collect()
}

/// Weights of all tiles at a place add up to 1.
fn normalised(mut tiles: Vec<AxisTile>) -> Vec<AxisTile> {
    let end = tiles.last().map_or(0, |tile| tile.begin + tile.weights.len());
    let mut totals = vec![0.0; end];
    for tile in &tiles {
        for (total, weight) in totals[tile.begin..].iter_mut().zip(&tile.weights) {
            *total += weight;
        }
    }
    for tile in &mut tiles {
        for (total, weight) in totals[tile.begin..].iter().zip(&mut tile.weights) {
            *weight /= total;
        }
    }
    tiles
}

/// Values [channels, frames, height, width].
#[derive(Clone, Copy)]
struct Volume<'a> {
    values: &'a [f32],
    sizes: [usize; 4],
}

impl<'a> Volume<'a> {
    fn of_latent(LatentView { values, shape }: LatentView<'a>) -> Self {
        let LatentShape { channels, frames, height, width } = shape;
        Self { values, sizes: [channels, frames, height, width] }
    }

    /// A part of it, of all channels, and its sizes.
    fn crop(&self, [frames, rows, columns]: [Span; 3]) -> (Vec<f32>, [usize; 4]) {
        let [channels, all_frames, height, width] = self.sizes;
        let sizes = [channels, frames[1], rows[1], columns[1]];
        let mut part = Vec::with_capacity(sizes.iter().product());
        for frame in (0..channels * frames[1])
            .map(|at| at / frames[1] * all_frames + frames[0] + at % frames[1])
        {
            for row in rows[0]..rows[0] + rows[1] {
                let first = (frame * height + row) * width + columns[0];
                part.extend_from_slice(&self.values[first..first + columns[1]]);
            }
        }
        (part, sizes)
    }
}

/// Sums of weighted tiles, [channels, frames, height, width].
struct Canvas {
    channels: usize,
    sizes: [usize; 3],
    values: Vec<f32>,
}

impl Canvas {
    fn new(channels: usize, axes: [&[AxisTile]; 3]) -> Self {
        let end =
            |tiles: &[AxisTile]| tiles.last().map_or(0, |tile| tile.begin + tile.weights.len());
        let [frames, height, width] = axes.map(end);
        let values = vec![0.0; channels * frames * height * width];
        Self { channels, sizes: [frames, height, width], values }
    }

    /// Computes every tile and adds it. A dry run has no values to blend, and computes one of each size: the last in time
    /// may be shorter.
    fn fill(
        &mut self,
        device: &Device,
        [frames, rows, columns]: [&[AxisTile]; 3],
        compute: impl Fn([&AxisTile; 3]) -> Result<Tensor>,
    ) -> Result<()> {
        if device.is_meta() {
            for alike in frames.chunk_by(|a, b| a.latent[1] == b.latent[1]) {
                let before = device.work();
                compute([&alike[0], &rows[0], &columns[0]])?;
                device.repeat_work(&before, (alike.len() * rows.len() * columns.len() - 1) as u64);
            }
            return Ok(());
        }
        for frame in frames {
            for row in rows {
                for column in columns {
                    let tile = [frame, row, column];
                    self.add(&to_vec(&compute(tile)?)?, tile);
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, values: &[f32], [frames, rows, columns]: [&AxisTile; 3]) {
        let [n_frames, n_rows, n_columns] = [frames, rows, columns].map(|axis| axis.weights.len());
        let [all_frames, height, width] = self.sizes;
        for (index, line) in values.chunks_exact(n_columns).enumerate() {
            let (channel, row) = (index / n_rows / n_frames, index % n_rows);
            let frame = index / n_rows % n_frames;
            let weight = frames.weights[frame] * rows.weights[row];
            let plane = (channel * all_frames + frames.begin + frame) * height;
            let first = (plane + rows.begin + row) * width + columns.begin;
            let sums = &mut self.values[first..first + n_columns];
            for ((sum, value), across) in sums.iter_mut().zip(line).zip(&columns.weights) {
                *sum += weight * across * value;
            }
        }
        debug_assert_eq!(values.len(), self.channels * n_frames * n_rows * n_columns);
    }
}

const COLOURS: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    const CLIP: VaeScale = VaeScale { side: 8, frames: 4 };

    fn latent(frames: usize, height: usize, width: usize) -> LatentShape {
        LatentShape { frames, ..LatentShape::image(16, height, width) }
    }

    #[test]
    fn weights_add_up_to_one_and_first_frames_are_left_out() {
        let tiling = Tiling { tile: 6, overlap: 2, frames: 5, frame_overlap: 2 };
        for target in [BlendTarget::Pixels, BlendTarget::Latent] {
            let axes = axes(tiling, latent(9, 11, 4), CLIP, target);
            for tiles in &axes {
                let end = tiles.last().map(|tile| tile.begin + tile.weights.len()).unwrap();
                let at = |place: usize, tile: &AxisTile| {
                    let place = place.checked_sub(tile.begin)?;
                    tile.weights.get(place).copied()
                };
                for place in 0..end {
                    let total: f32 = tiles.iter().filter_map(|tile| at(place, tile)).sum();
                    assert!((total - 1.0).abs() < 1e-6, "{place}: {total}");
                }
            }
            let frames: Vec<_> = axes[0].iter().map(|tile| (tile.latent, tile.pixels)).collect();
            let expected = [([0, 5], [0, 17]), ([3, 5], [12, 17]), ([6, 3], [24, 9])];
            assert_eq!(frames, expected);
            let first: Vec<f32> = axes[0].iter().map(|tile| tile.weights[0]).collect();
            assert!(first[0] == 1.0 && first[1..] == [0.0; 2], "{first:?}");
        }
    }

    #[test]
    fn a_latent_that_is_smaller_than_a_tile_is_not_cut() {
        let all = |shape| -> Vec<[usize; 2]> {
            let tilings = std::iter::once(Tiling::largest(shape)).chain(Tiling::candidates(shape));
            tilings.map(|it| [it.tile, it.frames]).collect()
        };
        let whole = usize::MAX;
        assert_eq!(all(latent(1, 24, 16)), [[whole, whole]]);
        assert_eq!(all(latent(1, 40, 16)), [[whole, whole], [32, whole], [24, whole]]);
        assert_eq!(all(latent(5, 16, 25)), [[whole, whole], [24, whole]]);
        assert_eq!(all(latent(6, 16, 25)), [[whole, 5], [24, 5]]);
    }

    #[test]
    fn a_part_of_a_clip_has_its_rows_of_every_frame_and_channel() {
        let values: Vec<f32> = (0..2 * 3 * 2 * 4).map(|at| at as f32).collect();
        let volume = Volume { values: &values, sizes: [2, 3, 2, 4] };
        let (part, sizes) = volume.crop([[1, 2], [1, 1], [2, 2]]);
        assert_eq!(sizes, [2, 2, 1, 2]);
        assert_eq!(part, [14.0, 15.0, 22.0, 23.0, 38.0, 39.0, 46.0, 47.0]);
    }
}
