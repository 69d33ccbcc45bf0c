//! T5's encoder, version 1.1 (transformers' `T5EncoderModel`): relative position bias in attention, RMS
//! norms, gated feed-forwards, no biases.
//!
//! Shapes: S samples, N tokens, D width, H heads.

use compute::ops::{Activation, Attention};
use compute::{Device, Result as Computed, Tape, Tensor, Var};
use serde::Deserialize;
use weights::Catalog;

use super::stack::{EncoderStack, StackedEncoder};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::files::CheckpointLayout;
use crate::model::host::to_vec;
use crate::model::layer::LinearLayer;
use crate::model::tensor_piece::TensorPiece;

/// What `text_encoder_3/config.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct T5Config {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// D
    pub d_model: usize,
    /// Width of a head.
    pub d_kv: usize,
    /// Inner width of a feed-forward.
    pub d_ff: usize,
    /// Blocks.
    pub num_layers: usize,
    /// H
    pub num_heads: usize,
    /// Buckets of relative positions.
    pub relative_attention_num_buckets: usize,
    /// Distances from here on share a bucket.
    #[serde(default = "default_distance")]
    pub relative_attention_max_distance: usize,
    /// The kind of feed-forward.
    pub feed_forward_proj: String,
    /// Epsilon of norms.
    #[serde(default = "default_epsilon")]
    pub layer_norm_epsilon: f32,
}

fn default_distance() -> usize {
    128
}

fn default_epsilon() -> f32 {
    1e-6
}

impl T5Config {
    /// T5-XXL of version 1.1, as image models come with it.
    pub fn xxl() -> Self {
        Self {
            vocab_size: 32128,
            d_model: 4096,
            d_kv: 64,
            d_ff: 10240,
            num_layers: 24,
            num_heads: 64,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: default_distance(),
            feed_forward_proj: "gated-gelu".into(),
            layer_norm_epsilon: default_epsilon(),
        }
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> std::result::Result<(), Unsupported> {
        let kind = &self.feed_forward_proj;
        Unsupported::unless(
            kind == "gated-gelu",
            format!("feed_forward_proj {kind} is not gated-gelu: not a T5 of version 1.1"),
        )?;
        let buckets = self.relative_attention_num_buckets;
        Unsupported::unless(
            buckets >= 4 && self.relative_attention_max_distance > buckets / 4,
            format!(
                "{buckets} buckets for distances up to {}",
                self.relative_attention_max_distance
            ),
        )
    }

    /// The bucket of a distance from query to key: half of them for later keys; near ones exact, far ones
    /// logarithmic.
    fn bucket(&self, distance: usize, is_to_come: bool) -> usize {
        let half = self.relative_attention_num_buckets / 2;
        let exact = half / 2;
        let side = if is_to_come { half } else { 0 };
        if distance < exact {
            return side + distance;
        }
        let (exact_f, most) = (exact as f32, self.relative_attention_max_distance as f32);
        let share = (distance as f32 / exact_f).ln() / (most / exact_f).ln();
        side + (exact + (share * (half - exact) as f32) as usize).min(half - 1)
    }
}

/// Whether a file holds T5's encoder.
pub fn is_t5(catalog: &Catalog) -> bool {
    shape_of(catalog, "encoder.block.0.layer.0.SelfAttention.q.weight").is_some()
}

/// Infers the config of a file from its shapes, and from `like` what they do not tell.
pub fn infer(catalog: &Catalog, like: &T5Config) -> Option<T5Config> {
    let shape = |name: &str| shape_of(catalog, name);
    let block =
        |index: usize, name: &str| shape(&format!("encoder.block.{index}.layer.{name}.weight"));
    let &[vocab_size, d_model] = &shape(SHARED)?[..] else { return None };
    let &[relative_attention_num_buckets, num_heads] =
        &block(0, "0.SelfAttention.relative_attention_bias")?[..]
    else {
        return None;
    };
    let queries = *block(0, "0.SelfAttention.q")?.first()?;
    let is_there = |index: &usize| block(*index, "0.SelfAttention.q").is_some();
    Some(T5Config {
        vocab_size,
        d_model,
        d_kv: queries / num_heads.max(1),
        d_ff: *block(0, "1.DenseReluDense.wi_0")?.first()?,
        num_layers: (0..catalog.tensors.len()).take_while(is_there).count(),
        num_heads,
        relative_attention_num_buckets,
        ..like.clone()
    })
}

/// The shape of a tensor by our name for it.
fn shape_of(catalog: &Catalog, name: &str) -> Option<Vec<usize>> {
    let pieces = (layout(catalog).pieces)(name);
    let tensor = catalog.find(&pieces.first()?.key).ok()?;
    Some(tensor.shape.iter().map(|size| *size as usize).collect())
}

/// The token embedding has either of two names, or both; decoders are ignored. GGUF files have names of their own.
pub fn layout(catalog: &Catalog) -> CheckpointLayout<'_> {
    if catalog.find("enc.blk.0.attn_q.weight").is_ok() {
        let place = |name: &str| vec![TensorPiece::whole(gguf_name(name))];
        let ignores = |name: &str| !name.starts_with("enc.") && name != "token_embd.weight";
        return CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) };
    }
    let place = |name: &str| {
        let is_other = name == SHARED && catalog.find(SHARED).is_err();
        vec![TensorPiece::whole(if is_other { EMBEDDED } else { name })]
    };
    let ignores = |name: &str| {
        [SHARED, EMBEDDED, "lm_head.weight", "spiece_model"].contains(&name)
            || name.starts_with("decoder.")
    };
    CheckpointLayout { pieces: Box::new(place), ignores: Box::new(ignores) }
}

