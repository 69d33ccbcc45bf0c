//! `config.json` of old and new versions of transformers. What hearth does not support is refused here;
//! keys that do not change the output are ignored.
//!
//! Written back, rotary settings use the keys of transformers before version 5, which later ones read
//! too.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use serde_json::Value;

use super::{ExpertsConfig, LanguageFamily, LlamaConfig, LongRope, RopeConfig, RopeScaling, gemma};

/// The file's keys, those that matter.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LlamaConfigJson {
    model_type: LanguageFamily,
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    #[serde(default = "default_epsilon")]
    rms_norm_eps: f32,
    #[serde(default = "silu")]
    hidden_act: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_experts: Option<usize>,
    /// Mixtral's name of the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    num_local_experts: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_experts_per_tok: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moe_intermediate_size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    norm_topk_prob: Option<bool>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    mlp_only_layers: Vec<usize>,
    /// Every so many layers one has experts.
    #[serde(skip_serializing)]
    decoder_sparse_step: Option<usize>,
    #[serde(skip_serializing)]
    output_router_logits: Option<bool>,
    #[serde(skip_serializing)]
    router_jitter_noise: Option<f64>,
    /// Gemma's name of `hidden_act`.
    #[serde(skip_serializing_if = "Option::is_none")]
    hidden_activation: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    query_pre_attn_scalar: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rope_local_base_freq: Option<f64>,
    #[serde(skip_serializing)]
    attn_logit_softcapping: Option<f64>,
    #[serde(skip_serializing)]
    final_logit_softcapping: Option<f64>,
    #[serde(skip_serializing)]
    use_bidirectional_attention: Option<bool>,
    /// Every so many layers one has full attention.
    #[serde(skip_serializing)]
    sliding_window_pattern: Option<usize>,
    #[serde(skip_serializing)]
    max_window_layers: Option<usize>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeScalingJson>,
    #[serde(skip_serializing)]
    rope_parameters: Option<RopeScalingJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    partial_rotary_factor: Option<f64>,
    /// Phi-3's, for `LongRoPE`; others have it among the rotary settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    original_max_position_embeddings: Option<usize>,
    #[serde(default)]
    tie_word_embeddings: bool,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    use_sliding_window: bool,
    /// Written even if there is none: Mistral's default is one.
    sliding_window: Option<usize>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    layer_types: Vec<String>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<TokenIds>,
}

/// `rope_scaling`, or `rope_parameters` as it is called since version 5.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct RopeScalingJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    rope_type: Option<String>,
    /// Its older name; some files have both.
    #[serde(skip_serializing, rename = "type")]
    kind: Option<String>,
    #[serde(skip_serializing)]
    rope_theta: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    low_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_max_position_embeddings: Option<usize>,
    #[serde(skip_serializing)]
    partial_rotary_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    short_factor: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    long_factor: Option<Vec<f64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_factor: Option<f64>,
}

/// One token or several.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Several(Vec<u32>),
}

/// Taken, as the next two: the defaults of transformers' `LlamaConfig`.
fn default_context() -> usize {
    2048
}

fn default_epsilon() -> f32 {
    1e-6
}

/// Layers whose kind is looked at. Chosen: far more than any model has.
const MOST_LAYERS: usize = 4096;

const DEFAULT_THETA: f64 = 10_000.0;

/// The activation of all families but Gemma.
const SILU: &str = "silu";
const GELU_TANH: &str = "gelu_pytorch_tanh";

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

fn silu() -> String {
    SILU.into()
}

impl TryFrom<Value> for LlamaConfig {
    type Error = String;

    fn try_from(settings: Value) -> Result<Self, String> {
        let written: LlamaConfigJson = serde_json::from_value(gemma::normalise(settings))
            .map_err(|error| error.to_string())?;
        written.try_into()
    }
}

impl TryFrom<LlamaConfigJson> for LlamaConfig {
    type Error = String;

