//! Masks: which part of an image the loss counts. White counts, black does not; one number per latent pixel, the mean of
//! the mask's pixels there, as kohya scales masks.
//!
//! ```text
//! images/fox.png     images/fox-masklabel.png     beside (OneTrainer)
//! images/fox.png     masks/fox.png                a folder (kohya, ai-toolkit, diffusion-pipe)
//! images/fox.png                                  its alpha channel
//! ```

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::bucket::Bucket;
use super::decode::{decode, decode_alpha};
use super::decoding::{DecodingMemory, decoding_bytes};
use super::listing::FolderListing;
use super::problem::{Problem, ProblemKind};
use super::resize::{Crop, resize_and_crop};
use super::roots::DataRoots;
use super::scan::{FolderScan, ImageItem};
use super::{header, metadata};
use crate::archive;
use crate::pixels::Pixels;

/// Where masks are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MaskSource {
    /// There are none.
    #[default]
    None,
    /// Beside the images, `NAME-masklabel.png`.
    Beside,
    /// The images' alpha channels.
    Alpha,
    /// In a folder, named like the images.
    Folder(PathBuf),
}

/// The mask of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageMask {
    /// Another image.
    File(PathBuf),
    /// Its own alpha channel.
    Alpha,
}

impl ImageMask {
    /// The file that it is in.
    pub fn file<'a>(&'a self, image: &'a Path) -> &'a Path {
        match self {
            Self::File(path) => path,
            Self::Alpha => image,
        }
    }
}

/// What `OneTrainer` calls masks.
const MASK_LABEL: &str = "-masklabel";

/// Gives images their masks, and takes masks out of the images. An image whose mask cannot be used is left out: all of it
/// would be learnt. `folder` is that of the images.
pub fn attach_masks(
    found: FolderScan,
    folder: &Path,
    source: &MaskSource,
    follow_links: bool,
) -> FolderScan {
    let FolderScan { mut items, mut problems } = found;
    let stems: BTreeSet<PathBuf> = items.iter().map(|item| item.path.with_extension("")).collect();
    items.retain(|item| !is_mask(&item.path, &stems, source));
    problems.retain(|problem| !is_mask(&problem.path, &stems, source));
    let mask_folder = match source {
        MaskSource::Folder(path) => Some(path.as_path()),
        _ => None,
    };
    let roots = DataRoots::new(std::iter::once(folder).chain(mask_folder), follow_links);
    items.retain_mut(|item| match mask_of(item, folder, source, &roots) {
        Ok(mask) => {
            if mask.is_none() && *source != MaskSource::None {
                problems.push(Problem::warning(&item.path, ProblemKind::MaskMissing));
            }
            item.mask = mask;
            true
        }
        Err(kind) => {
            problems.push(Problem::skipped(&item.path, kind));
            false
        }
    });
    FolderScan { items, problems }
}

/// Whether a file is the mask of an image: never trained on, whether masks are used or not. `stems` are those of images.
fn is_mask(path: &Path, stems: &BTreeSet<PathBuf>, source: &MaskSource) -> bool {
    let name = path.with_extension("");
    let of = name.to_str().and_then(|name| name.strip_suffix(MASK_LABEL));
    let is_label = of.is_some_and(|of| stems.contains(Path::new(of)));
    match source {
        MaskSource::Folder(folder) => is_label || path.starts_with(metadata::plain(folder)),
        _ => is_label,
    }
}

/// The mask of an image, if there is one; checked as far as its header goes.
fn mask_of(
    item: &ImageItem,
    folder: &Path,
    source: &MaskSource,
    roots: &DataRoots,
) -> Result<Option<ImageMask>, ProblemKind> {
    let stem = item.path.file_stem().unwrap_or_default();
    let path = match source {
        MaskSource::None => return Ok(None),
        // Clips have none, and their frames are not looked into.
        MaskSource::Alpha => return Ok(item.clip.is_none().then_some(ImageMask::Alpha)),
        MaskSource::Beside => {
            let mut name = stem.to_owned();
            name.push(MASK_LABEL);
            existing(item.path.parent().unwrap_or(folder), &name)
        }
        MaskSource::Folder(masks) => {
            let below = item.path.parent().and_then(|parent| parent.strip_prefix(folder).ok());
            existing(&masks.join(below.unwrap_or(Path::new(""))), stem)
        }
    };
    let Some(path) = path else { return Ok(None) };
    let unusable =
        |kind: ProblemKind| ProblemKind::MaskUnusable { mask: path.clone(), why: kind.to_string() };
    roots.check(&path).map_err(unusable)?;
    let size = header::read(&path).map_err(unusable)?.size;
    if !is_same_shape(item.size, size) {
        return Err(ProblemKind::MaskShape { size: item.size, mask: size });
    }
    Ok(Some(ImageMask::File(path)))
}

