//! Which files of a model hearth needs. Repositories hold a model several times: as a diffusers folder and as one file,
//! in two precisions, in formats of four frameworks.

use std::collections::BTreeMap;

use weights::hub::complete::{PartKind, parts};

use crate::error::{HubError, Result};
use crate::model::{HubModel, RemoteFile};

/// What a user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileSelection {
    /// What hearth needs.
    Needed,
    /// Files that fit one of these patterns; `*` stands for any characters, `?` for one.
    Only(Vec<String>),
    /// Everything.
    All,
}

/// The file that diffusers' folders have.
pub const MODEL_INDEX: &str = "model_index.json";

/// The files to download, small ones first. `index` is [`MODEL_INDEX`], where the model has one.
pub fn select(
    model: &HubModel,
    index: Option<&[u8]>,
    wanted: &FileSelection,
) -> Result<Vec<RemoteFile>> {
    let all: Vec<&RemoteFile> = model.files.iter().collect();
    let mut chosen = match wanted {
        FileSelection::All => all,
        FileSelection::Only(patterns) => {
            let fits =
                |file: &&RemoteFile| patterns.iter().any(|pattern| is_match(pattern, &file.path));
            let found: Vec<_> = all.into_iter().filter(fits).collect();
            if found.is_empty() {
                let (name, patterns) = (model.repo.clone(), patterns.join(" "));
                return Err(HubError::NoMatch { name, patterns });
            }
            found
        }
        FileSelection::Needed => needed(model, index)?,
    };
    chosen.sort_by(|a, b| (a.bytes > SMALL_BYTES, &a.path).cmp(&(b.bytes > SMALL_BYTES, &b.path)));
    Ok(chosen.into_iter().cloned().collect())
}

/// Chosen: settings and tokenizers are below, weights above. Settings come first, so that a download that was
/// interrupted can be told from a whole one.
const SMALL_BYTES: u64 = 32 << 20;

fn needed<'a>(model: &'a HubModel, index: Option<&[u8]>) -> Result<Vec<&'a RemoteFile>> {
    let in_folder = |folder: &str| files_in(model, folder);
    if let Some(index) = index {
        let mut chosen: Vec<_> = model.file(MODEL_INDEX).into_iter().collect();
        for (part, kind) in parts(index) {
            let files = in_folder(&part);
            chosen.extend(files.iter().filter(|file| is_settings(file_name(&file.path))));
            if kind == PartKind::Model {
                chosen.extend(weights_of(&files));
            }
        }
        return Ok(chosen);
    }
    let root = in_folder("");
    let weights = weights_of(&root);
    let is_folder =
        ["config.json", "adapter_config.json"].iter().any(|name| model.file(name).is_some());
    if is_folder && !weights.is_empty() {
        let settings = root.iter().copied().filter(|file| is_settings(file_name(&file.path)));
        return Ok(settings.chain(weights).collect());
    }
    // One file of another layout; which one is the user's choice.
    let files: Vec<_> = model.files.iter().filter(|file| is_single_file(&file.path)).collect();
    match files[..] {
        [file] => Ok(vec![file]),
        [] => Err(unclear(model, "no model that hearth reads".into())),
        _ => {
            let names: Vec<&str> =
                files.iter().take(SHOWN).map(|file| file.path.as_str()).collect();
            let more = if files.len() > SHOWN { ", …" } else { "" };
            let problem =
                format!("{} models to choose from: {}{more}", files.len(), names.join(", "));
            Err(unclear(model, problem))
        }
    }
}

/// Chosen: enough to see how its files are called.
const SHOWN: usize = 6;

fn unclear(model: &HubModel, problem: String) -> HubError {
    HubError::Unclear { name: model.repo.clone(), problem }
}

fn is_single_file(path: &str) -> bool {
    has_ending(path, &[".safetensors", ".gguf"])
}

fn has_ending(path: &str, endings: &[&str]) -> bool {
    endings.iter().any(|end| path.ends_with(end))
}

/// Files of a folder, without those of folders in it.
fn files_in<'a>(model: &'a HubModel, folder: &str) -> Vec<&'a RemoteFile> {
    let prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let is_in = |file: &&RemoteFile| {
        file.path.strip_prefix(&prefix).is_some_and(|rest| !rest.contains('/'))
    };
    model.files.iter().filter(is_in).collect()
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Configs, tokenizers and chat templates; indexes of shards come with their shards.
fn is_settings(name: &str) -> bool {
    let is_known = has_ending(name, &[".json", ".txt", ".model", ".jinja"]);
    is_known && !name.contains(".index.") && name != MODEL_INDEX
}

/// Weights in one precision: a file, or shards and their index.
#[derive(Default)]
struct WeightSet<'a> {
    files: Vec<&'a RemoteFile>,
    bytes: u64,
    is_sharded: bool,
}

/// Names of diffusers and transformers.
const STEMS: [&str; 3] = ["diffusion_pytorch_model", "model", "adapter_model"];

/// A variant counts as the smaller twin of another precision below this share of its size. Chosen: 16 of 32 bits are a
/// half, and the same precision under two names is the same size.
const TWIN_SHARE: f64 = 0.75;