    fn try_from(written: LlamaConfigJson) -> Result<Self, String> {
        written.check()?;
        let heads = written.num_attention_heads;
        let (rope, experts) = (written.rope()?, written.experts()?);
        let head_dim = written.head_dim.unwrap_or(written.hidden_size / heads.max(1));
        let rotary_dim = (head_dim as f64 * written.partial_rotary_factor()) as usize;
        Ok(Self {
            family: written.model_type,
            vocab_size: written.vocab_size,
            hidden_size: written.hidden_size,
            intermediate_size: written.intermediate_size,
            num_hidden_layers: written.num_hidden_layers,
            num_attention_heads: heads,
            num_key_value_heads: written.num_key_value_heads.unwrap_or(heads),
            head_dim,
            rotary_dim,
            max_position_embeddings: written.max_position_embeddings,
            rms_norm_eps: written.rms_norm_eps,
            rope,
            tie_word_embeddings: written.tie_word_embeddings,
            attention_bias: written.attention_bias.unwrap_or(false),
            mlp_bias: written.mlp_bias.unwrap_or(false),
            window: written.window(),
            full_attention: written.full_attention(),
            local_rope_theta: written.rope_local_base_freq,
            query_pre_attn_scalar: written.query_pre_attn_scalar,
            experts,
            bos_token_id: written.bos_token_id,
            eos_token_ids: match written.eos_token_id {
                None => Vec::new(),
                Some(TokenIds::One(id)) => vec![id],
                Some(TokenIds::Several(ids)) => ids,
            },
        })
    }
}

impl LlamaConfigJson {
    /// Checks that all of it is supported.
    fn check(&self) -> Result<(), String> {
        let Self { hidden_act, layer_types, .. } = self;
        let is_gemma = self.model_type == LanguageFamily::Gemma3;
        let expected = if is_gemma { GELU_TANH } else { SILU };
        if hidden_act != expected {
            return Err(format!("hidden_act is {hidden_act}, expected {expected}"));
        }
        for (name, cap) in [
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
        ] {
            if let Some(cap) = cap {
                return Err(format!("{name} is {cap}, expected none"));
            }
        }
        if self.use_bidirectional_attention == Some(true) {
            return Err("use_bidirectional_attention is true, expected false".into());
        }
        let (share, is_partial) =
            (self.partial_rotary_factor(), self.model_type == LanguageFamily::Phi3);
        if !(share == 1.0 || is_partial && share > 0.0 && share < 1.0) {
            let expected = if is_partial { "0 to 1" } else { "1" };
            return Err(format!("partial_rotary_factor is {share}, expected {expected}"));
        }
        let is_known = |kind: &String| [FULL, SLIDING].contains(&&**kind);
        match layer_types.iter().find(|kind| !is_known(kind)) {
            Some(kind) => Err(format!("layer_types has {kind}, expected {FULL} or {SLIDING}")),
            None => Ok(()),
        }
    }

    /// As transformers' `MixtralConfig` and `Qwen3MoeConfig`, with their defaults.
    fn experts(&self) -> Result<Option<ExpertsConfig>, String> {
        let [n, k, inner] = match self.model_type {
            LanguageFamily::Mixtral => [8, 2, self.intermediate_size],
            LanguageFamily::Qwen3Moe => [128, 8, 768],
            _ => return Ok(None),
        };
        if self.output_router_logits == Some(true) {
            let problem = "output_router_logits is true, expected false: the router's auxiliary loss is \
                           not computed";
            return Err(problem.into());
        }
        if let Some(noise) = self.router_jitter_noise.filter(|noise| *noise != 0.0) {
            return Err(format!("router_jitter_noise is {noise}, expected 0"));
        }
        let is_mixtral = self.model_type == LanguageFamily::Mixtral;
        let step = self.decoder_sparse_step.unwrap_or(1).max(1);
        let is_dense = |layer: &usize| {
            self.mlp_only_layers.contains(layer) || !(layer + 1).is_multiple_of(step)
        };
        let layers = 0..self.num_hidden_layers.min(MOST_LAYERS);
        Ok(Some(ExpertsConfig {
            num_experts: self.num_experts.or(self.num_local_experts).unwrap_or(n),
            num_experts_per_tok: self.num_experts_per_tok.unwrap_or(k),
            intermediate_size: self.moe_intermediate_size.unwrap_or(inner),
            norm_topk_prob: is_mixtral || self.norm_topk_prob.unwrap_or(false),
            dense_layers: layers.filter(|layer| !is_mixtral && is_dense(layer)).collect(),
        }))
    }

