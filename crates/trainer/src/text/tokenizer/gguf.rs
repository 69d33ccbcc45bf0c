//! The tokenizer inside a GGUF file. The file has the vocabulary and the name of a way to split
//! texts; what that way is stands here, for the families that are trained here.
//!
//! Two kinds: `gpt2`, byte pairs with their merges, and `llama`, `SentencePiece`'s pairs, whose
//! merges follow from the scores of its pieces. Names and patterns are llama.cpp's, from
//! `llama-vocab.cpp`; where the model's own `tokenizer.json` also normalises, so does this.

use std::collections::BTreeMap;
use std::path::Path;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{self, NFC, Prepend, Replace};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior,
    decoders,
};
use weights::Catalog;
use weights::gguf::{GgufArray, read_arrays};

use super::settings::{TemplateFile, TokenizerSettings};
use crate::error::Result;
use crate::model::encoder::tokenizer::TokenizerError;

/// How GPT-2 splits texts.
pub(crate) const GPT_2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(super) const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";

/// A way to split texts: the names it goes by, and the patterns, one after the other.
struct PreTokenizerPreset {
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// Whether a word that is a token is taken whole, whatever its merges say.
    ignores_merges: bool,
    is_composed: bool,
    /// Where the file does not say whether texts begin with a token.
    adds_bos: bool,
}

const GPT_2_PRESET: PreTokenizerPreset = PreTokenizerPreset {
    names: &[],
    patterns: &[GPT_2],
    ignores_merges: false,
    is_composed: false,
    adds_bos: false,
};

const PRE_TOKENIZERS: [PreTokenizerPreset; 5] = [
    PreTokenizerPreset { names: &["gpt-2", "mpt", "olmo", "phi-2", "jais"], ..GPT_2_PRESET },
    PreTokenizerPreset {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"],
        patterns: &[r"\p{N}", GPT_2],
        ..GPT_2_PRESET
    },
    PreTokenizerPreset {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[LLAMA_3],
        ignores_merges: true,
        adds_bos: true,
        ..GPT_2_PRESET
    },
    PreTokenizerPreset {
        names: &["qwen2", "deepseek-r1-qwen"],
        patterns: &[QWEN_2],
        is_composed: true,
        ..GPT_2_PRESET
    },
    PreTokenizerPreset {
        names: &["default"],
        patterns: &[PUNCTUATION, GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"],
        ..GPT_2_PRESET
    },
];

/// What llama.cpp calls the way of these patterns, if it has one.
pub(crate) fn pre_tokenizer_name(patterns: &[&str]) -> Option<&'static str> {
    PRE_TOKENIZERS.iter().find(|way| way.patterns == patterns)?.names.first().copied()
}

/// Taken from llama.cpp, `llama_token_type`: tokens that no text is made of, and those that texts
/// are searched for before anything else.
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// What stands for a space in `SentencePiece`'s vocabularies.
const SPACE: &str = "▁";

/// Reads the vocabulary of a file and what its tokens are for.
pub(super) fn read(path: &Path) -> Result<(tokenizers::Tokenizer, TokenizerSettings)> {
    let metadata = Catalog::open(path)?.metadata;
    let found = GgufVocab::read(path, &metadata)?;
    let kind = metadata.get("tokenizer.ggml.model").map_or("none", String::as_str);
    let (mut inner, begins) = match kind {
        "gpt2" => found.byte_pairs()?,
        "llama" => found.sentence_pieces()?,
        other => {
            let (part, found, known) =
                ("tokenizer.ggml.model", other.into(), &["gpt2", "llama"][..]);
            return Err(
                TokenizerError::UnknownPart { part, found, known, path: path.into() }.into()
            );
        }
    };
    let malformed = |error: tokenizers::Error| TokenizerError::malformed(path, error.to_string());
    inner.add_tokens(found.added()).map_err(malformed)?;
    let settings = found.settings(begins)?;
    if let Some((id, token)) = found.start(begins)? {
        let template = TemplateProcessing::builder()
            .try_single(vec![token.clone(), "$A".into()])
            .map_err(|problem| TokenizerError::malformed(path, problem))?
            .special_tokens(vec![(token, id)])
            .build()
            .map_err(|problem| TokenizerError::malformed(path, problem.to_string()))?;
        inner.with_post_processor(Some(template));
    }
    Ok((inner, settings))
}