/// The weights of a folder: safetensors before PyTorch, the usual name before others, half precision before single.
fn weights_of<'a>(files: &[&'a RemoteFile]) -> Vec<&'a RemoteFile> {
    let mut sets = BTreeMap::<(String, String, bool), WeightSet<'a>>::new();
    for file in files {
        let Some((stem, variant, kind)) = parsed(file_name(&file.path)) else { continue };
        let set = sets.entry((stem, variant, kind.is_sharded)).or_default();
        set.files.push(file);
        set.bytes += file.bytes;
        set.is_sharded = kind.is_sharded;
    }
    for stem in STEMS {
        let of = |variant: &str| {
            let single = sets.get(&(stem.to_owned(), variant.to_owned(), false));
            let shards = sets.get(&(stem.to_owned(), variant.to_owned(), true));
            single.or(shards.filter(|set| set.files.len() > 1))
        };
        let usual = of("");
        let halves = [of("fp16"), of("bf16")];
        let is_smaller = |half: &&WeightSet<'_>| {
            usual.is_none_or(|usual| half.bytes as f64 <= TWIN_SHARE * usual.bytes as f64)
        };
        if let Some(set) = halves.into_iter().flatten().find(is_smaller).or(usual) {
            return set.files.clone();
        }
    }
    let ending = |end: &str| -> Vec<&'a RemoteFile> {
        files.iter().copied().filter(|file| file.path.ends_with(end)).collect()
    };
    let others = ending(".safetensors");
    if !others.is_empty() {
        return others;
    }
    let is_torch = |file: &&&RemoteFile| {
        let name = file_name(&file.path);
        let is_usual =
            name.starts_with("pytorch_model") || name.starts_with("diffusion_pytorch_model");
        is_usual && has_ending(name, &[".bin", ".bin.index.json"]) && !name.contains(".fp16")
    };
    files.iter().filter(is_torch).copied().collect()
}

struct WeightFileKind {
    is_sharded: bool,
}

/// Stem, variant and kind of a safetensors file, or of its index: `model.fp16-00001-of-00002.safetensors`.
fn parsed(name: &str) -> Option<(String, String, WeightFileKind)> {
    let (rest, is_index) = match name.strip_suffix(".safetensors") {
        Some(rest) => (rest.to_owned(), false),
        // `model.safetensors.index.fp16.json` is as usual as `model.fp16.safetensors.index.json`.
        None => (
            name.strip_suffix(".json")?.replacen(".safetensors.index", "", 1),
            name.contains(".safetensors.index"),
        ),
    };
    if !is_index && !has_ending(name, &[".safetensors"]) {
        return None;
    }
    let is_shard = rest.contains("-of-");
    let rest = if is_shard { rest.rsplitn(4, '-').nth(3)?.to_owned() } else { rest };
    let (stem, variant) =
        rest.split_once('.').map_or((rest.as_str(), ""), |(stem, variant)| (stem, variant));
    Some((stem.into(), variant.into(), WeightFileKind { is_sharded: is_shard || is_index }))
}

/// Whether a path fits a pattern of a shell; `*` also stands for slashes.
fn is_match(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), path.chars().collect());
    // Where the pattern can be after each character of the path.
    let mut fits = vec![false; pattern.len() + 1];
    fits[0] = true;
    let skip_stars = |fits: &mut Vec<bool>| {
        for at in 0..pattern.len() {
            fits[at + 1] |= fits[at] && pattern[at] == '*';
        }
    };
    skip_stars(&mut fits);
    for c in path {
        let mut next = vec![false; pattern.len() + 1];
        for at in 0..pattern.len() {
            match pattern[at] {
                '*' => next[at] |= fits[at],
                known => next[at + 1] |= fits[at] && (known == '?' || known == c),
            }
        }
        skip_stars(&mut next);
        fits = next;
    }
    fits[pattern.len()]
}

#[cfg(test)]
mod tests {
    use weights::hub::HubName;

    use super::*;
    use crate::model::FileChecksum;

    fn chosen(
        files: &[(&str, u64)],
        index: Option<&str>,
        wanted: &FileSelection,
    ) -> Result<Vec<String>> {
        let files = files.iter().map(|(path, bytes)| RemoteFile {
            path: (*path).into(),
            bytes: *bytes,
            checksum: FileChecksum::GitSha1(String::new()),
        });
        let name = HubName::parse("a/b").unwrap();
        let model =
            HubModel { name, repo: "a/b".into(), commit: String::new(), files: files.collect() };
        let mut found: Vec<_> = select(&model, index.map(str::as_bytes), wanted)?
            .into_iter()
            .map(|it| it.path)
            .collect();
        found.sort_unstable();
        Ok(found)
    }

    fn check(files: &[(&str, u64)], index: Option<&str>, expected: &[&str]) {
        assert_eq!(chosen(files, index, &FileSelection::Needed).unwrap(), expected);
    }

    const SD35: &str = r#"{"_class_name": "StableDiffusion3Pipeline", "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"], "text_encoder_3": ["transformers", "T5EncoderModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"], "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"], "image_encoder": [null, null], "feature_extractor": ["transformers", "X"]}"#;

