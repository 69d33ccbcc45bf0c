//! Prompts to token ids, the same as the CLIP, T5 and Qwen2 tokenizers of transformers 5.
//!
//! Of a `tokenizer.json` only the vocabulary, the merges, the characters map and the added tokens
//! are used. Normalisation and pre-tokenisation are those of the class, since the reference does not
//! take them from the file either; so a vocabulary gives the same ids from `tokenizer.json` as from
//! `vocab.json` and `merges.txt`. Loading the file as it is would be shorter, but files written by
//! older versions then give other ids, and the crate panics on some that are damaged.
//!
//! Not supported: pairs of texts, decoding, tokenizers of other models.

mod charsmap;
mod error;
mod settings;
mod template;

use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::{self, Lowercase, NFC, Precompiled, Replace};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{NormalizerWrapper, SplitDelimiterBehavior};

pub use error::TokenizerError;
use settings::{AddedTokenEntry, PromptTokenizerConfig};
pub use template::{IMAGE_TOKEN, PromptTemplate, TemplateImages};

/// Turns texts into token ids, truncated to one length and, for CLIP and T5, padded to it.
pub struct PromptTokenizer {
    inner: tokenizers::Tokenizer,
    framing: Option<PromptFraming>,
    /// What fills up a template, if anything does.
    padding: Option<u32>,
    template: PromptTemplate,
    /// Tokens of a text at most, without those that its template drops.
    length: usize,
    vocab_size: usize,
}

/// The special tokens around a text, and those that fill it up.
struct PromptFraming {
    bos: Option<u32>,
    eos: u32,
    pad: u32,
}

/// A tokenised prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// Token ids: the text between its BOS and EOS tokens, then padding up to the full length; or the template with the
    /// text inside, then padding if it has some.
    pub ids: Vec<u32>,
    /// How many of them are not padding.
    pub n_tokens: usize,
    /// How many tokens of the text were truncated.
    pub dropped: usize,
}

/// A text that is longer than what an encoder sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncation<'t> {
    /// How many tokens it has, with BOS and EOS.
    pub n_tokens: usize,
    /// As many as the encoder sees.
    pub max_tokens: usize,
    /// The part that it does not see.
    pub lost: &'t str,
}

impl PromptTokenizer {
    /// Reads the tokenizer in `folder`; every text will take `length` tokens.
    pub fn open(folder: &Path, length: usize) -> Result<Self, TokenizerError> {
        Self::open_with(folder, length, PromptTemplate::NONE)
    }

    /// The same for texts inside of a template: up to `length` tokens after those that it drops.
    pub fn open_with(
        folder: &Path,
        length: usize,
        template: PromptTemplate,
    ) -> Result<Self, TokenizerError> {
        let settings = PromptTokenizerConfig::read(folder)?;
        let (model, listed) = TokenizerModel::read(folder, &settings)?;
        let kind = model.kind();
        let largest = model.largest_id(folder)?;
        let mut inner = model.build(folder, &settings)?;
        let added = settings.added(listed);
        let mut special = settings.special(kind)?;
        special.retain(|token| added.iter().all(|added| added.content != token.content));
        add(&mut inner, folder, added)?;
        // Before the special tokens are added: those without an id would get new ones.
        let framing = PromptFraming::find(kind, &inner, &settings, folder)?;
        add(&mut inner, folder, special)?;
        let padding = template.is_padded.then(|| padding(kind, &inner, &settings, folder));
        let padding = padding.transpose()?;

        let needed = framing.as_ref().map_or(0, PromptFraming::len);
        if length < needed {
            return Err(TokenizerError::TooShort { length, needed });
        }
        let largest = inner.get_added_tokens_decoder().into_keys().fold(largest, u32::max);
        Ok(Self { inner, framing, padding, template, length, vocab_size: largest as usize + 1 })
    }

    /// The ids of `text`, truncated at its end; BOS and EOS stay, what a template has after the text does not.
    pub fn encode(&self, text: &str) -> EncodedPrompt {
        self.encode_with_images(text, 0)
    }

