//! Reference images of editing models, and the sizes in which a model sees a sample.

use std::fmt;
use std::path::Path;

use super::bucket::Bucket;
use super::decode::decode;
use super::decoding::{DecodingMemory, decoding_bytes};
use super::header;
use super::problem::ProblemKind;
use super::resize::cut_middle;
use super::scan::{MAX_REFERENCES, ReferenceImage};
use crate::model::diffusion::editing::scaled_down;
use crate::pixels::{Filter, Pixels, scale};

/// What the work of a sample depends on: the bucket of its image or clip, its frames, and the sizes of its references.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleSize {
    /// Of the image, or of every frame.
    pub bucket: Bucket,
    /// Frames of a clip; 1 of an image.
    pub frames: usize,
    references: [Option<ReferenceSize>; MAX_REFERENCES],
}

/// The sizes in which a model sees a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReferenceSize {
    /// That the VAE sees.
    pub vae: Bucket,
    /// What it is cropped from, for the VAE: the image, scaled down to the area of a square with this side if it is larger.
    /// Where there is none, the image is scaled to what the VAE sees.
    pub cropped_from: Option<u32>,
    /// That the text encoder sees, where it sees images.
    pub encoder: Option<Bucket>,
}

/// How a reference becomes what a model sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceFit {
    size: Bucket,
    cropped_from: Option<u32>,
}

impl ReferenceSize {
    /// As the VAE sees it.
    pub fn of_vae(self) -> ReferenceFit {
        ReferenceFit { size: self.vae, cropped_from: self.cropped_from }
    }
}

impl From<Bucket> for ReferenceFit {
    /// Scaled alone.
    fn from(size: Bucket) -> Self {
        Self { size, cropped_from: None }
    }
}

impl SampleSize {
    /// Of an image with references; more than [`MAX_REFERENCES`] are not counted.
    pub fn new(bucket: Bucket, references: impl IntoIterator<Item = ReferenceSize>) -> Self {
        let mut sizes = [None; MAX_REFERENCES];
        for (size, reference) in sizes.iter_mut().zip(references) {
            *size = Some(reference);
        }
        Self { bucket, frames: 1, references: sizes }
    }

    /// The same with so many frames.
    #[must_use]
    pub fn with_frames(self, frames: usize) -> Self {
        Self { frames, ..self }
    }

    /// The same in another bucket.
    #[must_use]
    pub fn with_bucket(self, bucket: Bucket) -> Self {
        Self { bucket, ..self }
    }

    /// Of its references.
    pub fn references(&self) -> impl Iterator<Item = ReferenceSize> {
        self.references.into_iter().flatten()
    }

    /// Widths and heights of the images that the text encoder sees.
    pub fn encoder_images(&self) -> Vec<[u32; 2]> {
        self.references().filter_map(|reference| reference.encoder.map(Bucket::sides)).collect()
    }

    /// Pixels of all that goes through the model.
    pub fn pixels(&self) -> usize {
        let area = |size: Bucket| size.width * size.height;
        self.frames * area(self.bucket)
            + self.references().map(|reference| area(reference.vae)).sum::<usize>()
    }
}

impl From<Bucket> for SampleSize {
    fn from(bucket: Bucket) -> Self {
        Self::new(bucket, [])
    }
}

impl fmt::Display for SampleSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bucket)?;
        if self.frames != 1 {
            write!(f, "x{}f", self.frames)?;
        }
        self.references().try_for_each(|reference| write!(f, "+{}", reference.vae))
    }
}

impl Bucket {
    /// Width and height.
    pub fn sides(self) -> [u32; 2] {
        [self.width as u32, self.height as u32]
    }
}

impl From<[u32; 2]> for Bucket {
    fn from([width, height]: [u32; 2]) -> Self {
        Self { width: width as usize, height: height as usize }
    }
}

/// A reference image that is named by itself: its size, or why it cannot be used.
pub fn read_reference(path: &Path) -> Result<ReferenceImage, ProblemKind> {
    let header = header::read(path)?;
    Ok(ReferenceImage { path: path.into(), size: header.size })
}

/// The pixels of a reference as a model sees it: scaled, and cropped, as the pipelines of the models do it.
pub fn scaled_reference(
    path: &Path,
    fit: impl Into<ReferenceFit>,
    memory: &DecodingMemory,
) -> Result<Pixels, ProblemKind> {
    let ReferenceFit { size, cropped_from } = fit.into();
    let _reserved = memory.reserve(decoding_bytes(path, size.sides())?)?;
    let pixels = decode(path)?;
    let Some(side) = cropped_from else {
        return Ok(scale(pixels, size.sides(), Filter::PillowLanczos));
    };
    let [width, height] = scaled_down([pixels.width, pixels.height], side);
    // One that is smaller than a token becomes as large as one.
    let whole = [width.max(size.width as u32), height.max(size.height as u32)];
    Ok(cut_middle(&scale(pixels, whole, Filter::PillowLanczos), size.sides()))
}

/// Mirrored left to right.
pub fn mirrored(pixels: &Pixels) -> Pixels {
    let row = |row: &[u8]| row.chunks_exact(3).rev().flatten().copied().collect::<Vec<u8>>();
    let rows = pixels.rgb.chunks_exact((pixels.width as usize * 3).max(1));
    Pixels { rgb: rows.flat_map(row).collect(), ..*pixels }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_said_with_those_of_references() {
        let [wide, square] = [[96, 64], [64, 64]].map(Bucket::from);
        let size = |encoder| ReferenceSize { vae: square, cropped_from: None, encoder };
        let plain = SampleSize::from(wide);
        assert_eq!(plain.to_string(), "96x64");
        assert!(plain.encoder_images().is_empty());
        let edited = SampleSize::new(wide, [size(None), size(Some(wide))]);
        assert_eq!(edited.to_string(), "96x64+64x64+64x64");
        assert_eq!(edited.encoder_images(), [[96, 64]]);
        assert_eq!(edited.pixels(), 96 * 64 + 2 * 64 * 64);
        let clip = plain.with_frames(81);
        assert_eq!((clip.to_string().as_str(), clip.pixels()), ("96x64x81f", 81 * 96 * 64));
        assert!(plain < clip && clip < SampleSize::from(Bucket::from([96, 65])));
    }

    #[test]
    fn a_mirror_image_has_its_rows_reversed() {
        let pixels = Pixels { width: 2, height: 2, rgb: (0..12).collect() };
        let rgb = vec![3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8];
        assert_eq!(mirrored(&pixels), Pixels { rgb, ..pixels.clone() });
    }
}
