//! Which format each tensor of a GGUF file has: the mixes that llama.cpp's `llama-quantize` knows by name. They give more
//! bits to the tensors that suffer most from few: the output layer, and in some layers values and the second matmul of the
//! feed-forward.
//!
//! Taken: `llama_tensor_get_type_impl` and `tensor_type_fallback` of llama.cpp's `llama-quant.cpp`, for the families that
//! are written and without an importance matrix.

use weights::gguf::write::GgufFormat;

use crate::model::llama::{LanguageFamily, LlamaConfig};

/// A file's formats, by llama.cpp's name for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // llama.cpp's own names.
pub enum GgufMix {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q6K,
    Q5KM,
    Q5KS,
    Q4KM,
    Q4KS,
}

impl GgufMix {
    /// What `general.file_type` says. Taken: `llama_ftype` of llama.cpp's `llama.h`.
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Q4KS => 14,
            Self::Q4KM => 15,
            Self::Q5KS => 16,
            Self::Q5KM => 17,
            Self::Q6K => 18,
            Self::Bf16 => 32,
        }
    }

    /// The format of most matrices.
    pub fn most(self) -> GgufFormat {
        match self {
            Self::F32 => GgufFormat::F32,
            Self::F16 => GgufFormat::F16,
            Self::Bf16 => GgufFormat::Bf16,
            Self::Q8_0 => GgufFormat::Q8_0,
            Self::Q6K => GgufFormat::Q6K,
            Self::Q5KM | Self::Q5KS => GgufFormat::Q5K,
            Self::Q4KM | Self::Q4KS => GgufFormat::Q4K,
        }
    }

    /// The format of a tensor, by its name in GGUF. Vectors are f32 always.
    pub(super) fn format(self, config: &LlamaConfig, name: &str, shape: &[u64]) -> MixedFormat {
        let &[_, row] = shape else {
            return MixedFormat { format: GgufFormat::F32, is_fallback: false };
        };
        let wanted = self.wanted(config, name, row);
        let format = fallback(wanted, row);
        MixedFormat { format, is_fallback: format != wanted }
    }

    /// What a matrix should have, whether or not its rows are whole blocks.
    fn wanted(self, config: &LlamaConfig, name: &str, row: u64) -> GgufFormat {
        let most = self.most();
        let is_output =
            name == "output.weight" || (name == "token_embd.weight" && config.tie_word_embeddings);
        if is_output && most.is_k() {
            return if fits(most, row) { GgufFormat::Q6K } else { GgufFormat::Q8_0 };
        }
        let Some((index, module)) = in_block(name) else { return most };
        let n_layers = config.num_hidden_layers;
        match (module, self) {
            ("attn_v" | "ffn_down", Self::Q4KM | Self::Q5KM) if more_bits(index, n_layers) => {
                GgufFormat::Q6K
            }
            ("attn_v", Self::Q4KS) if index < 4 => GgufFormat::Q5K,
            ("ffn_down", Self::Q4KS) if index < n_layers / 8 => GgufFormat::Q5K,
            ("attn_qkv", Self::Q4KM) => GgufFormat::Q5K,
            ("attn_qkv", Self::Q5KM) => GgufFormat::Q6K,
            ("attn_v", Self::Q4KM | Self::Q4KS) if is_70b(config) => GgufFormat::Q5K,
            _ => most,
        }
    }
}

/// A tensor's format, and whether its rows did not fit the one that the mix has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MixedFormat {
    pub format: GgufFormat,
    pub is_fallback: bool,
}

/// For rows that are no whole blocks: blocks of 32 with a bit more, else half precision.
fn fallback(wanted: GgufFormat, row: u64) -> GgufFormat {
    let smaller = match wanted {
        _ if fits(wanted, row) => return wanted,
        GgufFormat::Q4K => GgufFormat::Q5_0,
        GgufFormat::Q5K => GgufFormat::Q5_1,
        GgufFormat::Q6K => GgufFormat::Q8_0,
        _ => GgufFormat::F16,
    };
    if fits(smaller, row) { smaller } else { GgufFormat::F16 }
}

fn fits(format: GgufFormat, row: u64) -> bool {
    format.encoding().bytes_for(row).is_some()
}

/// The first and the last eighth of the layers, and every third between them.
fn more_bits(index: usize, n_layers: usize) -> bool {
    let eighth = n_layers / 8;
    index < eighth || index >= 7 * n_layers / 8 || (index - eighth) % 3 == 2
}

/// Llama and Qwen2 of 80 layers, where eight heads share their values and these matrices are small.
fn is_70b(config: &LlamaConfig) -> bool {
    let shares_values = config.num_attention_heads != config.num_key_value_heads;
    config.num_hidden_layers == 80
        && match config.family {
            LanguageFamily::Llama | LanguageFamily::Mistral => shares_values,
            LanguageFamily::Qwen2 => true,
            LanguageFamily::Qwen3
            | LanguageFamily::Qwen3Moe
            | LanguageFamily::Mixtral
            | LanguageFamily::Gemma3
            | LanguageFamily::Phi3 => false,
        }
}

/// Index and module of a matrix in a block.
fn in_block(name: &str) -> Option<(usize, &str)> {
    let (index, module) = name.strip_prefix("blk.")?.split_once('.')?;
    Some((index.parse().ok()?, module.strip_suffix(".weight")?))
}
