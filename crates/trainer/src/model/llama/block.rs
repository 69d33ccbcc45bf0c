//! A block of the model: attention and a feed-forward, or experts.
//!
//! Shapes: S samples, N tokens, D width.

use compute::ops::{Activation, Attention, QkNormRope, Rope, RopePairs};
use compute::{Tag, Tape, Tensor, Var};

use super::LlamaConfig;
use super::experts::Experts;
use super::inputs::BlockInputs;
use super::projections::Projections;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::{LinearLayer, NormTensor};

/// Attention and a feed-forward, each with a residual connection.
pub struct LlamaBlock {
    /// Before attention and before the feed-forward.
    norms: [NormWeight; 2],
    /// Of what they add to x.
    branch_norms: Option<[NormWeight; 2]>,
    qkv: Projections,
    /// Of queries and of keys.
    head_norms: Option<[NormWeight; 2]>,
    out: LinearLayer,
    feed_forward: BlockFeedForward,
    n_heads: usize,
    n_kv_heads: usize,
    d_head: usize,
    scale: f32,
    epsilon: f32,
    activation: Activation,
    is_local: bool,
}

/// What a block adds after attention.
enum BlockFeedForward {
    Dense { gate_up: Projections, down: Box<LinearLayer> },
    Experts(Box<Experts>),
}

/// The weight of a norm.
pub(super) struct NormWeight {
    weight: NormTensor,
    /// Of Gemma, which multiplies by one more than the weight.
    ones: Option<Var>,
}

impl NormWeight {
    pub(super) fn new(
        config: &LlamaConfig,
        b: &mut ModelBuilder<'_>,
        name: &str,
        width: usize,
    ) -> Result<Self> {
        let weight = b.norm(name, width)?;
        let device = b.device();
        let ones =
            || device.with_tag(Tag::Weights, || device.upload([width], &vec![1.0f32; width]));
        let ones = config.is_gemma().then(ones).transpose()?.map(Var::from);
        Ok(Self { weight, ones })
    }

    /// What it multiplies by.
    pub(super) fn var(&self, tape: &Tape<'_>) -> compute::Result<Var> {
        let weight = self.weight.var(tape)?;
        self.ones.as_ref().map_or(Ok(weight.clone()), |ones| tape.add(&weight, ones))
    }
}

impl LlamaBlock {
    /// Builds a block of a model whose blocks are all alike.
    pub fn new(config: &LlamaConfig, b: ModelBuilder<'_>) -> Result<Self> {
        Self::of_layer(config, 0, b)
    }