    /// The same with so many images before the text, each one token. The text is truncated as without them.
    pub fn encode_with_images(&self, text: &str, n_images: usize) -> EncodedPrompt {
        let found = self.split(self.template.around_images(n_images, text));
        let room = self.room() + self.placeholder_tokens(n_images);
        let fits = found.get_ids().len().min(room);
        let (kept, dropped) = found.get_ids().split_at(fits);
        let mut ids = kept.to_vec();
        if let Some(PromptFraming { bos, eos, .. }) = &self.framing {
            ids = bos.iter().chain(kept).chain([eos]).copied().collect();
        }
        let n_tokens = ids.len();
        if let Some(PromptFraming { pad, .. }) = self.framing {
            ids.resize(self.length, pad);
        }
        if let Some(pad) = self.padding {
            ids.resize(room, pad);
        }
        EncodedPrompt { ids, n_tokens, dropped: dropped.len() }
    }

    /// Tokens that stand for so many images in the template.
    pub fn placeholder_tokens(&self, n_images: usize) -> usize {
        self.split(self.template.images.placeholders(n_images)).len()
    }

    /// The id of a token, if there is one.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The crate fails if a piece of text has no id and there is no unknown token.
    fn split(&self, text: String) -> tokenizers::Encoding {
        self.inner.encode_fast(text, false).expect("unk_token was found in the vocabulary")
    }

    /// What of a text is truncated, if anything.
    pub fn truncation<'t>(&self, text: &'t str) -> Option<Truncation<'t>> {
        let (room, PromptTemplate { prefix, suffix, n_dropped, .. }) = (self.room(), self.template);
        // A token has at least a byte, and T5 puts a space in front. Text that is not ASCII may become
        // longer when it is normalised.
        if text.is_ascii() && text.len() + prefix.len() + suffix.len() < room {
            return None;
        }
        let whole = self.template.around(text);
        let found = self.inner.encode(whole, false).expect("unk_token was found in the vocabulary");
        let (start, _) = *found.get_offsets().get(room)?;
        let start = start.saturating_sub(prefix.len()).min(text.len());
        let start = (0..=start).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        let n_tokens = found.len() + self.n_framing() - n_dropped;
        let lost = text[start..].trim();
        // Of a template, the end may be lost alone.
        let is_lost = suffix.is_empty() || !lost.is_empty();
        is_lost.then_some(Truncation { n_tokens, max_tokens: self.length, lost })
    }

    /// As many ids as a text can have, with its template.
    pub fn max_tokens(&self) -> usize {
        self.template.n_dropped + self.length
    }

    /// Tokens that a text and its template may have.
    fn room(&self) -> usize {
        self.max_tokens() - self.n_framing()
    }

    fn n_framing(&self) -> usize {
        self.framing.as_ref().map_or(0, PromptFraming::len)
    }

    /// How many tokens of a text the tokenizer in `folder` says its model takes, if it says so.
    pub fn stated_length(folder: &Path) -> Result<Option<usize>, TokenizerError> {
        PromptTokenizerConfig::read(folder)?.model_max_length()
    }

    /// Every id is below this: an encoder needs as many embeddings.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }
}

/// The id of the token that fills up a template.
fn padding(
    kind: TokenizerKind,
    inner: &tokenizers::Tokenizer,
    settings: &PromptTokenizerConfig,
    folder: &Path,
) -> Result<u32, TokenizerError> {
    let token = settings.content(kind, "pad_token")?;
    let id = inner.token_to_id(&token);
    id.ok_or_else(|| not_in_vocabulary(folder, "pad_token", token))
}

impl PromptFraming {
    /// Language models have none.
    fn find(
        kind: TokenizerKind,
        inner: &tokenizers::Tokenizer,
        settings: &PromptTokenizerConfig,
        folder: &Path,
    ) -> Result<Option<Self>, TokenizerError> {
        let id = |role| {
            let token = settings.content(kind, role)?;
            inner.token_to_id(&token).ok_or_else(|| not_in_vocabulary(folder, role, token))
        };
        let bos = match kind {
            TokenizerKind::Clip => Some(id("bos_token")?),
            TokenizerKind::T5 => None,
            TokenizerKind::Qwen2 => return Ok(None),
        };
        settings.right("padding_side")?;
        Ok(Some(Self { bos, eos: id("eos_token")?, pad: id("pad_token")? }))
    }

