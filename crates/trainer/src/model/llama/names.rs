//! Tensor names in files: transformers' are used here too, GGUF has its own.
//!
//! llama.cpp rotates interleaved pairs of a head where transformers rotates halves, so GGUF files of Llama
//! have the rows of queries and keys permuted. It is undone as they are read, row by row: adapters are
//! trained for transformers' order.

use weights::Catalog;

use super::{LanguageFamily, LlamaConfig};
use crate::model::files::CheckpointLayout;
use crate::model::tensor_piece::TensorPiece;

/// The layout of these files.
pub fn layout_of(catalog: &Catalog, config: &LlamaConfig) -> CheckpointLayout<'static> {
    if is_gguf(catalog) { gguf(config) } else { transformers(catalog, config) }
}

/// Whether these are a language model's tensors by the names of GGUF.
pub fn is_gguf(catalog: &Catalog) -> bool {
    catalog.find("token_embd.weight").is_ok()
}

/// A folder as transformers saves it.
pub fn transformers(catalog: &Catalog, config: &LlamaConfig) -> CheckpointLayout<'static> {
    let is_tied = config.tie_word_embeddings;
    let prefix = prefix(catalog);
    let is_inside = prefix != "model." && config.is_gemma();
    let own = prefix.clone();
    // Old files hold rotary frequencies, and some hold a tied output layer twice; others a vision tower.
    let is_spare = move |name: &str| {
        name.ends_with("rotary_emb.inv_freq")
            || (is_tied && name.ends_with("lm_head.weight"))
            || (is_inside && !name.starts_with(&own))
    };
    let place = move |name: &str| match name.strip_prefix("model.").filter(|_| is_inside) {
        Some(rest) => vec![TensorPiece::whole(format!("{prefix}{rest}"))],
        None => vec![TensorPiece::whole(name)],
    };
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(is_spare) }
}

/// A GGUF file.
pub fn gguf(config: &LlamaConfig) -> CheckpointLayout<'static> {
    let config = config.clone();
    let place = move |name: &str| {
        let key = gguf_name(name);
        if !is_permuted(&config, name) {
            return vec![TensorPiece::whole(key)];
        }
        let is_of_keys = layer_of(name) == "k_proj";
        let n_heads =
            if is_of_keys { config.num_key_value_heads } else { config.num_attention_heads };
        let rows = n_heads * config.head_dim;
        let piece = |row| TensorPiece::part(key.clone(), stored_row(row, config.head_dim), rows);
        (0..rows).map(piece).collect()
    };
    // Rotary factors are a part of the config.
    let is_spare = |name: &str| [ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS].contains(&name);
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(is_spare) }
}

const EMBEDDING: &str = "embed_tokens.weight";

/// What the names of a model begin with in files of transformers: `model.`, `model.language_model.` in newer files of models
/// with a vision tower, or nothing where the model was saved without its output layer.
pub fn prefix(catalog: &Catalog) -> String {
    let mut found = catalog.tensors.iter().filter_map(|tensor| tensor.name.strip_suffix(EMBEDDING));
    found.next().unwrap_or("model.").to_owned()
}

/// Layers that are looked for in a file. Chosen: far more than any model has.
const MOST_LAYERS: usize = 4096;

/// Infers a model's settings from the shapes of its tensors, and from `like` what they do not tell.
pub fn infer(
    like: &LlamaConfig,
    shape: impl Fn(&str) -> Option<Vec<usize>>,
) -> Option<LlamaConfig> {
    let shape = |name: &str| shape(&format!("model.{name}.weight"));
    let rows = |layer: &str| shape(&format!("layers.0.{layer}"))?.first().copied();
    let &[vocab_size, hidden_size] = &shape("embed_tokens")?[..] else { return None };
    let is_there = |index: &usize| shape(&format!("layers.{index}.mlp.up_proj")).is_some();
    let head_dim = rows("self_attn.q_norm").unwrap_or(like.head_dim).max(1);
    Some(LlamaConfig {
        vocab_size,
        hidden_size,
        intermediate_size: rows("mlp.up_proj")?,
        num_hidden_layers: (0..MOST_LAYERS).take_while(is_there).count(),
        num_attention_heads: rows("self_attn.q_proj")? / head_dim,
        num_key_value_heads: rows("self_attn.k_proj")? / head_dim,
        head_dim,
        rotary_dim: head_dim,
        ..like.clone()
    })
}

