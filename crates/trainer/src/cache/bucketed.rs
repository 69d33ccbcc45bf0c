//! The images of a folder in the sizes they are trained in, from their headers alone. A run goes
//! on from here to their bytes (`select`); a plan ends here (`plan::DatasetSummary`). Both see the same
//! images in the same sizes because there is no second way to choose them.

use std::path::Path;

use weights::BytesDoneFn;

use super::scaled::RESOLUTIONS;
use crate::config::data::{DataConfig, ValidationSplit};
use crate::config::data_sets::DataSets;
use crate::data::clip::{ClipSettings, whole};
use crate::data::findings::explained;
use crate::data::mask::attach_masks;
use crate::data::{
    Bucket, Buckets, ClipSegment, ImageItem, MediaKinds, Problem, ProblemKind, ReferenceSize,
    SampleSize, ScanOptions, scan,
};
use crate::error::{Result, TrainerError};
use crate::model::diffusion::Pipeline;
use crate::sample::reference::reference_size;

/// Chosen: what an epoch's order takes in memory stays below a gigabyte.
const MAX_EPOCH_SAMPLES: u64 = 100_000_000;

/// The longest ratio of a reference's sides. Chosen: half of what Qwen2.5-VL takes, since sides are rounded to multiples
/// before it sees them.
const MAX_REFERENCE_RATIO: u32 = 100;

/// An image, or a segment of a clip, in its size.
pub(crate) struct BucketedImage {
    /// Which of the job's sets it is of.
    pub set: usize,
    pub item: ImageItem,
    /// The resolution that the bucket is of.
    pub resolution: usize,
    pub bucket: Bucket,
    /// Of a clip, the part that is seen.
    pub segment: Option<ClipSegment>,
    /// The sizes of its references, for a model that takes them.
    pub references: Vec<ReferenceSize>,
    /// How often an epoch shows it.
    pub repeats: u32,
}

impl BucketedImage {
    /// What its work depends on.
    pub fn size(&self) -> SampleSize {
        let frames = self.segment.map_or(1, |segment| segment.frames);
        SampleSize::new(self.bucket, self.references.iter().copied()).with_frames(frames)
    }
}

/// What the headers in a job's folders give.
#[derive(Default)]
pub(crate) struct BucketedFolders {
    /// Set by set, each sorted by path; of one path by resolution.
    pub images: Vec<BucketedImage>,
    pub problems: Vec<Problem>,
}

/// Looks through the folders of all sets and gives every image its sizes.
pub(crate) fn assign_buckets(
    pipeline: &Pipeline,
    data: &DataSets,
    tick: BytesDoneFn<'_>,
) -> Result<BucketedFolders> {
    let mut found = BucketedFolders::default();
    for set in 0..data.n_sets() {
        assign_set(pipeline, data, set, &mut found, tick)?;
    }
    balance(&mut found, data);
    let BucketedFolders { images, problems } = &found;
    check_any(images.iter().map(|image| (image.set, image.repeats)), data, problems)?;
    check_sizes(pipeline, images)?;
    let scaled_up: Vec<Problem> =
        images.iter().filter_map(|image| scaled_up(image, &data[image.set])).collect();
    found.problems.extend(scaled_up);
    Ok(found)
}

/// Repeats regularisation images so often that an epoch shows as many of them as of the others. Where there are more of
/// them, those that are left out are spread evenly.
fn balance(BucketedFolders { images, problems }: &mut BucketedFolders, data: &DataSets) {
    let is_regular = |image: &BucketedImage| data[image.set].regularisation;
    let learnt = images.iter().filter(|image| !is_regular(image));
    let n_shown: u64 = learnt.map(|image| u64::from(image.repeats)).sum();
    let n_regular = images.iter().filter(|image| is_regular(image)).count() as u64;
    let shown_before = |at: u64| at.saturating_mul(n_shown) / n_regular.max(1);
    for (at, image) in (0..).zip(images.iter_mut().filter(|image| is_regular(image))) {
        let repeats = shown_before(at + 1) - shown_before(at);
        image.repeats = u32::try_from(repeats).unwrap_or(u32::MAX);
    }
    for (set, config) in data.iter().enumerate() {
        let of = images.iter().filter(|image| image.set == set).count();
        let n = images.iter().filter(|image| image.set == set && image.repeats == 0).count();
        if n > 0 {
            problems.push(Problem::warning(
                &config.images,
                ProblemKind::RegularisationSurplus { n, of },
            ));
        }
    }
    images.retain(|image| image.repeats > 0);
}