    #[test]
    fn a_pipeline_comes_once() {
        let files = [
            ("LICENSE.md", 1),
            ("README.md", 1),
            ("model_index.json", 1),
            ("sd3.5_medium.safetensors", 5000),
            ("text_encoders/clip_l.safetensors", 200),
            ("feature_extractor/preprocessor_config.json", 1),
            ("scheduler/scheduler_config.json", 1),
            ("text_encoder/config.json", 1),
            ("text_encoder/model.fp16.safetensors", 250),
            ("text_encoder/model.safetensors", 250),
            ("text_encoder/flax_model.msgpack", 500),
            ("text_encoder/pytorch_model.bin", 500),
            ("text_encoder/model.onnx", 500),
            ("text_encoder_3/config.json", 1),
            ("text_encoder_3/model.safetensors.index.json", 1),
            ("text_encoder_3/model-00001-of-00002.safetensors", 5000),
            ("text_encoder_3/model-00002-of-00002.safetensors", 4000),
            ("text_encoder_3/model.fp16-00001-of-00002.safetensors", 2500),
            ("text_encoder_3/model.fp16-00002-of-00002.safetensors", 2000),
            ("text_encoder_3/model.safetensors.index.fp16.json", 1),
            ("tokenizer/merges.txt", 1),
            ("tokenizer/vocab.json", 1),
            ("transformer/config.json", 1),
            ("transformer/diffusion_pytorch_model.safetensors", 4900),
            ("vae/config.json", 1),
            ("vae/diffusion_pytorch_model.safetensors", 160),
            ("vae/sub/x.json", 1),
        ];
        check(
            &files,
            Some(SD35),
            &[
                "model_index.json",
                "scheduler/scheduler_config.json",
                "text_encoder/config.json",
                "text_encoder/model.safetensors",
                "text_encoder_3/config.json",
                "text_encoder_3/model.fp16-00001-of-00002.safetensors",
                "text_encoder_3/model.fp16-00002-of-00002.safetensors",
                "text_encoder_3/model.safetensors.index.fp16.json",
                "tokenizer/merges.txt",
                "tokenizer/vocab.json",
                "transformer/config.json",
                "transformer/diffusion_pytorch_model.safetensors",
                "vae/config.json",
                "vae/diffusion_pytorch_model.safetensors",
            ],
        );
        let all = chosen(&files, Some(SD35), &FileSelection::All).unwrap();
        assert_eq!(all.len(), files.len());
    }

    #[test]
    fn a_language_model_comes_once() {
        let settings = [("config.json", 1), ("tokenizer.json", 1), ("generation_config.json", 1)];
        let with = |more: &[(&'static str, u64)]| [&settings[..], more].concat();
        let names = ["config.json", "generation_config.json"];
        let one = with(&[
            ("model.safetensors", 9),
            ("pytorch_model.bin", 9),
            ("onnx/model.onnx", 9),
            ("tf_model.h5", 9),
            ("x.gguf", 1),
        ]);
        check(&one, None, &[names[0], names[1], "model.safetensors", "tokenizer.json"]);
        let shards = with(&[
            ("consolidated.safetensors", 9),
            ("model-00001-of-00001.safetensors", 9),
            ("model.safetensors.index.json", 1),
        ]);
        let expected = [
            names[0],
            names[1],
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ];
        check(&shards, None, &expected);
        let torch =
            with(&[("pytorch_model-00001-of-00001.bin", 9), ("pytorch_model.bin.index.json", 1)]);
        check(
            &torch,
            None,
            &[
                names[0],
                names[1],
                "pytorch_model-00001-of-00001.bin",
                "pytorch_model.bin.index.json",
                "tokenizer.json",
            ],
        );
        check(
            &[("adapter_config.json", 1), ("adapter_model.safetensors", 2), ("README.md", 1)],
            None,
            &["adapter_config.json", "adapter_model.safetensors"],
        );
    }

    #[test]
    fn of_several_files_the_user_chooses() {
        let files = [("x-q4.gguf", 4), ("x-q8.gguf", 8), ("README.md", 1), ("sub/y.gguf", 1)];
        let said = chosen(&files, None, &FileSelection::Needed).unwrap_err().to_string();
        assert_eq!(said, "a/b has 3 models to choose from: x-q4.gguf, x-q8.gguf, sub/y.gguf");
        let only = |pattern: &str| chosen(&files, None, &FileSelection::Only(vec![pattern.into()]));
        assert_eq!(only("*q4*").unwrap(), ["x-q4.gguf"]);
        assert_eq!(only("*.gguf").unwrap(), ["sub/y.gguf", "x-q4.gguf", "x-q8.gguf"]);
        assert_eq!(only("x-q?.gguf").unwrap().len(), 2);
        assert!(only("q4").is_err());
        check(&files[..1], None, &["x-q4.gguf"]);
        let said =
            chosen(&[("README.md", 1)], None, &FileSelection::Needed).unwrap_err().to_string();
        assert_eq!(said, "a/b has no model that hearth reads");
    }
}
