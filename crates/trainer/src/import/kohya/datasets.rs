//! The data sets of both trainers: values fall through from `[general]` to `[[datasets]]` and, in sd-scripts, to
//! `[[datasets.subsets]]`; flags stand below all of them.

use serde_json::Value;

use super::super::data_folder::{self, DatasetEntry};
use super::super::error::ImportError;
use super::super::mapping::Mapping;
use super::DATASET;

/// One folder of images with the sections that its values may stand in, the nearest first.
pub(super) struct Sections(Vec<String>);

impl Sections {
    /// Of a subset, or of a data set that has none.
    pub fn new(dataset: usize, subset: Option<usize>) -> Self {
        let mut sections = Vec::new();
        if let Some(subset) = subset {
            sections.push(format!("{DATASET}.datasets[{dataset}].subsets[{subset}]."));
        }
        sections.push(format!("{DATASET}.datasets[{dataset}]."));
        sections.push(format!("{DATASET}.general."));
        sections.push(String::new());
        Self(sections)
    }

    /// Of flags alone.
    pub fn flags() -> Self {
        Self(vec![String::new()])
    }

    /// The key that decides; those that it overrides are dealt with by that.
    pub fn key(&self, mapping: &mut Mapping, name: &str) -> String {
        let keys: Vec<String> = self.0.iter().map(|section| format!("{section}{name}")).collect();
        let nearest = keys.iter().find(|key| mapping.config.peek(key).is_some()).cloned();
        for key in &keys {
            mapping.config.value(key);
        }
        nearest.unwrap_or_else(|| keys[0].clone())
    }
}

/// Folders of sd-scripts' data sets.
pub(super) fn subsets(mapping: &Mapping) -> Vec<Sections> {
    let mut folders = Vec::new();
    for dataset in 0..mapping.config.count(&format!("{DATASET}.datasets")) {
        let n_subsets = mapping.config.count(&format!("{DATASET}.datasets[{dataset}].subsets"));
        folders.extend((0..n_subsets).map(|subset| Sections::new(dataset, Some(subset))));
    }
    folders
}

/// Folders of musubi-tuner's.
pub(super) fn plain(mapping: &Mapping) -> Vec<Sections> {
    let n_datasets = mapping.config.count(&format!("{DATASET}.datasets"));
    (0..n_datasets).map(|dataset| Sections::new(dataset, None)).collect()
}

/// Begins a set: writes its folder with its size and repeats; gives the folder as typed.
pub(super) fn begin(
    mapping: &mut Mapping,
    sections: &Sections,
    names: &[&str],
    default: &[f64],
) -> Result<String, ImportError> {
    let mut from = sections.key(mapping, names[0]);
    for name in names {
        let key = sections.key(mapping, name);
        if mapping.config.peek(&key).is_some() {
            from = key;
        }
    }
    let folder = mapping.config.text(&from)?.ok_or_else(|| mapping.config.missing(&from))?;
    let repeats_from = sections.key(mapping, "num_repeats");
    let repeats = mapping.config.number(&repeats_from)?.unwrap_or(1.0);
    let sides_from = sections.key(mapping, "resolution");
    let size = mapping.config.numbers(&sides_from)?;
    let has_sides = !size.is_empty();
    let size = if has_sides { size } else { default.to_vec() };
    if let [width, height] = size[..]
        && width != height
    {
        mapping.differs(
            &sides_from,
            "the area is the same; without buckets there, all images have this very size",
        );
    }
    let sides = data_folder::side(&size).into_iter().collect();
    let entry = DatasetEntry { folder, from, repeats, repeats_from, sides, sides_from, has_sides };
    data_folder::begin(mapping, &entry);
    Ok(entry.folder)
}

/// Batch size and buckets of the first data set.
pub(super) fn batches(mapping: &mut Mapping, sections: &Sections) -> Result<(), ImportError> {
    let flag = "train_batch_size";
    let from = sections.key(mapping, "batch_size");
    match mapping.config.whole(&from)? {
        Some(size) => {
            mapping.set("train.batch_size", size, &from);
            if mapping.config.peek(flag).is_some() {
                mapping.no_effect(flag, "the data set has its own batch size");
            }
        }
        None => _ = mapping.whole(flag, "train.batch_size", 1)?,
    }
    let from = sections.key(mapping, "enable_bucket");
    if mapping.config.flag(&from)? != Some(true) {
        mapping.differs(&from, "images keep their aspect ratio in buckets; without `enable_bucket` they are cropped to one size there");
    }
    let from = sections.key(mapping, "bucket_no_upscale");
    if mapping.config.flag(&from)? == Some(true) {
        mapping.differs(&from, "images that are smaller than their bucket are enlarged");
    }
    Ok(())
}

/// That captions are read from files that hearth reads.
pub(super) fn caption_ending(
    mapping: &mut Mapping,
    sections: &Sections,
    default: &'static str,
) -> Result<String, ImportError> {
    let from = sections.key(mapping, "caption_extension");
    let typed = mapping.config.text(&from)?;
    let ending = typed.as_deref().unwrap_or(default).trim_start_matches('.').to_owned();
    if !["txt", "caption"].contains(&ending.as_str()) {
        mapping.refuse(&from, "captions are read from .txt and .caption");
    } else if ending == "caption" {
        mapping.no_effect(&from, "hearth reads .txt and .caption; of both, .txt");
    }
    Ok(ending)
}

/// Tells of a key of batches that a later set has otherwise than the first.
pub(super) fn tell_others(mapping: &mut Mapping, folders: &[Sections], names: &[&str]) {
    let Some((first, others)) = folders.split_first() else { return };
    for sections in others {
        for name in names {
            let (mine, theirs) = (first.key(mapping, name), sections.key(mapping, name));
            let value = |key: &str| mapping.config.peek(key).cloned().unwrap_or(Value::Null);
            if value(&mine) != value(&theirs) {
                mapping.differs(&theirs, "batches are of several sets: the first decides");
            }
        }
    }
}
