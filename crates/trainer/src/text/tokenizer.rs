//! Tokenizers of language models, texts to token ids and back: from a `tokenizer.json`, from the
//! vocabulary inside a GGUF file, or the bytes themselves where there is neither.
//!
//! ```text
//! folder/                      what `save` writes and transformers loads
//! ├── tokenizer.json             vocabulary, merges, how texts are split
//! └── tokenizer_config.json      special tokens by name, the chat template
//! ```
//!
//! The `tokenizers` crate does the work; what would make it panic is refused before it sees it
//! (`file`). Special tokens that stand in a text are taken for what they are, as the reference does.
//!
//! Deliberately absent: models other than BPE, which no family here has; the tokenizers of image models'
//! text encoders (`model::encoder::tokenizer`).

mod bytes;
mod decoder;
mod file;
mod gguf;
mod merges;
mod parts;
mod settings;
#[cfg(test)]
mod tests;

use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

use weights::checksum::Hasher;
use weights::write::AtomicFile;

pub use decoder::TokenDecoder;
pub(crate) use gguf::{GPT_2, pre_tokenizer_name};
use settings::{TemplateFile, TokenizerSettings, processor_template};

use super::chat::ChatTemplate;
use crate::error::{Result, TrainerError};
use crate::hashes::field;
use crate::model::encoder::tokenizer::{IMAGE_TOKEN, TokenizerError};

/// The file that holds a vocabulary.
const FILE: &str = "tokenizer.json";
/// The file that says what its special tokens are for.
const CONFIG: &str = "tokenizer_config.json";

/// Turns texts into token ids, and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// `tokenizer.json` as it was found, or made.
    json: Vec<u8>,
    settings: TokenizerSettings,
    vocab_size: usize,
    /// Ids below 256 are bytes, and there is nothing to look up.
    is_bytes: bool,
    /// A space is put before every text, so that two texts are as one with a space between.
    puts_space: bool,
}

/// The tokens of a text, with a mask.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskedTokens {
    /// The tokens.
    pub ids: Vec<u32>,
    /// For each, whether it ends in one of the ranges.
    pub mask: Vec<bool>,
}

impl Tokenizer {
    /// Reads a folder with a `tokenizer.json`, or the two files of an older Qwen; that file itself, or a GGUF file.
    pub fn open(path: &Path) -> Result<Self> {
        let is_gguf = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        if is_gguf {
            let (inner, settings) = gguf::read(path)?;
            return Self::made(inner, settings);
        }
        let is_folder = path.is_dir();
        let folder = if is_folder { path } else { path.parent().unwrap_or(Path::new("")) };
        let file = if is_folder { path.join(FILE) } else { path.into() };
        let json = if !is_folder || file.exists() {
            fs::read(&file).map_err(|error| TokenizerError::io(&file, error))?
        } else if let Some(json) = merges::read(folder)? {
            json
        } else {
            let looked_for = &["tokenizer.json"][..];
            return Err(TokenizerError::Missing { looked_for, folder: folder.into() }.into());
        };
        let inner = file::build(&file, &json)?;
        let settings = TokenizerSettings::read(folder, &file, &json, &inner)?;
        Self::new(inner, json, settings)
    }

    /// The one that needs no file: every byte is a token, and one more ends a text.
    pub fn bytes() -> Self {
        let made = bytes::build().and_then(|(inner, settings)| Self::made(inner, settings));
        let tokenizer = made.expect("the built-in vocabulary is whole: a test opens it");
        Self { is_bytes: true, ..tokenizer }
    }

