//! The config of a model in a GGUF file: from its metadata, and some values from its tensors.

use std::str::FromStr;
use std::sync::Arc;

use weights::Catalog;
use weights::load::load_f32;

use super::names::{LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS};
use super::{LanguageFamily, LlamaConfig, LongRope, RopeConfig, RopeScaling};
use crate::error::{Result, TrainerError};
use crate::model::config::Unsupported;

/// Reads the config and checks it.
pub fn config(catalog: &Catalog) -> Result<LlamaConfig> {
    let settings = GgufConfigReader::new(catalog)?;
    let config = settings.config()?;
    config.check().map_err(|Unsupported(problem)| settings.wrong(problem))?;
    Ok(config)
}

/// The keys of a file.
struct GgufConfigReader<'a> {
    catalog: &'a Catalog,
    family: LanguageFamily,
    /// Prefix of keys.
    architecture: &'a str,
}

impl<'a> GgufConfigReader<'a> {
    fn new(catalog: &'a Catalog) -> Result<Self> {
        let architecture = catalog.metadata.get("general.architecture").map_or("", String::as_str);
        match LanguageFamily::of_architecture(architecture) {
            Some(LanguageFamily::Gemma3 | LanguageFamily::Qwen3Moe) => Err(TrainerError::Config {
                problem: format!("architecture is {architecture}, whose files are not read"),
                path: catalog.path.clone(),
            }),
            Some(family) => Ok(Self { catalog, family, architecture }),
            None => {
                let known = LanguageFamily::architectures().join(", ");
                let problem = format!("architecture is {architecture}, expected one of {known}");
                Err(TrainerError::Config { problem, path: catalog.path.clone() })
            }
        }
    }

    fn config(&self) -> Result<LlamaConfig> {
        self.check()?;
        let (width, heads) = (self.size("embedding_length")?, self.size("attention.head_count")?);
        let kv_heads = self.optional_size("attention.head_count_kv")?.unwrap_or(heads);
        let per_head = width / heads.max(1);
        let rotary = self.optional_size("rope.dimension_count")?.unwrap_or(per_head);
        let is_partial = self.family == LanguageFamily::Phi3;
        let usual = if is_partial { per_head } else { rotary };
        let head_dim = self.optional_size("attention.key_length")?.unwrap_or(usual);
        let rotary_dim = if is_partial { rotary } else { head_dim };
        let is_llama = self.family == LanguageFamily::Llama;
        Ok(LlamaConfig {
            family: self.family,
            vocab_size: self.rows("token_embd.weight"),
            hidden_size: width,
            intermediate_size: self.size("feed_forward_length")?,
            num_hidden_layers: self.size("block_count")?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            rotary_dim,
            max_position_embeddings: self.size("context_length")?,
            rms_norm_eps: self.needed("attention.layer_norm_rms_epsilon")?,
            rope: self.rope(rotary_dim)?,
            tie_word_embeddings: !self.has("output.weight"),
            attention_bias: self.has("blk.0.attn_output.bias") && is_llama,
            mlp_bias: self.has("blk.0.ffn_gate.bias"),
            window: self.window()?,
            full_attention: Vec::new(),
            local_rope_theta: None,
            query_pre_attn_scalar: None,
            experts: None,
            bos_token_id: self.token("bos_token_id")?,
            eos_token_ids: self.eos_token_ids()?,
        })
    }

    /// Checks that all of it is supported.
    fn check(&self) -> Result<()> {
        let n_experts: u64 = self.number("expert_count")?.unwrap_or(0);
        if n_experts > 0 {
            return Err(self.wrong(format!("expert_count is {n_experts}, expected 0")));
        }
        if self.family == LanguageFamily::Phi3 {
            return Ok(());
        }
        let rotary: Option<usize> = self.number("rope.dimension_count")?;
        let width: Option<usize> = self.number("attention.key_length")?;
        match (rotary, width) {
            (Some(rotary), Some(width)) if rotary != width => {
                Err(self.wrong(format!("rope.dimension_count is {rotary}, expected {width}")))
            }
            _ => Ok(()),
        }
    }