    /// Builds a block.
    pub(super) fn of_layer(
        config: &LlamaConfig,
        index: usize,
        mut b: ModelBuilder<'_>,
    ) -> Result<Self> {
        let (d, inner, d_head) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (n_heads, n_kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let queries = n_heads * d_head;
        let mut pair = |names: [&str; 2], width| -> Result<[NormWeight; 2]> {
            let [first, second] = names.map(|name| NormWeight::new(config, &mut b, name, width));
            Ok([first?, second?])
        };
        let [before_attention, after_attention] = ["input_layernorm", "post_attention_layernorm"];
        let [before, after] = ["pre_feedforward_layernorm", "post_feedforward_layernorm"];
        let (norms, branch_norms) = if config.is_gemma() {
            let norms = pair([before_attention, before], d)?;
            (norms, Some(pair([after_attention, after], d)?))
        } else {
            (pair([before_attention, after_attention], d)?, None)
        };
        let heads = ["self_attn.q_norm", "self_attn.k_norm"];
        let qkv = Projections::qkv(config, &mut b)?;
        Ok(Self {
            norms,
            branch_norms,
            qkv,
            head_norms: if config.has_qk_norm() {
                let [q, k] = heads.map(|name| NormWeight::new(config, &mut b, name, d_head));
                Some([q?, k?])
            } else {
                None
            },
            out: layer(&mut b, "self_attn.o_proj", [queries, d], config.attention_bias)?,
            feed_forward: match config.experts_of(index) {
                None => BlockFeedForward::Dense {
                    gate_up: Projections::gate_up(config, &mut b)?,
                    down: Box::new(layer(&mut b, "mlp.down_proj", [inner, d], config.mlp_bias)?),
                },
                Some(experts) => {
                    BlockFeedForward::Experts(Box::new(Experts::new(config, experts, &mut b)?))
                }
            },
            n_heads,
            n_kv_heads,
            d_head,
            scale: config.attention_scale(),
            epsilon: config.rms_norm_eps,
            activation: if config.is_gemma() { Activation::GeluTanh } else { Activation::Silu },
            is_local: config.is_local(index),
        })
    }

    /// x [S, N, D] to the same.
    pub fn forward(&self, tape: &Tape<'_>, x: &Var, inputs: &BlockInputs) -> compute::Result<Var> {
        let inputs = inputs.of_layer(self.is_local);
        let [q, k, v] = self.project(tape, x, &inputs.rope_table, inputs.recomputes_queries)?;
        let attention = Attention {
            first_keys: inputs.first_keys.as_ref(),
            window: inputs.window,
            key_lengths: inputs.key_lengths.as_ref(),
            ..self.attention()
        };
        let attended = tape.attention(&q, &k, &v, attention)?;
        drop((q, k, v));
        self.finish(tape, x, &attended)
    }

    /// The same for the next tokens of one sample; their keys and values go into the cache after the
    /// `first` that it holds.
    pub(super) fn forward_cached(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        inputs: &BlockInputs,
        kv: &mut [Tensor; 2],
        first: usize,
    ) -> compute::Result<Var> {
        let inputs = inputs.of_layer(self.is_local);
        let [q, k, v] = self.project(tape, x, &inputs.rope_table, false)?;
        let (n, width) = (first + x.shape().sizes()[1], k.shape().width());
        let mut all = |which: usize, next: &Var| {
            kv[which].write_rows(first, &next.tensor().reshape([n - first, width]))?;
            Ok::<_, compute::ComputeError>(Var::from(kv[which].narrow(0..n).reshape([1, n, width])))
        };
        let (k, v) = (all(0, &k)?, all(1, &v)?);
        let first_keys = inputs.first_keys.as_ref();
        let attended = tape.attention(&q, &k, &v, Attention { first_keys, ..self.attention() })?;
        drop((q, k, v));
        self.finish(tape, x, &attended)
    }

    /// The same for a group of texts: their prompt, which all of them share, or the next token of each.
    pub(super) fn forward_group(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        inputs: &BlockInputs,
        kv: &mut [Tensor; 2],
        first: usize,
    ) -> compute::Result<Var> {
        let inputs = inputs.of_layer(self.is_local);
        let first_keys = inputs.first_keys.as_ref();
        let [q, k, v] = self.project(tape, x, &inputs.rope_table, false)?;
        let (width, all) = (k.shape().width(), kv[0].shape().width());
        let (samples, n) = (x.shape().sizes()[0], x.shape().sizes()[1]);
        if samples == 1 {
            let n_texts = all / width;
            let repeated: Vec<u32> = (0..n as u32).flat_map(|token| vec![token; n_texts]).collect();
            let repeated = tape.device().upload([1, n * n_texts], &repeated)?;
            for (held, next) in kv.iter_mut().zip([&k, &v]) {
                let rows = tape.gather_tokens(next, &repeated)?;
                held.write_rows(first, &rows.tensor().reshape([n, all]))?;
            }
            let how = Attention { first_keys, ..self.attention() };
            let attended = tape.attention(&q, &k, &v, how)?;
            drop((q, k, v));
            return self.finish(tape, x, &attended);
        }
        for (held, next) in kv.iter_mut().zip([&k, &v]) {
            held.write_rows(first, &next.tensor().reshape([1, all]))?;
        }
        // All texts are as long, so that their heads can stand beside each other in one.
        let one = |tensor: &Tensor, n: usize| {
            let width = tensor.shape().elements() / n;
            Var::from(tensor.reshape([1, n, width]))
        };
        let [keys, values] =
            [&kv[0], &kv[1]].map(|held| one(&held.narrow(0..first + 1), first + 1));
        let how = Attention {
            n_heads: samples * self.n_heads,
            n_kv_heads: samples * self.n_kv_heads,
            first_keys,
            ..self.attention()
        };
        let attended = tape.attention(&one(q.tensor(), 1), &keys, &values, how)?;
        let attended = Var::from(attended.tensor().reshape(q.shape()));
        drop((q, k, v, keys, values));
        self.finish(tape, x, &attended)
    }

    /// Queries, keys and values, with rotary positions.
    fn project(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        table: &Tensor,
        recomputes_queries: bool,
    ) -> compute::Result<[Var; 3]> {
        let h = tape.rms_norm(x, Some(&self.norms[0].var(tape)?), self.epsilon)?;
        let rotated = |x: &Var, norm: Option<&NormWeight>, n_heads: usize| {
            let weight = norm.map(|norm| norm.var(tape)).transpose()?;
            let norm = weight.as_ref().map(|weight| (weight, self.epsilon));
            let rope = Some(Rope { table, pairs: RopePairs::HalfSplit });
            tape.qk_norm_rope(x, QkNormRope { n_heads, norm, rope })
        };
        let [q_norm, k_norm] =
            [0, 1].map(|which| self.head_norms.as_ref().map(|norms| &norms[which]));
        let parts = self.qkv.of(tape, &h)?;
        let q = rotated(&parts.part(tape, 0, recomputes_queries)?, q_norm, self.n_heads)?;
        let k = rotated(&parts.part(tape, 1, false)?, k_norm, self.n_kv_heads)?;
        Ok([q, k, parts.part(tape, 2, false)?])
    }

    fn attention(&self) -> Attention<'static> {
        let Self { n_heads, n_kv_heads, d_head, scale, .. } = *self;
        Attention { n_kv_heads, is_causal: true, scale, ..Attention::full(n_heads, d_head) }
    }