    fn len(&self) -> usize {
        usize::from(self.bos.is_some()) + 1
    }
}

/// Whose tokenizer it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenizerKind {
    Clip,
    T5,
    Qwen2,
}

impl TokenizerKind {
    /// What the reference takes for a token that no file mentions.
    fn default(self, role: &str) -> Option<&'static str> {
        match (self, role) {
            (Self::Clip, "bos_token") => Some("<|startoftext|>"),
            (Self::Clip | Self::Qwen2, "eos_token" | "unk_token" | "pad_token") => {
                Some("<|endoftext|>")
            }
            (Self::T5, "eos_token") => Some("</s>"),
            (Self::T5, "unk_token") => Some("<unk>"),
            (Self::T5, "pad_token") => Some("<pad>"),
            _ => None,
        }
    }
}

/// The trained part of a tokenizer: vocabulary, and merges or scores.
enum TokenizerModel {
    Clip { vocab: Vocab, merges: Merges },
    Qwen2 { vocab: Vocab, merges: Merges },
    T5 { pieces: Vec<(String, f64)>, charsmap: Option<Precompiled> },
}

/// `tokenizer.json` with the parts that are used.
#[derive(Deserialize)]
struct TokenizerFile<M> {
    model: M,
    #[serde(default)]
    added_tokens: Vec<AddedTokenEntry>,
    normalizer: Option<Normalizer>,
}

#[derive(Deserialize)]
struct PromptBpeJson {
    vocab: Vocab,
    merges: Vec<PromptMerge>,
}

/// Newer files have pairs.
#[derive(Deserialize)]
#[serde(untagged)]
enum PromptMerge {
    Pair(String, String),
    Line(String),
}

#[derive(Deserialize)]
struct T5TokenizerJson {
    vocab: Vec<(String, f64)>,
}

#[derive(Deserialize)]
struct Normalizer {
    precompiled_charsmap: Option<String>,
    #[serde(default)]
    normalizers: Vec<Normalizer>,
}

/// The fields that tell which tokenizer it is.
#[derive(Deserialize)]
struct ModelTraits {
    r#type: Option<String>,
    end_of_word_suffix: Option<String>,
}

impl TokenizerModel {
    fn read(
        folder: &Path,
        settings: &PromptTokenizerConfig,
    ) -> Result<(Self, Vec<AddedTokenEntry>), TokenizerError> {
        let [file, vocab, merges, spiece] =
            ["tokenizer.json", "vocab.json", "merges.txt", "spiece.model"].map(|f| folder.join(f));
        let kind = settings.kind()?;
        if let Some(bytes) = read_if_there(&file)? {
            match kind.map_or_else(|| TokenizerKind::detect(&file, &bytes), Ok)? {
                TokenizerKind::T5 => Self::t5_file(&file, &bytes),
                kind => Self::bpe_file(kind, &file, &bytes),
            }
        } else if kind != Some(TokenizerKind::T5) && vocab.exists() && merges.exists() {
            let kind = kind.unwrap_or(TokenizerKind::Clip);
            Ok((Self::bpe_files(kind, &vocab, &merges)?, vec![]))
        } else if spiece.exists() {
            Err(TokenizerError::SentencePiece { path: spiece })
        } else {
            let looked_for = match kind {
                Some(TokenizerKind::T5) => &["tokenizer.json"][..],
                _ => &["tokenizer.json", "vocab.json with merges.txt"],
            };
            Err(TokenizerError::Missing { looked_for, folder: folder.into() })
        }
    }

    fn bpe_file(
        kind: TokenizerKind,
        path: &Path,
        bytes: &[u8],
    ) -> Result<(Self, Vec<AddedTokenEntry>), TokenizerError> {
        let file: TokenizerFile<PromptBpeJson> = parse_json(path, bytes)?;
        let mut merges = Merges::with_capacity(file.model.merges.len());
        for (at, merge) in file.model.merges.into_iter().enumerate() {
            merges.push(match merge {
                PromptMerge::Pair(a, b) => (a, b),
                PromptMerge::Line(line) => {
                    pair(&line).ok_or_else(|| no_pair(path, "merge", at, &line))?
                }
            });
        }
        Ok((Self::bpe(kind, path, file.model.vocab, merges)?, file.added_tokens))
    }