/// An image of this name without its ending.
fn existing(folder: &Path, stem: &std::ffi::OsStr) -> Option<PathBuf> {
    // The usual one without looking through the folder.
    let mut name = stem.to_owned();
    name.push(".png");
    let usual = folder.join(name);
    if archive::is_file(&usual) {
        return Some(usual);
    }
    let images = FolderListing::read(folder).ok()?.images;
    images.into_iter().find(|path| path.file_stem() == Some(stem))
}

/// Whether two sizes have one aspect, but for sides rounded to whole pixels.
fn is_same_shape([width, height]: [u32; 2], mask: [u32; 2]) -> bool {
    let [width, height, across, down] = [width, height, mask[0], mask[1]].map(i64::from);
    (width * down - height * across).abs() <= width.max(height).max(across).max(down)
}

/// Bytes at the peak of reading the mask of an image of this size.
pub fn mask_bytes(mask: &ImageMask, image: &Path, bucket: Bucket) -> Result<usize, ProblemKind> {
    decoding_bytes(mask.file(image), bucket.sides())
}

/// A number from 0 to 1 for each latent pixel of an image, whose sides are `scale` of its pixels, row by row.
pub fn read_mask(
    mask: &ImageMask,
    image: &Path,
    bucket: Bucket,
    crop: Crop,
    scale: usize,
    memory: &DecodingMemory,
) -> Result<Vec<f32>, ProblemKind> {
    let _reserved = memory.reserve(mask_bytes(mask, image, bucket)?)?;
    let pixels = match mask {
        ImageMask::File(path) => decode(path)?,
        ImageMask::Alpha => decode_alpha(image)?,
    };
    Ok(means(&resize_and_crop(pixels, bucket, crop), scale))
}

/// The mean of each square of pixels with this side.
fn means(pixels: &Pixels, side: usize) -> Vec<f32> {
    let (width, height) = (pixels.width as usize / side, pixels.height as usize / side);
    let row_bytes = pixels.width as usize * 3;
    let mut sums = vec![0_u32; width * height];
    for (y, row) in pixels.rgb.chunks_exact(row_bytes).enumerate().take(height * side) {
        for (x, pixel) in row.chunks_exact(3).enumerate().take(width * side) {
            sums[y / side * width + x / side] += u32::from(luminance(pixel));
        }
    }
    let most = (side * side * 255) as f32;
    sums.into_iter().map(|sum| sum as f32 / most).collect()
}

/// As Pillow converts to gray.
fn luminance(pixel: &[u8]) -> u8 {
    let [red, green, blue] = [0, 1, 2].map(|channel| u32::from(pixel[channel]));
    ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latent_pixel_has_the_mean_of_its_pixels() {
        let gray = |x: usize, y: usize| if y < 2 { 255 } else { (x * 50) as u8 };
        let bytes = |at: usize| [gray(at % 6, at / 6); 3];
        let pixels = Pixels { width: 6, height: 4, rgb: (0..24).flat_map(bytes).collect() };
        let expected = [1.0, 1.0, 1.0, 25.0 / 255.0, 125.0 / 255.0, 225.0 / 255.0];
        assert_eq!(means(&pixels, 2), expected);
        assert_eq!(luminance(&[255, 0, 0]), 76);
    }

    #[test]
    fn a_smaller_mask_has_the_same_shape() {
        for (image, mask, expected) in [
            ([100, 80], [100, 80], true),
            ([1000, 667], [500, 333], true),
            ([1000, 667], [64, 43], true),
            ([100, 80], [80, 100], false),
            ([100, 80], [50, 50], false),
        ] {
            assert_eq!(is_same_shape(image, mask), expected, "{image:?} {mask:?}");
        }
    }
}
