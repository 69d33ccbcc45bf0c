//! Whether a snapshot has all files that the model in it needs, told by its own `model_index.json`, `config.json` and
//! indexes of shards. Python and hearth put a file into a snapshot when it is whole, so that one that is there counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::HubPath;
use crate::catalog::INDEX_SUFFIX;
use crate::plain_file::read_plain;

/// How much of a model is in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchState {
    /// Nothing of it.
    Absent,
    /// A download was begun; what is known to be missing.
    Partial(Vec<String>),
    /// All that is needed.
    Complete,
}

/// Parts of a pipeline that hearth has no use for.
pub const UNUSED_PARTS: [&str; 3] = ["safety_checker", "feature_extractor", "image_encoder"];

/// What a part of a pipeline has, by its class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// Settings alone: schedulers, tokenizers.
    Settings,
    /// `config.json` and weights.
    Model,
}

/// The parts that `model_index.json` lists and hearth uses.
pub fn parts(index: &[u8]) -> Vec<(String, PartKind)> {
    let index: BTreeMap<String, Value> = serde_json::from_slice(index).unwrap_or_default();
    let used = index.into_iter().filter_map(|(name, value)| {
        let class = value.as_array().and_then(|pair| pair.get(1)?.as_str().map(str::to_owned))?;
        let is_used = !UNUSED_PARTS.contains(&name.as_str())
            && super::is_inside(&name)
            && !name.contains('/');
        let models =
            ["Model", "Autoencoder", "Transformer", "ForConditionalGeneration", "ForCausalLM"];
        let is_model = models.iter().any(|part| class.contains(part));
        is_used.then_some((name, if is_model { PartKind::Model } else { PartKind::Settings }))
    });
    used.collect()
}

impl HubPath {
    /// How much of what it names is there.
    pub fn state(&self) -> FetchState {
        let snapshot = self.snapshot();
        if !snapshot.is_dir() {
            let blobs = fs::read_dir(self.name.folder(&self.cache).join("blobs"));
            let is_begun = blobs
                .into_iter()
                .flatten()
                .flatten()
                .any(|entry| is_partial(&entry.file_name().to_string_lossy()));
            return if is_begun { FetchState::Partial(Vec::new()) } else { FetchState::Absent };
        }
        let missing = match &self.name.file {
            Some(file) if snapshot.join(file).exists() => Vec::new(),
            Some(file) => vec![file.clone()],
            None => missing(&snapshot),
        };
        if missing.is_empty() { FetchState::Complete } else { FetchState::Partial(missing) }
    }
}

/// A blob that is still being written, by Python or by hearth.
fn is_partial(blob: &str) -> bool {
    [".incomplete", super::listing::PARTIAL].iter().any(|end| blob.ends_with(end))
}

/// Files that a snapshot lacks.
fn missing(snapshot: &Path) -> Vec<String> {
    if let Ok(index) = read_plain(&snapshot.join("model_index.json")) {
        let missing =
            parts(&index).into_iter().flat_map(|(part, kind)| missing_of(snapshot, &part, kind));
        return missing.collect();
    }
    if snapshot.join("config.json").exists() {
        return missing_weights(snapshot, "");
    }
    let is_file = file_names(snapshot).iter().any(|name| is_weights(name));
    if is_file { Vec::new() } else { vec!["model_index.json or config.json".into()] }
}

fn missing_of(snapshot: &Path, part: &str, kind: PartKind) -> Vec<String> {
    let folder = snapshot.join(part);
    match kind {
        PartKind::Settings if file_names(&folder).is_empty() => vec![format!("{part}/")],
        PartKind::Settings => Vec::new(),
        PartKind::Model => {
            let config = format!("{part}/config.json");
            let config = Some(config).filter(|config| !snapshot.join(config).exists());
            config.into_iter().chain(missing_weights(&folder, &format!("{part}/"))).collect()
        }
    }
}

#[derive(Deserialize)]
struct HubShardIndex {
    weight_map: BTreeMap<String, String>,
}

/// Weights of a folder that are not there: shards of its index, or all.
fn missing_weights(folder: &Path, shown: &str) -> Vec<String> {
    let names = file_names(folder);
    let index =
        names.iter().filter(|name| name.ends_with(INDEX_SUFFIX)).min_by_key(|name| name.len());
    let is_single = |name: &String| is_weights(name) && !name.contains("-of-");
    let Some(index) = index.filter(|_| !names.iter().any(is_single)) else {
        let is_there = names.iter().any(|name| is_weights(name));
        return if is_there { Vec::new() } else { vec![format!("{shown}*.safetensors")] };
    };
    let read = read_plain(&folder.join(index))
        .ok()
        .and_then(|text| serde_json::from_slice::<HubShardIndex>(&text).ok());
    let shards: BTreeSet<String> =
        read.map(|index| index.weight_map.into_values().collect()).unwrap_or_default();
    let missing = shards.into_iter().filter(|shard| !names.contains(shard));
    missing.map(|shard| format!("{shown}{shard}")).collect()
}