/// Whether GGUF files permute a tensor's rows. Mistral's models have the architecture `llama` there.
pub(crate) fn is_permuted(config: &LlamaConfig, name: &str) -> bool {
    let is_family = matches!(config.family, LanguageFamily::Llama | LanguageFamily::Mistral);
    is_family && ["q_proj", "k_proj"].contains(&layer_of(name))
}

/// The last component of a layer's name, before its tensor's.
fn layer_of(name: &str) -> &str {
    name.rsplit('.').nth(1).unwrap_or_default()
}

/// The divisor of each rotary frequency, in GGUF files of Llama 3.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The same in those of `LongRoPE`: for texts longer than the original context, and for others.
pub(crate) const LONG_FACTORS: &str = "rope_factors_long.weight";
pub(crate) const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// The row of a GGUF file that holds a row of queries or keys: the halves of each head are interleaved.
pub(crate) fn stored_row(row: usize, d_head: usize) -> usize {
    let (head, at) = (row / d_head, row % d_head);
    let (half, pair) = (at / (d_head / 2), at % (d_head / 2));
    head * d_head + 2 * pair + half
}

/// Taken: `gguf-py/gguf/tensor_mapping.py` of llama.cpp.
const LAYERS: [(&str, &str); 13] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
];

/// What GGUF calls a tensor of a model. Gemma has a norm more before and after each branch.
pub fn gguf_name_of(config: &LlamaConfig, name: &str) -> String {
    if !config.is_gemma() {
        return gguf_name(name);
    }
    let stored = gguf_name(name);
    for (ours, theirs) in GEMMA_NORMS {
        if let Some(start) = name.strip_suffix(&format!(".{ours}.weight")) {
            let index = start.rsplit('.').next().unwrap_or_default();
            return format!("blk.{index}.{theirs}.weight");
        }
    }
    stored
}

/// Taken: as [`LAYERS`].
const GEMMA_NORMS: [(&str, &str); 3] = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Whether GGUF files hold one more than this weight, which is what llama.cpp multiplies by.
pub(crate) fn is_offset_norm(config: &LlamaConfig, name: &str) -> bool {
    config.is_gemma() && name.ends_with("norm.weight")
}

/// What GGUF calls a tensor of all families but Gemma.
pub fn gguf_name(name: &str) -> String {
    let (module, end) = name.rsplit_once('.').unwrap_or((name, ""));
    let outer = match module {
        "model.embed_tokens" => Some("token_embd"),
        "model.norm" => Some("output_norm"),
        "lm_head" => Some("output"),
        _ => None,
    };
    if let Some(outer) = outer {
        return format!("{outer}.{end}");
    }
    let inner = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let Some((index, layer)) = inner else { return name.into() };
    let known = LAYERS.iter().find(|(ours, _)| *ours == layer);
    known.map_or_else(|| name.into(), |(_, theirs)| format!("blk.{index}.{theirs}.{end}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_head_are_interleaved() {
        let stored: Vec<usize> = (0..8).map(|row| stored_row(row, 4)).collect();
        assert_eq!(stored, [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn names_of_gguf_are_found() {
        assert_eq!(gguf_name("model.layers.12.mlp.down_proj.weight"), "blk.12.ffn_down.weight");
        assert_eq!(gguf_name("model.layers.0.self_attn.q_proj.bias"), "blk.0.attn_q.bias");
        assert_eq!(gguf_name("lm_head.weight"), "output.weight");
    }
}
