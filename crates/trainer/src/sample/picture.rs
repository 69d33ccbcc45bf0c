//! Pictures as PNG files, with what they were made from inside: `parameters` in the form that other
//! programs read, `hearth` as JSON.

use std::io::Write;
use std::path::Path;

use weights::write::AtomicFile;

use super::Picture;
use crate::error::{Result, TrainerError};

/// Writes a picture, whole or not at all.
pub fn write(path: &Path, picture: &Picture, texts: &[(&str, String)]) -> Result<()> {
    let failed =
        |source: std::io::Error| TrainerError::Io { what: "write", path: path.into(), source };
    let mut file = AtomicFile::create(path)?;
    let encoded = encode(picture, texts).map_err(std::io::Error::from).map_err(failed)?;
    file.write_all(&encoded).map_err(failed)?;
    file.commit()?;
    Ok(())
}

fn encode(
    picture: &Picture,
    texts: &[(&str, String)],
) -> std::result::Result<Vec<u8>, png::EncodingError> {
    let [width, height] = picture.size;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    for (key, text) in texts {
        encoder.add_itxt_chunk((*key).to_owned(), text.clone())?;
    }
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels(picture))?;
    writer.finish()?;
    Ok(bytes)
}

/// Bytes, colour by colour and pixel by pixel, rounded as the reference rounds.
fn pixels(picture: &Picture) -> Vec<u8> {
    let count = picture.size[0] * picture.size[1];
    let byte = |number: f32| (number * 255.0).round_ties_even() as u8;
    (0..count)
        .flat_map(|at| [0, 1, 2].map(|colour| byte(picture.numbers[colour * count + at])))
        .collect()
}
