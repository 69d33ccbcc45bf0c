//! Images to the patches that the vision tower sees, as transformers' `Qwen2VLImageProcessor` makes them: scaled to sides
//! that are multiples of a merged patch, within limits of pixels, normalised, and cut up.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::vision::VisionConfig;
use crate::error::{Result, TrainerError};
use crate::model::config::{self, Unsupported};
use crate::model::encoder::image_processor::{CHANNELS, PixelNorm, check_steps};
use crate::pixels::{Filter, Pixels, scale};

/// How images are prepared, as `preprocessor_config.json` states it.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageProcessor {
    /// Pixels that an image has at least and at most.
    pixels: [u64; 2],
    norm: PixelNorm,
    patch_size: usize,
    merge_size: usize,
    temporal_patch_size: usize,
}

/// Patches of an image, from top to bottom and from left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PatchGrid {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

impl PatchGrid {
    /// Patches.
    pub fn len(self) -> usize {
        self.rows * self.columns
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The same in squares of `merge` patches a side.
    #[must_use]
    pub fn merged(self, merge: usize) -> Self {
        Self { rows: self.rows / merge, columns: self.columns / merge }
    }
}

/// An image whose sides differ more cannot be seen. Taken: transformers' `smart_resize`.
const MOST_ASPECT: u64 = 200;

/// Images are never scaled up to more pixels. Chosen: such an image takes a gigabyte.
const MOST_SCALED: u64 = 1 << 28;

/// The older file with settings of images, and the newer one of a whole processor.
const FILES: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];

/// The file's keys.
#[derive(Deserialize)]
struct ImageProcessorJson {
    min_pixels: Option<u64>,
    max_pixels: Option<u64>,
    #[serde(default)]
    size: PixelLimitsJson,
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
    patch_size: Option<usize>,
    merge_size: Option<usize>,
    temporal_patch_size: Option<usize>,
    rescale_factor: Option<f32>,
    resample: Option<u32>,
    do_resize: Option<bool>,
    do_rescale: Option<bool>,
    do_normalize: Option<bool>,
}

/// Limits of pixels, under names of other processors' limits of sides.
#[derive(Default, Deserialize)]
struct PixelLimitsJson {
    #[serde(alias = "min_pixels")]
    shortest_edge: Option<u64>,
    #[serde(alias = "max_pixels")]
    longest_edge: Option<u64>,
}

impl ImageProcessor {
    /// That of the published models.
    pub fn published() -> Self {
        Self {
            pixels: [56 * 56, 28 * 28 * 16_384],
            norm: PixelNorm::CLIP,
            patch_size: 14,
            merge_size: 2,
            temporal_patch_size: 2,
        }
    }

    /// Reads that of a folder, for a vision tower of these settings, with the file that it was read from.
    pub fn open(folder: &Path, vision: &VisionConfig) -> Result<(Self, PathBuf)> {
        let [older, newer] = FILES.map(|name| folder.join(name));
        let nested = if newer.exists() { config::read::<Value>(&newer)? } else { Value::Null };
        let (settings, path) = match nested.get("image_processor") {
            Some(inner) => (inner.clone(), newer),
            None if older.exists() => (config::read(&older)?, older),
            None => {
                let what = "image processor";
                let problem = format!("lacks {}", FILES.join(" and "));
                return Err(TrainerError::Folder { what, problem, path: folder.into() });
            }
        };
        let wrong = |problem: String| TrainerError::Config { problem, path: path.clone() };
        let json: ImageProcessorJson =
            serde_json::from_value(settings).map_err(|error| wrong(error.to_string()))?;
        let read = json.meaning().and_then(|read| read.check(vision).map(|()| read));
        let read = read.map_err(|Unsupported(problem)| wrong(problem))?;
        Ok((read, path))
    }

    /// That of the published models, for a vision tower of these settings: pipelines for images come without one.
    pub fn published_for(vision: &VisionConfig) -> std::result::Result<Self, Unsupported> {
        let published = Self::published();
        published.check(vision).map(|()| published)
    }

    /// Smaller images are scaled up to so many pixels.
    pub fn min_pixels(&self) -> u64 {
        self.pixels[0]
    }

    /// The same with images of at most so many pixels.
    pub fn with_max_pixels(self, most: u64) -> Result<Self> {
        let [least, own] = self.pixels;
        if most < least {
            let problem =
                format!("images of at most {most} pixels, the model sees {least} at least");
            return Err(TrainerError::Request { problem, hint: "give a larger --max-pixels" });
        }
        Ok(Self { pixels: [least, own.min(most)], ..self })
    }

