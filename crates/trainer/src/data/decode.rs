//! Decodes one image to 8-bit RGB: EXIF orientation applied, transparency over white.
//!
//! Files come from strangers. What they may take is limited before anything is decoded: pixels and
//! bytes of the file by `header`, allocations by `image`. Panics are not caught: a panic that is caught
//! still prints into the middle of a screen, and hides a bug of a decoder that should be fixed.
//! Tests here feed damaged files to all of them.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;

use image::{DynamicImage, ImageReader};

use super::header;
use super::problem::ProblemKind;
use crate::pixels::Pixels;

/// Decodes it; of an animation the first frame.
pub fn decode(path: &Path) -> Result<Pixels, ProblemKind> {
    let header = header::read(path)?;
    let bytes = fs::metadata(path).map_or(0, |about| about.len());
    let file = File::open(path).map_err(|error| ProblemKind::unreadable(&error))?;
    let mut reader = ImageReader::with_format(BufReader::new(file), header.format);
    reader.limits(header::limits());
    let mut image = reader.decode().map_err(|error| header::explain(error, bytes))?;
    image.apply_orientation(header.orientation);
    Ok(over_white(image))
}

/// Whole channels are converted by `image`, which rounds 16 bits to the nearest of 8.
pub(super) fn over_white(image: DynamicImage) -> Pixels {
    let (width, height) = (image.width(), image.height());
    if !image.color().has_alpha() {
        return Pixels { width, height, rgb: image.into_rgb8().into_raw() };
    }
    let rgba = image.into_rgba8();
    let rgb = rgba.pixels().flat_map(|pixel| {
        let [red, green, blue, alpha] = pixel.0;
        [red, green, blue].map(|colour| mixed(colour, alpha))
    });
    Pixels { width, height, rgb: rgb.collect() }
}

/// A colour blended over white, rounded to the nearest.
fn mixed(colour: u8, alpha: u8) -> u8 {
    let [colour, alpha] = [u32::from(colour), u32::from(alpha)];
    ((colour * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}
