//! Published models of these families, by their configs: a plan can be made before a model is downloaded.
//! There are no weights, and loading any is an error.

use std::path::Path;

use super::{LanguageFamily, LlamaConfig, RopeConfig, RopeScaling};

/// A published model.
#[derive(Clone, Copy, Debug)]
pub struct PublishedLlama(&'static PublishedLlamaRow);

/// Name, family, vocabulary; width, inner width, blocks; heads, KV heads, head dim; context, θ, Llama 3's
/// rotary factor, ε, whether embeddings are tied.
type PublishedLlamaRow =
    (&'static str, LanguageFamily, usize, [usize; 3], [usize; 3], (usize, f64, f64, f32, bool));

use LanguageFamily::{Llama, Mistral, Qwen2, Qwen3};

/// Taken: `config.json` of each at huggingface.co.
const TABLE: [PublishedLlamaRow; 15] = [
    (
        "llama-3.2-1b",
        Llama,
        128_256,
        [2048, 8192, 16],
        [32, 8, 64],
        (131_072, 5e5, 32.0, 1e-5, true),
    ),
    (
        "llama-3.2-3b",
        Llama,
        128_256,
        [3072, 8192, 28],
        [24, 8, 128],
        (131_072, 5e5, 32.0, 1e-5, true),
    ),
    (
        "llama-3.1-8b",
        Llama,
        128_256,
        [4096, 14_336, 32],
        [32, 8, 128],
        (131_072, 5e5, 8.0, 1e-5, false),
    ),
    (
        "mistral-7b-v0.3",
        Mistral,
        32_768,
        [4096, 14_336, 32],
        [32, 8, 128],
        (32_768, 1e6, 1.0, 1e-5, false),
    ),
    ("qwen2.5-0.5b", Qwen2, 151_936, [896, 4864, 24], [14, 2, 64], (32_768, 1e6, 1.0, 1e-6, true)),
    (
        "qwen2.5-1.5b",
        Qwen2,
        151_936,
        [1536, 8960, 28],
        [12, 2, 128],
        (131_072, 1e6, 1.0, 1e-6, true),
    ),
    (
        "qwen2.5-3b",
        Qwen2,
        151_936,
        [2048, 11_008, 36],
        [16, 2, 128],
        (32_768, 1e6, 1.0, 1e-6, true),
    ),
    (
        "qwen2.5-7b",
        Qwen2,
        152_064,
        [3584, 18_944, 28],
        [28, 4, 128],
        (131_072, 1e6, 1.0, 1e-6, false),
    ),
    ("qwen3-0.6b", Qwen3, 151_936, [1024, 3072, 28], [16, 8, 128], (40_960, 1e6, 1.0, 1e-6, true)),
    ("qwen3-1.7b", Qwen3, 151_936, [2048, 6144, 28], [16, 8, 128], (40_960, 1e6, 1.0, 1e-6, true)),
    ("qwen3-4b", Qwen3, 151_936, [2560, 9728, 36], [32, 8, 128], (40_960, 1e6, 1.0, 1e-6, true)),
    ("qwen3-8b", Qwen3, 151_936, [4096, 12_288, 36], [32, 8, 128], (40_960, 1e6, 1.0, 1e-6, false)),
    ("smollm2-135m", Llama, 49_152, [576, 1536, 30], [9, 3, 64], (8192, 1e5, 1.0, 1e-5, true)),
    ("smollm2-360m", Llama, 49_152, [960, 2560, 32], [15, 5, 64], (8192, 1e5, 1.0, 1e-5, true)),
    ("smollm2-1.7b", Llama, 49_152, [2048, 8192, 24], [32, 32, 64], (8192, 1.3e5, 1.0, 1e-5, true)),
];

impl PublishedLlama {
    /// The model that a folder is named after: its name begins with the model's, ignoring case.
    pub fn by_path(path: &Path) -> Option<Self> {
        let name = weights::hub::model_name(path).to_lowercase();
        let name = name.strip_prefix("meta-").unwrap_or(&name);
        TABLE.iter().find(|row| name.starts_with(row.0)).map(Self)
    }

    /// What `config.json` says.
    pub fn config(self) -> LlamaConfig {
        let &(_, family, vocab_size, [width, inner, blocks], [heads, kv_heads, d_head], rest) =
            self.0;
        let (context, theta, factor, rms_norm_eps, tie_word_embeddings) = rest;
        let stretched = RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let scaling = if factor > 1.0 { stretched } else { RopeScaling::None };
        LlamaConfig {
            family,
            vocab_size,
            hidden_size: width,
            intermediate_size: inner,
            num_hidden_layers: blocks,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim: d_head,
            rotary_dim: d_head,
            max_position_embeddings: context,
            rms_norm_eps,
            rope: RopeConfig { theta, scaling },
            tie_word_embeddings,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::build::tensor_specs;
    use crate::model::llama::language_model::LanguageModel;

    /// Counted by transformers on the meta device, of the configs in the table; the model cards say the
    /// same.
    const COUNTS: [usize; TABLE.len()] = [
        1_235_814_400,
        3_212_749_824,
        8_030_261_248,
        7_248_023_552,
        494_032_768,
        1_543_714_304,
        3_085_938_688,
        7_615_616_512,
        596_049_920,
        1_720_574_976,
        4_022_468_096,
        8_190_735_360,
        134_515_008,
        361_821_120,
        1_711_376_384,
    ];

    #[test]
    fn published_models_have_their_number_of_parameters() {
        for (row, expected) in TABLE.iter().zip(COUNTS) {
            let config = PublishedLlama(row).config();
            config.check().unwrap_or_else(|problem| panic!("{problem:?}"));
            let wants =
                tensor_specs(|build| crate::model::llama::Llama::new(&config, build)).unwrap();
            let count: usize = wants.iter().map(|want| want.shape.elements()).sum();
            assert_eq!(count, expected, "{}", row.0);
        }
    }

    #[test]
    fn a_model_that_is_not_there_can_be_planned_and_not_loaded() {
        let path = Path::new("models/Meta-Llama-3.1-8B-Instruct");
        let base = LanguageModel::open_or_published(path).unwrap();
        assert_eq!(base.config.num_hidden_layers, 32);
        let error = LanguageModel::open(path).err().unwrap();
        assert!(error.hint().contains("a plan needs its name alone"), "{}", error.hint());
        assert!(LanguageModel::open_or_published(Path::new("models/unheard-of")).is_err());
    }
}