fn is_weights(name: &str) -> bool {
    [".safetensors", ".gguf", ".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end))
}

/// Files of a folder; a link that leads nowhere is none.
fn file_names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.path().is_file());
    files.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn check(files: &[(&str, &str)], expected: &[&str]) {
        let place = tempfile::tempdir().unwrap();
        let snapshot = place.path().join("models--a--b/snapshots/main");
        let blobs = place.path().join("models--a--b/blobs");
        fs::create_dir_all(&blobs).unwrap();
        for (number, (name, text)) in files.iter().enumerate() {
            let path = snapshot.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            if *text != "nowhere" {
                fs::write(blobs.join(number.to_string()), text).unwrap();
            }
            symlink(blobs.join(number.to_string()), path).unwrap();
        }
        let found = HubPath::of(&snapshot).unwrap().state();
        let expected: Vec<String> = expected.iter().map(|&name| name.into()).collect();
        let expected =
            if expected.is_empty() { FetchState::Complete } else { FetchState::Partial(expected) };
        assert_eq!(found, expected, "{files:?}");
    }

    const INDEX: (&str, &str) = (
        "model_index.json",
        r#"{"_class_name": "X", "vae": ["diffusers", "AutoencoderKL"], "scheduler": ["diffusers", "FlowScheduler"],
            "tokenizer": ["transformers", "CLIPTokenizer"], "text_encoder_3": [null, null],
            "safety_checker": ["x", "Y"], "../x": ["a", "B"], "n": 3}"#,
    );
    const SHARDS: &str =
        r#"{"weight_map": {"x": "model-1-of-2.safetensors", "y": "model-2-of-2.safetensors"}}"#;

    #[test]
    fn what_a_pipeline_lacks_is_named() {
        let small =
            [INDEX, ("scheduler/scheduler_config.json", "{}"), ("tokenizer/vocab.json", "{}")];
        let with = |more: &[(&'static str, &'static str)]| [&small[..], more].concat();
        let (config, weights) = (("vae/config.json", "{}"), ("vae/x.safetensors", ""));
        check(&with(&[config, weights]), &[]);
        check(&with(&[config]), &["vae/*.safetensors"]);
        check(&with(&[weights]), &["vae/config.json"]);
        check(&with(&[config, ("vae/x.safetensors", "nowhere")]), &["vae/*.safetensors"]);
        check(&[INDEX, config, weights], &["scheduler/", "tokenizer/"]);
    }

    /// FLUX.2 klein's: its text encoder is a language model with its output layer.
    #[test]
    fn a_text_encoder_may_be_a_whole_language_model() {
        let index = br#"{"_class_name": "Flux2KleinPipeline", "is_distilled": true,
            "text_encoder": ["transformers", "Qwen3ForCausalLM"],
            "tokenizer": ["transformers", "Qwen2TokenizerFast"],
            "vae": ["diffusers", "AutoencoderKLFlux2"]}"#;
        let (model, settings) = (PartKind::Model, PartKind::Settings);
        let expected = [("text_encoder", model), ("tokenizer", settings), ("vae", model)];
        assert_eq!(parts(index), expected.map(|(name, kind)| (name.to_owned(), kind)));
    }

    #[test]
    fn what_a_language_model_lacks_is_named() {
        let config = ("config.json", "{}");
        let index = ("model.safetensors.index.json", SHARDS);
        let [one, two] = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"];
        check(&[config, ("model.safetensors", "")], &[]);
        check(&[config], &["*.safetensors"]);
        check(&[config, index, (one, ""), (two, "")], &[]);
        check(&[config, index, (one, ""), (two, "nowhere")], &[two]);
        check(&[config, index], &[one, two]);
        check(&[("x.gguf", "")], &[]);
        check(&[("README.md", "")], &["model_index.json or config.json"]);
    }

    #[test]
    fn a_download_that_was_begun_is_told_from_none() {
        let place = tempfile::tempdir().unwrap();
        let path = HubPath::of(&place.path().join("models--a--b/snapshots/main")).unwrap();
        assert_eq!(path.state(), FetchState::Absent);
        let blobs = place.path().join("models--a--b/blobs");
        fs::create_dir_all(&blobs).unwrap();
        assert_eq!(path.state(), FetchState::Absent);
        fs::write(blobs.join("x.incomplete"), "").unwrap();
        assert_eq!(path.state(), FetchState::Partial(vec![]));
    }
}
