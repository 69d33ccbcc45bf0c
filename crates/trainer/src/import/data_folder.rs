//! Data sets of other trainers as the one folder of a job. Entries of the same folder are one, with as many repeats and
//! the largest resolution; several folders have to be put into one by whoever has them.

use std::fs;
use std::path::Path;

use super::error::ImportError;
use super::mapping::Mapping;

/// A data set of another trainer.
#[derive(Debug)]
pub(super) struct DatasetEntry {
    /// The folder, as it is typed.
    pub folder: String,
    /// Its key.
    pub from: String,
    /// How often each image is seen in an epoch.
    pub repeats: f64,
    pub repeats_from: String,
    /// Sides of squares of the area; more than one: each image is seen at each.
    pub sides: Vec<f64>,
    pub sides_from: String,
    /// Whether the config sets it.
    pub has_sides: bool,
}

/// Sides are multiples of it.
const SIDE_STEP: f64 = 16.0;

/// Writes the folder, the repeats and the resolution; the folder's path, as it is typed.
pub(super) fn write(mapping: &mut Mapping, entries: &[DatasetEntry]) -> Option<String> {
    let (first, others) = entries.split_first()?;
    let images = mapping.places.written(&first.folder);
    for other in others {
        if mapping.places.written(&other.folder) != images {
            let why = format!(
                "hearth trains on one folder: put it and {} into one and name that; folders called \
                 `3_name` have 3 repeats",
                first.folder
            );
            mapping.refuse(&other.from, why);
            return None;
        }
    }
    mapping.set("data.images", images, &first.from);
    write_resolution(mapping, entries);
    write_repeats(mapping, entries);
    Some(first.folder.clone())
}

/// Writes a prefix of all captions as the trigger.
pub(super) fn write_caption_prefix(mapping: &mut Mapping, from: &str) -> Result<(), ImportError> {
    if let Some(prefix) = mapping.config.text(from)? {
        if !prefix.ends_with(',') {
            mapping.differs(
                from,
                "a comma follows it, and captions that have it already get no second one",
            );
        }
        mapping.set("data.trigger", prefix.trim_end_matches(',').trim(), from);
    }
    Ok(())
}

fn write_resolution(mapping: &mut Mapping, entries: &[DatasetEntry]) {
    let mut sides: Vec<f64> =
        entries.iter().flat_map(|entry| entry.sides.iter().copied()).collect();
    sides.sort_by(f64::total_cmp);
    sides.dedup();
    let Some(largest) = sides.last() else { return };
    let side = ((largest / SIDE_STEP).round() * SIDE_STEP) as u64;
    let first = &entries[0];
    let from = first.sides_from.as_str();
    if sides.len() > 1 {
        let list: Vec<_> = sides.iter().map(ToString::to_string).collect();
        let why =
            format!("every image is seen at {side} alone, there at each of {}", list.join(", "));
        mapping.differs(from, why);
    }
    let side_of_set = first.has_sides.then_some(side);
    mapping.set_or("data.resolution", side_of_set, side, from);
}

fn write_repeats(mapping: &mut Mapping, entries: &[DatasetEntry]) {
    let repeats: f64 =
        entries.iter().map(|entry| entry.repeats * entry.sides.len().max(1) as f64).sum();
    let from = match entries {
        [one] if one.sides.len() > 1 => format!("{}, {}", one.repeats_from, one.sides_from),
        [first, ..] => first.repeats_from.clone(),
        [] => return,
    };
    if repeats.fract() != 0.0 {
        mapping.differs(&entries[0].repeats_from, "rounded to a whole number of repeats");
    }
    if repeats != 1.0 {
        mapping.set("data.repeats", repeats.round().max(1.0) as u64, &from);
    }
}

/// Endings of images that every trainer reads.
const IMAGES: [&str; 5] = ["png", "jpg", "jpeg", "webp", "bmp"];

/// Images in a folder, without those in folders in it; nothing if it is not there.
pub(super) fn n_images(folder: &Path) -> Option<u64> {
    let is_image = |name: &std::ffi::OsStr| {
        let ending =
            Path::new(name).extension().unwrap_or_default().to_string_lossy().to_lowercase();
        IMAGES.contains(&ending.as_str())
    };
    let entries = fs::read_dir(folder).ok()?;
    let count = entries.filter_map(Result::ok).filter(|entry| is_image(&entry.file_name())).count();
    (count > 0).then_some(count as u64)
}

/// Steps of an epoch of the job so far, if the images are there to be counted.
pub(super) fn steps_per_epoch(mapping: &Mapping, folder: &str) -> Option<u64> {
    let n_images = n_images(&mapping.places.find(folder)?)?;
    let number = |key: &str| mapping.value(key).and_then(serde_json::Value::as_u64).unwrap_or(1);
    let seen = n_images.checked_mul(number("data.repeats"))?;
    let batches = seen.div_ceil(number("train.batch_size").max(1));
    Some(batches.div_ceil(number("train.gradient_accumulation").max(1)).max(1))
}

/// Steps of so many epochs, for what is done every few of them. Without the images it is left to the default.
pub(super) fn steps_of_epochs(
    mapping: &mut Mapping,
    from: &str,
    epochs: u64,
    folder: Option<&str>,
) -> Option<u64> {
    let steps = folder.and_then(|folder| steps_per_epoch(mapping, folder));
    let steps = steps.and_then(|steps| steps.checked_mul(epochs));
    if steps.is_none() {
        let why = "hearth counts steps, and the images are not there to be counted: its default";
        mapping.differs(from, why);
    }
    steps.map(|steps| steps.max(1))
}

/// The side of the square with the area of a size.
pub(super) fn side(size: &[f64]) -> Option<f64> {
    match size {
        [side] => Some(*side),
        [width, height] => Some((width * height).sqrt()),
        _ => None,
    }
}

/// Tells if a folder has captions of several lines, of which the other trainer does something else than read them all.
pub(super) fn tell_caption_lines(
    mapping: &mut Mapping,
    folder: &str,
    endings: &[&str],
    from: &str,
    there: &str,
) {
    let count = mapping.places.find(folder).and_then(|path| n_with_lines(&path, endings));
    match count {
        Some(0) => {}
        Some(count) => {
            mapping.differs(
                from,
                format!("{count} captions have several lines: hearth reads them whole, {there}"),
            );
        }
        None => mapping
            .differs(from, format!("of captions with several lines hearth reads all, {there}")),
    }
}

/// Chosen: no caption is longer, and a stranger's folder may have anything in it.
const CAPTION_BYTES: u64 = 1 << 16;

fn n_with_lines(folder: &Path, endings: &[&str]) -> Option<usize> {
    let entries = fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let captions = entries.filter(|entry| {
        let path = entry.path();
        let ending = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        endings.contains(&ending.as_str())
            && entry.metadata().is_ok_and(|data| data.is_file() && data.len() <= CAPTION_BYTES)
    });
    let has_lines = |entry: &fs::DirEntry| {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        text.lines().filter(|line| !line.trim().is_empty()).count() > 1
    };
    Some(captions.filter(has_lines).count())
}
