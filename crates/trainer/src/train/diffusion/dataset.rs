//! The dataset summary of images: sizes and how many of each, and what has to be encoded first.
//!
//! A run knows it exactly, since it has compared its folder with its cache. A plan made beforehand knows the
//! images' headers, or not even those; it then assumes what takes no less. Nothing here decodes an image or
//! writes a file.

use super::DiffusionTask;
use crate::cache::bucketed::{BucketedImage, assign_buckets, clip_settings, n_held_out, n_items};
use crate::cache::scaled::{scaled_counts, shortened_counts};
use crate::cache::{CacheBuilder, CacheIndex, CachedSample, waiting_bytes};
use crate::config::data::{DataConfig, ValidationSplit};
use crate::config::data_sets::DataSets;
use crate::data::decoding::decoding_bytes;
use crate::data::{Bucket, DecodingNeed, ReferenceSize, SampleSize, SizeCounts};
use crate::error::Result;
use crate::model::diffusion::editing::{Editing, EncoderImages};
use crate::sample::reference::reference_size;
use crate::task::traits::DatasetSummary;

type SampleCounts = SizeCounts<SampleSize>;

/// Batches of an epoch where there is no folder to count. Chosen: as many images as people train on at the
/// least, and enough to fill the largest encoding batch.
const NOMINAL_BATCHES: usize = 16;

impl DatasetSummary<SampleSize> {
    /// Of a folder that was compared with the cache.
    pub fn from_caching(caching: &CacheBuilder<'_>) -> Self {
        let CacheIndex { train, held_out, .. } = caching.index();
        let [to_encode, references_to_encode] = caching.to_encode();
        Self {
            train: counts(train, |sample| sample.repeats as usize),
            held_out: counts(held_out, |_| 1),
            to_encode,
            references_to_encode,
            decoding: caching.decoding_need(),
            n_texts: caching.missing().texts,
            is_nominal: false,
        }
    }

    /// Of a job that has not started, with this batch size: of its folders if they exist.
    pub fn estimate(task: &DiffusionTask<'_>, batch: usize) -> Result<Self> {
        let has_all = task.data.iter().all(|set| set.images.exists());
        if has_all { Self::from_folders(task) } else { Self::nominal(task, batch) }
    }

    /// Of folders, from their images' headers alone. Nothing is taken as encoded yet. Which images are held out
    /// follows from their contents, so each counts as trained on, and each size as validated on.
    pub fn from_folders(task: &DiffusionTask<'_>) -> Result<Self> {
        let data = task.data;
        let images = assign_buckets(task.pipeline, data, &|_| true)?.images;
        let mut summary = Self::nothing(task);
        for set in 0..data.n_sets() {
            let of_set = || images.iter().filter(|image| image.set == set);
            let n_items = n_items(of_set().map(|image| &*image.item.path));
            let n_held = n_held_out(n_items, data, set)?.saturating_mul(data[set].segments);
            let (mut train, mut found) = (SampleCounts::new(), SampleCounts::new());
            for image in of_set() {
                *train.entry(image.size()).or_default() += image.repeats as usize;
                *found.entry(image.size()).or_default() += 1;
            }
            let held_out = found.iter().map(|(size, n)| (*size, n_held.min(*n)));
            let held_out = held_out.filter(|(_, n)| *n > 0).collect();
            summary.add(&data[set], train, held_out, &found);
        }
        Ok(Self { decoding: decoding_need(&images), ..summary })
    }

    /// Of folders that do not exist yet: square images, as many as `data.draw` will draw, else enough to
    /// fill batches. For a video model, square clips.
    pub fn nominal(task: &DiffusionTask<'_>, batch: usize) -> Result<Self> {
        let mut summary = Self { is_nominal: true, ..Self::nothing(task) };
        for data in task.data {
            let n = match data.draw {
                Some(_) => data.draw_count,
                None => NOMINAL_BATCHES * batch,
            };
            let mut found = SampleCounts::new();
            for resolution in data.resolution.iter() {
                *found.entry(nominal_size(task, data, resolution)?).or_default() += n;
            }
            let repeats = usize::try_from(data.repeats).unwrap_or(usize::MAX);
            let train = found.iter().map(|(size, n)| (*size, n.saturating_mul(repeats)));
            let has_validation = data.validation != ValidationSplit::None;
            let held_out = found.keys().filter(|_| has_validation).map(|size| (*size, 1));
            summary.add(data, train.collect(), held_out.collect(), &found);
        }
        Ok(summary)
    }

