//! The tokenizer of a Qwen as it was published before `tokenizer.json` was usual: `vocab.json`, `merges.txt` and
//! `tokenizer_config.json`. Pipelines such as Qwen-Image have no other. They are made into the `tokenizer.json` that
//! transformers makes of them, which is then checked as any.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::CONFIG;
use super::gguf::QWEN_2;
use super::settings::read_fields;
use crate::model::encoder::tokenizer::TokenizerError;

const VOCABULARY: &str = "vocab.json";
const MERGES: &str = "merges.txt";

/// The `tokenizer.json` of a folder that has none; nothing if it has not these files either, or is of another class, whose
/// texts are split otherwise.
pub(super) fn read(folder: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    let [vocabulary, merges] = [VOCABULARY, MERGES].map(|name| folder.join(name));
    let settings = read_fields(&folder.join(CONFIG))?;
    let class = settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
    let is_qwen2 = ["Qwen2Tokenizer", "Qwen2TokenizerFast"].contains(&class);
    if !is_qwen2 || !vocabulary.exists() || !merges.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&merges).map_err(|error| TokenizerError::io(&merges, error))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    let split = json!({
        "type": "Split", "pattern": {"Regex": QWEN_2}, "behavior": "Isolated", "invert": false,
    });
    let file = json!({
        "version": "1.0",
        "added_tokens": added_tokens(folder, &settings)?,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes]},
        "decoder": bytes,
        "model": {
            "type": "BPE",
            "vocab": read_fields(&vocabulary)?,
            "merges": lines.collect::<Vec<_>>(),
        },
    });
    Ok(Some(file.to_string().into_bytes()))
}

/// Tokens that are looked for before texts are split, by their ids: from the settings, in older folders from a file of their
/// own.
fn added_tokens(
    folder: &Path,
    settings: &Map<String, Value>,
) -> Result<Vec<Value>, TokenizerError> {
    let path = folder.join("added_tokens.json");
    let mut added = Vec::new();
    if let Some(Value::Object(tokens)) = settings.get("added_tokens_decoder") {
        for (id, token) in tokens {
            let mut token = token.clone();
            let (Ok(id), Some(fields)) = (id.parse::<u32>(), token.as_object_mut()) else {
                let problem = format!("added token {id} is {token}");
                return Err(TokenizerError::malformed(&folder.join(CONFIG), problem));
            };
            fields.insert("id".into(), id.into());
            added.push((id, token));
        }
    } else {
        for (content, id) in read_fields(&path)? {
            let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = number.ok_or_else(|| {
                TokenizerError::malformed(&path, format!("the id of {content:?} is {id}"))
            })?;
            let token = json!({
                "id": id, "content": content, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false,
            });
            added.push((id, token));
        }
    }
    added.sort_by_key(|(id, _)| *id);
    Ok(added.into_iter().map(|(_, token)| token).collect())
}
