//! `tokenizer.json`, checked before the `tokenizers` crate sees it: the crate panics on files that
//! are damaged in certain ways, and cuts texts off where a file says so.
//!
//! What it lets pass is what tokenizers of language models are made of.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::parts;
use crate::model::encoder::tokenizer::TokenizerError;

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
    dropout: Option<f64>,
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
    parts::check(path, &file)?;
    check_model(path, &file["model"])?;
    if let Some(object) = file.as_object_mut() {
        object.retain(|key, _| !LEFT_OUT.contains(&key.as_str()));
    }
    let malformed =
        |problem: String| TokenizerError::Malformed { problem, path: path.to_path_buf() };
    tokenizers::Tokenizer::from_bytes(file.to_string())
        .map_err(|error| malformed(error.to_string()))
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
    if let Some(dropout) = model.dropout.filter(|dropout| *dropout != 0.0) {
        return Err(malformed(format!(
            "its dropout is {dropout}, expected none: equal texts would have different tokens"
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
