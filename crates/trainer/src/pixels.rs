//! An image in memory as 8-bit RGB, and scaling it.

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

/// How pixels are interpolated; both with antialiasing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// Lanczos of three lobes.
    Lanczos,
    /// Cubic with a = -0.5 (Catmull-Rom), as Pillow and torchvision have it.
    Bicubic,
}

/// Scales to width and height. On gamma-encoded bytes and not in linear light, as in the programs that models were
/// pretrained with.
pub fn scale(pixels: &Pixels, [width, height]: [u32; 2], filter: Filter) -> Pixels {
    let same = [pixels.width, pixels.height] == [width, height];
    let filter = match filter {
        Filter::Lanczos => FilterType::Lanczos3,
        Filter::Bicubic => FilterType::CatmullRom,
    };
    match RgbImage::from_raw(pixels.width, pixels.height, pixels.rgb.clone()) {
        // Not the generic function, which would be compiled here, for size, and not in its crate, for speed.
        Some(image) if !same => {
            let scaled = DynamicImage::from(image).resize_exact(width, height, filter);
            Pixels { width, height, rgb: scaled.into_bytes() }
        }
        _ => pixels.clone(),
    }
}