    /// The tokens of a text, without those that begin and end one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if self.is_bytes && !text.contains(bytes::END) {
            return Ok(text.bytes().map(u32::from).collect());
        }
        let found = self.inner.encode_fast(text, false);
        Ok(found.map_err(|error| refused(&*error))?.get_ids().to_vec())
    }

    /// The tokens of a text, and which of them end in some ranges of its bytes: one that begins
    /// before a range has its first letters in it, one that goes beyond it is of what comes then.
    pub fn encode_masked(&self, text: &str, ranges: &[Range<usize>]) -> Result<MaskedTokens> {
        let found = self.inner.encode(text, false).map_err(|error| refused(&*error))?;
        let is_in = |(_, end): &(usize, usize)| {
            ranges.iter().any(|range| *end > range.start && *end <= range.end)
        };
        let is_in = found.get_offsets().iter().map(is_in).collect();
        Ok(MaskedTokens { ids: found.get_ids().to_vec(), mask: is_in })
    }

    /// The text of tokens, special ones included; bytes that are no text become U+FFFD. Ids that
    /// stand for nothing are left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        // None of the decoders that `file` lets pass can fail.
        self.inner.decode(ids, false).unwrap_or_default()
    }

    /// The same without special tokens.
    pub fn decode_text(&self, ids: &[u32]) -> String {
        self.inner.decode(ids, true).unwrap_or_default()
    }

    /// The id of a token, if there is one.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Gives the text of tokens that come one by one.
    pub fn decoder(&self) -> TokenDecoder<'_> {
        TokenDecoder::new(self)
    }

    /// The token that every text begins with, where the model was trained so.
    pub fn bos(&self) -> Option<u32> {
        self.settings.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.settings.eos.first().copied()
    }

    /// Whether a token ends generation. Chat models often have two such tokens: one ends a text, the other
    /// an answer.
    pub fn is_eos(&self, id: u32) -> bool {
        self.settings.eos.contains(&id)
    }

    /// All tokens that a model stops at; the first one ends a text.
    pub(crate) fn eos_ids(&self) -> &[u32] {
        &self.settings.eos
    }

    /// The texts of tokens that a model stops at.
    pub(crate) fn eos_texts(&self) -> Vec<String> {
        self.settings.eos.iter().filter_map(|id| self.token(*id)).collect()
    }

    /// A token's text.
    pub(crate) fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Its `tokenizer.json`.
    pub(crate) fn json(&self) -> &[u8] {
        &self.json
    }

    /// How its files say that conversations are written down, in Jinja.
    pub(crate) fn template(&self) -> Option<&str> {
        self.settings.template.as_ref().map(|template| template.source.as_str())
    }

    /// Every id is below this. A model may have more embeddings, never fewer.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// How conversations are written down for the model; `ChatML` where its files do not say.
    pub fn chat_template(&self) -> ChatTemplate {
        let tokens = self.settings.named_tokens();
        match &self.settings.template {
            Some(TemplateFile { source, path }) => ChatTemplate::of_model(source, tokens, path),
            None => ChatTemplate::chat_ml(tokens),
        }
    }

    /// How conversations with images are written down: its own template, or that of the model's processor in a folder.
    /// None where neither writes images.
    pub fn image_template(&self, processor: Option<&Path>) -> Result<Option<ChatTemplate>> {
        let beside = processor.map(processor_template).transpose()?.flatten();
        let mut templates = self.settings.template.iter().chain(&beside);
        let found = templates.find(|template| template.source.contains(IMAGE_TOKEN));
        Ok(found.map(|TemplateFile { source, path }| {
            ChatTemplate::of_model(source, self.settings.named_tokens(), path)
        }))
    }

    /// Identifies this tokenizer: a checksum of all that its ids depend on.
    pub fn fingerprint(&self) -> String {
        let mut hasher = Hasher::new();
        field(&mut hasher, &self.json);
        field(&mut hasher, format!("{:?}", (self.bos(), &self.settings.eos)).as_bytes());
        field(&mut hasher, self.template().unwrap_or_default().as_bytes());
        hasher.finalize().to_hex().to_string()
    }

    /// Writes it into a folder, where transformers and [`Self::open`] find it.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let config = serde_json::to_vec_pretty(&self.settings.config()).expect("it is plain JSON");
        for (name, bytes) in [(FILE, &self.json), (CONFIG, &config)] {
            let path = folder.join(name);
            let io = |source| TrainerError::Io { what: "write", path: path.clone(), source };
            let mut file = AtomicFile::create(&path)?;
            file.write_all(bytes).map_err(io)?;
            file.commit()?;
        }
        Ok(())
    }

    /// Whether [`Self::encode`] of two texts, one after the other, is that of both with a space
    /// between.
    pub(super) fn puts_space(&self) -> bool {
        self.puts_space
    }

    /// Of parts that no file holds as they are.
    fn made(inner: tokenizers::Tokenizer, settings: TokenizerSettings) -> Result<Self> {
        let json = inner.to_string(false).map_err(|error| refused(&*error))?.into_bytes();
        Self::new(inner, json, settings)
    }

    fn new(
        inner: tokenizers::Tokenizer,
        json: Vec<u8>,
        settings: TokenizerSettings,
    ) -> Result<Self> {
        let largest = inner.get_vocab(true).into_values().max();
        let vocabulary = largest.map_or(0, |largest| largest as usize + 1);
        let mut tokenizer = Self {
            inner,
            json,
            settings,
            vocab_size: vocabulary,
            is_bytes: false,
            puts_space: false,
        };
        let [both, a, b] = ["a b", "a", "b"].map(|text| tokenizer.encode(text));
        tokenizer.puts_space = [a?, b?].concat() == both?;
        Ok(tokenizer)
    }
}

fn refused(error: &(dyn std::error::Error + Send + Sync)) -> TrainerError {
    TokenizerError::Text { problem: error.to_string() }.into()
}