    /// Llama.cpp knows those of Phi-3 alone; 0 is none.
    fn window(&self) -> Result<Option<usize>> {
        if self.family != LanguageFamily::Phi3 {
            return Ok(None);
        }
        let context = self.size("context_length")?;
        let window = self.optional_size("attention.sliding_window")?;
        Ok(window.filter(|window| (1..context).contains(window)))
    }

    fn rope(&self, rotary: usize) -> Result<RopeConfig> {
        let theta = self.number("rope.freq_base")?.unwrap_or(DEFAULT_THETA);
        let kind = self.value("rope.scaling.type").unwrap_or("none");
        let scaling = match kind {
            "none" if self.has(ROPE_FACTORS) => self.llama_3(theta, rotary)?,
            "none" | "longrope" if self.has(LONG_FACTORS) => self.long_rope()?,
            "none" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: self.needed("rope.scaling.factor")? },
            other => {
                let problem = format!("rope.scaling.type is {other}, expected none or linear");
                return Err(self.wrong(problem));
            }
        };
        Ok(RopeConfig { theta, scaling })
    }

    /// Files of Llama 3 hold the divisor of each frequency instead of the settings it follows from. All but
    /// the factor is the same in all of them.
    fn llama_3(&self, theta: f64, d_head: usize) -> Result<RopeScaling> {
        let tensor = self.catalog.find(ROPE_FACTORS)?;
        let divisors = load_f32(self.catalog, tensor, 0..tensor.numel())?;
        let factor = f64::from(divisors.iter().copied().fold(1.0, f32::max));
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192,
        };
        let n = divisors.len();
        if n != d_head / 2 {
            let problem = format!("{ROPE_FACTORS} has {n} values, a head has {d_head}");
            return Err(self.wrong(problem));
        }
        let axis = RopeConfig { theta, scaling: RopeScaling::None }.axis(d_head, 0);
        let is_near = |(frequency, divisor): (&f64, &f32)| {
            (scaling.divisor(0, *frequency, 0) / f64::from(*divisor) - 1.0).abs() < 1e-4
        };
        if axis.frequencies.iter().zip(&divisors).all(is_near) {
            return Ok(scaling);
        }
        Err(self.wrong(format!("{ROPE_FACTORS} up to {factor} are not those of Llama 3")))
    }

    fn long_rope(&self) -> Result<RopeScaling> {
        let context = self.size("context_length")?;
        let factors = |name: &str| -> Result<Vec<f64>> {
            let tensor = self.catalog.find(name)?;
            let factors = load_f32(self.catalog, tensor, 0..tensor.numel())?;
            Ok(factors.into_iter().map(f64::from).collect())
        };
        let original = self.size("rope.scaling.original_context_length")?;
        let usual = LongRope::usual_attention_factor(context, original);
        // Rounded to f32 in the file.
        let said: f64 = self.number("rope.scaling.attn_factor")?.unwrap_or(usual);
        let attention_factor = if (said / usual - 1.0).abs() < 1e-6 { usual } else { said };
        Ok(RopeScaling::LongRope(Arc::new(LongRope {
            short_factor: factors(SHORT_FACTORS)?,
            long_factor: factors(LONG_FACTORS)?,
            original_max_position_embeddings: original,
            attention_factor,
        })))
    }

    fn eos_token_ids(&self) -> Result<Vec<u32>> {
        let mut ends = Vec::new();
        for key in ["eos_token_id", "eot_token_id"] {
            ends.extend(self.token(key)?.filter(|end| !ends.contains(end)));
        }
        Ok(ends)
    }

    fn token(&self, key: &str) -> Result<Option<u32>> {
        let key = format!("tokenizer.ggml.{key}");
        self.catalog.metadata.get(&key).map(|value| self.parsed(&key, value)).transpose()
    }

    fn value(&self, key: &str) -> Option<&'a str> {
        let key = format!("{}.{key}", self.architecture);
        self.catalog.metadata.get(&key).map(String::as_str)
    }

    fn number<T: FromStr>(&self, key: &str) -> Result<Option<T>> {
        self.value(key).map(|value| self.parsed(key, value)).transpose()
    }

    fn needed<T: FromStr>(&self, key: &str) -> Result<T> {
        let architecture = self.architecture;
        self.number(key)?.ok_or_else(|| self.wrong(format!("{architecture}.{key} is missing")))
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        Ok(self.number::<u32>(key)?.map(|size| size as usize))
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.needed::<u32>(key).map(|size| size as usize)
    }

    fn parsed<T: FromStr>(&self, key: &str, value: &str) -> Result<T> {
        value.parse().map_err(|_| self.wrong(format!("{key} is {value}, expected a number")))
    }

    fn has(&self, tensor: &str) -> bool {
        self.catalog.find(tensor).is_ok()
    }

    /// Rows of a tensor, none if it is not there.
    fn rows(&self, tensor: &str) -> usize {
        let found = self.catalog.find(tensor).ok();
        found.and_then(|tensor| tensor.shape.first()).map_or(0, |rows| *rows as usize)
    }

    fn wrong(&self, problem: String) -> TrainerError {
        TrainerError::Config { problem, path: self.catalog.path.clone() }
    }
}