/// Taken: `gguf-py/gguf/tensor_mapping.py` of llama.cpp.
const GGUF_LAYERS: [(&str, &str); 10] = [
    ("0.SelfAttention.q", "attn_q"),
    ("0.SelfAttention.k", "attn_k"),
    ("0.SelfAttention.v", "attn_v"),
    ("0.SelfAttention.o", "attn_o"),
    ("0.SelfAttention.relative_attention_bias", "attn_rel_b"),
    ("0.layer_norm", "attn_norm"),
    ("1.layer_norm", "ffn_norm"),
    ("1.DenseReluDense.wi_0", "ffn_gate"),
    ("1.DenseReluDense.wi_1", "ffn_up"),
    ("1.DenseReluDense.wo", "ffn_down"),
];

/// What GGUF calls a tensor.
fn gguf_name(name: &str) -> String {
    let inner = name.strip_prefix("encoder.block.").and_then(|name| name.split_once(".layer."));
    let Some((index, layer)) = inner else {
        let outer = if name == SHARED { "token_embd.weight" } else { "enc.output_norm.weight" };
        return outer.into();
    };
    let layer = layer.strip_suffix(".weight").unwrap_or(layer);
    let known = GGUF_LAYERS.iter().find(|(ours, _)| *ours == layer);
    known.map_or_else(|| name.into(), |(_, theirs)| format!("enc.blk.{index}.{theirs}.weight"))
}

const SHARED: &str = "shared.weight";
const EMBEDDED: &str = "encoder.embed_tokens.weight";

/// The encoder.
pub type T5Encoder = StackedEncoder<T5Config>;

impl EncoderStack for T5Config {
    type Embedding = T5Embedding;
    type Block = T5Block;
    /// The bias of every distance.
    type Inputs = Tensor;

    fn n_blocks(&self) -> usize {
        self.num_layers
    }

    fn epsilon(&self) -> f32 {
        self.layer_norm_epsilon
    }

