//! Language models of Llama's architecture: decoder-only, with grouped-query attention, rotary positions
//! and gated feed-forwards (Touvron et al.,
//! "`LLaMA`", arXiv 2302.13971; Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783). As
//! transformers' `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM`,
//! `Qwen3MoeForCausalLM`, `MixtralForCausalLM`, `Gemma3ForCausalLM` and `Phi3ForCausalLM` compute it. Not supported: the
//! auxiliary loss of routers.

mod block;
mod config_json;
mod experts;
mod family;
mod forward;
mod gemma;
mod gguf;
pub mod init;
mod inputs;
pub mod kv_cache;
pub mod language_model;
pub mod names;
pub mod preset;
mod projections;
pub mod published;
mod rope;

use compute::Dtype;
use serde::{Deserialize, Serialize};

pub use block::LlamaBlock;
pub use experts::ExpertsConfig;
pub use family::LanguageFamily;
pub use forward::{Llama, TokenTargets, run_blocks, run_cached_blocks};
pub use inputs::BlockInputs;
pub use rope::{LongRope, RopeConfig, RopeScaling};

use crate::error::TrainerError;
use crate::model::config::Unsupported;
use config_json::LlamaConfigJson;

/// What `config.json` says, with what it leaves to the family's defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "serde_json::Value", into = "LlamaConfigJson")]
pub struct LlamaConfig {
    /// Its family.
    pub family: LanguageFamily,
    /// Vocabulary size.
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
    /// How many numbers of a head have rotary positions, its first ones.
    pub rotary_dim: usize,
    /// Context length.
    pub max_position_embeddings: usize,
    /// Epsilon of norms.
    pub rms_norm_eps: f32,
    /// Rotary positions.
    pub rope: RopeConfig,
    /// Whether the token embedding is also the output layer.
    pub tie_word_embeddings: bool,
    /// Whether the projections of attention have biases; q, k and v of Qwen2 have them anyway.
    pub attention_bias: bool,
    /// Whether feed-forwards have biases.
    pub mlp_bias: bool,
    /// The sliding window of layers: of each token they see this many, with itself. None for full attention.
    pub window: Option<usize>,
    /// Layers that see all tokens nevertheless.
    pub full_attention: Vec<usize>,
    /// Base of the rotary frequencies of layers with a window, where it is another.
    pub local_rope_theta: Option<f64>,
    /// What q·k is divided by the square root of; the width of a head if not given.
    pub query_pre_attn_scalar: Option<f64>,
    /// Experts in place of feed-forwards.
    pub experts: Option<ExpertsConfig>,
    /// The token that begins a text, if any does.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
}

impl LlamaConfig {
    /// Whether queries, keys and values have biases.
    fn has_qkv_bias(&self) -> bool {
        self.attention_bias || self.family == LanguageFamily::Qwen2
    }

    /// Whether queries and keys are normed, head by head.
    fn has_qk_norm(&self) -> bool {
        use LanguageFamily::{Gemma3, Qwen3, Qwen3Moe};
        matches!(self.family, Qwen3 | Qwen3Moe | Gemma3)
    }

    /// Whether norms multiply by one more than their weight, and each branch of a block ends with a norm too.
    fn is_gemma(&self) -> bool {
        self.family == LanguageFamily::Gemma3
    }

    /// Whether a layer has the window, and rotary frequencies of its own.
    fn is_local(&self, layer: usize) -> bool {
        let has_any = self.window.is_some() || self.local_rope_theta.is_some();
        has_any && !self.full_attention.contains(&layer)
    }

    /// The experts of a layer.
    fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| !experts.dense_layers.contains(&layer))
    }

    /// What q·k is multiplied by.
    fn attention_scale(&self) -> f32 {
        self.query_pre_attn_scalar.unwrap_or(self.head_dim as f64).powf(-0.5) as f32
    }

    /// What embeddings are multiplied by, which transformers rounds to the dtype of weights.
    fn embedding_scale(&self, dtype: Dtype) -> Option<f32> {
        let scale = (self.hidden_size as f32).sqrt();
        // Bits of an f32 that the dtype has no place for.
        let spare = match dtype {
            Dtype::Bf16 => 16,
            Dtype::F16 => 13,
            _ => return self.is_gemma().then_some(scale),
        };
        let to_even = (1 << (spare - 1)) - 1 + ((scale.to_bits() >> spare) & 1);
        let rounded = f32::from_bits((scale.to_bits() + to_even) >> spare << spare);
        self.is_gemma().then_some(rounded)
    }

    /// Whether queries, keys and values come from one layer, and gate and up too.
    fn has_fused_layers(&self) -> bool {
        self.family == LanguageFamily::Phi3
    }

    /// Checks that a text of this length fits into the sliding window, where windows are not computed.
    pub fn check_length(&self, length: usize) -> crate::error::Result<()> {
        match self.window {
            Some(window) if length > window => Err(TrainerError::Request {
                problem: format!(
                    "a prompt of {length} tokens, the text encoder's sliding_window is {window}"
                ),
                hint: "text encoders see all of a prompt: shorten it",
            }),
            _ => Ok(()),
        }
    }

    /// Checks that all of it is supported.
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
        let (rotary_dim, head_dim) = (self.rotary_dim, self.head_dim);
        Unsupported::unless(
            rotary_dim.is_multiple_of(2) && (2..=head_dim).contains(&rotary_dim),
            format!("{rotary_dim} of head_dim {head_dim} have rotary positions, which need pairs"),
        )?;
        Unsupported::unless(
            u32::try_from(self.vocab_size).is_ok_and(|size| size < compute::ops::IGNORE_INDEX),
            format!("vocab_size {} does not fit into 32 bits", self.vocab_size),
        )?;
        self.experts.as_ref().map_or(Ok(()), ExpertsConfig::check)?;
        Unsupported::unless(self.window != Some(0), "sliding_window is 0".to_owned())?;
        let positive = |number: Option<f64>| number.is_none_or(|it| it.is_finite() && it > 0.0);
        Unsupported::unless(
            positive(self.local_rope_theta) && positive(self.query_pre_attn_scalar),
            "rope_local_base_freq or query_pre_attn_scalar is not above 0".to_owned(),
        )?;
        self.rope.check(self.rotary_dim)
    }
}

#[cfg(test)]
pub(crate) mod tests;