/// Adds the images of a set, each in every resolution.
fn assign_set(
    pipeline: &Pipeline,
    sets: &DataSets,
    set: usize,
    BucketedFolders { images, problems }: &mut BucketedFolders,
    tick: BytesDoneFn<'_>,
) -> Result<()> {
    let data = &sets[set];
    let buckets = buckets(pipeline, data)?;
    let clips = clip_settings(pipeline, data)?;
    let (media, follow_links) = (media_kinds(pipeline), data.follow_links);
    let options = ScanOptions { media, follow_links };
    let found = scan(&data.images, &data.references.0, options, tick)?;
    let found = attach_masks(found, &data.images, &data.masks, follow_links);
    problems.extend(found.problems);
    for item in found.items {
        let repeats = u64::from(item.repeats).saturating_mul(data.repeats);
        let repeats = u32::try_from(repeats).unwrap_or(u32::MAX);
        let references = match reference_sizes(pipeline, data, &item) {
            Ok(references) => references,
            Err(kind) => {
                problems.push(Problem::skipped(item.path, kind));
                continue;
            }
        };
        if references.len() < item.references.len() {
            problems.push(Problem::warning(&item.path, ProblemKind::ReferencesUnused));
        }
        for segment in segments(&item, clips, problems) {
            let sized = buckets.iter().map(|(resolution, buckets)| BucketedImage {
                set,
                item: item.clone(),
                resolution: *resolution,
                bucket: buckets.choose(item.size),
                segment,
                references: references.clone(),
                repeats,
            });
            images.extend(sized);
        }
    }
    Ok(())
}

/// What a model can be trained on.
pub fn media_kinds(pipeline: &Pipeline) -> MediaKinds {
    match pipeline.family().video {
        Some(_) => MediaKinds::ImagesAndClips,
        None => MediaKinds::Images,
    }
}

/// Which parts of clips a job sees; `None` with a model of images.
pub(crate) fn clip_settings(
    pipeline: &Pipeline,
    data: &DataConfig,
) -> Result<Option<ClipSettings>> {
    let Some(video) = pipeline.family().video else { return Ok(None) };
    let unit = pipeline.vae.temporal_scale_factor();
    let frames = data.frames.unwrap_or(video.frames);
    let whole = whole(frames, unit);
    // What was typed is meant; the family's own number is rounded for a VAE of another size.
    if whole != frames && frames != video.frames {
        return Err(TrainerError::Request {
            problem: format!(
                "data.frames is {frames}, the model takes {unit}·k + 1, such as {whole}"
            ),
            hint: "choose such a number",
        });
    }
    let fps = data.fps.unwrap_or(video.fps);
    Ok(Some(ClipSettings { frames: whole, fps, segments: data.segments, unit }))
}

/// An image as it is; the segments of a clip. A clip that is too short becomes a problem.
fn segments(
    item: &ImageItem,
    settings: Option<ClipSettings>,
    problems: &mut Vec<Problem>,
) -> Vec<Option<ClipSegment>> {
    let (Some(clip), Some(settings)) = (&item.clip, settings) else { return vec![None] };
    let ClipSettings { frames: wanted, fps, .. } = settings;
    let frames = clip.n_frames(fps);
    let segments = settings.segments(frames);
    match segments.first() {
        None => {
            let kind = ProblemKind::ClipTooShort { frames, fps, least: settings.least() };
            problems.push(Problem::skipped(&item.path, kind));
        }
        Some(ClipSegment { frames: used, .. }) if *used < wanted => {
            let kind = ProblemKind::ClipShort { frames, fps, wanted, used: *used };
            problems.push(Problem::warning(&item.path, kind));
        }
        Some(_) => {}
    }
    segments.into_iter().map(Some).collect()
}

