//! Resizes an image to its bucket: scaled until it covers the bucket, cropped, then converted to floats.

use super::bucket::Bucket;
use crate::pixels::{Filter, Pixels, scale};

/// Which part of an image is kept by a crop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Crop {
    /// The middle.
    Centre,
    /// From left or top, at 0, to right or bottom, at 1.
    At {
        /// Across.
        x: f32,
        /// Down.
        y: f32,
    },
}

/// Scales and cuts. Every pixel of the bucket is one of the image; its aspect is kept, but for
/// rounding the scaled sides to whole pixels.
pub fn resize_and_crop(pixels: Pixels, bucket: Bucket, crop: Crop) -> Pixels {
    let size = [bucket.width as u32, bucket.height as u32];
    let at = match crop {
        Crop::Centre => [0.5, 0.5],
        Crop::At { x, y } => [x, y],
    };
    let pixels = shortened(pixels, size, at);
    let covering = covering([pixels.width, pixels.height], size);
    let scaled = scale(pixels, covering, Filter::Lanczos);
    if covering == size { scaled } else { cut(&scaled, at, size) }
}

/// Bytes at the peak of scaling an image to a size: its own, those between its two passes, and the result.
pub(super) fn scaling_bytes(size: [u32; 2], to: [u32; 2]) -> usize {
    let area = |[width, height]: [u32; 2]| width as usize * height as usize;
    let shorter = shortened_size(size, to);
    let copied = if shorter == size { 0 } else { area(shorter) };
    let covering = covering(shorter, to);
    // Scaled in one direction: rows of floats with an alpha channel, or columns of bytes.
    let between = (16 * area([shorter[0], covering[1]])).max(3 * area([covering[0], shorter[1]]));
    3 * (area(size) + copied + 2 * area(covering)) + between
}

/// As [3, height, width] from -1 to 1, mirrored left to right if asked.
pub fn to_chw(pixels: &Pixels, flip: bool) -> Vec<f32> {
    frames_to_chw(std::slice::from_ref(pixels), flip)
}

/// The frames of a clip as [3, frames, height, width], in the same way.
pub fn frames_to_chw(frames: &[Pixels], flip: bool) -> Vec<f32> {
    let mut numbers = Vec::with_capacity(frames.iter().map(|frame| frame.rgb.len()).sum());
    for colour in 0..3 {
        for frame in frames {
            add_colour(frame, colour, flip, &mut numbers);
        }
    }
    numbers
}

fn add_colour(pixels: &Pixels, colour: usize, flip: bool, numbers: &mut Vec<f32>) {
    let row_bytes = pixels.width as usize * 3;
    for row in pixels.rgb.chunks_exact(row_bytes.max(1)) {
        let number = |pixel: &[u8]| f32::from(pixel[colour]) / 127.5 - 1.0;
        let pixels = row.chunks_exact(3);
        if flip {
            numbers.extend(pixels.rev().map(number));
        } else {
            numbers.extend(pixels.map(number));
        }
    }
}

/// The smallest size of the image's aspect that covers another. The side that decides is met
/// exactly; the other is rounded, and never below.
fn covering(from: [u32; 2], [width, height]: [u32; 2]) -> [u32; 2] {
    let [from_width, from_height] = from.map(u64::from);
    let [to_width, to_height] = [u64::from(width), u64::from(height)];
    let divided = |value: u64, by: u64| ((value + by / 2) / by.max(1)) as u32;
    if to_width * from_height >= to_height * from_width {
        [width, divided(from_height * to_width, from_width).max(height)]
    } else {
        [divided(from_width * to_height, from_height).max(width), height]
    }
}

/// How many times longer than its bucket a scaled image may be. Chosen: beyond any usual image.
const LONGEST: u32 = 4;

/// Crops an extreme aspect before scaling: an image 64 pixels wide and 65535 high would take more than a
/// gigabyte to scale. The crop has the same fraction before and after scaling, so that the same part stays.
pub(super) fn shortened(pixels: Pixels, to: [u32; 2], at: [f32; 2]) -> Pixels {
    let from = [pixels.width, pixels.height];
    let size = shortened_size(from, to);
    if size == from { pixels } else { cut(&pixels, at, size) }
}

fn shortened_size(from: [u32; 2], [width, height]: [u32; 2]) -> [u32; 2] {
    let covering = covering(from, [width, height]);
    let within = |from: u32, to: u32, bucket: u32| {
        let most = u64::from(from) * u64::from(LONGEST * bucket) / u64::from(to.max(1));
        if to / LONGEST > bucket { (most as u32).clamp(1, from) } else { from }
    };
    [within(from[0], covering[0], width), within(from[1], covering[1], height)]
}

/// Crops to a size, at a fraction of the excess. A fraction out of range, or NaN, is clamped.
fn cut(pixels: &Pixels, [x, y]: [f32; 2], size: [u32; 2]) -> Pixels {
    let place = |excess: u32, share: f32| (excess as f32 * share.clamp(0.0, 1.0)).round() as usize;
    let [width, height] = size;
    cut_at(pixels, [place(pixels.width - width, x), place(pixels.height - height, y)], size)
}

/// The middle of an image that is at least as large; of an odd excess the larger part is lost at the right and below.
pub(super) fn cut_middle(pixels: &Pixels, [width, height]: [u32; 2]) -> Pixels {
    let excess = [pixels.width - width, pixels.height - height];
    cut_at(pixels, excess.map(|excess| (excess / 2) as usize), [width, height])
}

fn cut_at(pixels: &Pixels, [left, top]: [usize; 2], [width, height]: [u32; 2]) -> Pixels {
    let rows = pixels.rgb.chunks_exact(pixels.width as usize * 3);
    let row = |row: &[u8]| row[left * 3..(left + width as usize) * 3].to_vec();
    let rgb = rows.skip(top).take(height as usize).flat_map(row).collect();
    Pixels { width, height, rgb }
}
