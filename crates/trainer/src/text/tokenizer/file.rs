//! `tokenizer.json`, checked before the `tokenizers` crate sees it: the crate panics on files that
//! are damaged in certain ways, and cuts texts off where a file says so.
//!
//! What it lets pass is what tokenizers of language models are made of. A part of another type is
//! refused by name rather than tried.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::model::encoder::tokenizer::TokenizerError;

/// Normalisers, ways to split, and decoders, as `tokenizer.json` calls them.
const PARTS: [(&str, &[&str]); 3] = [
    ("normalizer", &["Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Sequence"]),
    (
        "pre_tokenizer",
        &[
            "ByteLevel",
            "Digits",
            "Metaspace",
            "Punctuation",
            "Sequence",
            "Split",
            "WhitespaceSplit",
        ],
    ),
    (
        "decoder",
        &["ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"],
    ),
];

/// A sequence's parts, by the names that the three kinds of it give them.
const INNER: [&str; 3] = ["normalizers", "pretokenizers", "decoders"];

/// What would truncate texts, pad them or put tokens around them. Users of a tokenizer do that here, and the
/// last one shifts the offsets of tokens.
const LEFT_OUT: [&str; 3] = ["truncation", "padding", "post_processor"];

/// The model as far as it is checked.
#[derive(Deserialize)]
struct BpeModel {
    r#type: Option<String>,
    #[serde(default)]
    vocab: HashMap<String, Value>,
    #[serde(default)]
    merges: Vec<BpeMerge>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
}

/// Newer files have pairs.
#[derive(Deserialize)]
#[serde(untagged)]
enum BpeMerge {
    Pair(String, String),
    Line(String),
}

/// Makes the crate's tokenizer of a file.
pub(super) fn build(path: &Path, json: &[u8]) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let mut file: Value =
        serde_json::from_slice(json).map_err(|error| TokenizerError::json(path, &error))?;
    for (part, known) in PARTS {
        check_part(path, part, known, &file[part])?;
    }
    check_model(path, &file["model"])?;
    if let Some(object) = file.as_object_mut() {
        object.retain(|key, _| !LEFT_OUT.contains(&key.as_str()));
    }
    let malformed =
        |problem: String| TokenizerError::Malformed { problem, path: path.to_path_buf() };
    tokenizers::Tokenizer::from_bytes(file.to_string())
        .map_err(|error| malformed(error.to_string()))
}

fn check_part(
    path: &Path,
    part: &'static str,
    known: &'static [&'static str],
    value: &Value,
) -> Result<(), TokenizerError> {
    if value.is_null() {
        return Ok(());
    }
    let r#type = value["type"].as_str().unwrap_or("unknown");
    if !known.contains(&r#type) {
        let (found, path) = (r#type.into(), path.into());
        return Err(TokenizerError::UnknownPart { part, found, known, path });
    }
    // The crate counts back from the end of an empty token.
    if part == "decoder" && r#type == "Strip" && value["stop"] != 0 {
        let problem = format!("decoder strips {} at the end of tokens, not 0", value["stop"]);
        return Err(TokenizerError::malformed(path, problem));
    }
    let inner = INNER.iter().filter_map(|key| value[*key].as_array()).flatten();
    inner.into_iter().try_for_each(|value| check_part(path, part, known, value))
}

fn check_model(path: &Path, model: &Value) -> Result<(), TokenizerError> {
    let malformed = |problem| TokenizerError::malformed(path, problem);
    let model =
        BpeModel::deserialize(model).map_err(|error| malformed(format!("its model: {error}")))?;
    let found = model.r#type.unwrap_or_else(|| "BPE".into());
    if found != "BPE" {
        let (part, known, path) = ("model", &["BPE"][..], path.into());
        return Err(TokenizerError::UnknownPart { part, found, known, path });
    }
    if let Some(prefix) = model.continuing_subword_prefix.filter(|prefix| !prefix.is_empty()) {
        return Err(malformed(format!(
            "its tokens within words begin with {prefix:?}, not as they are"
        )));
    }
    if let Some(unknown) = model.unk_token.filter(|token| !model.vocab.contains_key(token)) {
        return Err(malformed(format!("unk_token is {unknown:?}, which is not in its vocabulary")));
    }
    for (token, id) in &model.vocab {
        if id.as_u64().is_none_or(|id| id > i32::MAX as u64) {
            return Err(malformed(format!(
                "id of {token:?} is {id}, the largest can be {}",
                i32::MAX
            )));
        }
    }
    model.merges.iter().try_for_each(|merge| check_merge(path, &model.vocab, merge))
}

/// The crate would panic where the merged token is longer than any in the vocabulary.
fn check_merge(
    path: &Path,
    vocab: &HashMap<String, Value>,
    merge: &BpeMerge,
) -> Result<(), TokenizerError> {
    let pair = match merge {
        BpeMerge::Pair(a, b) => Some((a.as_str(), b.as_str())),
        BpeMerge::Line(line) => line.split_once(' '),
    };
    let Some((a, b)) = pair else {
        return Err(TokenizerError::malformed(path, "a merge is not of two tokens"));
    };
    let whole = format!("{a}{b}");
    match [a, b, &whole].into_iter().find(|token| !vocab.contains_key(*token)) {
        None => Ok(()),
        Some(lost) => {
            let n = vocab.len();
            let problem = format!(
                "merge of {a:?} and {b:?}, but {lost:?} is none of the {n} in the vocabulary"
            );
            Err(TokenizerError::malformed(path, problem))
        }
    }
}