    /// Of no images.
    fn nothing(task: &DiffusionTask<'_>) -> Self {
        Self {
            train: SampleCounts::new(),
            held_out: SampleCounts::new(),
            to_encode: SampleCounts::new(),
            references_to_encode: SampleCounts::new(),
            decoding: DecodingNeed::default(),
            n_texts: n_other_texts(task),
            is_nominal: false,
        }
    }

    /// Adds the images of a set: how many are shown, held out, and found.
    fn add(
        &mut self,
        data: &DataConfig,
        train: SampleCounts,
        held_out: SampleCounts,
        found: &SampleCounts,
    ) {
        add_counts(&mut self.train, train);
        add_counts(&mut self.held_out, held_out);
        add_counts(&mut self.to_encode, to_encode(found, views(data), own));
        add_counts(&mut self.references_to_encode, to_encode(found, views(data), references));
        self.n_texts += n_texts(found, data);
    }
}

fn add_counts(to: &mut SampleCounts, counts: SampleCounts) {
    for (size, n) in counts {
        *to.entry(size).or_default() += n;
    }
}

/// A square image, or clip, with one reference of the same shape for a model that needs one or a set that has a folder of
/// them.
fn nominal_size(
    task: &DiffusionTask<'_>,
    data: &DataConfig,
    resolution: usize,
) -> Result<SampleSize> {
    let side = (resolution / data.bucket_step).max(1) * data.bucket_step;
    let square = Bucket { width: side, height: side };
    let has_references = !data.references.0.is_empty();
    let editing = task.pipeline.family().editing;
    let editing = editing.filter(|editing| editing.needs_reference || has_references);
    let reference = editing.map(|it| reference_size(it, square.sides(), data.reference_resolution));
    let frames = clip_settings(task.pipeline, data)?.map_or(1, |settings| settings.frames);
    Ok(SampleSize::new(square, reference).with_frames(frames))
}

/// What decoding all images of a folder takes.
fn decoding_need(images: &[BucketedImage]) -> DecodingNeed {
    let mut need = DecodingNeed::default();
    for BucketedImage { item, bucket, references: sizes, .. } in images {
        let own = match &item.clip {
            None => decoding_bytes(&item.path, bucket.sides()),
            Some(clip) => clip.decoding_bytes(&item.path, item.size, bucket.sides()),
        };
        need.add(&item.path, own.unwrap_or(0));
        for (image, size) in item.references.iter().zip(sizes) {
            need.add(&image.path, decoding_bytes(&image.path, size.vae.sides()).unwrap_or(0));
        }
    }
    let sizes = images.iter().map(BucketedImage::size);
    need.waiting_bytes =
        waiting_bytes(sizes.flat_map(|size| [own(&size), references(&size)].concat()));
    need
}

/// The same images at another resolution.
pub(super) fn scaled(
    dataset: &DatasetSummary<SampleSize>,
    data: &DataSets,
    resolution: usize,
) -> DatasetSummary<SampleSize> {
    let counts = |counts: &SampleCounts| scaled_counts(counts, data, resolution);
    DatasetSummary {
        train: counts(&dataset.train),
        held_out: counts(&dataset.held_out),
        to_encode: counts(&dataset.to_encode),
        references_to_encode: dataset.references_to_encode.clone(),
        decoding: dataset.decoding.clone(),
        ..*dataset
    }
}

