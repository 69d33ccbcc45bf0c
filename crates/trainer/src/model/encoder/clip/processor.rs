//! Images as CLIP's vision model sees them, as transformers' `CLIPImageProcessor` makes them: scaled to a side, the middle
//! cut out, normalised, and cut up into patches.

use std::path::Path;

use serde::Deserialize;

use super::vision::ClipVisionConfig;
use crate::error::{Result, TrainerError};
use crate::model::config::{self, Unsupported};
use crate::model::encoder::image_processor::{CHANNELS, PixelNorm, check_steps};
use crate::pixels::{Filter, Pixels, scale};

/// The file with its settings.
pub const FILE_NAME: &str = "preprocessor_config.json";

/// How images are prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct ClipImageProcessor {
    resize: ClipResize,
    /// Pixels along the side of the square that is cut out.
    crop: u32,
    norm: PixelNorm,
    patch_size: usize,
}

/// How an image is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClipResize {
    /// Its shorter side becomes so long.
    ShortestEdge(u32),
    /// To this width and height.
    Exact([u32; 2]),
}

/// The file's keys.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ClipImageProcessorJson {
    do_resize: Option<bool>,
    do_center_crop: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
    size: Option<SizeJson>,
    crop_size: Option<SizeJson>,
    resample: Option<u32>,
    rescale_factor: Option<f32>,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
}

/// A number in files of before.
#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum SizeJson {
    Side(u32),
    ShortestEdge { shortest_edge: u32 },
    Exact { width: u32, height: u32 },
}

/// Sides beyond this are cut off before scaling. Chosen: no more than the middle of an image is seen, and one of 1 by
/// 100,000 pixels would take gigabytes when it is scaled.
const MOST_ASPECT: u32 = 8;

impl ClipImageProcessor {
    /// Reads that of a folder for a vision model; that of the published models where a folder has none.
    pub fn open(folder: &Path, vision: &ClipVisionConfig) -> Result<Self> {
        let path = folder.join(FILE_NAME);
        let json =
            if path.exists() { config::read(&path)? } else { ClipImageProcessorJson::default() };
        let read = json.meaning(vision);
        read.map_err(|Unsupported(problem)| TrainerError::Config { problem, path })
    }

    /// The values of each patch [channels, patch, patch], one after the other along rows.
    pub fn patches(&self, image: Pixels) -> Vec<f32> {
        let image = self.scaled(image);
        let crop = self.crop as usize;
        let first = |side: u32| (side as usize).saturating_sub(crop) / 2;
        let (left, top) = (first(image.width), first(image.height));
        let (side, per_side) = (self.patch_size, crop / self.patch_size);
        let mut values = Vec::with_capacity(per_side * per_side * side * side * CHANNELS);
        for place in 0..per_side * per_side {
            let (row, column) = (place / per_side, place % per_side);
            for channel in 0..CHANNELS {
                let from = [top + row * side, left + column * side];
                self.norm.push_patch(&mut values, &image, from, side, channel);
            }
        }
        values
    }

    fn scaled(&self, image: Pixels) -> Pixels {
        let image = middle(image);
        let size = match self.resize {
            ClipResize::Exact(size) => size,
            ClipResize::ShortestEdge(edge) => {
                let (width, height) = (u64::from(image.width), u64::from(image.height));
                let shorter = width.min(height).max(1);
                [width, height].map(|side| (u64::from(edge) * side / shorter) as u32)
            }
        };
        scale(image, size, Filter::Bicubic)
    }
}

/// An image without the ends of a very long side, which are not seen.
fn middle(image: Pixels) -> Pixels {
    let most = image.width.min(image.height).saturating_mul(MOST_ASPECT);
    let (width, height) = (image.width.min(most), image.height.min(most));
    if (width, height) == (image.width, image.height) {
        return image;
    }
    let (left, top) = ((image.width - width) / 2, (image.height - height) / 2);
    let row_bytes = image.width as usize * CHANNELS;
    let rows = image.rgb.chunks_exact(row_bytes).skip(top as usize).take(height as usize);
    let from = left as usize * CHANNELS;
    let rgb = rows.flat_map(|row| &row[from..from + width as usize * CHANNELS]).copied().collect();
    Pixels { width, height, rgb }
}

impl ClipImageProcessorJson {
    fn meaning(
        self,
        vision: &ClipVisionConfig,
    ) -> std::result::Result<ClipImageProcessor, Unsupported> {
        let steps = [
            ("do_resize", self.do_resize),
            ("do_center_crop", self.do_center_crop),
            ("do_rescale", self.do_rescale),
            ("do_normalize", self.do_normalize),
        ];
        check_steps(steps, self.resample)?;
        let side = vision.image_size as u32;
        let crop = match self.crop_size.unwrap_or(SizeJson::Side(side)) {
            SizeJson::Side(crop) | SizeJson::ShortestEdge { shortest_edge: crop } => [crop; 2],
            SizeJson::Exact { width, height } => [width, height],
        };
        let [width, height] = crop;
        let problem =
            format!("crop_size is {width} x {height}, the vision model sees {side} x {side}");
        Unsupported::unless(crop == [side; 2], problem)?;
        let resize = match self.size.unwrap_or(SizeJson::Side(side)) {
            SizeJson::Side(edge) | SizeJson::ShortestEdge { shortest_edge: edge } => {
                ClipResize::ShortestEdge(edge)
            }
            SizeJson::Exact { width, height } => ClipResize::Exact([width, height]),
        };
        let sides = match resize {
            ClipResize::ShortestEdge(edge) => [edge; 2],
            ClipResize::Exact(sides) => sides,
        };
        // Transformers would fill up what is missing with black.
        let is_fine = sides.iter().all(|edge| (side..=MOST_SIDE).contains(edge));
        Unsupported::unless(
            is_fine,
            format!("size is {}, expected {side} to {MOST_SIDE}", sides[0].min(sides[1])),
        )?;
        let norm = PixelNorm {
            mean: self.image_mean.unwrap_or(PixelNorm::CLIP.mean),
            std: self.image_std.unwrap_or(PixelNorm::CLIP.std),
            rescale_factor: self.rescale_factor.unwrap_or(PixelNorm::CLIP.rescale_factor),
        };
        norm.check()?;
        Ok(ClipImageProcessor { resize, crop: side, norm, patch_size: vision.patch_size })
    }
}

/// Chosen: more than any model sees.
const MOST_SIDE: u32 = 1 << 13;
