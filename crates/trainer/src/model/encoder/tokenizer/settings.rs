//! The settings files beside a vocabulary: the tokenizer's class and its special tokens.
//!
//! As transformers 5 reads them: `tokenizer_config.json` alone if it lists the added tokens (that
//! is what transformers 4.34 and later write), else overridden by `special_tokens_map.json`, and the
//! added tokens come from `added_tokens.json` and `tokenizer.json`. Left out: named tokens of other
//! kinds of models, as an `image_token`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::error::TokenizerError;
use super::{TokenizerKind, read_json};

const CONFIG: &str = "tokenizer_config.json";
const SPECIAL: &str = "special_tokens_map.json";
/// In the order in which the reference adds them.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The settings of a tokenizer, and where they are from.
pub struct PromptTokenizerConfig {
    folder: PathBuf,
    /// Each with the file it is from.
    values: BTreeMap<String, (&'static str, Value)>,
    /// Added tokens, matched in texts before anything else, by id. The id only gives the order: the token's
    /// id is the vocabulary's.
    added: BTreeMap<u32, AddedToken>,
    /// Whether the added tokens of `tokenizer.json` are used.
    legacy: bool,
}

/// An added token with its matching options, as in files.
#[derive(Deserialize)]
pub struct AddedTokenJson {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

/// An entry of `added_tokens` in `tokenizer.json`.
#[derive(Deserialize)]
pub struct AddedTokenEntry {
    id: u32,
    #[serde(flatten)]
    token: AddedTokenJson,
}

impl PromptTokenizerConfig {
    pub fn read(folder: &Path) -> Result<Self, TokenizerError> {
        let values = BTreeMap::new();
        let added = BTreeMap::new();
        let mut settings = Self { folder: folder.into(), values, added, legacy: false };
        settings.read_values(CONFIG)?;
        let added: Option<BTreeMap<u32, AddedTokenJson>> = settings.get("added_tokens_decoder")?;
        if let Some(added) = added {
            settings.added = added.into_iter().map(|(id, token)| (id, token.into())).collect();
        } else {
            settings.legacy = true;
            settings.read_values(SPECIAL)?;
            settings.read_added()?;
        }
        settings.right("truncation_side")?;
        Ok(settings)
    }

    /// Merges the values of a file, if it exists.
    fn read_values(&mut self, file: &'static str) -> Result<(), TokenizerError> {
        let values: Option<Map<String, Value>> = read_json(&self.folder.join(file))?;
        for (key, mut value) in values.unwrap_or_default() {
            if let (SPECIAL, Value::Object(token)) = (file, &mut value) {
                token.insert("special".into(), true.into());
            }
            self.values.insert(key, (file, value));
        }
        Ok(())
    }

    fn read_added(&mut self) -> Result<(), TokenizerError> {
        let added: Option<BTreeMap<String, u32>> =
            read_json(&self.folder.join("added_tokens.json"))?;
        for (content, id) in added.unwrap_or_default() {
            let special = self.names(&content)?;
            self.added.insert(id, AddedToken::from(content, special));
        }
        Ok(())
    }

    /// Whether the settings give `content` a role.
    fn names(&self, content: &str) -> Result<bool, TokenizerError> {
        let mut tokens = self.extra()?;
        for role in ROLES {
            tokens.extend(self.token(role, None)?);
        }
        Ok(tokens.iter().any(|token| token.content == content))
    }

    /// Which model's tokenizer it is, if that is written.
    pub fn kind(&self) -> Result<Option<TokenizerKind>, TokenizerError> {
        let class: Option<String> = self.get("tokenizer_class")?;
        match class.as_deref() {
            None => Ok(None),
            Some("CLIPTokenizer" | "CLIPTokenizerFast") => Ok(Some(TokenizerKind::Clip)),
            Some("T5Tokenizer" | "T5TokenizerFast") => Ok(Some(TokenizerKind::T5)),
            Some("Qwen2Tokenizer" | "Qwen2TokenizerFast") => Ok(Some(TokenizerKind::Qwen2)),
            Some(class) => {
                Err(TokenizerError::UnknownClass { class: class.into(), path: self.path() })
            }
        }
    }