/// The same with clips of at most so many frames.
pub(super) fn shortened(
    dataset: &DatasetSummary<SampleSize>,
    frames: usize,
) -> DatasetSummary<SampleSize> {
    DatasetSummary {
        train: shortened_counts(&dataset.train, frames),
        held_out: shortened_counts(&dataset.held_out, frames),
        to_encode: shortened_counts(&dataset.to_encode, frames),
        references_to_encode: dataset.references_to_encode.clone(),
        decoding: dataset.decoding.clone(),
        ..*dataset
    }
}

/// The same with references of at most another resolution. Their own sizes are not known any more, only those of now: each
/// side may be rounded to a step more than is needed, so that a plan with them is never too small.
pub(super) fn with_smaller_references(
    dataset: &DatasetSummary<SampleSize>,
    editing: Editing,
    resolution: usize,
) -> DatasetSummary<SampleSize> {
    let smaller = |now: Bucket| {
        let [width, height] = editing.vae_size(now.sides(), resolution as u32);
        let step = editing.multiple();
        let most = |side: u32, now: usize| ((side + step) as usize).min(now);
        Bucket { width: most(width, now.width), height: most(height, now.height) }
    };
    let reference = |now: ReferenceSize| {
        let vae = smaller(now.vae);
        let is_same = editing.encoder == Some(EncoderImages::Same);
        let cropped_from = editing.cropped_from(resolution as u32);
        let encoder = now.encoder.map(|seen| if is_same { vae } else { seen });
        ReferenceSize { vae, cropped_from, encoder }
    };
    let counts = |counts: &SampleCounts| {
        let mut all = SampleCounts::new();
        for (size, n) in counts {
            let references = size.references().map(reference);
            let size = SampleSize::new(size.bucket, references).with_frames(size.frames);
            *all.entry(size).or_default() += n;
        }
        all
    };
    let mut references_to_encode = SizeCounts::new();
    for (size, n) in &dataset.references_to_encode {
        *references_to_encode.entry(smaller(size.bucket).into()).or_default() += n;
    }
    DatasetSummary {
        train: counts(&dataset.train),
        held_out: counts(&dataset.held_out),
        to_encode: dataset.to_encode.clone(),
        references_to_encode,
        decoding: dataset.decoding.clone(),
        ..*dataset
    }
}

fn counts(samples: &[CachedSample], weight: impl Fn(&CachedSample) -> usize) -> SampleCounts {
    let mut counts = SampleCounts::new();
    for sample in samples {
        *counts.entry(sample.size()).or_default() += weight(sample);
    }
    counts
}

/// Latents of some images of each sample, in all their views.
fn to_encode(
    found: &SampleCounts,
    views: usize,
    images: fn(&SampleSize) -> Vec<SampleSize>,
) -> SampleCounts {
    let mut counts = SizeCounts::new();
    for (size, n) in found {
        for image in images(size) {
            *counts.entry(image).or_default() += n * views;
        }
    }
    counts
}

/// Of a sample without its references.
fn own(size: &SampleSize) -> Vec<SampleSize> {
    vec![SampleSize::from(size.bucket).with_frames(size.frames)]
}

fn references(size: &SampleSize) -> Vec<SampleSize> {
    size.references().map(|reference| reference.vae.into()).collect()
}

/// Captions; where the text encoder sees images, those of mirror images and, with caption dropout, empty ones are
/// prompts of their own.
fn n_texts(found: &SampleCounts, data: &DataConfig) -> usize {
    let of_sample = |size: &SampleSize| {
        if size.encoder_images().is_empty() {
            return 1;
        }
        views(data) * (1 + usize::from(data.caption_dropout > 0.0))
    };
    found.iter().map(|(size, n)| n * of_sample(size)).sum()
}

/// Texts that are encoded beside captions: prompts, the negative prompt, and the empty one. Where the text encoder sees
/// images, each prompt has a negative one with the same images.
fn n_other_texts(task: &DiffusionTask<'_>) -> usize {
    let n = task.sample.prompts.len();
    let sees_images = task.pipeline.family().editing.is_some_and(|it| it.encoder.is_some());
    if sees_images { 2 * n } else { n + 2 }
}