    fn bpe_files(kind: TokenizerKind, vocab: &Path, merges: &Path) -> Result<Self, TokenizerError> {
        let text = fs::read_to_string(merges).map_err(|error| TokenizerError::io(merges, error))?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with("#version"));
        let pairs = lines
            .map(|(at, line)| pair(line).ok_or_else(|| no_pair(merges, "line", at, line)))
            .collect::<Result<Merges, _>>()?;
        let bytes = fs::read(vocab).map_err(|error| TokenizerError::io(vocab, error))?;
        Self::bpe(kind, merges, parse_json(vocab, &bytes)?, pairs)
    }

    /// The crate would panic where the merged token is longer than any in the vocabulary.
    fn bpe(
        kind: TokenizerKind,
        path: &Path,
        vocab: Vocab,
        merges: Merges,
    ) -> Result<Self, TokenizerError> {
        for (a, b) in &merges {
            let whole = format!("{a}{b}");
            if let Some(lost) = [a, b, &whole].into_iter().find(|token| !vocab.contains_key(*token))
            {
                let problem = format!(
                    "merge of {a:?} and {b:?}, but {lost:?} is none of the {} in the vocabulary",
                    vocab.len()
                );
                return Err(TokenizerError::malformed(path, problem));
            }
        }
        Ok(match kind {
            TokenizerKind::Qwen2 => Self::Qwen2 { vocab, merges },
            _ => Self::Clip { vocab, merges },
        })
    }

    fn t5_file(path: &Path, bytes: &[u8]) -> Result<(Self, Vec<AddedTokenEntry>), TokenizerError> {
        let file: TokenizerFile<T5TokenizerJson> = parse_json(path, bytes)?;
        let charsmap = file.normalizer.and_then(Normalizer::charsmap);
        let charsmap = charsmap.map(|text| charsmap::read(&text)).transpose();
        let charsmap = charsmap.map_err(|problem| TokenizerError::malformed(path, problem))?;
        Ok((Self::T5 { pieces: file.model.vocab, charsmap }, file.added_tokens))
    }

    fn kind(&self) -> TokenizerKind {
        match self {
            Self::Clip { .. } => TokenizerKind::Clip,
            Self::Qwen2 { .. } => TokenizerKind::Qwen2,
            Self::T5 { .. } => TokenizerKind::T5,
        }
    }

    /// The crate adds ids after the largest; a huge one could overflow.
    fn largest_id(&self, folder: &Path) -> Result<u32, TokenizerError> {
        let largest = match self {
            Self::Clip { vocab, .. } | Self::Qwen2 { vocab, .. } => {
                vocab.values().copied().max().unwrap_or(0)
            }
            Self::T5 { pieces, .. } => pieces.len().saturating_sub(1) as u32,
        };
        if i32::try_from(largest).is_err() {
            let problem =
                format!("id {largest} in the vocabulary, the largest can be {}", i32::MAX);
            return Err(TokenizerError::malformed(folder, problem));
        }
        Ok(largest)
    }

    fn build(
        self,
        folder: &Path,
        settings: &PromptTokenizerConfig,
    ) -> Result<tokenizers::Tokenizer, TokenizerError> {
        let kind = self.kind();
        let unknown = || settings.content(kind, "unk_token");
        let built = match self {
            Self::Qwen2 { vocab, merges } => qwen2(vocab, merges),
            Self::Clip { ref vocab, .. } if !vocab.contains_key(&unknown()?) => {
                return Err(not_in_vocabulary(folder, "unk_token", unknown()?));
            }
            Self::Clip { vocab, merges } => clip(vocab, merges, unknown()?),
            Self::T5 { pieces, charsmap } => {
                let unknown = unknown()?;
                let Some(unknown) = pieces.iter().position(|(piece, _)| *piece == unknown) else {
                    return Err(not_in_vocabulary(folder, "unk_token", unknown));
                };
                t5(pieces, charsmap, unknown)
            }
        };
        built.map_err(|error| TokenizerError::malformed(folder, error.to_string()))
    }
}

