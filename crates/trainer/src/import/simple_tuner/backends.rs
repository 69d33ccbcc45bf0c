//! The data backends: folders of images, those of their references, and caches.

use serde_json::Value;

use super::super::data_folder::{self, DatasetEntry};
use super::super::error::ImportError;
use super::super::family::ForeignFamily;
use super::super::mapping::Mapping;

/// Where the keys of the list stand.
const BACKENDS: &str = "backends";

fn key(index: usize, name: &str) -> String {
    format!("{BACKENDS}[{index}].{name}")
}

/// Writes `[data]`, or `[[data]]` of several backends.
pub(super) fn write(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let from = "data_backend_config";
    let file = mapping.document(from)?.ok_or_else(|| mapping.config.missing(from))?;
    if !file.root.is_array() {
        return Err(mapping.config.refuse(
            from,
            &Value::from(file.path.to_string_lossy()),
            "a file with a list of backends",
        ));
    }
    mapping.config.add(BACKENDS, &file.root);
    let mut first = None;
    for index in 0..mapping.config.count(BACKENDS) {
        let kind =
            mapping.config.text(&key(index, "dataset_type"))?.unwrap_or_else(|| "image".into());
        if mapping.config.flag(&key(index, "disabled"))? == Some(true)
            || !["image", "video"].contains(&kind.as_str())
        {
            continue;
        }
        first = first.or(Some(index));
        let entry = entry(mapping, index)?;
        data_folder::begin(mapping, &entry);
        let step = mapping.config.whole("aspect_bucket_alignment")?;
        if family == ForeignFamily::Flux2Klein {
            mapping.set_default("data.bucket_step", 16, "always 16 for FLUX.2");
        } else if let Some(step) = step {
            mapping.set("data.bucket_step", step, "aspect_bucket_alignment");
        }
        captions(mapping, index, &entry.folder)?;
        cropping(mapping, index)?;
        let from = key(index, "is_regularisation_data");
        if mapping.config.flag(&from)? == Some(true) {
            mapping.set("data.target", "base", &from);
        }
        references(mapping, index)?;
    }
    let Some(index) = first else {
        return Err(mapping.config.missing(&format!("{BACKENDS}[].instance_data_dir")));
    };
    if family == ForeignFamily::Kandinsky5Video {
        let from = key(index, "video.num_frames");
        if let Some(frames) = mapping.config.whole(&from)? {
            mapping.set("data.frames", frames, &from);
        }
    }
    Ok(())
}

fn entry(mapping: &mut Mapping, index: usize) -> Result<DatasetEntry, ImportError> {
    let kind = mapping.config.text(&key(index, "type"))?.unwrap_or_else(|| "local".into());
    if kind != "local" {
        mapping.refuse(&key(index, "type"), "hearth reads folders of images on this computer");
    }
    let from = key(index, "instance_data_dir");
    let folder = mapping.config.text(&from)?;
    // Passes beyond the first.
    let repeats = mapping.config.number(&key(index, "repeats"))?.unwrap_or(0.0) + 1.0;
    let own = mapping.config.number(&key(index, "resolution"))?;
    let sides_from = if own.is_some() { key(index, "resolution") } else { "resolution".into() };
    let size = own.or(mapping.config.number("resolution")?);
    let own = mapping.config.text(&key(index, "resolution_type"))?;
    let kind = own.or(mapping.config.text("resolution_type")?);
    let side = match (kind.as_deref().unwrap_or("pixel_area"), size.unwrap_or(1024.0)) {
        // Megapixels of 1024 × 1024.
        ("area", size) if size < 64.0 => size.sqrt() * 1024.0,
        ("pixel", size) => {
            mapping.differs(
                &sides_from,
                "the side of a square with the area of the images; there their shorter side",
            );
            size
        }
        (_, size) => size,
    };
    Ok(DatasetEntry {
        folder: folder.unwrap_or_default(),
        from,
        repeats,
        repeats_from: format!("{} + 1", key(index, "repeats")),
        sides: vec![side],
        sides_from,
        has_sides: size.is_some(),
    })
}

fn captions(mapping: &mut Mapping, index: usize, folder: &str) -> Result<(), ImportError> {
    mapping.number("caption_dropout_probability", "data.caption_dropout", 0.1)?;
    let from = key(index, "caption_strategy");
    let own = mapping.config.text(&from)?;
    let strategy =
        own.or(mapping.config.text("caption_strategy")?).unwrap_or_else(|| "filename".into());
    let prompt_from = key(index, "instance_prompt");
    let prompt = mapping.config.text(&prompt_from)?;
    let is_prepended = mapping.config.flag(&key(index, "prepend_instance_prompt"))? == Some(true);
    match strategy.as_str() {
        "textfile" => {}
        "instanceprompt" => {
            mapping.differs(
                &from,
                "captions beside the images are read all the same, behind `instance_prompt`",
            );
        }
        _ => mapping
            .refuse(&from, "captions are read from .txt beside images, and from metadata.jsonl"),
    }
    if let Some(prompt) = prompt.filter(|_| is_prepended || strategy == "instanceprompt") {
        mapping.set("data.trigger", prompt, &prompt_from);
    }
    let from = key(index, "disable_multiline_split");
    let is_whole = mapping.config.flag(&from)? == Some(true);
    if let ("textfile", false) = (strategy.as_str(), is_whole) {
        data_folder::take_caption_lines(mapping, folder, &from);
    }
    Ok(())
}

fn cropping(mapping: &mut Mapping, index: usize) -> Result<(), ImportError> {
    let is_cropped = mapping.config.flag(&key(index, "crop"))? == Some(true);
    let aspect =
        mapping.config.text(&key(index, "crop_aspect"))?.unwrap_or_else(|| "square".into());
    let style = mapping.config.text(&key(index, "crop_style"))?;
    if is_cropped && aspect == "square" {
        mapping.differs(
            &key(index, "crop_aspect"),
            "images keep their aspect ratio, there they are cropped to squares",
        );
    }
    if is_cropped && style.as_deref() == Some("random") {
        mapping.set("data.crop", "random", &key(index, "crop_style"));
    }
    Ok(())
}

/// The folders of the backends that `conditioning_data` names.
fn references(mapping: &mut Mapping, index: usize) -> Result<(), ImportError> {
    let from = key(index, "conditioning_data");
    let ids = mapping.config.texts(&from)?;
    let mut folders = Vec::new();
    for other in 0..mapping.config.count(BACKENDS) {
        let id = mapping.config.text(&key(other, "id"))?;
        if !id.is_some_and(|id| ids.contains(&id)) {
            continue;
        }
        let kind = mapping.config.text(&key(other, "conditioning_type"))?;
        let folder = mapping.config.text(&key(other, "instance_data_dir"))?;
        match kind.as_deref() {
            Some("mask") => {
                if let Some(folder) = folder {
                    let folder = mapping.places.written(&folder);
                    mapping.set("data.masks", folder, &from);
                }
                continue;
            }
            Some(kind) if kind.starts_with("reference") => {}
            _ => mapping.refuse(
                &key(other, "conditioning_type"),
                "hearth has reference images and masks, not ControlNets",
            ),
        }
        folders.extend(folder.map(|folder| mapping.places.written(&folder)));
    }
    if !folders.is_empty() {
        mapping.set("data.references", folders, &from);
    }
    Ok(())
}