/// Latents of an image: its own, and those of its mirror image with `data.flip`.
fn views(data: &DataConfig) -> usize {
    1 + usize::from(data.flip)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use tempfile::TempDir;

    use super::*;
    use crate::cache::CacheRequest;
    use crate::config::{RawConfig, RunConfig};
    use crate::model::diffusion::Pipeline;
    use crate::model::diffusion::paths::PartPaths;

    fn golden(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
    }

    fn pipeline() -> Pipeline {
        Pipeline::open(&golden("sd3/pipeline"), &PartPaths::default()).unwrap()
    }

    fn job(folder: &Path, settings: &[&str]) -> RunConfig {
        let mut raw = RawConfig::empty();
        let images = format!("data.images={}", folder.join("images").display());
        let output = format!("output.folder={}", folder.join("run").display());
        let fixed = ["base.path=x", &images, &output, "data.resolution=96", "data.bucket_step=16"];
        fixed.iter().chain(settings).for_each(|argument| raw.set(argument).unwrap());
        raw.resolve().unwrap()
    }

    /// Images of other programs, some rotated, some truncated or too small, and a folder of tall and wide ones
    /// whose name asks for three repeats.
    fn folder() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let images = folder.path().join("images");
        fs::create_dir_all(images.join("3_shape")).unwrap();
        for entry in fs::read_dir(golden("images")).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, images.join(path.file_name().unwrap())).unwrap();
        }
        for (index, [width, height]) in
            [[64, 64], [64, 128], [192, 70], [128, 64], [100, 80]].into_iter().enumerate()
        {
            let path = images.join(format!("3_shape/{index}.png"));
            let mut encoder =
                png::Encoder::new(fs::File::create(path).unwrap(), width as u32, height as u32);
            encoder.set_color(png::ColorType::Rgb);
            let pixels = vec![index as u8; width * height * 3];
            encoder.write_header().unwrap().write_image_data(&pixels).unwrap();
        }
        folder
    }

    fn estimated(folder: &Path, settings: &[&str]) -> Result<DatasetSummary<SampleSize>> {
        let (config, pipeline) = (job(folder, settings), pipeline());
        DatasetSummary::estimate(&DiffusionTask::new(&config, &pipeline)?, config.train.batch_size)
    }

    /// What a run finds, and the estimate.
    fn both(folder: &Path, settings: &[&str]) -> [DatasetSummary<SampleSize>; 2] {
        let (config, pipeline) = (job(folder, settings), pipeline());
        let estimated = estimated(folder, settings).unwrap();
        assert!(!folder.join("run").exists(), "an estimate writes nothing");
        let caching =
            CacheBuilder::new(&pipeline, CacheRequest::from_config(&config).unwrap(), &|_| true)
                .unwrap();
        let exact = DatasetSummary::from_caching(&caching);
        fs::remove_dir_all(folder.join("run")).unwrap();
        [exact, estimated]
    }

    #[test]
    fn headers_give_the_sizes_that_a_run_finds() {
        let folder = folder();
        for settings in [&[][..], &["data.flip=true", "data.repeats=2"], &["data.resolution=64"]] {
            let [exact, estimated] = both(folder.path(), settings);
            // Some have the same caption, or none; an estimate does not read captions.
            assert!(exact.n_texts <= estimated.n_texts, "{exact:?} {estimated:?}");
            assert_eq!(
                exact,
                DatasetSummary { n_texts: exact.n_texts, ..estimated },
                "{settings:?}"
            );
            assert!(exact.train.len() > 3, "{settings:?}: only {:?}", exact.train);
        }
    }

    #[test]
    fn headers_of_several_sets_give_the_sizes_that_a_run_finds() {
        let folder = folder();
        let images = folder.path().join("images");
        let shapes = images.join("3_shape");
        let sets = format!(
            "data=[{{images = {images:?}, resolution = 96}}, {{images = {shapes:?}, resolution = [64, 96], \
             flip = true, repeats = 2, validation = 1}}]"
        );
        let settings = [sets.as_str(), "data.bucket_step=16"];
        let [exact, estimated] = both(folder.path(), &settings);
        let one = both(folder.path(), &["data.resolution=96"])[0].clone();
        let n = |counts: &SampleCounts| counts.values().sum::<usize>();
        // Five images at two sizes, thrice by the folder's name and twice by the set; one is held out of both sets.
        assert_eq!(n(&estimated.train), n(&one.train) + 5 * 2 * 6);
        assert_eq!(n(&exact.train), n(&one.train) - 3 + 4 * 2 * 6);
        assert_eq!(n(&exact.held_out), 3);
        assert!(exact.train.keys().all(|size| estimated.train.contains_key(size)));
        assert_eq!(n(&estimated.to_encode), n(&one.to_encode) + 5 * 2 * 2);
    }

    #[test]
    fn no_more_is_held_out_than_estimated() {
        let folder = folder();
        for setting in ["data.validation=2", "data.validation=0.4"] {
            let [exact, estimated] = both(folder.path(), &[setting]);
            for (exact, estimated) in
                [(&exact.train, &estimated.train), (&exact.held_out, &estimated.held_out)]
            {
                let is_estimated =
                    |(size, n): (&SampleSize, &usize)| estimated.get(size) >= Some(n);
                assert!(exact.iter().all(is_estimated), "{setting}: {exact:?} {estimated:?}");
            }
            assert_eq!(exact.to_encode, estimated.to_encode);
        }
    }

    #[test]
    fn too_many_held_out_are_refused_before_the_run() {
        let folder = folder();
        let error = estimated(folder.path(), &["data.validation=1000"]).unwrap_err().to_string();
        assert!(error.contains("holds out 1000 images, there are"), "{error}");
    }

    #[test]
    fn without_a_folder_images_are_square_and_fill_batches() {
        let folder = tempfile::tempdir().unwrap();
        let square = Bucket { width: 96, height: 96 };
        let at = |settings: &[&str]| estimated(folder.path(), settings).unwrap();
        let plain = at(&["train.batch_size=3"]);
        assert!(plain.is_nominal && plain.held_out.is_empty());
        assert_eq!(plain.n_texts, 48 + 2);
        assert_eq!(plain.train, SampleCounts::from([(square.into(), 48)]));
        assert_eq!(plain.to_encode, SampleCounts::from([(square.into(), 48)]));
        let measured = at(&[
            "data.validation=0.1",
            "data.bucket_step=32",
            "data.flip=true",
            "data.resolution=112",
        ]);
        assert_eq!(measured.held_out, SampleCounts::from([(square.into(), 1)]));
        assert_eq!(measured.to_encode, SampleCounts::from([(square.into(), 32)]));
        let drawn = at(&["data.draw=flat", "data.draw_count=5", "data.repeats=2"]);
        assert_eq!(drawn.train, SampleCounts::from([(square.into(), 10)]));
    }

    #[test]
    fn smaller_references_are_no_smaller_than_those_of_a_job_that_asks_for_them() {
        let folder = tempfile::tempdir().unwrap();
        for base in ["FLUX.1-Kontext-dev", "Qwen-Image-Edit"] {
            let pipeline =
                Pipeline::open_or_published(Path::new(base), &PartPaths::default()).unwrap();
            let editing = pipeline.family().editing.unwrap();
            for side in ["1024", "640", "96"] {
                let resolution = format!("data.resolution={side}");
                let nominal = |references: &str| {
                    let references = format!("data.reference_resolution={references}");
                    let config = job(folder.path(), &[&resolution, &references]);
                    let task = DiffusionTask::new(&config, &pipeline).unwrap();
                    DatasetSummary::nominal(&task, 1).unwrap()
                };
                let (now, asked) = (nominal("1024"), nominal("512"));
                let smaller = with_smaller_references(&now, editing, 512);
                let pixels = |dataset: &DatasetSummary<SampleSize>| {
                    dataset.train.keys().map(SampleSize::pixels).max().unwrap()
                };
                assert!(pixels(&asked) <= pixels(&smaller), "{base} {side}");
                assert!(pixels(&smaller) < pixels(&now), "{base} {side}");
            }
        }
    }
}