impl TokenizerKind {
    /// Detects the kind by the model, where no class is given.
    fn detect(path: &Path, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let TokenizerFile { model, .. } = parse_json::<TokenizerFile<ModelTraits>>(path, bytes)?;
        match (model.r#type.as_deref(), model.end_of_word_suffix.as_deref()) {
            (Some("Unigram"), _) => Ok(Self::T5),
            (_, Some("</w>")) => Ok(Self::Clip),
            (Some("BPE"), None | Some("")) => Ok(Self::Qwen2),
            (r#type, _) => {
                let class = format!("unknown with a model of type {}", r#type.unwrap_or("unknown"));
                Err(TokenizerError::UnknownClass { class, path: path.into() })
            }
        }
    }
}

impl Normalizer {
    /// Older files have it in a sequence; the reference ignores the rest of it.
    fn charsmap(self) -> Option<String> {
        self.precompiled_charsmap
            .or_else(|| self.normalizers.into_iter().find_map(|part| part.precompiled_charsmap))
    }
}

/// Taken from transformers 5.22.2, `models/clip/tokenization_clip.py`.
fn clip(
    vocab: Vocab,
    merges: Merges,
    unknown: String,
) -> tokenizers::Result<tokenizers::Tokenizer> {
    const WORDS: &str = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .unk_token(unknown)
        .end_of_word_suffix("</w>".into())
        .build()?;
    let spaces = normalizers::replace::ReplacePattern::Regex(r"\s+".into());
    let normalizer: [NormalizerWrapper; 3] =
        [NFC.into(), Replace::new(spaces, " ")?.into(), Lowercase.into()];
    let words = SplitPattern::Regex(WORDS.into());
    let words = Split::new(words, SplitDelimiterBehavior::Removed, true)?;
    let bytes = ByteLevel::default().add_prefix_space(false);
    let mut inner = tokenizers::Tokenizer::new(model);
    inner.with_normalizer(Some(normalizers::Sequence::new(normalizer.into())))?;
    inner.with_pre_tokenizer(Some(Sequence::new(vec![words.into(), bytes.into()])));
    Ok(inner)
}

/// Taken from transformers 5.22.2, `models/qwen2/tokenization_qwen2.py`.
fn qwen2(vocab: Vocab, merges: Merges) -> tokenizers::Result<tokenizers::Tokenizer> {
    const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let words = SplitPattern::Regex(WORDS.into());
    let words = Split::new(words, SplitDelimiterBehavior::Isolated, false)?;
    let bytes = ByteLevel::new(false, true, false);
    let mut inner =
        tokenizers::Tokenizer::new(BPE::builder().vocab_and_merges(vocab, merges).build()?);
    inner.with_normalizer(Some(NFC))?;
    inner.with_pre_tokenizer(Some(Sequence::new(vec![words.into(), bytes.into()])));
    inner.with_decoder(Some(bytes));
    Ok(inner)
}

/// Taken from transformers 5.22.2, `models/t5/tokenization_t5.py`.
fn t5(
    pieces: Vec<(String, f64)>,
    charsmap: Option<Precompiled>,
    unknown: usize,
) -> tokenizers::Result<tokenizers::Tokenizer> {
    let mut inner = tokenizers::Tokenizer::new(Unigram::from(pieces, Some(unknown), false)?);
    inner.with_normalizer(charsmap)?;
    let spaces = Metaspace::new('▁', PrependScheme::Always, true);
    inner.with_pre_tokenizer(Some(Sequence::new(vec![WhitespaceSplit.into(), spaces.into()])));
    Ok(inner)
}

fn add(
    inner: &mut tokenizers::Tokenizer,
    folder: &Path,
    tokens: Vec<tokenizers::AddedToken>,
) -> Result<(), TokenizerError> {
    inner.add_tokens(tokens).map(drop).map_err(|error| {
        TokenizerError::malformed(folder, format!("the added tokens cannot be used: {error}"))
    })
}

fn pair(line: &str) -> Option<(String, String)> {
    let (a, b) = line.split_once(' ')?;
    (!b.contains(' ')).then(|| (a.into(), b.into()))
}

fn no_pair(path: &Path, unit: &str, at: usize, line: &str) -> TokenizerError {
    TokenizerError::malformed(path, format!("{unit} {} is not two tokens: {line:?}", at + 1))
}

fn not_in_vocabulary(folder: &Path, role: &'static str, token: String) -> TokenizerError {
    TokenizerError::SpecialToken { role, token, folder: folder.into() }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, TokenizerError> {
    read_if_there(path)?.map(|bytes| parse_json(path, &bytes)).transpose()
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TokenizerError::io(path, error)),
    }
}