/// Images and clips of a folder; segments of one clip lie side by side.
pub(crate) fn n_items<'a>(paths: impl Iterator<Item = &'a Path>) -> usize {
    let mut last = None;
    paths.filter(|path| last.replace(*path) != Some(*path)).count()
}

/// The sizes of an image's references; none for a model that takes none.
fn reference_sizes(
    pipeline: &Pipeline,
    data: &DataConfig,
    item: &ImageItem,
) -> std::result::Result<Vec<ReferenceSize>, ProblemKind> {
    let Some(editing) = pipeline.family().editing else { return Ok(Vec::new()) };
    let (n, most) = (item.references.len(), editing.max_references);
    match n {
        0 if editing.needs_reference => return Err(ProblemKind::ReferenceNone),
        n if n > most => return Err(ProblemKind::ReferencesTooMany { n, most }),
        _ => {}
    }
    let sizes = item.references.iter().map(|reference| {
        let [width, height] = reference.size;
        if width.max(height) / width.min(height).max(1) > MAX_REFERENCE_RATIO {
            let (size, most) = (reference.size, MAX_REFERENCE_RATIO);
            return Err(ProblemKind::ReferenceTooLong { size, most });
        }
        Ok(reference_size(editing, reference.size, data.reference_resolution))
    });
    sizes.collect()
}

/// That an image is smaller than its bucket, with the resolution that it fits.
fn scaled_up(image: &BucketedImage, data: &DataConfig) -> Option<Problem> {
    let BucketedImage { item: ImageItem { path, size, .. }, bucket, segment, resolution, .. } =
        image;
    // Of a clip it is said once.
    if covers(*size, *bucket) || segment.is_some_and(|segment| segment.start > 0) {
        return None;
    }
    let fits = |resolution: &usize| {
        let buckets = buckets_of(*resolution, data.bucket_step);
        buckets.is_ok_and(|buckets| covers(*size, buckets.choose(*size)))
    };
    let fits = RESOLUTIONS.into_iter().filter(|side| side < resolution).find(fits);
    Some(Problem::warning(path, ProblemKind::ScaledUp { size: *size, bucket: *bucket, fits }))
}

fn covers([width, height]: [u32; 2], bucket: Bucket) -> bool {
    width as usize >= bucket.width && height as usize >= bucket.height
}

/// How many of the `n` images of a set are held out.
pub(crate) fn n_held_out(n: usize, data: &DataSets, set: usize) -> Result<usize> {
    let n_held = match data[set].validation {
        ValidationSplit::None => 0,
        ValidationSplit::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        ValidationSplit::Share(share) => ((n as f64 * share).round() as usize).max(1),
    };
    if n_held < n {
        return Ok(n_held);
    }
    Err(TrainerError::Request {
        problem: format!(
            "{} holds out {n_held} images, there are {n}",
            data.key(set, "validation")
        ),
        hint: "leave at least one to train on",
    })
}

