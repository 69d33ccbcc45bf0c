//! What the small files beside a `tokenizer.json` say: which tokens begin and end a text, and how
//! conversations are written down.
//!
//! As transformers reads them: special tokens from `tokenizer_config.json`, in older folders from
//! `special_tokens_map.json`; the template from `chat_template.jinja` before the settings. What a
//! model stops at besides is in `generation_config.json` and `config.json`.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::CONFIG;
use crate::model::encoder::tokenizer::TokenizerError;

/// A file of settings, read.
type JsonFields = Map<String, Value>;

/// A chat template, and the file it stands in.
pub(super) struct TemplateFile {
    pub source: String,
    pub path: PathBuf,
}

/// What a tokenizer's tokens are for.
pub(super) struct TokenizerSettings {
    /// What every text begins with.
    pub bos: Option<u32>,
    /// What a model stops at; the first one ends texts.
    pub eos: Vec<u32>,
    /// How conversations are written, in Jinja.
    pub template: Option<TemplateFile>,
    /// `tokenizer_config.json`, as found.
    fields: JsonFields,
}

impl TokenizerSettings {
    /// Of a tokenizer without files: tokens with their texts.
    pub fn new(
        start: Option<(u32, String)>,
        ends: Vec<(u32, String)>,
        template: Option<TemplateFile>,
    ) -> Self {
        let mut fields = JsonFields::new();
        fields.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        fields.insert("clean_up_tokenization_spaces".into(), false.into());
        let named = [("bos_token", start.as_ref()), ("eos_token", ends.first())];
        for (role, (_, text)) in named.iter().filter_map(|(role, token)| Some((role, (*token)?))) {
            fields.insert((*role).into(), text.clone().into());
        }
        let ends = ends.into_iter().map(|(id, _)| id).collect();
        Self { bos: start.map(|(id, _)| id), eos: ends, template, fields }
    }

    /// Reads the files of a folder; `json` is the tokenizer's own.
    pub fn read(
        folder: &Path,
        file: &Path,
        json: &[u8],
        inner: &tokenizers::Tokenizer,
    ) -> Result<Self, TokenizerError> {
        let mut fields = read_fields(&folder.join(CONFIG))?;
        for (key, value) in read_fields(&folder.join("special_tokens_map.json"))? {
            fields.entry(key).or_insert(value);
        }
        let id = |role| match content(fields.get(role)) {
            None => Ok(None),
            Some(token) => inner.token_to_id(token).map(Some).ok_or_else(|| {
                TokenizerError::SpecialToken { role, token: token.into(), folder: folder.into() }
            }),
        };
        let start = match fields.get("add_bos_token").and_then(Value::as_bool) {
            Some(true) => id("bos_token")?,
            Some(false) => None,
            None => put_before(file, json)?.and_then(|token| inner.token_to_id(&token)),
        };
        let mut ends: Vec<u32> = id("eos_token")?.into_iter().collect();
        for name in ["generation_config.json", "config.json"] {
            let found = ids(read_fields(&folder.join(name))?.get("eos_token_id"));
            let is_new = |id: &u32| !ends.contains(id) && inner.id_to_token(*id).is_some();
            let new: Vec<u32> = found.into_iter().filter(is_new).collect();
            ends.extend(new);
        }
        let template = template(folder, &fields)?;
        Ok(Self { bos: start, eos: ends, template, fields })
    }

    /// What `tokenizer_config.json` says the same by.
    pub fn config(&self) -> Value {
        let mut fields = self.fields.clone();
        if let Some(template) = &self.template {
            fields.insert("chat_template".into(), template.source.clone().into());
        }
        Value::Object(fields)
    }

    /// Special tokens by the names that templates use, as `eos_token`.
    pub fn named_tokens(&self) -> BTreeMap<String, String> {
        let tokens = self.fields.iter().filter(|(key, _)| key.ends_with("_token"));
        let named =
            tokens.filter_map(|(key, value)| Some((key.clone(), content(Some(value))?.into())));
        named.collect()
    }
}

/// The text of a token: written plainly, or with its manner of matching around it.
fn content(value: Option<&Value>) -> Option<&str> {
    let value = value?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// One id, or a list of them.
fn ids(value: Option<&Value>) -> Vec<u32> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(values)) => values.iter().filter_map(one).collect(),
        value => value.and_then(one).into_iter().collect(),
    }
}

/// The token that `tokenizer.json` itself puts before every text.
fn put_before(file: &Path, json: &[u8]) -> Result<Option<String>, TokenizerError> {
    let json: Value =
        serde_json::from_slice(json).map_err(|error| TokenizerError::json(file, &error))?;
    let processor = &json["post_processor"];
    let inner = processor["processors"].as_array().into_iter().flatten();
    let mut templates =
        inner.chain([processor]).filter(|part| part["type"] == "TemplateProcessing");
    let first = templates.find_map(|part| part["single"][0]["SpecialToken"]["id"].as_str());
    Ok(first.map(Into::into))
}

/// Settings may have several by name; the one that conversations without tools use is `default`.
fn template(folder: &Path, fields: &JsonFields) -> Result<Option<TemplateFile>, TokenizerError> {
    let path = folder.join("chat_template.jinja");
    match fs::read_to_string(&path) {
        Ok(source) => return Ok(Some(TemplateFile { source, path })),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(TokenizerError::io(&path, error)),
    }
    let found = match fields.get("chat_template") {
        Some(Value::Array(named)) => named
            .iter()
            .find(|entry| entry["name"] == json!("default"))
            .and_then(|entry| entry["template"].as_str()),
        other => other.and_then(Value::as_str),
    };
    let path = folder.join(CONFIG);
    Ok(found.map(|source| TemplateFile { source: source.into(), path }))
}

/// The template of a processor, as transformers before version 4.52 wrote it beside that of the tokenizer.
pub(super) fn processor_template(folder: &Path) -> Result<Option<TemplateFile>, TokenizerError> {
    let path = folder.join("chat_template.json");
    let fields = read_fields(&path)?;
    let source = fields.get("chat_template").and_then(Value::as_str);
    Ok(source.map(|source| TemplateFile { source: source.into(), path }))
}

/// None where there is no such file.
pub(super) fn read_fields(path: &Path) -> Result<JsonFields, TokenizerError> {
    match fs::read(path) {
        Ok(json) => {
            serde_json::from_slice(&json).map_err(|error| TokenizerError::json(path, &error))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(JsonFields::new()),
        Err(error) => Err(TokenizerError::io(path, error)),
    }
}