    /// Checks that it cuts up images as the tower sees them.
    fn check(&self, vision: &VisionConfig) -> std::result::Result<(), Unsupported> {
        let [least, most] = self.pixels;
        let limits = format!("min_pixels {least} is not from 1 to max_pixels {most}");
        Unsupported::unless((1..=most).contains(&least), limits)?;
        let problem = format!("min_pixels is {least}, expected up to {MOST_SCALED}");
        Unsupported::unless(least <= MOST_SCALED, problem)?;
        self.norm.check()?;
        for (key, ours, towers) in [
            ("patch_size", self.patch_size, vision.patch_size),
            ("merge_size", self.merge_size, vision.spatial_merge_size),
            ("temporal_patch_size", self.temporal_patch_size, vision.temporal_patch_size),
        ] {
            let problem = format!("{key} is {ours}, the vision tower's {towers}");
            Unsupported::unless(ours == towers, problem)?;
        }
        Ok(())
    }

    /// The patches of an image of this width and height, when it is scaled.
    pub fn grid(&self, [width, height]: [u32; 2]) -> Result<PatchGrid> {
        let [width, height] = [u64::from(width), u64::from(height)];
        let [shorter, longer] = [width.min(height), width.max(height)];
        if shorter == 0 || longer > MOST_ASPECT * shorter {
            let problem = format!(
                "an image of {width} x {height} pixels, the text encoder sees sides that differ by up to {MOST_ASPECT} times"
            );
            return Err(TrainerError::Request { problem, hint: "crop it" });
        }
        let [rows, columns] = self.units([height, width]).map(|n| n as usize * self.merge_size);
        Ok(PatchGrid { rows, columns })
    }

    /// Merged patches along each side: the nearest, or as many as the limits allow.
    fn units(&self, sides: [u64; 2]) -> [u64; 2] {
        let unit = (self.patch_size * self.merge_size) as f64;
        let [least, most] = self.pixels.map(|limit| limit as f64);
        let sides = sides.map(|side| side as f64);
        let area = sides[0] * sides[1];
        let nearest = sides.map(|side| (side / unit).round_ties_even());
        let scaled = nearest[0] * nearest[1] * unit * unit;
        if scaled > most {
            let by = (area / most).sqrt();
            return sides.map(|side| (side / by / unit).floor().max(1.0) as u64);
        }
        if scaled < least {
            let by = (least / area).sqrt();
            return sides.map(|side| (side * by / unit).ceil() as u64);
        }
        nearest.map(|n| n as u64)
    }

    /// The values of each patch [channels, temporal, patch, patch], one patch after the other, in the order of
    /// transformers: all patches of a square that will be merged, then the next square. A still image is repeated for each
    /// frame of a patch: the weights of frames could be summed instead, but not exactly in 16 bits.
    pub fn patches(&self, image: Pixels, grid: PatchGrid) -> Vec<f32> {
        let side = self.patch_size;
        let size = [grid.columns * side, grid.rows * side].map(|pixels| pixels as u32);
        let image = scale(image, size, Filter::Bicubic);
        let mut values = Vec::with_capacity(grid.len() * self.values_per_patch());
        for [row, column] in patch_order(grid, self.merge_size) {
            for channel in 0..CHANNELS {
                for _ in 0..self.temporal_patch_size {
                    let from = [row * side, column * side];
                    self.norm.push_patch(&mut values, &image, from, side, channel);
                }
            }
        }
        values
    }

    /// Values of a patch.
    pub fn values_per_patch(&self) -> usize {
        CHANNELS * self.temporal_patch_size * self.patch_size * self.patch_size
    }
}

/// Row and column of each patch of an image, squares of `merge` patches a side one after the other.
pub fn patch_order(grid: PatchGrid, merge: usize) -> impl Iterator<Item = [usize; 2]> {
    let PatchGrid { rows, columns } = grid.merged(merge);
    let squares = (0..rows).flat_map(move |row| (0..columns).map(move |column| [row, column]));
    squares.flat_map(move |[row, column]| {
        let inner = (0..merge * merge).map(move |at| [at / merge, at % merge]);
        inner.map(move |[down, right]| [row * merge + down, column * merge + right])
    })
}

