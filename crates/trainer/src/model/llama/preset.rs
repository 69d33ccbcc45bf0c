//! Presets of models to train from scratch, by size.

use std::path::Path;

use super::{LanguageFamily, LlamaConfig, RopeConfig, RopeScaling};

/// A preset. All have tied embeddings: at these sizes an output layer would be a large part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LlamaPreset {
    /// For a first look on any computer.
    Tiny,
    /// For an experiment of minutes on a GPU.
    M25,
    /// As wide and deep as the smallest GPT-2.
    M125,
    /// As wide and deep as the middle GPT-2.
    M350,
    /// As Llama 3.2 1B.
    B1,
}

impl LlamaPreset {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Tiny, Self::M25, Self::M125, Self::M350, Self::B1];

    /// Its name in jobs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::M25 => "25M",
            Self::M125 => "125M",
            Self::M350 => "350M",
            Self::B1 => "1B",
        }
    }

    /// The one of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|preset| preset.name().eq_ignore_ascii_case(name))
    }

    /// The one that a path names, where nothing else lies there.
    pub fn by_path(path: &Path) -> Option<Self> {
        let preset = path.file_name().and_then(|name| Self::from_name(name.to_str()?));
        preset.filter(|_| !path.exists())
    }

    /// Its config, for a vocabulary of this size. Chosen: inner widths are 8/3 of the width, rounded to
    /// multiples of 256, as Llama's (arXiv 2302.13971, section 2.2), but for the largest, whose shape is
    /// Llama 3.2 1B's; contexts are what such a model is trained with on one computer.
    pub fn config(self, vocabulary: usize) -> LlamaConfig {
        // Width, inner width, blocks, heads, KV heads, context length.
        let [width, inner, blocks, heads, kv_heads, context] = match self {
            Self::Tiny => [192, 512, 4, 6, 2, 512],
            Self::M25 => [512, 1280, 8, 8, 8, 2048],
            Self::M125 => [768, 2048, 12, 12, 12, 2048],
            Self::M350 => [1024, 2816, 24, 16, 16, 2048],
            Self::B1 => [2048, 8192, 16, 32, 8, 8192],
        };
        LlamaConfig {
            family: LanguageFamily::Llama,
            vocab_size: vocabulary,
            hidden_size: width,
            intermediate_size: inner,
            num_hidden_layers: blocks,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: width / heads,
            rotary_dim: width / heads,
            max_position_embeddings: context,
            rms_norm_eps: 1e-5,
            rope: RopeConfig { theta: THETA, scaling: RopeScaling::None },
            tie_word_embeddings: true,
            attention_bias: false,
            mlp_bias: false,
            window: None,
            full_attention: Vec::new(),
            local_rope_theta: None,
            query_pre_attn_scalar: None,
            experts: None,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
        }
    }
}

/// Taken: the first Llama's, made for texts of 2048 tokens; at twice that, the lowest frequency is still far
/// from a whole turn.
const THETA: f64 = 10_000.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::build::tensor_specs;
    use crate::model::llama::Llama;

    fn count(config: &LlamaConfig) -> usize {
        let wants = tensor_specs(|build| Llama::new(config, build)).unwrap();
        wants.iter().map(|want| want.shape.elements()).sum()
    }

    /// Counted by transformers' `LlamaForCausalLM` on the meta device. With Llama 3's
    /// vocabulary the largest is Llama 3.2 1B to the digit.
    #[test]
    fn presets_have_their_number_of_parameters() {
        let expected = [
            (LlamaPreset::Tiny, 257, 1_623_936),
            (LlamaPreset::M25, 50_257, 49_857_536),
            (LlamaPreset::M125, 50_257, 123_551_232),
            (LlamaPreset::M350, 50_257, 359_794_688),
            (LlamaPreset::B1, 128_256, 1_235_814_400),
        ];
        for (preset, vocabulary, n) in expected {
            let config = preset.config(vocabulary);
            config.check().unwrap_or_else(|problem| panic!("{problem:?}"));
            assert_eq!(count(&config), n, "{}", preset.name());
            assert_eq!(LlamaPreset::from_name(preset.name()), Some(preset));
        }
        assert_eq!(LlamaPreset::from_name("2B"), None);
    }
}