    /// `model_max_length`, if given. The reference writes 1e30 for no limit, which becomes the largest
    /// integer.
    pub fn model_max_length(&self) -> Result<Option<usize>, TokenizerError> {
        let length: Option<f64> = self.get("model_max_length")?;
        Ok(length.map(|length| length as usize))
    }

    /// The tokens that the files add to the vocabulary, `listed` in `tokenizer.json` or elsewhere.
    pub fn added(&self, listed: Vec<AddedTokenEntry>) -> Vec<AddedToken> {
        let mut added = self.added.clone();
        if self.legacy {
            added.extend(listed.into_iter().map(|entry| (entry.id, entry.token.into())));
        }
        added.into_values().collect()
    }

    /// Those that have a role, in the order in which the reference adds what is not `added`.
    pub fn special(&self, kind: TokenizerKind) -> Result<Vec<AddedToken>, TokenizerError> {
        let mut tokens = Vec::new();
        for role in ROLES {
            tokens.extend(self.token(role, kind.default(role))?);
        }
        let extra = self.extra()?;
        if kind == TokenizerKind::T5 && extra.is_empty() {
            let n: Option<u16> = self.get("extra_ids")?;
            let sentinels = (0..n.unwrap_or(100)).map(|n| format!("<extra_id_{n}>"));
            tokens.extend(sentinels.map(|token| AddedToken::from(token, true)));
        }
        tokens.extend(extra);
        Ok(tokens)
    }

    /// The text of the token with this role.
    pub fn content(
        &self,
        kind: TokenizerKind,
        role: &'static str,
    ) -> Result<String, TokenizerError> {
        let token = self.token(role, kind.default(role))?;
        let none = || TokenizerError::NoSpecialToken { role, folder: self.folder.clone() };
        Ok(token.ok_or_else(none)?.content)
    }

    /// A token from the settings, none if they set it to `null`; else the `default`.
    fn token(
        &self,
        role: &str,
        default: Option<&str>,
    ) -> Result<Option<AddedToken>, TokenizerError> {
        match self.values.get(role) {
            Some((file, value)) => self.parse_token(file, role, value),
            None => Ok(default.map(|content| AddedToken::from(content, true))),
        }
    }

    fn extra(&self) -> Result<Vec<AddedToken>, TokenizerError> {
        let lists = ["extra_special_tokens", "additional_special_tokens"];
        let mut tokens = Vec::new();
        for key in lists {
            let Some((file, Value::Array(values))) = self.values.get(key) else { continue };
            for value in values {
                tokens.extend(self.parse_token(file, key, value)?);
            }
            if !tokens.is_empty() {
                break;
            }
        }
        Ok(tokens)
    }

    fn parse_token(
        &self,
        file: &str,
        key: &str,
        value: &Value,
    ) -> Result<Option<AddedToken>, TokenizerError> {
        match value {
            Value::Null => Ok(None),
            Value::String(content) => Ok(Some(AddedToken::from(content, true))),
            described => Ok(Some(self.parse::<AddedTokenJson>(file, key, described)?.into())),
        }
    }

    /// Checks that a side is the right one.
    pub fn right(&self, setting: &'static str) -> Result<(), TokenizerError> {
        let side: Option<String> = self.get(setting)?;
        match side.filter(|side| side != "right") {
            Some(found) => Err(TokenizerError::Side { setting, found, path: self.path() }),
            None => Ok(()),
        }
    }

    fn get<T: DeserializeOwned>(&self, key: &str) -> Result<T, TokenizerError> {
        let (file, value) = self.values.get(key).unwrap_or(&(CONFIG, Value::Null));
        self.parse(file, key, value)
    }

    fn parse<T: DeserializeOwned>(
        &self,
        file: &str,
        key: &str,
        value: &Value,
    ) -> Result<T, TokenizerError> {
        let malformed =
            |error| TokenizerError::malformed(&self.folder.join(file), format!("{key}: {error}"));
        T::deserialize(value).map_err(malformed)
    }

    fn path(&self) -> PathBuf {
        self.folder.join(CONFIG)
    }
}

impl From<AddedTokenJson> for AddedToken {
    fn from(token: AddedTokenJson) -> Self {
        Self::from(token.content, token.special)
            .single_word(token.single_word)
            .lstrip(token.lstrip)
            .rstrip(token.rstrip)
            .normalized(token.normalized.unwrap_or(!token.special))
    }
}
