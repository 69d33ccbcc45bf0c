//! A picture in the size of its bucket: scaled until it covers the bucket, the rest cut off, then
//! as numbers for a model.

use image::imageops::{self, FilterType};
use image::{ImageBuffer, Rgb};

use super::bucket::Bucket;
use super::decode::Pixels;

/// Which part of a picture stays, where it is longer than its bucket.
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

/// Scales and cuts. Every pixel of the bucket is one of the picture; its aspect is kept, but for
/// rounding the scaled sides to whole pixels.
pub fn fit(pixels: &Pixels, bucket: Bucket, crop: Crop) -> Pixels {
    let [width, height] = [bucket.width as u32, bucket.height as u32];
    let scaled = scale(pixels, covering(pixels, [width, height]));
    let (x, y) = match crop {
        Crop::Centre => (0.5, 0.5),
        Crop::At { x, y } => (x, y),
    };
    let left = place(scaled.width - width, x);
    let top = place(scaled.height - height, y);
    cut(&scaled, [left, top], [width, height])
}

/// As [3, height, width] from -1 to 1, mirrored left to right if asked.
pub fn to_numbers(pixels: &Pixels, flip: bool) -> Vec<f32> {
    let row_bytes = pixels.width as usize * 3;
    let mut numbers = Vec::with_capacity(pixels.rgb.len());
    for colour in 0..3 {
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
    numbers
}

/// The smallest size of the picture's aspect that covers another. The side that decides is met
/// exactly; the other is rounded, and never below.
fn covering(pixels: &Pixels, [width, height]: [u32; 2]) -> [u32; 2] {
    let [from_width, from_height] = [u64::from(pixels.width), u64::from(pixels.height)];
    let [to_width, to_height] = [u64::from(width), u64::from(height)];
    let rounded = |product: u64, by: u64| ((product + by / 2) / by.max(1)) as u32;
    if to_width * from_height >= to_height * from_width {
        [width, rounded(from_height * to_width, from_width).max(height)]
    } else {
        [rounded(from_width * to_height, from_height).max(width), height]
    }
}

/// By Lanczos, whose window grows with the factor, so that fine patterns do not turn into coarse
/// ones. On the bytes as they are and not on light, as every program does that models were trained
/// with.
pub(super) fn scale(pixels: &Pixels, [width, height]: [u32; 2]) -> Pixels {
    let same = [pixels.width, pixels.height] == [width, height];
    let view: Option<ImageBuffer<Rgb<u8>, &[u8]>> =
        ImageBuffer::from_raw(pixels.width, pixels.height, &pixels.rgb);
    match view {
        Some(view) if !same => {
            let rgb = imageops::resize(&view, width, height, FilterType::Lanczos3).into_raw();
            Pixels { width, height, rgb }
        }
        _ => pixels.clone(),
    }
}

/// How much of the excess is cut off in front. Out of range, or not a number, is the nearest end.
fn place(excess: u32, share: f32) -> u32 {
    (excess as f32 * share.clamp(0.0, 1.0)).round() as u32
}

fn cut(pixels: &Pixels, [left, top]: [u32; 2], [width, height]: [u32; 2]) -> Pixels {
    let rows = pixels.rgb.chunks_exact(pixels.width as usize * 3);
    let row = |row: &[u8]| row[left as usize * 3..(left + width) as usize * 3].to_vec();
    let rgb = rows.skip(top as usize).take(height as usize).flat_map(row).collect();
    Pixels { width, height, rgb }
}