    /// Layers with full attention beside others with a window.
    fn full_attention(&self) -> Vec<usize> {
        if self.window().is_none() && self.rope_local_base_freq.is_none() {
            return Vec::new();
        }
        let layers = 0..self.num_hidden_layers;
        let is_full = |layer: &usize| {
            if let Some(kind) = self.layer_types.get(*layer) {
                return kind == FULL;
            }
            let is_one_of = |pattern: usize| pattern > 0 && (layer + 1).is_multiple_of(pattern);
            let is_early = self.max_window_layers.is_some_and(|first| *layer < first);
            is_early || self.sliding_window_pattern.is_some_and(is_one_of)
        };
        // Believed up to what a model can have.
        layers.take(MOST_LAYERS).filter(is_full).collect()
    }

    /// The sliding window, if it is shorter than the context. Qwen's files name a window that is not in use.
    fn window(&self) -> Option<usize> {
        use LanguageFamily::{Gemma3, Mistral, Mixtral, Phi3};
        let has_no_switch = [Mistral, Mixtral, Phi3, Gemma3];
        let is_used = self.use_sliding_window || has_no_switch.contains(&self.model_type);
        self.sliding_window.filter(|window| is_used && *window < self.max_position_embeddings)
    }

    /// The share of a head that has rotary positions.
    fn partial_rotary_factor(&self) -> f64 {
        let nested = self.rope_json().and_then(|rotation| rotation.partial_rotary_factor);
        self.partial_rotary_factor.or(nested).unwrap_or(1.0)
    }

    fn rope_json(&self) -> Option<&RopeScalingJson> {
        self.rope_parameters.as_ref().or(self.rope_scaling.as_ref())
    }

    fn rope(&self) -> Result<RopeConfig, String> {
        let none = RopeScalingJson::default();
        let rotation = self.rope_json().unwrap_or(&none);
        let theta = rotation.rope_theta.or(self.rope_theta).unwrap_or(DEFAULT_THETA);
        let context = self.max_position_embeddings;
        let original = self.original_max_position_embeddings;
        Ok(RopeConfig { theta, scaling: rotation.scaling(context, original)? })
    }
}

impl RopeScalingJson {
    fn scaling(&self, context: usize, original: Option<usize>) -> Result<RopeScaling, String> {
        let kind = self.rope_type.as_deref().or(self.kind.as_deref()).unwrap_or("default");
        let number = |name: &str, number: Option<f64>| {
            number.ok_or_else(|| format!("rope_scaling of type {kind} has no {name}"))
        };
        let factor = || number("factor", self.factor);
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: factor()? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: number("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: number("high_freq_factor", self.high_freq_factor)?,
                original_max_position_embeddings: self
                    .original_max_position_embeddings
                    .unwrap_or(context),
            }),
            // `su` is its name in Microsoft's first files.
            "longrope" | "su" => {
                self.long_rope(context, original.or(self.original_max_position_embeddings))
            }
            other => Err(format!(
                "rope_scaling is of type {other}, expected default, linear, llama3 or longrope"
            )),
        }
    }

    fn long_rope(&self, context: usize, original: Option<usize>) -> Result<RopeScaling, String> {
        let factors = |name: &str, factors: &Option<Vec<f64>>| {
            factors.clone().ok_or_else(|| format!("rope_scaling of type longrope has no {name}"))
        };
        let Some(original) = original.filter(|original| *original > 1) else {
            return Err(
                "rope_scaling of type longrope has no original_max_position_embeddings".into()
            );
        };
        let usual = LongRope::usual_attention_factor(context, original);
        Ok(RopeScaling::LongRope(Arc::new(LongRope {
            short_factor: factors("short_factor", &self.short_factor)?,
            long_factor: factors("long_factor", &self.long_factor)?,
            original_max_position_embeddings: original,
            attention_factor: self.attention_factor.unwrap_or(usual),
        })))
    }
}

