//! A tokenizer as GGUF metadata: its tokens by id, their types, the merges, and the name of the pre-tokenizer,
//! which llama.cpp implements itself.
//!
//! Two kinds, as `text::tokenizer` reads them: `gpt2`, byte-level BPE with merges, and `llama`, `SentencePiece` BPE
//! with scores.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value as Json;
use weights::gguf::write::GgufValue;

use crate::error::{Result, TrainerError};
use crate::model::llama::LlamaConfig;
use crate::text::Tokenizer;
use crate::text::tokenizer::{GPT_2, pre_tokenizer_name};

/// What matters of a `tokenizer.json`.
#[derive(Deserialize)]
struct VocabFile {
    model: VocabModel,
    #[serde(default)]
    added_tokens: Vec<VocabAddedToken>,
    #[serde(default)]
    pre_tokenizer: Json,
    #[serde(default)]
    normalizer: Json,
}

#[derive(Deserialize)]
struct VocabModel {
    vocab: HashMap<String, u32>,
    #[serde(default)]
    merges: Vec<VocabMerge>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    unk_token: Option<String>,
}

/// Both forms that files have.
#[derive(Deserialize)]
#[serde(untagged)]
enum VocabMerge {
    Line(String),
    Pair(String, String),
}

impl VocabMerge {
    fn line(&self) -> String {
        match self {
            Self::Line(line) => line.clone(),
            Self::Pair(a, b) => format!("{a} {b}"),
        }
    }
}

#[derive(Deserialize)]
struct VocabAddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

/// What a token is for. Taken: `llama_token_type` of llama.cpp's `llama.h`.
#[derive(Clone, Copy)]
enum LlamaTokenType {
    Normal = 1,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// The tokenizer of a model with these settings, by GGUF's keys.
pub fn metadata(tokenizer: &Tokenizer, config: &LlamaConfig) -> Result<Vec<(String, GgufValue)>> {
    let file: VocabFile = serde_json::from_slice(tokenizer.json())
        .map_err(|error| unsupported(format!("tokenizer.json: {error}")))?;
    let (tokens, kinds) = file.tokens(config.vocab_size)?;
    let mut all =
        if file.model.byte_fallback { file.sentence_pieces(&tokens) } else { file.byte_pairs()? };
    all.push(("ggml.tokens", GgufValue::Texts(tokens)));
    all.push((
        "ggml.token_type",
        GgufValue::I32s(kinds.into_iter().map(|kind| kind as i32).collect()),
    ));
    let start = tokenizer.bos().or(config.bos_token_id);
    let mut ends = tokenizer.eos_ids().iter().chain(&config.eos_token_ids);
    let end = ends.next();
    // The other token that ends an answer; llama.cpp finds further ones by their texts.
    let turn = ends.find(|other| Some(*other) != end);
    for (key, id) in [
        ("ggml.bos_token_id", start.as_ref()),
        ("ggml.eos_token_id", end),
        ("ggml.eot_token_id", turn),
    ] {
        all.extend(id.map(|id| (key, GgufValue::U32(*id))));
    }
    all.push(("ggml.add_bos_token", GgufValue::Bool(tokenizer.bos().is_some())));
    let template = tokenizer.template();
    all.extend(template.map(|template| ("chat_template", GgufValue::Text(template.into()))));
    Ok(all.into_iter().map(|(key, value)| (format!("tokenizer.{key}"), value)).collect())
}

impl VocabFile {
    /// All tokens by id, and what each is for. A model may have more rows than there are tokens.
    fn tokens(&self, n_rows: usize) -> Result<(Vec<String>, Vec<LlamaTokenType>)> {
        let mut all: Vec<_> =
            (0..n_rows).map(|id| (format!("[PAD{id}]"), LlamaTokenType::Unused)).collect();
        let inner = self.model.vocab.iter().map(|(token, id)| (token, *id, self.kind(token)));
        let added = self.added_tokens.iter().map(|VocabAddedToken { id, content, special }| {
            let is_unknown = Some(content) == self.model.unk_token.as_ref();
            let kind = if *special { LlamaTokenType::Control } else { LlamaTokenType::UserDefined };
            (content, *id, if is_unknown { LlamaTokenType::Unknown } else { kind })
        });
        for (token, id, kind) in inner.chain(added) {
            let row = all.get_mut(id as usize).ok_or_else(|| {
                unsupported(format!("token {token:?} has id {id}, the model has {n_rows}"))
            })?;
            *row = (token.clone(), kind);
        }
        Ok(all.into_iter().unzip())
    }

