//! kohya's two trainers, sd-scripts and musubi-tuner: flags of a Python program, from a shell script or from the TOML of
//! `--config_file`, whose sections mean nothing, and a TOML with the data sets. Read in
//! <https://github.com/kohya-ss/sd-scripts/tree/48d368fa> and <https://github.com/kohya-ss/musubi-tuner/tree/30c658c>.

mod datasets;
mod flags;
mod layer_patterns;
mod musubi;
mod rules;
mod sd_scripts;
mod timesteps;

use serde_json::{Map, Value};

use super::ForeignTrainer;
use super::document::Document;
use super::error::ImportError;
use super::foreign::ForeignConfig;
use super::places::Places;

pub(super) const SD_SCRIPTS: ForeignTrainer = ForeignTrainer {
    name: "kohya's sd-scripts",
    told_by: "`pretrained_model_name_or_path` with `network_module`, or a script that starts flux_train_network.py",
    recognises: |document| match kind(document) {
        Some(KohyaFile::Flags) => !is_musubi(document),
        Some(KohyaFile::Datasets) => {
            !has_key(&document.root, "image_directory")
                && !has_key(&document.root, "video_directory")
        }
        None => false,
    },
    keys,
    map: sd_scripts::map,
    rules: &[rules::BOTH, rules::SD_SCRIPTS],
};

pub(super) const MUSUBI_TUNER: ForeignTrainer = ForeignTrainer {
    name: "musubi-tuner",
    told_by: "`dit` with `network_module`, or a script that starts qwen_image_train_network.py",
    recognises: |document| kind(document).is_some(),
    keys,
    map: musubi::map,
    rules: &[rules::BOTH, rules::MUSUBI],
};

/// Where the keys of the data set's file stand.
const DATASET: &str = "dataset";

/// Which of the two files it is.
enum KohyaFile {
    Flags,
    Datasets,
}

fn kind(document: &Document) -> Option<KohyaFile> {
    let flags = flat(&document.root);
    let is_trainer = flags.contains_key("network_module") || document.program.is_some();
    let has_base = flags.contains_key("pretrained_model_name_or_path") || flags.contains_key("dit");
    let has_file = flags.contains_key("dataset_config") || flags.contains_key("config_file");
    if is_trainer && (has_base || has_file) || has_base && flags.contains_key("dataset_config") {
        return Some(KohyaFile::Flags);
    }
    let datasets = document.root["datasets"].as_array()?;
    let is_dataset = |it: &Value| {
        ["subsets", "image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file"]
            .iter()
            .any(|key| it.get(key).is_some())
    };
    datasets.iter().any(is_dataset).then_some(KohyaFile::Datasets)
}

fn is_musubi(document: &Document) -> bool {
    const PROGRAMS: [&str; 8] = [
        "qwen_image",
        "flux_kontext",
        "flux_2",
        "zimage",
        "kandinsky5",
        "hv_train",
        "wan_train",
        "fpack",
    ];
    let flags = flat(&document.root);
    let program = document.program.as_deref().unwrap_or_default();
    flags.contains_key("dit") || PROGRAMS.iter().any(|name| program.contains(name))
}

fn has_key(value: &Value, name: &str) -> bool {
    match value {
        Value::Object(table) => {
            table.contains_key(name) || table.values().any(|it| has_key(it, name))
        }
        Value::Array(parts) => parts.iter().any(|it| has_key(it, name)),
        _ => false,
    }
}

/// Flags without the sections that a file may put them into.
fn flat(root: &Value) -> Map<String, Value> {
    let mut flags = Map::new();
    for (key, value) in root.as_object().into_iter().flatten() {
        match value {
            Value::Object(section) => flags.extend(section.clone()),
            value => _ = flags.insert(key.clone(), value.clone()),
        }
    }
    flags
}

fn keys(document: &Document) -> Result<ForeignConfig, ImportError> {
    if matches!(kind(document), Some(KohyaFile::Datasets)) {
        return Err(ImportError::Half {
            found: "the file of the data sets",
            needed: "the file of flags (`--config_file`) or the script that names this one as `dataset_config`",
            path: document.path.clone(),
        });
    }
    let mut flags = flat(&document.root);
    if let Some(Value::String(file)) = flags.remove("config_file") {
        // What is typed stands above the file.
        let file = config_file(document, &file)?;
        flags = flat(&file.root).into_iter().chain(flags).collect();
    }
    if let Some(program) = &document.program {
        flags.insert("program".into(), program.clone().into());
    }
    for list in ["network_args", "optimizer_args", "lr_scheduler_args"] {
        if let Some(value) = flags.get(list).and_then(arguments) {
            flags.insert(list.into(), Value::Object(value));
        }
    }
    Ok(ForeignConfig::new(&document.path, &Value::Object(flags)))
}

/// A file of flags; its ending may be left out.
fn config_file(document: &Document, typed: &str) -> Result<Document, ImportError> {
    let folder = document.path.parent().unwrap_or(&document.path);
    let places = Places::new(&document.path, folder, &document.path);
    let mut looked_at = places.candidates(typed);
    looked_at.extend(places.candidates(&format!("{typed}.toml")));
    match looked_at.iter().find(|path| path.is_file()) {
        Some(path) => Document::read(path),
        None => Err(ImportError::MissingFile { key: "config_file".into(), looked_at }),
    }
}

/// `name=value` one by one, so that each is a key.
fn arguments(value: &Value) -> Option<Map<String, Value>> {
    let one = std::slice::from_ref(value);
    let parts = value.as_array().map_or(one, Vec::as_slice);
    let pairs = parts.iter().map(|part| part.as_str()?.split_once('='));
    let pairs: Option<Vec<(&str, &str)>> = pairs.collect();
    Some(
        pairs?
            .into_iter()
            .map(|(name, value)| (name.trim().into(), unquoted(value).into()))
            .collect(),
    )
}

fn unquoted(value: &str) -> &str {
    value.trim().trim_matches(['"', '\''])
}