    /// Adds the output projection of attention to x, then the feed-forward.
    fn finish(&self, tape: &Tape<'_>, x: &Var, attended: &Var) -> compute::Result<Var> {
        let x = self.add(tape, &self.out, attended, x, 0)?;
        let h = tape.rms_norm(&x, Some(&self.norms[1].var(tape)?), self.epsilon)?;
        let (gate_up, down) = match &self.feed_forward {
            BlockFeedForward::Dense { gate_up, down } => (gate_up, down),
            BlockFeedForward::Experts(experts) => return tape.add(&x, &experts.forward(tape, &h)?),
        };
        let parts = gate_up.of(tape, &h)?;
        let (gate, up) = (parts.part(tape, 0, false)?, parts.part(tape, 1, false)?);
        drop(parts);
        drop(h);
        let inner = tape.glu(&gate, &up, self.activation)?;
        drop((gate, up));
        self.add(tape, down, &inner, &x, 1)
    }

    /// Adds a branch to x, the first or the second: what its last layer makes of `inner`, normed if branches are.
    fn add(
        &self,
        tape: &Tape<'_>,
        layer: &LinearLayer,
        inner: &Var,
        x: &Var,
        branch: usize,
    ) -> compute::Result<Var> {
        let Some(norms) = &self.branch_norms else { return layer.forward_add(tape, inner, x) };
        let weight = norms[branch].var(tape)?;
        let added = tape.rms_norm(&layer.forward(tape, inner)?, Some(&weight), self.epsilon)?;
        tape.add(x, &added)
    }
}

pub(super) fn layer(
    b: &mut ModelBuilder<'_>,
    name: &str,
    sizes: [usize; 2],
    is_biased: bool,
) -> Result<LinearLayer> {
    let [inputs, outputs] = sizes;
    if is_biased {
        b.linear(name, inputs, outputs)
    } else {
        b.linear_no_bias(name, inputs, outputs)
    }
}
