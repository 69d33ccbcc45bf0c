//! PNG to 8-bit RGB over white, row by row: an image of 16 bits is never in memory as such. Colour profiles and texts are
//! not read: nothing uses them, and they may be a thousand times as long as they look.

use std::io::BufReader;

use image::error::{DecodingError, LimitError, LimitErrorKind};
use image::metadata::Orientation;
use image::{ImageError, ImageFormat};
use png::{BitDepth, ColorType, Limits, Reader, Transformations};

use super::decode::{PixelPart, mixed};
use super::header::MOST_BESIDE;
use crate::archive::DataFile;
use crate::pixels::Pixels;

/// Rows that the decoder may hold: what it looks back upon, and what was decompressed ahead.
const ROWS: usize = 10;

/// A PNG up to its pixels.
pub(super) struct PngImage {
    reader: Reader<BufReader<DataFile>>,
}

impl PngImage {
    pub(super) fn open(file: BufReader<DataFile>) -> Result<Self, ImageError> {
        let mut decoder = png::Decoder::new(file);
        decoder.set_ignore_text_chunk(true);
        decoder.set_ignore_iccp_chunk(true);
        decoder.set_transformations(Transformations::EXPAND);
        let row = decoder.read_header_info().map_err(explained)?.width as usize * WIDEST_PIXEL;
        decoder.set_limits(Limits { bytes: MOST_BESIDE.saturating_add(row) });
        Ok(Self { reader: decoder.read_info().map_err(explained)? })
    }

    pub(super) fn size(&self) -> [u32; 2] {
        self.reader.info().size().into()
    }

    pub(super) fn orientation(&self) -> Orientation {
        let exif = self.reader.info().exif_metadata.as_deref();
        exif.and_then(Orientation::from_exif_chunk).unwrap_or(Orientation::NoTransforms)
    }

    pub(super) fn is_animated(&self) -> bool {
        self.reader.info().animation_control.is_some()
    }

    /// Bytes of the decoder and the pixels.
    pub(super) fn decoding_bytes(&self) -> usize {
        let [width, height] = self.size().map(|side| side as usize);
        let stored =
            if self.reader.info().interlaced { self.reader.output_buffer_size() } else { Some(0) };
        let rows = width.saturating_mul(ROWS * WIDEST_PIXEL).saturating_add(MOST_BESIDE);
        let rgb = width.saturating_mul(height).saturating_mul(3);
        rgb.saturating_add(rows).saturating_add(stored.unwrap_or(usize::MAX))
    }

    pub(super) fn decode(mut self, part: PixelPart) -> Result<Pixels, ImageError> {
        let [width, height] = self.size();
        let (colour, depth) = self.reader.output_color_type();
        let format = RowFormat { colour, depth };
        let mut rgb = Vec::with_capacity(width as usize * height as usize * 3);
        if self.reader.info().interlaced {
            let bytes = self.reader.output_buffer_size().ok_or_else(too_large)?;
            let mut stored = vec![0; bytes];
            self.reader.next_frame(&mut stored).map_err(explained)?;
            add_pixels(&stored, format, part, &mut rgb);
        } else {
            while let Some(row) = self.reader.next_row().map_err(explained)? {
                add_pixels(row.data(), format, part, &mut rgb);
            }
        }
        Ok(Pixels { width, height, rgb })
    }
}

/// Bytes of a pixel with four channels of 16 bits.
const WIDEST_PIXEL: usize = 8;

/// What a row is made of.
#[derive(Clone, Copy)]
struct RowFormat {
    colour: ColorType,
    depth: BitDepth,
}

fn add_pixels(
    row: &[u8],
    RowFormat { colour, depth }: RowFormat,
    part: PixelPart,
    rgb: &mut Vec<u8>,
) {
    if colour == ColorType::Rgb && depth == BitDepth::Eight && part == PixelPart::Colours {
        return rgb.extend_from_slice(row);
    }
    let (channels, bytes) = (colour.samples(), if depth == BitDepth::Sixteen { 2 } else { 1 });
    for pixel in row.chunks_exact(channels * bytes) {
        let value = |channel: usize| match pixel[channel * bytes..][..bytes] {
            [high, low] => narrowed(u16::from_be_bytes([high, low])),
            _ => pixel[channel],
        };
        let colours = if channels < 3 { [value(0); 3] } else { [value(0), value(1), value(2)] };
        let alpha = if channels % 2 == 0 { value(channels - 1) } else { u8::MAX };
        rgb.extend(match part {
            PixelPart::Colours => colours.map(|colour| mixed(colour, alpha)),
            PixelPart::Alpha => [alpha; 3],
        });
    }
}

/// Of 16 bits the nearest of 8.
fn narrowed(value: u16) -> u8 {
    ((u32::from(value) + 128) / 257) as u8
}

/// As `image` has it.
fn explained(error: png::DecodingError) -> ImageError {
    match error {
        png::DecodingError::IoError(error) => ImageError::IoError(error),
        png::DecodingError::LimitsExceeded => too_large(),
        error => ImageError::Decoding(DecodingError::new(ImageFormat::Png.into(), error)),
    }
}

fn too_large() -> ImageError {
    ImageError::Limits(LimitError::from_kind(LimitErrorKind::InsufficientMemory))
}