/// Taken: llama.cpp's, for files that name none.
const DEFAULT_THETA: f64 = 10_000.0;

#[cfg(test)]
mod tests {
    use weights::gguf::write::{GgufFormat, GgufTensor, GgufValue, write};

    use super::*;

    /// The error for a file with these settings changed or added.
    fn refused(changes: &[(&str, GgufValue)]) -> String {
        let number = GgufValue::U32;
        let mut settings = vec![
            ("general.architecture", GgufValue::Text("llama".into())),
            ("llama.embedding_length", number(64)),
            ("llama.feed_forward_length", number(96)),
            ("llama.block_count", number(2)),
            ("llama.attention.head_count", number(4)),
            ("llama.attention.layer_norm_rms_epsilon", GgufValue::F32(1e-5)),
        ];
        settings.retain(|(key, _)| changes.iter().all(|(other, _)| other != key));
        settings.extend(changes.iter().cloned());
        let settings: Vec<(String, GgufValue)> =
            settings.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let tensor = |name: &str, shape: &[u64]| GgufTensor {
            name: name.into(),
            shape: shape.into(),
            format: GgufFormat::F32,
        };
        let tensors = [tensor("token_embd.weight", &[8, 64]), tensor(ROPE_FACTORS, &[8])];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut zeros = |_: usize, range: std::ops::Range<u64>| {
            Ok(vec![2.0; (range.end - range.start) as usize])
        };
        write(&path, &settings, &tensors, &mut zeros).unwrap();
        config(&Catalog::open(&path).unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn unsupported_settings_are_refused() {
        let context = ("llama.context_length", GgufValue::U32(256));
        let text = |text: &str| GgufValue::Text(text.into());
        let cases = [
            (vec![], "llama.context_length is missing"),
            (
                vec![("general.architecture", text("gemma"))],
                "architecture is gemma, expected one of llama",
            ),
            (vec![("llama.expert_count", GgufValue::U32(8))], "expert_count is 8, expected 0"),
            (vec![("llama.block_count", text("two"))], "block_count is two, expected a number"),
            (
                vec![context.clone(), ("llama.rope.scaling.type", text("yarn"))],
                "rope.scaling.type is yarn, expected none or linear",
            ),
            (
                vec![
                    ("llama.rope.dimension_count", GgufValue::U32(8)),
                    ("llama.attention.key_length", GgufValue::U32(16)),
                ],
                "rope.dimension_count is 8, expected 16",
            ),
            (vec![context], "rope_freqs.weight up to 2 are not those of Llama 3"),
        ];
        for (changes, says) in cases {
            let error = refused(&changes);
            assert!(error.contains(says), "{error}");
        }
    }
}