/// What a file says of its tokens.
struct GgufVocab<'a> {
    path: &'a Path,
    metadata: &'a BTreeMap<String, String>,
    tokens: Vec<String>,
    scores: Vec<f64>,
    kinds: Vec<i64>,
    merges: Vec<String>,
}

impl<'a> GgufVocab<'a> {
    fn read(path: &'a Path, metadata: &'a BTreeMap<String, String>) -> Result<Self> {
        let names = ["tokens", "scores", "token_type", "merges"];
        let names = names.map(|name| format!("tokenizer.ggml.{name}"));
        let mut lists = read_arrays(path, &names.each_ref().map(String::as_str))?;
        let [tokens, scores, kinds, merges] = names.map(|name| lists.remove(&name));
        let Some(GgufArray::Strings(tokens)) = tokens else {
            let problem = "no tokenizer.ggml.tokens in its metadata";
            return Err(TokenizerError::malformed(path, problem).into());
        };
        let scores = if let Some(GgufArray::Floats(scores)) = scores { scores } else { Vec::new() };
        let kinds = if let Some(GgufArray::Integers(kinds)) = kinds { kinds } else { Vec::new() };
        let merges =
            if let Some(GgufArray::Strings(merges)) = merges { merges } else { Vec::new() };
        Ok(Self { path, metadata, tokens, scores, kinds, merges })
    }

    fn byte_pairs(&self) -> Result<(tokenizers::Tokenizer, bool)> {
        let name = self.metadata.get("tokenizer.ggml.pre").map_or("default", String::as_str);
        let way = PRE_TOKENIZERS.iter().find(|way| way.names.contains(&name)).ok_or_else(|| {
            let known = &["gpt-2", "smollm", "llama-bpe", "qwen2", "default"][..];
            let (part, found) = ("tokenizer.ggml.pre", name.into());
            TokenizerError::UnknownPart { part, found, known, path: self.path.into() }
        })?;
        let vocab = self.vocab();
        let merges = self.merges.iter().map(|line| self.merge(&vocab, line));
        let merges = merges.collect::<std::result::Result<Merges, _>>()?;
        let model = BPE::builder().vocab_and_merges(vocab, merges);
        let built = model.ignore_merges(way.ignores_merges).build().and_then(|model| {
            let mut inner = tokenizers::Tokenizer::new(model);
            inner.with_normalizer(way.is_composed.then_some(NFC))?;
            let mut parts = Vec::new();
            for pattern in way.patterns {
                parts.push(isolated(pattern)?);
            }
            let bytes = ByteLevel::default().add_prefix_space(false).use_regex(false);
            parts.push(bytes.into());
            inner.with_pre_tokenizer(Some(Sequence::new(parts)));
            inner.with_decoder(Some(bytes));
            Ok(inner)
        });
        Ok((built.map_err(|error| self.malformed(error.to_string()))?, way.adds_bos))
    }

    fn sentence_pieces(&self) -> Result<(tokenizers::Tokenizer, bool)> {
        if self.scores.len() != self.tokens.len() {
            let (n, tokens) = (self.scores.len(), self.tokens.len());
            return Err(self.malformed(format!("{n} scores for {tokens} tokens")).into());
        }
        let vocab = self.vocab();
        let merges = self.merges_by_score(&vocab);
        let unknown = self.metadata.get("tokenizer.ggml.unknown_token_id");
        let unknown = unknown.and_then(|id| self.tokens.get(id.parse::<usize>().ok()?));
        let puts_space = self.flag("tokenizer.ggml.add_space_prefix").unwrap_or(true);
        let mut model = BPE::builder().vocab_and_merges(vocab, merges);
        if let Some(unknown) = unknown {
            model = model.unk_token(unknown.clone());
        }
        let built = model.byte_fallback(true).fuse_unk(true).build().and_then(|model| {
            let mut inner = tokenizers::Tokenizer::new(model);
            let prefix = puts_space.then(|| NormalizerWrapper::from(Prepend::new(SPACE.into())));
            let spaces = Replace::new(" ", SPACE)?.into();
            let normalizer = prefix.into_iter().chain([spaces]).collect();
            inner.with_normalizer(Some(normalizers::Sequence::new(normalizer)))?;
            inner.with_decoder(Some(spaced(puts_space)?));
            Ok(inner)
        });
        Ok((built.map_err(|error| self.malformed(error.to_string()))?, true))
    }

