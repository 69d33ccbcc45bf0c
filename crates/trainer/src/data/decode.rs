//! Decodes one image to 8-bit RGB: EXIF orientation applied, transparency over white.
//!
//! Files come from strangers. What they may take is limited before anything is decoded: pixels and
//! bytes of the file by `header`, allocations by `image`. A decoder that panics has found a damaged file, see `contain.rs`.
//! Tests here feed damaged files to all of them.

use std::io::BufReader;
use std::path::Path;

use image::metadata::Orientation;
use image::{DynamicImage, ImageFormat, ImageReader, RgbImage};

use super::contain::contained;
use super::header;
use super::jpeg_scans;
use super::png_rows::PngImage;
use super::problem::ProblemKind;
use crate::archive::{self, DataFile};
use crate::pixels::Pixels;

/// What of an image's pixels is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PixelPart {
    /// Colours over white.
    Colours,
    /// The alpha channel, in all three colours; white where there is none.
    Alpha,
}

/// Decodes it; of an animation the first frame.
pub fn decode(path: &Path) -> Result<Pixels, ProblemKind> {
    decode_part(path, PixelPart::Colours)
}

/// Its alpha channel, in the same way.
pub(super) fn decode_alpha(path: &Path) -> Result<Pixels, ProblemKind> {
    decode_part(path, PixelPart::Alpha)
}

fn decode_part(path: &Path, part: PixelPart) -> Result<Pixels, ProblemKind> {
    let header = header::read(path)?;
    let file = DataFile::open(path).map_err(|error| ProblemKind::unreadable(&error))?;
    let bytes = file.length();
    let explain = |error| header::explain(error, bytes);
    if header.format == ImageFormat::Jpeg {
        let file = archive::read(path).map_err(|error| ProblemKind::unreadable(&error))?;
        if jpeg_scans::is_cut(&file) {
            return Err(ProblemKind::Truncated { bytes });
        }
    }
    let file = BufReader::new(file);
    let pixels = if header.format == ImageFormat::Png {
        contained(|| PngImage::open(file)?.decode(part))?.map_err(explain)?
    } else {
        let mut reader = ImageReader::with_format(file, header.format);
        reader.limits(header.limits());
        let image = contained(|| reader.decode())?.map_err(explain)?;
        match part {
            PixelPart::Colours => over_white(image),
            PixelPart::Alpha => alpha_of(image),
        }
    };
    Ok(oriented(pixels, header.orientation))
}

fn oriented(pixels: Pixels, orientation: Orientation) -> Pixels {
    if orientation == Orientation::NoTransforms {
        return pixels;
    }
    let Pixels { width, height, rgb } = pixels;
    let image = RgbImage::from_raw(width, height, rgb).expect("it has all of its pixels");
    let mut image = DynamicImage::from(image);
    image.apply_orientation(orientation);
    Pixels { width: image.width(), height: image.height(), rgb: image.into_bytes() }
}

/// In place where there is an alpha channel.
pub(super) fn over_white(image: DynamicImage) -> Pixels {
    let (width, height) = (image.width(), image.height());
    if !image.color().has_alpha() {
        return Pixels { width, height, rgb: image.into_rgb8().into_raw() };
    }
    let mut bytes = image.into_rgba8().into_raw();
    let n = bytes.len() / 4;
    for at in 0..n {
        let alpha = bytes[4 * at + 3];
        for channel in 0..3 {
            bytes[3 * at + channel] = mixed(bytes[4 * at + channel], alpha);
        }
    }
    bytes.truncate(3 * n);
    bytes.shrink_to_fit();
    Pixels { width, height, rgb: bytes }
}

fn alpha_of(image: DynamicImage) -> Pixels {
    let (width, height) = (image.width(), image.height());
    let rgba = image.into_rgba8().into_raw();
    let rgb = rgba.chunks_exact(4).flat_map(|pixel| [pixel[3]; 3]).collect();
    Pixels { width, height, rgb }
}

/// A colour blended over white, rounded to the nearest.
pub(super) fn mixed(colour: u8, alpha: u8) -> u8 {
    let [colour, alpha] = [u32::from(colour), u32::from(alpha)];
    ((colour * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}