    /// Of a token that is not an added one.
    fn kind(&self, token: &str) -> LlamaTokenType {
        let is_byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
        if self.model.byte_fallback && is_byte {
            LlamaTokenType::Byte
        } else {
            LlamaTokenType::Normal
        }
    }

    fn byte_pairs(&self) -> Result<Vec<(&'static str, GgufValue)>> {
        let merges: Vec<String> = self.model.merges.iter().map(VocabMerge::line).collect();
        let patterns = patterns(&self.pre_tokenizer);
        let known = patterns.as_deref().and_then(pre_tokenizer_name);
        // Without merges the pre-tokenizer does not matter.
        let name = if merges.is_empty() { pre_tokenizer_name(&[GPT_2]) } else { known };
        let name = name.ok_or_else(|| {
            unsupported("llama.cpp has no pre-tokenizer like that of this model".into())
        })?;
        Ok(vec![
            ("ggml.model", GgufValue::Text("gpt2".into())),
            ("ggml.pre", GgufValue::Text(name.into())),
            ("ggml.merges", GgufValue::Texts(merges)),
        ])
    }

    /// The earlier a merge, the higher the score of its token.
    fn sentence_pieces(&self, tokens: &[String]) -> Vec<(&'static str, GgufValue)> {
        let mut scores: HashMap<String, f32> = HashMap::new();
        for (rank, merge) in self.model.merges.iter().enumerate() {
            scores.entry(merge.line().replacen(' ', "", 1)).or_insert(-(rank as f32));
        }
        let score = |token: &String| scores.get(token).copied().unwrap_or(0.0);
        vec![
            ("ggml.model", GgufValue::Text("llama".into())),
            ("ggml.pre", GgufValue::Text("default".into())),
            ("ggml.scores", GgufValue::F32s(tokens.iter().map(score).collect())),
            ("ggml.add_space_prefix", GgufValue::Bool(puts_space(&self.normalizer))),
        ]
    }
}

/// The patterns of a pre-tokenizer, in their order; none if it has another step.
fn patterns(splitter: &Json) -> Option<Vec<&str>> {
    match splitter["type"].as_str()? {
        "Sequence" => {
            let parts = splitter["pretokenizers"].as_array()?;
            let parts: Option<Vec<_>> = parts.iter().map(patterns).collect();
            Some(parts?.concat())
        }
        "Split" if splitter["behavior"] == "Isolated" => {
            Some(vec![splitter["pattern"]["Regex"].as_str()?])
        }
        "Digits" if splitter["individual_digits"] == true => Some(vec![r"\p{N}"]),
        "ByteLevel" if splitter["add_prefix_space"] == true => None,
        "ByteLevel" if splitter["use_regex"] == false => Some(Vec::new()),
        "ByteLevel" => Some(vec![GPT_2]),
        _ => None,
    }
}

/// Whether a normaliser begins texts with a space.
fn puts_space(normalizer: &Json) -> bool {
    let parts = normalizer["normalizers"].as_array().into_iter().flatten();
    parts.chain([normalizer]).any(|part| part["type"] == "Prepend")
}

fn unsupported(problem: String) -> TrainerError {
    let hint =
        "llama.cpp does not support this model's tokenizer; use its folder with transformers";
    TrainerError::Request { problem, hint }
}
