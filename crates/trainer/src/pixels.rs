//! An image in memory as 8-bit RGB, and scaling it. On gamma-encoded bytes and not in linear light, as in the programs that
//! models were pretrained with.

use std::f64::consts::PI;
use std::ops::Range;

use image::imageops::FilterType;
use image::{DynamicImage, RgbImage};

/// An image in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// Red, green and blue of each pixel, row by row.
    pub rgb: Vec<u8>,
}

/// How pixels are interpolated; all with antialiasing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Lanczos of three lobes.
    Lanczos,
    /// The same to the bits of Pillow, with which pipelines scale reference images.
    PillowLanczos,
    /// Cubic with a = -0.5 (Catmull-Rom), to the same bits as Pillow, with which the image processors of text encoders
    /// scale.
    Bicubic,
}

/// Scales to width and height.
pub fn scale(pixels: Pixels, [width, height]: [u32; 2], filter: Filter) -> Pixels {
    if [pixels.width, pixels.height] == [width, height] {
        return pixels;
    }
    match filter {
        Filter::Lanczos => lanczos(pixels, [width, height]),
        Filter::PillowLanczos => pillow(&pixels, [width, height], LANCZOS),
        Filter::Bicubic => pillow(&pixels, [width, height], BICUBIC),
    }
}

fn lanczos(pixels: Pixels, [width, height]: [u32; 2]) -> Pixels {
    let image = RgbImage::from_raw(pixels.width, pixels.height, pixels.rgb);
    let image = image.expect("it has all of its pixels");
    // Not the generic function, which would be compiled here, for size, and not in its crate, for speed.
    let scaled = DynamicImage::from(image).resize_exact(width, height, FilterType::Lanczos3);
    Pixels { width, height, rgb: scaled.into_bytes() }
}

/// A kernel, and how far it reaches.
#[derive(Clone, Copy)]
struct Kernel {
    support: f64,
    weight: fn(f64) -> f64,
}

const LANCZOS: Kernel = Kernel { support: 3.0, weight: sinc };
const BICUBIC: Kernel = Kernel { support: 2.0, weight: cubic };

/// Columns first, then rows, with values of 8 bits between them: what overshoots is lost there, as in Pillow. From version
/// 13 on, Pillow scales rows first where that is less work, which differs by a few levels at sharp edges.
fn pillow(pixels: &Pixels, [width, height]: [u32; 2], kernel: Kernel) -> Pixels {
    scale_height(&scale_width(pixels, width, kernel), height, kernel)
}

fn scale_width(pixels: &Pixels, width: u32, kernel: Kernel) -> Pixels {
    if width == pixels.width {
        return pixels.clone();
    }
    let taps: Vec<_> = taps(pixels.width, width, kernel).collect();
    let rows = pixels.rgb.chunks_exact((pixels.width as usize * CHANNELS).max(1));
    // Its length is said, as a vector that grows takes twice as much.
    let mut rgb = Vec::with_capacity(width as usize * pixels.height as usize * CHANNELS);
    rows.for_each(|row| rgb.extend(taps.iter().flat_map(|tap| tap.of_row(row))));
    Pixels { width, height: pixels.height, rgb }
}

fn scale_height(pixels: &Pixels, height: u32, kernel: Kernel) -> Pixels {
    if height == pixels.height {
        return pixels.clone();
    }
    let (taps, row_bytes) = (taps(pixels.height, height, kernel), pixels.width as usize * CHANNELS);
    let rgb = taps.flat_map(|tap| tap.of_rows(&pixels.rgb, row_bytes)).collect();
    Pixels { width: pixels.width, height, rgb }
}

/// Red, green and blue.
const CHANNELS: usize = 3;

/// Bits behind the point of a weight. Taken: Pillow's `PRECISION_BITS`.
const BITS: u32 = 22;

/// Which of the values along a side make a new one.
struct KernelTap {
    from: Range<usize>,
    weights: Vec<i64>,
}

impl KernelTap {
    /// The pixel that is made of a row's.
    fn of_row(&self, row: &[u8]) -> [u8; CHANNELS] {
        let pixels = &row[self.from.start * CHANNELS..self.from.end * CHANNELS];
        let mut sums = [HALF; CHANNELS];
        for (pixel, weight) in pixels.as_chunks::<CHANNELS>().0.iter().zip(&self.weights) {
            for (sum, value) in sums.iter_mut().zip(pixel) {
                *sum += i64::from(*value) * weight;
            }
        }
        sums.map(rounded)
    }

    /// The row that is made of rows.
    fn of_rows(&self, rgb: &[u8], row_bytes: usize) -> Vec<u8> {
        let mut sums = vec![HALF; row_bytes];
        let rows = &rgb[self.from.start * row_bytes..self.from.end * row_bytes];
        for (row, weight) in rows.chunks_exact(row_bytes.max(1)).zip(&self.weights) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += i64::from(*value) * weight;
            }
        }
        sums.into_iter().map(rounded).collect()
    }
}

const HALF: i64 = 1 << (BITS - 1);

fn rounded(sum: i64) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// The taps of each new value, when a side becomes longer or shorter. A longer filter when it becomes shorter is the
/// antialiasing.
fn taps(from: u32, to: u32, kernel: Kernel) -> impl Iterator<Item = KernelTap> {
    let ratio = f64::from(from) / f64::from(to);
    let stretch = ratio.max(1.0);
    let support = kernel.support * stretch;
    (0..to).map(move |at| {
        let centre = (f64::from(at) + 0.5) * ratio;
        let start = (centre - support + 0.5).max(0.0) as usize;
        let end = ((centre + support + 0.5) as usize).min(from as usize);
        let weight = |at: usize| (kernel.weight)((at as f64 - centre + 0.5) / stretch);
        let weights: Vec<f64> = (start..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| (weight / sum * f64::from(1 << BITS)).round() as i64;
        KernelTap { from: start..end, weights: weights.iter().map(fixed).collect() }
    })
}

/// A sinc, windowed by a sinc that is three times as wide.
fn sinc(x: f64) -> f64 {
    let sinc = |x: f64| if x == 0.0 { 1.0 } else { (x * PI).sin() / (x * PI) };
    if (-3.0..3.0).contains(&x) { sinc(x) * sinc(x / 3.0) } else { 0.0 }
}

/// Keys' kernel with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    match x.abs() {
        x if x < 1.0 => ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0,
        x if x < 2.0 => (((x - 5.0) * x + 8.0) * x - 4.0) * A,
        _ => 0.0,
    }
}
