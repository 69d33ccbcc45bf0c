//! Sample images, small enough to be embedded in the page. Each links to its file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Cursor;
use std::path::{Component, Path, PathBuf};

use image::codecs::jpeg::JpegEncoder;
use image::{DynamicImage, ImageFormat};

use crate::event::history::SampleImage;

/// Files up to this go into the page as they are. Chosen: a small model's images stay exact, two
/// hundred of 1024 pixels do not make a page of 300 MB.
const EXACT_BYTES: usize = 128 << 10;
/// Larger ones are scaled down to this side and stored as JPEG of this quality.
const SIDE: u32 = 512;
const QUALITY: u8 = 85;
/// Images in the page; of more, steps are left out evenly. Chosen: about 10 MB of page.
const SHOWN: usize = 200;

/// The images of a page.
#[derive(Clone, Debug, Default)]
pub struct Gallery {
    /// By step.
    pub shown: Vec<GalleryImage>,
    /// The reference images of those, as `data:` addresses.
    pub references: BTreeMap<PathBuf, String>,
    /// Images that were left out for their number.
    pub n_left_out: usize,
    /// What could not be shown, and why.
    pub problems: Vec<String>,
}

/// An image of a page.
#[derive(Clone, Debug)]
pub struct GalleryImage {
    /// What was drawn, and when.
    pub sample: SampleImage,
    /// The image itself, as a `data:` address.
    pub data: String,
}

/// Reads the images of a run.
pub fn gallery(run_folder: &Path, samples: &[SampleImage]) -> Gallery {
    let mut gallery = Gallery::default();
    let chosen = chosen(samples);
    gallery.n_left_out = samples.len() - chosen.len();
    for sample in chosen {
        match data(run_folder, &sample.path) {
            Ok(data) => gallery.shown.push(GalleryImage { sample: sample.clone(), data }),
            Err(why) => gallery.problems.push(format!("{} {why}", sample.path.display())),
        }
    }
    let shown = gallery.shown.iter();
    let references: BTreeSet<&PathBuf> = shown.flat_map(|image| &image.sample.references).collect();
    for path in references {
        match data(run_folder, path) {
            Ok(data) => _ = gallery.references.insert(path.clone(), data),
            Err(why) => gallery.problems.push(format!("{} {why}", path.display())),
        }
    }
    gallery
}

/// Whole steps at even distances, the last one always, and the first one of an editing model.
fn chosen(samples: &[SampleImage]) -> Vec<&SampleImage> {
    let steps: Vec<_> = samples.chunk_by(|a, b| a.step == b.step).collect();
    let every = samples.len().div_ceil(SHOWN).max(1);
    let counted = steps.iter().rev().step_by(every);
    let is_edit = |step: &[SampleImage]| step.iter().any(|sample| !sample.references.is_empty());
    let is_counted = steps.len() % every == 1 % every;
    let first = steps.first().filter(|step| !is_counted && is_edit(step));
    let mut chosen: Vec<_> = counted.chain(first).flat_map(|step| step.iter()).collect();
    chosen.sort_by_key(|sample| sample.step);
    chosen
}

/// An image as a `data:` address, or why there is none.
fn data(run_folder: &Path, path: &Path) -> Result<String, String> {
    // An untrusted history must not embed other files of this computer.
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err("is outside the run's folder".into());
    }
    let bytes =
        fs::read(run_folder.join(path)).map_err(|error| format!("cannot be read: {error}"))?;
    let damaged = |error: image::ImageError| format!("is not an image: {error}");
    let image = image::load_from_memory_with_format(&bytes, ImageFormat::Png).map_err(damaged)?;
    if bytes.len() <= EXACT_BYTES {
        return Ok(format!("data:image/png;base64,{}", base64::encode(&bytes)));
    }
    Ok(format!("data:image/jpeg;base64,{}", base64::encode(scaled(&image).map_err(damaged)?)))
}

fn scaled(image: &DynamicImage) -> image::ImageResult<Vec<u8>> {
    let small = if image.width().max(image.height()) > SIDE {
        image.thumbnail(SIDE, SIDE)
    } else {
        image.clone()
    };
    let mut bytes = Cursor::new(Vec::new());
    JpegEncoder::new_with_quality(&mut bytes, QUALITY).encode_image(&small.to_rgb8())?;
    Ok(bytes.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_images_whole_steps_are_left_out() {
        let sample = |step, n| SampleImage {
            step,
            path: format!("{step}-{n}.png").into(),
            prompt: String::new(),
            seed: n,
            references: Vec::new(),
            clip: None,
        };
        let mut samples: Vec<_> =
            (0..=150).flat_map(|step| (0..4).map(move |n| sample(step, n))).collect();
        let ends = |chosen: &[&SampleImage]| [0, chosen.len() - 1].map(|at| chosen[at].step);
        let without = chosen(&samples);
        assert!(without.len() <= SHOWN, "{}", without.len());
        assert_eq!(without.len() % 4, 0);
        assert!(without.is_sorted_by_key(|sample| (sample.step, sample.seed)));
        assert_eq!(ends(&without), [2, 150]);
        let n_without = without.len();
        // An edit is compared with the image before training.
        for sample in &mut samples {
            sample.references = vec!["reference.png".into()];
        }
        let with = chosen(&samples);
        assert_eq!((with.len(), ends(&with)), (n_without + 4, [0, 150]));
    }

    #[test]
    fn large_images_become_small_ones_and_strange_paths_none() {
        let folder = tempfile::tempdir().unwrap();
        // Noise, which no format compresses.
        let image = image::RgbImage::from_fn(700, 350, |x, y| {
            let noise = (x * 7919 + y * 104_729).wrapping_mul(2_654_435_761) >> 8;
            image::Rgb(noise.to_le_bytes()[..3].try_into().unwrap())
        });
        image.save(folder.path().join("a.png")).unwrap();
        let found = data(folder.path(), Path::new("a.png")).unwrap();
        let bytes = base64::decode(found.strip_prefix("data:image/jpeg;base64,").unwrap()).unwrap();
        let small = image::load_from_memory(&bytes).unwrap();
        assert_eq!((small.width(), small.height()), (512, 256));
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        assert!(data(&inner, Path::new("../a.png")).is_err());
        fs::write(inner.join("b.png"), "not an image").unwrap();
        assert!(data(&inner, Path::new("b.png")).is_err());
    }
}
