//! Data sets of other trainers as those of a job: each is a set of its own, also several of one folder.

use std::fs;
use std::path::Path;

use serde_json::Value;

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

/// Writes the folder, the repeats and the resolution of a set, which lines of `[data]` are of from here on.
pub(super) fn begin(mapping: &mut Mapping, entry: &DatasetEntry) {
    mapping.begin_set(mapping.folders.len());
    mapping.folders.push(entry.folder.clone());
    let images = mapping.places.written(&entry.folder);
    mapping.set("data.images", images, &entry.from);
    write_resolution(mapping, entry);
    write_repeats(mapping, entry);
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

fn write_resolution(mapping: &mut Mapping, entry: &DatasetEntry) {
    let rounded = |side: &f64| ((side / SIDE_STEP).round() * SIDE_STEP) as u64;
    let mut sides: Vec<u64> = entry.sides.iter().map(rounded).collect();
    sides.sort_unstable();
    sides.dedup();
    let value = match sides[..] {
        [] => return,
        [side] => Value::from(side),
        _ => Value::from(sides),
    };
    let typed = entry.has_sides.then(|| value.clone());
    mapping.set_or("data.resolution", typed, value, &entry.sides_from);
}

fn write_repeats(mapping: &mut Mapping, DatasetEntry { repeats, repeats_from, .. }: &DatasetEntry) {
    if repeats.fract() != 0.0 {
        mapping.differs(repeats_from, "rounded to a whole number of repeats");
    }
    if *repeats != 1.0 {
        mapping.set("data.repeats", repeats.round().max(1.0) as u64, repeats_from);
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

/// Steps of an epoch of the job so far, if the images are there to be counted. Nothing is known of buckets here: each of
/// them may have a smaller batch.
fn steps_per_epoch(mapping: &Mapping) -> Option<u64> {
    let mut n_shown = 0_u64;
    for (set, folder) in mapping.folders.iter().enumerate() {
        let n_images = n_images(&mapping.places.find(folder)?)?;
        let value = |key: &str| mapping.value_of(key, Some(set));
        let repeats = value("data.repeats").and_then(Value::as_u64).unwrap_or(1);
        let n_sides = value("data.resolution").and_then(Value::as_array).map_or(1, Vec::len);
        let shown = n_images.checked_mul(repeats)?.checked_mul(n_sides as u64)?;
        n_shown = n_shown.checked_add(shown)?;
    }
    let number = |key: &str| mapping.value(key).and_then(Value::as_u64).unwrap_or(1);
    let batches = n_shown.div_ceil(number("train.batch_size").max(1));
    (n_shown > 0).then(|| batches.div_ceil(number("train.gradient_accumulation").max(1)).max(1))
}

/// Steps of so many epochs, for what is done every few of them. Without the images it is left to the default.
pub(super) fn steps_of_epochs(mapping: &mut Mapping, from: &str, epochs: u64) -> Option<u64> {
    let steps = steps_per_epoch(mapping).and_then(|steps| steps.checked_mul(epochs));
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

/// The other trainer takes each line as a caption: so does the job, unless a look at the folder finds no caption of several.
pub(super) fn take_caption_lines(mapping: &mut Mapping, folder: &str, from: &str) {
    let count = mapping.places.find(folder).and_then(|path| n_with_lines(&path, &["txt"]));
    if count != Some(0) {
        mapping.set_default("data.caption_choice", "line", from);
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
