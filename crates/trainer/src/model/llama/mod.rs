//! Language models of Llama's kind: one stream of tokens, each of which sees those before it through
//! grouped-query attention with rotary positions, and gated feed-forwards between (Touvron et al.,
//! "`LLaMA`", arXiv 2302.13971; Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783). As
//! transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` and `Qwen3ForCausalLM`
//! compute it; texts beyond a window of attention and mixtures of experts are not.

mod config_json;
mod forward;
mod gguf;
pub mod init;
pub mod kv_cache;
pub mod language_model;
pub mod names;
pub mod preset;
pub mod published;
mod rope;

use serde::{Deserialize, Serialize};

pub use forward::Llama;
pub use rope::{RopeConfig, RopeScaling};

use crate::error::TrainerError;
use crate::model::config::Unsupported;
use config_json::LlamaConfigJson;

/// What `config.json` says, with what it leaves to the family's defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "LlamaConfigJson", into = "LlamaConfigJson")]
pub struct LlamaConfig {
    /// Whose model it is.
    pub family: LanguageFamily,
    /// Tokens there are.
    pub vocab_size: usize,
    /// Width of a token inside.
    pub hidden_size: usize,
    /// Inner width of a feed-forward.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Heads of the queries.
    pub num_attention_heads: usize,
    /// Heads of keys and values.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens that the model was made for.
    pub max_position_embeddings: usize,
    /// Added to mean squares.
    pub rms_norm_eps: f32,
    /// How positions turn queries and keys.
    pub rope: RopeConfig,
    /// Whether the table of tokens is also the last layer.
    pub tie_word_embeddings: bool,
    /// Whether the layers around attention have biases; those of Qwen2 have them anyway, but for the
    /// last.
    pub attention_bias: bool,
    /// Whether feed-forwards have biases.
    pub mlp_bias: bool,
    /// Tokens that a token sees at most, itself among them, in some layers; none if it sees all before
    /// it. Texts that are no longer are computed as without.
    pub window: Option<usize>,
    /// The token that begins a text, if any does.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

/// Whose model it is, which decides the little that files do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LanguageFamily {
    /// Meta's, and all that are built like them.
    Llama,
    /// Mistral's.
    Mistral,
    /// Alibaba's second: queries, keys and values have biases.
    Qwen2,
    /// Alibaba's third: queries and keys are normed.
    Qwen3,
}

impl LanguageFamily {
    /// As transformers calls the model.
    pub fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

impl LlamaConfig {
    /// Whether queries, keys and values have biases.
    fn has_qkv_bias(&self) -> bool {
        self.attention_bias || self.family == LanguageFamily::Qwen2
    }

    /// Whether queries and keys are normed, head by head.
    fn has_qk_norm(&self) -> bool {
        self.family == LanguageFamily::Qwen3
    }

    /// That every token of a text of this length sees all before it, which is all that is computed.
    pub fn check_length(&self, length: usize) -> crate::error::Result<()> {
        match self.window {
            Some(window) if length > window => Err(TrainerError::Request {
                problem: format!(
                    "a text of {length} tokens, the model's sliding_window is {window}"
                ),
                hint: "windows of attention are not computed; up to its window a model sees all: \
                       set text.length, or prompt and --max-tokens, so that no text is longer",
            }),
            _ => Ok(()),
        }
    }

    /// That all of it can be computed.
    pub fn check(&self) -> Result<(), Unsupported> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", heads),
            ("num_key_value_heads", kv_heads),
            ("head_dim", self.head_dim),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Unsupported(format!("{name} is 0")));
        }
        Unsupported::unless(
            heads.is_multiple_of(kv_heads),
            format!("num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"),
        )?;
        Unsupported::unless(
            self.head_dim.is_multiple_of(2),
            format!("head_dim {} is odd, positions turn pairs", self.head_dim),
        )?;
        Unsupported::unless(
            u32::try_from(self.vocab_size).is_ok_and(|size| size < compute::ops::IGNORE_INDEX),
            format!("vocab_size {} does not fit into 32 bits", self.vocab_size),
        )?;
        self.rope.check()
    }
}

#[cfg(test)]
pub(crate) mod tests;