    fn vocab(&self) -> Vocab {
        // In reverse, so that the first of two alike stays.
        let ids = self.tokens.iter().cloned().zip(0..).collect::<Vec<(String, u32)>>();
        ids.into_iter().rev().collect()
    }

    /// The crate would panic where the whole is longer than anything in the vocabulary.
    fn merge(
        &self,
        vocab: &Vocab,
        line: &str,
    ) -> std::result::Result<(String, String), TokenizerError> {
        // A token may begin with the letter that stands for a space, never with a space.
        let pair = line.split_once(' ');
        let pair = pair.filter(|(a, b)| {
            [*a, *b, &format!("{a}{b}")].iter().all(|token| vocab.contains_key(*token))
        });
        let (a, b) = pair.ok_or_else(|| {
            self.malformed(format!("merge {line:?} is not of two tokens that make a third"))
        })?;
        Ok((a.into(), b.into()))
    }

    /// Every way to make a piece of two, those of the highest score first: what `SentencePiece` does
    /// while it encodes, written down beforehand.
    fn merges_by_score(&self, vocab: &Vocab) -> Merges {
        let mut found = Vec::new();
        for (piece, score) in self.tokens.iter().zip(&self.scores) {
            for (at, _) in piece.char_indices().skip(1) {
                let (a, b) = piece.split_at(at);
                if let (Some(first), Some(second)) = (vocab.get(a), vocab.get(b)) {
                    found.push((*score, *first, *second, (a.to_owned(), b.to_owned())));
                }
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        found.into_iter().map(|(_, _, _, pair)| pair).collect()
    }

    fn added(&self) -> Vec<AddedToken> {
        let named = self.tokens.iter().zip(&self.kinds);
        let added = named
            .filter(|(token, kind)| [CONTROL, USER_DEFINED].contains(*kind) && !token.is_empty());
        added
            .map(|(token, kind)| {
                AddedToken::from(token.clone(), *kind == CONTROL).normalized(false)
            })
            .collect()
    }

    fn settings(&self, begins: bool) -> std::result::Result<TokenizerSettings, TokenizerError> {
        let mut ends = Vec::new();
        for role in ["eos", "eot", "eom"] {
            ends.extend(self.named(role)?.filter(|end| !ends.contains(end)));
        }
        let template = self.metadata.get("tokenizer.chat_template");
        let template =
            template.map(|source| TemplateFile { source: source.clone(), path: self.path.into() });
        Ok(TokenizerSettings::new(self.start(begins)?, ends, template))
    }

    /// What texts begin with, if they do.
    fn start(&self, begins: bool) -> std::result::Result<Option<(u32, String)>, TokenizerError> {
        let begins = self.flag("tokenizer.ggml.add_bos_token").unwrap_or(begins);
        if begins { self.named("bos") } else { Ok(None) }
    }

    fn named(&self, role: &str) -> std::result::Result<Option<(u32, String)>, TokenizerError> {
        let key = format!("tokenizer.ggml.{role}_token_id");
        let Some(text) = self.metadata.get(&key) else { return Ok(None) };
        let token =
            text.parse::<u32>().ok().and_then(|id| Some((id, self.tokens.get(id as usize)?)));
        let (id, token) = token.ok_or_else(|| {
            self.malformed(format!("{key} is {text}, there are {} tokens", self.tokens.len()))
        })?;
        Ok(Some((id, token.clone())))
    }

    fn flag(&self, key: &str) -> Option<bool> {
        self.metadata.get(key)?.parse().ok()
    }

    fn malformed(&self, problem: String) -> TokenizerError {
        TokenizerError::malformed(self.path, problem)
    }
}

fn isolated(pattern: &str) -> tokenizers::Result<PreTokenizerWrapper> {
    let pattern = SplitPattern::Regex(pattern.into());
    Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into())
}

/// Pieces back to text: spaces, bytes that had no piece, and without the space put before.
fn spaced(puts_space: bool) -> tokenizers::Result<DecoderWrapper> {
    let mut parts: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ")?.into(),
        decoders::byte_fallback::ByteFallback::default().into(),
        decoders::fuse::Fuse::default().into(),
    ];
    if puts_space {
        parts.push(decoders::strip::Strip::new(' ', 1, 0).into());
    }
    Ok(decoders::sequence::Sequence::new(parts).into())
}