fn parse_json<T: DeserializeOwned>(path: &Path, bytes: &[u8]) -> Result<T, TokenizerError> {
    serde_json::from_slice(bytes).map_err(|error| TokenizerError::json(path, &error))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;

    #[derive(Deserialize)]
    struct Golden {
        length: usize,
        texts: Vec<Expected>,
    }

    #[derive(Deserialize)]
    struct Expected {
        text: String,
        ids: Vec<u32>,
        n_tokens: usize,
        dropped: usize,
    }

    fn golden(name: &str) -> PathBuf {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tokenizers")).join(name)
    }

    fn read(path: impl AsRef<Path>) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    /// A copy of some files of a golden folder.
    fn copy(name: &str, files: &[&str]) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            fs::copy(golden(name).join(file), folder.path().join(file)).unwrap();
        }
        folder
    }

    const ALL: &[&str] = &[
        "vocab.json",
        "merges.txt",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ];
    const NO_FILE: &[&str] =
        &["vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"];
    const T5: &[&str] = &["tokenizer.json", "tokenizer_config.json"];

    /// These files give the ids that the reference gave for the folder.
    fn check(name: &str, files: &[&str]) {
        let golden: Golden = read_json(&golden(name).join("golden.json")).unwrap().unwrap();
        let folder = copy(name, files);
        let tokenizer = PromptTokenizer::open(folder.path(), golden.length).unwrap();
        for Expected { text, ids, n_tokens, dropped } in golden.texts {
            let expected = EncodedPrompt { ids, n_tokens, dropped };
            assert_eq!(tokenizer.encode(&text), expected, "{name} from {files:?}: {text:?}");
        }
    }

    #[test]
    fn gives_the_ids_of_the_reference() {
        check("clip", ALL);
        check("clip", NO_FILE);
        check("clip", &["tokenizer.json", "tokenizer_config.json"]);
        check("clip", &["tokenizer.json"]);
        check("clip_g", ALL);
        check("clip_g", NO_FILE);
        check("clip_g", &["vocab.json", "merges.txt", "tokenizer_config.json"]);
        check("clip_g", &["vocab.json", "merges.txt", "special_tokens_map.json"]);
        check("t5", T5);
        check("t5", &["tokenizer.json"]);
    }

    #[test]
    fn knows_how_many_ids_there_are() {
        for (name, vocabulary) in [("clip", 664), ("clip_g", 664), ("t5", 271)] {
            let tokenizer = PromptTokenizer::open(&golden(name), 77).unwrap();
            assert_eq!(tokenizer.vocab_size(), vocabulary, "{name}");
        }
    }

    /// A token that the settings add gets the next id and is found inside of words, as it is.
    #[test]
    fn takes_added_tokens() {
        let legacy = [("added_tokens.json", json!({"<New>": 664}))];
        let token = json!({"content": "<New>", "normalized": false, "special": true});
        let mut config = read(golden("clip").join("tokenizer_config.json"));
        config["added_tokens_decoder"]["664"] = token;
        let listed = [("tokenizer_config.json", config)];
        for (files, written) in
            [(&["vocab.json", "merges.txt"][..], legacy), (&["tokenizer.json"], listed)]
        {
            let folder = copy("clip", files);
            for (file, value) in written {
                fs::write(folder.path().join(file), value.to_string()).unwrap();
            }
            let tokenizer = PromptTokenizer::open(folder.path(), 5).unwrap();
            let id = |text| tokenizer.inner.token_to_id(text).unwrap();
            let ids = vec![662, id("a</w>"), 664, id("b</w>"), 663];
            assert_eq!(tokenizer.encode("a<New>b").ids, ids, "{files:?}");
            assert_eq!(tokenizer.vocab_size(), 665);
        }
    }

    #[test]
    fn cuts_down_to_the_framing_tokens() {
        let tokenizer = PromptTokenizer::open(&golden("clip"), 2).unwrap();
        let expected = EncodedPrompt { ids: vec![662, 663], n_tokens: 2, dropped: 3 };
        assert_eq!(tokenizer.encode("1 2 3"), expected);
        let tokenizer = PromptTokenizer::open(&golden("t5"), 1).unwrap();
        assert_eq!(tokenizer.encode("").ids, [1]);
    }

    /// Opening a copy of `name` after `change` fails, saying `what`.
    fn fails(name: &str, files: &[&str], change: impl Fn(&Path), what: &str) {
        let folder = copy(name, files);
        change(folder.path());
        let error = PromptTokenizer::open(folder.path(), 77).map(drop).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(what), "{said:?} does not say {what:?}");
        assert!(said.contains(folder.path().to_str().unwrap()), "{said:?} does not say where");
        assert!(!error.hint().is_empty());
    }

    /// Changes the JSON of a file.
    fn edit(file: &'static str, change: fn(&mut Value)) -> impl Fn(&Path) {
        move |folder| {
            let mut value = read(folder.join(file));
            change(&mut value);
            fs::write(folder.join(file), value.to_string()).unwrap();
        }
    }

    #[test]
    fn says_which_files_are_missing() {
        let both = "looked for tokenizer.json, then for vocab.json with merges.txt: ";
        fails("clip", &[], |_| (), both);
        fails("clip", &["vocab.json"], |_| (), both);
        let spiece = |folder: &Path| fs::write(folder.join("spiece.model"), "x").unwrap();
        fails("t5", &[], spiece, "only a SentencePiece model, no tokenizer.json beside");
        fails(
            "t5",
            &["tokenizer_config.json"],
            |_| (),
            "no tokenizer: looked for tokenizer.json: ",
        );
    }

    #[test]
    fn says_where_json_is_damaged() {
        let cut = |file, at| {
            move |folder: &Path| {
                let text = fs::read(folder.join(file)).unwrap();
                fs::write(folder.join(file), &text[..at]).unwrap();
            }
        };
        let at = "invalid JSON at line 1, column 100: EOF while parsing";
        fails("clip", NO_FILE, cut("vocab.json", 100), at);
        fails("clip", ALL, cut("tokenizer.json", 30), "line 3, column 9: EOF while parsing");
        fails("t5", T5, cut("tokenizer_config.json", 0), "line 1, column 0: EOF while parsing");
        let text =
            |folder: &Path| fs::write(folder.join("vocab.json"), "{\n\"a\": \"b\"}").unwrap();
        fails("clip", NO_FILE, text, "line 2, column 8: invalid type: string \"b\", expected u32");
    }

    #[test]
    fn invalid_settings_are_named() {
        let file = "tokenizer.json";
        let config = "tokenizer_config.json";
        let map = "special_tokens_map.json";
        let class = edit(config, |v| v["tokenizer_class"] = "LlamaTokenizer".into());
        fails("clip", ALL, class, "of class LlamaTokenizer, known are");
        let suffix = edit(file, |v| v["model"]["end_of_word_suffix"] = "@@".into());
        fails("clip", &[file], suffix, "of class unknown with a model of type BPE");
        let side = edit(config, |v| v["padding_side"] = "left".into());
        fails("t5", T5, side, "padding_side is left, the encoders need right");
        let pad = edit(config, |v| v["pad_token"] = "<nothing>".into());
        fails("clip", ALL, pad, "pad_token is \"<nothing>\", which is not in the vocabulary");
        let pad = edit(config, |v| v["pad_token"] = Value::Null);
        fails("clip", ALL, pad, "no pad_token in the tokenizer's settings");
        let start = edit(map, |v| v["bos_token"]["content"] = "<begin>".into());
        fails("clip_g", NO_FILE, start, "bos_token is \"<begin>\", which is not");
        let unknown = edit(config, |v| v["unk_token"] = "<unknown>".into());
        fails("clip", ALL, unknown, "unk_token is \"<unknown>\", which is not");
        let unknown = edit(config, |v| v["unk_token"] = "<unknown>".into());
        fails("t5", T5, unknown, "unk_token is \"<unknown>\", which is not");
        let pad = edit(map, |v| v["pad_token"] = 7.into());
        fails("clip_g", ALL, pad, "malformed: pad_token: invalid type");
        let id = edit("vocab.json", |v| v["!"] = u32::MAX.into());
        fails("clip", NO_FILE, id, "id 4294967295 in the vocabulary, the largest can be");
    }

    #[test]
    fn says_which_merge_is_wrong() {
        let lost = edit("vocab.json", |v| drop(v.as_object_mut().unwrap().remove("the</w>")));
        let what = "merge of \"th\" and \"e</w>\", but \"the</w>\" is none of the 663";
        fails("clip", NO_FILE, lost, what);
        // The merged token is longer than any in the vocabulary, which the crate does not check.
        let long = edit("tokenizer.json", |v| {
            v["model"]["merges"] = json!([["<|startoftext|>", "<|startoftext|>"]]);
        });
        fails("clip", ALL, long, "is none of the 664 in the vocabulary");
        let three = edit("tokenizer.json", |v| v["model"]["merges"] = json!(["t h", "t h e"]));
        fails("clip_g", ALL, three, "merge 2 is not two tokens: \"t h e\"");
        let lines = |folder: &Path| {
            fs::write(folder.join("merges.txt"), "#version: 0.2\nt h\nth\n").unwrap();
        };
        fails("clip", NO_FILE, lines, "line 3 is not two tokens: \"th\"");
    }

    #[test]
    fn refuses_a_length_without_room() {
        for (name, length) in [("clip", 1), ("t5", 0)] {
            let error = PromptTokenizer::open(&golden(name), length).map(drop).unwrap_err();
            assert!(matches!(error, TokenizerError::TooShort { .. }), "{error}");
        }
    }

    /// A file that ends anywhere, or has any byte changed, is an error or a tokenizer that works.
    #[test]
    fn never_panics_on_damaged_files() {
        let texts = ["a cafe\u{301} \u{ff26} 猫 <|endoftext|>! the lighthouse", "e\u{308}\u{301}"];
        let mut opened = 0;
        for (name, files) in [("clip", NO_FILE), ("clip_g", ALL), ("t5", T5)] {
            let folder = copy(name, files);
            for file in files {
                let path = folder.path().join(file);
                let whole = fs::read(&path).unwrap();
                for at in (0..whole.len()).step_by(whole.len() / 12 + 1) {
                    let mut changed = whole.clone();
                    changed[at] = changed[at].wrapping_add(1 + at as u8 % 40);
                    for bytes in [&whole[..at], &changed] {
                        fs::write(&path, bytes).unwrap();
                        let Ok(tokenizer) = PromptTokenizer::open(folder.path(), 9) else {
                            continue;
                        };
                        opened += 1;
                        assert!(texts.iter().all(|text| tokenizer.encode(text).ids.len() == 9));
                    }
                }
                fs::write(&path, whole).unwrap();
            }
        }
        assert!(opened > 20, "only {opened} were still tokenizers");
    }

    /// Every byte of the characters map in turn, since the crate trusts it.
    #[test]
    fn never_panics_on_a_damaged_characters_map() {
        let file = read(golden("t5").join("tokenizer.json"));
        let whole = file["normalizer"]["precompiled_charsmap"].as_str().unwrap();
        let whole = base64::decode(whole).unwrap();
        let texts =
            ["e\u{301}i\u{308}u\u{308}o\u{308}A\u{30a}", "\u{a0}\u{2003}\u{3000}\u{200b}\t"];
        let (mut sound, mut refused) = (0, 0);
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (at % 8);
            let Ok(map) = charsmap::read(&base64::encode(bytes)) else {
                refused += 1;
                continue;
            };
            sound += 1;
            for text in texts {
                map.normalize_string(text);
            }
            (0..=0xffff).step_by(17).filter_map(char::from_u32).for_each(|c| {
                map.transform(c.encode_utf8(&mut [0; 4]));
            });
        }
        assert!(sound > 100 && refused > 100, "{sound} sound, {refused} refused");
    }
}