/// That there is an image in each set, and no more of them than an epoch can hold. Given are the set and the repeats of
/// each.
pub(super) fn check_any(
    images: impl Iterator<Item = (usize, u32)>,
    data: &DataSets,
    problems: &[Problem],
) -> Result<()> {
    let mut n_shown = 0_u64;
    let mut is_empty = vec![true; data.n_sets()];
    for (set, repeats) in images {
        n_shown += u64::from(repeats);
        is_empty[set] = false;
    }
    if n_shown > MAX_EPOCH_SAMPLES {
        return Err(TrainerError::Request {
            problem: format!("an epoch shows {n_shown} images, most is {MAX_EPOCH_SAMPLES}"),
            hint: "lower data.repeats, or the numbers that folders begin with",
        });
    }
    let Some(set) = is_empty.iter().position(|is_empty| *is_empty) else { return Ok(()) };
    let folder = &data[set].images;
    let is_of_set = |problem: &&Problem| problem.path.starts_with(folder);
    let problems: Vec<Problem> = problems.iter().filter(is_of_set).cloned().collect();
    let why = explained(&problems).unwrap_or_else(|| "it holds none".into());
    Err(TrainerError::Request {
        problem: format!("no image to train with in {}: {why}", folder.display()),
        hint: "give data.images a folder with png, jpeg, webp or gif images",
    })
}

/// The buckets of each resolution of a set.
fn buckets(pipeline: &Pipeline, data: &DataConfig) -> Result<Vec<(usize, Buckets)>> {
    let unit = pipeline.pixels_per_token();
    if !data.bucket_step.is_multiple_of(unit) {
        return Err(TrainerError::Request {
            problem: format!(
                "data.bucket_step is {}, the model needs a multiple of {unit}",
                data.bucket_step
            ),
            hint: "choose a multiple of that number",
        });
    }
    let of = |side| Ok((side, buckets_of(side, data.bucket_step)?));
    data.resolution.iter().map(of).collect()
}

fn buckets_of(resolution: usize, step: usize) -> Result<Buckets> {
    Buckets::new(resolution, step, resolution / 2, resolution * 2)
}

/// That the model has a place for every patch.
fn check_sizes(pipeline: &Pipeline, images: &[BucketedImage]) -> Result<()> {
    let Some(most) = pipeline.max_side() else { return Ok(()) };
    let too_long = |image: &&BucketedImage| image.bucket.width.max(image.bucket.height) > most;
    let Some(image) = images.iter().find(too_long) else { return Ok(()) };
    let Bucket { width, height } = image.bucket;
    Err(TrainerError::Request {
        problem: format!(
            "bucket {width}x{height} is larger than the model's {most}x{most}: {}",
            image.item.path.display()
        ),
        hint: "lower data.resolution, or leave out very long images",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;

    #[test]
    fn an_image_that_is_scaled_up_is_named_with_the_resolution_it_fits() {
        let mut raw = RawConfig::empty();
        for argument in ["base.path=x", "data.images=y", "data.resolution=1024"] {
            raw.set(argument).unwrap();
        }
        let config = raw.resolve().unwrap();
        let data = config.data.images().unwrap().0.common();
        let resolution = data.resolution.largest();
        let buckets = buckets_of(resolution, data.bucket_step).unwrap();
        let said = |size: [u32; 2]| {
            let (path, caption) = ("a.png".into(), String::new());
            let item = ImageItem {
                path,
                caption,
                caption_source: crate::data::CaptionSource::default(),
                size,
                repeats: 1,
                references: Vec::new(),
                clip: None,
                mask: None,
            };
            let (bucket, references) = (buckets.choose(size), Vec::new());
            let (set, segment, repeats) = (0, None, 1);
            let image =
                BucketedImage { set, item, resolution, bucket, segment, references, repeats };
            scaled_up(&image, data).map(|problem| problem.to_string())
        };
        assert_eq!(said([1024, 1024]), None);
        assert_eq!(said([4000, 3000]), None);
        let says = |words: &str| Some(format!("a.png is scaled up from {words}"));
        assert_eq!(
            said([1023, 1024]),
            says("1023 x 1024 to 1024 x 1024 pixels; it fits data.resolution = 768")
        );
        assert_eq!(
            said([300, 300]),
            says("300 x 300 to 1024 x 1024 pixels; it fits data.resolution = 256")
        );
        assert_eq!(
            said([200, 200]),
            says("200 x 200 to 1024 x 1024 pixels; it fits no usual data.resolution")
        );
    }
}