    fn layout<'c>(&self, catalog: &'c Catalog) -> CheckpointLayout<'c> {
        layout(catalog)
    }

    fn embedding(&self, build: &mut ModelBuilder<'_>) -> Result<T5Embedding> {
        T5Embedding::new(self, build)
    }

    fn block(&self, build: &mut ModelBuilder<'_>, index: usize) -> Result<T5Block> {
        T5Block::new(self, build, index)
    }

    fn last_norm(&self, build: &mut ModelBuilder<'_>) -> Result<Option<Var>> {
        build.vector("encoder.final_layer_norm.weight", self.d_model).map(Some)
    }

    fn tokens(embedding: &T5Embedding) -> &Var {
        &embedding.tokens
    }

    fn inputs(&self, device: &Device, embedding: &T5Embedding, n: usize) -> Result<Tensor> {
        embedding.position_bias(self, device, n)
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        block: &T5Block,
        x: &Var,
        relative: &Tensor,
        lengths: Option<&Tensor>,
    ) -> Computed<Var> {
        let attention = Attention {
            scale: 1.0,
            relative_bias: Some(relative),
            key_lengths: lengths,
            ..Attention::full(self.num_heads, self.d_kv)
        };
        block.forward(tape, x, attention, self.layer_norm_epsilon)
    }
}

/// What comes before the blocks.
pub struct T5Embedding {
    tokens: Var,
    /// [buckets, H], of the first block for all.
    relative_bias: Var,
}

impl T5Embedding {
    fn new(config: &T5Config, build: &mut ModelBuilder<'_>) -> Result<Self> {
        Ok(Self {
            tokens: build.array(SHARED, [config.vocab_size, config.d_model])?,
            relative_bias: build.array(
                "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                [config.relative_attention_num_buckets, config.num_heads],
            )?,
        })
    }

    /// The bias of every distance from -(N - 1) to N - 1: [H, 2 N - 1].
    fn position_bias(&self, config: &T5Config, device: &Device, n: usize) -> Result<Tensor> {
        let heads = config.num_heads;
        let table = to_vec(self.relative_bias.tensor())?;
        // Earlier keys, then the query itself and later keys.
        let buckets: Vec<usize> = (1..n)
            .rev()
            .map(|distance| config.bucket(distance, false))
            .chain((0..n).map(|distance| config.bucket(distance, distance > 0)))
            .collect();
        let of_head = |head| buckets.iter().map(move |bucket| bucket * heads + head);
        let biases: Vec<f32> = (0..heads).flat_map(of_head).map(|at| table[at]).collect();
        Ok(device.upload([heads, buckets.len()], &biases)?)
    }
}

/// A block.
pub struct T5Block {
    norms: [Var; 2],
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    out: LinearLayer,
    gate: LinearLayer,
    up: LinearLayer,
    down: LinearLayer,
}

impl T5Block {
    fn new(config: &T5Config, build: &mut ModelBuilder<'_>, index: usize) -> Result<Self> {
        let mut b = build.at(format!("encoder.block.{index}.layer"));
        let (d, inner, wide) = (config.d_model, config.num_heads * config.d_kv, config.d_ff);
        Ok(Self {
            norms: [b.vector("0.layer_norm.weight", d)?, b.vector("1.layer_norm.weight", d)?],
            q: b.linear_no_bias("0.SelfAttention.q", d, inner)?,
            k: b.linear_no_bias("0.SelfAttention.k", d, inner)?,
            v: b.linear_no_bias("0.SelfAttention.v", d, inner)?,
            out: b.linear_no_bias("0.SelfAttention.o", inner, d)?,
            gate: b.linear_no_bias("1.DenseReluDense.wi_0", d, wide)?,
            up: b.linear_no_bias("1.DenseReluDense.wi_1", d, wide)?,
            down: b.linear_no_bias("1.DenseReluDense.wo", wide, d)?,
        })
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        attention: Attention<'_>,
        epsilon: f32,
    ) -> Computed<Var> {
        let h = tape.rms_norm(x, Some(&self.norms[0]), epsilon)?;
        let (q, k) = (self.q.forward(tape, &h)?, self.k.forward(tape, &h)?);
        let v = self.v.forward(tape, &h)?;
        let x = self.out.forward_add(tape, &tape.attention(&q, &k, &v, attention)?, x)?;
        let h = tape.rms_norm(&x, Some(&self.norms[1]), epsilon)?;
        let gate = self.gate.forward(tape, &h)?;
        let h = tape.glu(&gate, &self.up.forward(tape, &h)?, Activation::GeluTanh)?;
        self.down.forward_add(tape, &h, &x)
    }
}
