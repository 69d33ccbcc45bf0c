//! Images as files, with what they were made from inside. A PNG has text chunks: `parameters` in the form that
//! other programs read, `hearth` as JSON. A JPEG has the same in EXIF, as `UserComment` and `ImageDescription`.

use std::io::Write;
use std::path::Path;

use image::codecs::jpeg::JpegEncoder;
use image::{ExtendedColorType, ImageEncoder};
use weights::write::AtomicFile;

use super::{Image, exif};
use crate::error::{Result, TrainerError};

/// Chosen: what photographs are saved with where size matters little.
const JPEG_QUALITY: u8 = 95;
/// Taken: a segment of a JPEG counts its bytes in 16 bits, of which the EXIF mark takes some.
const EXIF_BYTES: usize = 65_000;

/// The format of an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFileFormat {
    /// Exact.
    Png,
    /// Smaller, with losses.
    Jpeg,
}

impl ImageFileFormat {
    /// By the ending of a file's name.
    pub fn from_path(path: &Path) -> Result<Self> {
        let ending = path.extension().unwrap_or_default().to_string_lossy().to_lowercase();
        let named = match ending.as_str() {
            "png" => return Ok(Self::Png),
            "jpg" | "jpeg" => return Ok(Self::Jpeg),
            "" => "without an ending".to_owned(),
            other => format!("as .{other}"),
        };
        Err(TrainerError::Request {
            problem: format!(
                "cannot write an image {named}, accepted are .png, .jpg and .jpeg: {}",
                path.display()
            ),
            hint: "end the name in .png, or give a folder that ends in /",
        })
    }
}

/// Writes an image, whole or not at all. Texts are told by their keys `parameters` and `hearth`.
pub fn write(path: &Path, image: &Image, texts: &[(&str, String)]) -> Result<()> {
    let failed =
        |source: std::io::Error| TrainerError::Io { what: "write", path: path.into(), source };
    let encoded = match ImageFileFormat::from_path(path)? {
        ImageFileFormat::Png => png(image, texts).map_err(std::io::Error::from),
        ImageFileFormat::Jpeg => jpeg(image, texts).map_err(std::io::Error::other),
    };
    let mut file = AtomicFile::create(path)?;
    file.write_all(&encoded.map_err(failed)?).map_err(failed)?;
    file.commit()?;
    Ok(())
}

fn png(
    image: &Image,
    texts: &[(&str, String)],
) -> std::result::Result<Vec<u8>, png::EncodingError> {
    let [width, height] = image.size;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    for (key, text) in texts {
        encoder.add_itxt_chunk((*key).to_owned(), text.clone())?;
    }
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels(image))?;
    writer.finish()?;
    Ok(bytes)
}

fn jpeg(image: &Image, texts: &[(&str, String)]) -> image::ImageResult<Vec<u8>> {
    let [width, height] = image.size;
    let text =
        |key: &str| texts.iter().find(|(other, _)| *other == key).map_or("", |(_, text)| text);
    let mut bytes = Vec::new();
    let mut encoder = JpegEncoder::new_with_quality(&mut bytes, JPEG_QUALITY);
    let mut block = exif::block(text("parameters"), text("hearth"));
    // The JSON says the same as the parameters, which come first where there is no room for both.
    if block.len() > EXIF_BYTES {
        block = exif::block(text("parameters"), "");
    }
    encoder.set_exif_metadata(block).map_err(image::ImageError::Unsupported)?;
    encoder.write_image(&pixels(image), width as u32, height as u32, ExtendedColorType::Rgb8)?;
    Ok(bytes)
}

/// Bytes, colour by colour and pixel by pixel, rounded as the reference rounds.
pub(super) fn pixels(image: &Image) -> Vec<u8> {
    let count = image.size[0] * image.size[1];
    let byte = |number: f32| (number * 255.0).round_ties_even() as u8;
    (0..count)
        .flat_map(|at| [0, 1, 2].map(|colour| byte(image.values[colour * count + at])))
        .collect()
}

#[cfg(test)]
mod tests {
    use image::ImageDecoder;
    use image::codecs::jpeg::JpegDecoder;

    use super::*;

    #[test]
    fn a_jpeg_has_what_it_was_made_from() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fox.JPG");
        let image = Image { values: vec![0.5; 3 * 16 * 32], size: [16, 32] };
        let texts = [("parameters", "a füchs\nSteps: 2".to_owned()), ("hearth", "{}".to_owned())];
        write(&path, &image, &texts).unwrap();
        let file = std::fs::read(&path).unwrap();
        let mut decoder = JpegDecoder::new(std::io::Cursor::new(&file)).unwrap();
        assert_eq!(decoder.dimensions(), (16, 32));
        let exif = decoder.exif_metadata().unwrap().unwrap();
        assert_eq!(exif, exif::block("a füchs\nSteps: 2", "{}"));
        let mut pixels = vec![0; decoder.total_bytes() as usize];
        decoder.read_image(&mut pixels).unwrap();
        assert!(pixels.iter().all(|byte| byte.abs_diff(128) <= 1), "{pixels:?}");
    }

    #[test]
    fn other_endings_are_refused() {
        for (name, says) in [("fox.webp", "as .webp"), ("fox", "without an ending")] {
            let error = ImageFileFormat::from_path(Path::new(name)).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
        assert_eq!(
            ImageFileFormat::from_path(Path::new("a.b/Fox.PNG")).unwrap(),
            ImageFileFormat::Png
        );
    }
}