impl ImageProcessorJson {
    fn meaning(self) -> std::result::Result<ImageProcessor, Unsupported> {
        let steps = [
            ("do_resize", self.do_resize),
            ("do_rescale", self.do_rescale),
            ("do_normalize", self.do_normalize),
        ];
        check_steps(steps, self.resample)?;
        Ok(ImageProcessor {
            pixels: [
                needed("min_pixels", self.min_pixels.or(self.size.shortest_edge))?,
                needed("max_pixels", self.max_pixels.or(self.size.longest_edge))?,
            ],
            norm: PixelNorm {
                mean: needed("image_mean", self.image_mean)?,
                std: needed("image_std", self.image_std)?,
                rescale_factor: self.rescale_factor.unwrap_or(PixelNorm::CLIP.rescale_factor),
            },
            patch_size: needed("patch_size", self.patch_size)?,
            merge_size: needed("merge_size", self.merge_size)?,
            temporal_patch_size: needed("temporal_patch_size", self.temporal_patch_size)?,
        })
    }
}

/// A setting that the file has to have: the defaults of programs differ.
fn needed<T>(key: &str, value: Option<T>) -> std::result::Result<T, Unsupported> {
    value.ok_or_else(|| Unsupported(format!("{key} is missing")))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    /// Made with transformers 5.23's `smart_resize`, width and height of images and of what is seen.
    #[test]
    fn sizes_are_those_of_the_reference() {
        let published = ImageProcessor::published();
        let limited = ImageProcessor { pixels: [56 * 56, 28 * 28 * 1280], ..published.clone() };
        for (processor, size, expected) in SIZES.map(|(is_limited, size, expected)| {
            (if is_limited { &limited } else { &published }, size, expected)
        }) {
            let PatchGrid { rows, columns } = processor.grid(size).unwrap();
            assert_eq!([columns, rows].map(|side| side * 14), expected, "{size:?}");
        }
    }

    const SIZES: [(bool, [u32; 2], [usize; 2]); 12] = [
        (false, [1024, 1024], [1036, 1036]),
        (true, [1024, 1024], [980, 980]),
        (false, [384, 384], [392, 392]),
        (false, [544, 288], [532, 280]),
        (false, [1, 1], [56, 56]),
        (false, [14, 42], [56, 112]),
        (false, [42, 70], [56, 56]),
        (false, [2000, 10], [812, 28]),
        (false, [8000, 6000], [4116, 3080]),
        (true, [3000, 20], [2996, 28]),
        (true, [30, 2000], [28, 1988]),
        (false, [70, 98], [56, 112]),
    ];

    #[test]
    fn extreme_sides_are_refused() {
        let refused = |size| ImageProcessor::published().grid(size).unwrap_err().to_string();
        assert!(ImageProcessor::published().grid([2000, 10]).is_ok());
        assert_eq!(
            refused([2001, 10]),
            "an image of 2001 x 10 pixels, the text encoder sees sides that differ by up to 200 times"
        );
        assert!(refused([0, 10]).contains("0 x 10 pixels"));
    }

    #[test]
    fn settings_are_read_in_all_forms() {
        let published = ImageProcessor::published();
        let open = |name: &str, settings: &Value| {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), settings.to_string()).unwrap();
            let opened = ImageProcessor::open(folder.path(), &VisionConfig::published());
            opened.map(|(read, _)| read).map_err(|error| error.to_string())
        };
        let refused = |settings: &Value| {
            let message = open(FILES[0], settings).unwrap_err();
            message.split(": /").next().unwrap().to_owned()
        };
        let older = json!({
            "min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
            "image_mean": published.norm.mean, "image_std": published.norm.std,
        });
        let mut newer = older.clone();
        newer["min_pixels"] = Value::Null;
        newer["max_pixels"] = Value::Null;
        newer["size"] = json!({"shortest_edge": 3136, "longest_edge": 12_845_056});
        for settings in [&older, &newer] {
            assert_eq!(open(FILES[0], settings).unwrap(), published);
            assert_eq!(open(FILES[1], &json!({"image_processor": settings})).unwrap(), published);
        }
        for (key, value, problem) in [
            ("max_pixels", Value::Null, "max_pixels is missing"),
            ("min_pixels", json!(0), "min_pixels 0 is not from 1 to max_pixels 12845056"),
            ("max_pixels", json!(3135), "min_pixels 3136 is not from 1 to max_pixels 3135"),
            ("rescale_factor", json!(0.0), "rescale_factor is 0"),
            ("image_std", json!([0.0, 1.0, 1.0]), "image_std is [0.0, 1.0, 1.0]"),
            ("merge_size", json!(3), "merge_size is 3, the vision tower's 2"),
            ("do_resize", json!(false), "do_resize is false, expected true"),
            ("resample", json!(2), "resample is 2, expected 3 (bicubic)"),
        ] {
            let mut wrong = older.clone();
            wrong[key] = value;
            assert_eq!(refused(&wrong), problem);
        }
        let nothing = open("other.json", &older).unwrap_err();
        assert!(nothing.ends_with("lacks preprocessor_config.json and processor_config.json"));
    }
}