impl From<LlamaConfig> for LlamaConfigJson {
    fn from(config: LlamaConfig) -> Self {
        use LanguageFamily::{Mixtral, Qwen2, Qwen3, Qwen3Moe};
        let is_qwen = matches!(config.family, Qwen2 | Qwen3 | Qwen3Moe);
        let experts = config.experts.as_ref();
        let is_mixtral = config.family == Mixtral;
        let n_experts = experts.map(|experts| experts.num_experts);
        let of_llama = |bias: bool| (config.family == LanguageFamily::Llama).then_some(bias);
        let is_gemma = config.is_gemma();
        // Of layers that are all alike the families know by themselves.
        let kind = |layer: usize| if config.is_local(layer) { SLIDING } else { FULL }.to_owned();
        let is_mixed = !config.full_attention.is_empty() || is_gemma;
        let n_told = if is_mixed { config.num_hidden_layers } else { 0 };
        let layer_types = (0..n_told).map(kind).collect();
        let is_partial = config.rotary_dim != config.head_dim;
        let share = config.rotary_dim as f64 / config.head_dim as f64;
        let original_max_position_embeddings = match &config.rope.scaling {
            RopeScaling::LongRope(long) => Some(long.original_max_position_embeddings),
            _ => None,
        };
        Self {
            model_type: config.family,
            architectures: vec![config.family.class().into()],
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: Some(config.num_key_value_heads),
            head_dim: Some(config.head_dim),
            max_position_embeddings: config.max_position_embeddings,
            rms_norm_eps: config.rms_norm_eps,
            num_experts: n_experts.filter(|_| !is_mixtral),
            num_local_experts: n_experts.filter(|_| is_mixtral),
            num_experts_per_tok: experts.map(|experts| experts.num_experts_per_tok),
            moe_intermediate_size: experts
                .filter(|_| !is_mixtral)
                .map(|experts| experts.intermediate_size),
            norm_topk_prob: experts.filter(|_| !is_mixtral).map(|experts| experts.norm_topk_prob),
            mlp_only_layers: experts.map_or_else(Vec::new, |it| it.dense_layers.clone()),
            decoder_sparse_step: None,
            output_router_logits: None,
            router_jitter_noise: None,
            hidden_act: if is_gemma { GELU_TANH.into() } else { silu() },
            hidden_activation: is_gemma.then(|| GELU_TANH.into()),
            query_pre_attn_scalar: config.query_pre_attn_scalar,
            rope_local_base_freq: config.local_rope_theta,
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            use_bidirectional_attention: None,
            sliding_window_pattern: None,
            max_window_layers: None,
            rope_theta: Some(config.rope.theta),
            rope_scaling: config.rope.scaling.into(),
            rope_parameters: None,
            partial_rotary_factor: is_partial.then_some(share),
            original_max_position_embeddings,
            tie_word_embeddings: config.tie_word_embeddings,
            attention_bias: is_qwen
                .then_some(config.attention_bias)
                .or(of_llama(config.attention_bias)),
            mlp_bias: of_llama(config.mlp_bias),
            use_sliding_window: is_qwen && config.window.is_some(),
            sliding_window: config.window,
            layer_types,
            bos_token_id: config.bos_token_id,
            eos_token_id: match config.eos_token_ids.as_slice() {
                [] => None,
                [id] => Some(TokenIds::One(*id)),
                several => Some(TokenIds::Several(several.to_vec())),
            },
        }
    }
}

impl From<RopeScaling> for Option<RopeScalingJson> {
    fn from(scaling: RopeScaling) -> Self {
        let of = |kind: &str, factor: f64| RopeScalingJson {
            rope_type: Some(kind.into()),
            factor: Some(factor),
            ..RopeScalingJson::default()
        };
        match scaling {
            RopeScaling::None => None,
            RopeScaling::Linear { factor } => Some(of("linear", factor)),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => Some(RopeScalingJson {
                low_freq_factor: Some(low_freq_factor),
                high_freq_factor: Some(high_freq_factor),
                original_max_position_embeddings: Some(original_max_position_embeddings),
                ..of("llama3", factor)
            }),
            RopeScaling::LongRope(long) => Some(RopeScalingJson {
                rope_type: Some("longrope".into()),
                short_factor: Some(long.short_factor.clone()),
                long_factor: Some(long.long_factor.clone()),
                attention_factor: Some(long.attention_factor),
                ..RopeScalingJson::default()
            }),
        }
    }
}
