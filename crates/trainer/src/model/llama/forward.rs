//! The forward pass of Llama.
//!
//! Shapes: S samples, N tokens, D width.

use std::ops::Range;

use compute::ops::{
    Activation, Attention, Linear, QkNormRope, Rope, RopeAxis, RopePairs, RowWeights, rope_table,
};
use compute::{BlockSwap, Device, Dtype, Tag, Tape, Tensor, Var};

use super::kv_cache::KvCache;
use super::projections::Projections;
use super::{LlamaConfig, RopeConfig, RopeScaling};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::{LinearLayer, ModelTensor};
use crate::model::recompute::Recompute;

/// The model.
pub struct Llama {
    config: LlamaConfig,
    /// Dtype of activations.
    dtype: Dtype,
    /// [vocabulary, D]
    tokens: ModelTensor,
    blocks: Vec<LlamaBlock>,
    block_swap: Option<BlockSwap>,
    norm: NormWeight,
    /// [vocabulary, D]; none where it is tied to the token embedding.
    head: Option<ModelTensor>,
}

/// Tokens, and which of them count.
#[derive(Clone, Copy)]
pub struct TokenTargets<'a> {
    /// [S, N], u32
    pub ids: &'a Tensor,
    /// The next token of each that counts, [S, N], u32.
    pub targets: &'a Tensor,
    /// What logits are divided by; 1 for the model's own probabilities.
    pub temperature: f64,
}

/// Inputs that all blocks share.
#[derive(Clone)]
pub struct BlockInputs {
    /// The rotary table.
    rope_table: Tensor,
    /// The first key that each query sees, [S, N].
    first_keys: Option<Tensor>,
    /// The most keys that a query sees.
    window: Option<usize>,
    /// How many keys of each sample count, `[S]`.
    key_lengths: Option<Tensor>,
    /// Whether queries are recomputed.
    recomputes_queries: bool,
    /// The same for layers with a window, where theirs are others.
    local: Option<Box<Self>>,
}

impl BlockInputs {
    /// For texts of N tokens that a model only reads.
    pub fn of_text(config: &LlamaConfig, device: &Device, n: usize) -> Result<Self> {
        Self::packed(config, device, n, Recompute::None)
    }

    /// For texts of N tokens in training.
    pub fn packed(
        config: &LlamaConfig,
        device: &Device,
        n: usize,
        recompute: Recompute,
    ) -> Result<Self> {
        let rope_table = rotary_table(config, device, 0..n, n)?;
        Ok(Self::with_table(rope_table, recompute == Recompute::Queries))
    }

    fn with_table(rope_table: Tensor, recomputes_queries: bool) -> Self {
        Self {
            rope_table,
            first_keys: None,
            window: None,
            key_lengths: None,
            recomputes_queries,
            local: None,
        }
    }

    /// For texts of N tokens, each of which attends from its first key on.
    fn of_documents(
        config: &LlamaConfig,
        device: &Device,
        sizes: [usize; 2],
        first_keys: Option<&[u32]>,
        recompute: Recompute,
    ) -> Result<Self> {
        let [samples, n] = sizes;
        let mut inputs = Self::packed(config, device, n, recompute)?;
        inputs.first_keys = first_keys.map(|keys| device.upload(sizes, keys)).transpose()?;
        let zeros = || vec![0; samples * n];
        inputs.narrow(config, device, 0..n, n, || first_keys.map_or_else(zeros, <[u32]>::to_vec))?;
        Ok(inputs)
    }

    /// For the next `n` tokens of a text behind those in a cache; with `window`, all layers have one.
    fn of_next(
        config: &LlamaConfig,
        device: &Device,
        cache: &KvCache,
        n: usize,
        window: Option<usize>,
    ) -> Result<Self> {
        let (first, position) = (cache.n_tokens(), cache.next_position());
        let table = rotary_table(config, device, position..position + n, cache.max_tokens())?;
        let mut inputs = Self::with_table(table, false);
        if let Some(window) = window {
            let keys = within_window(&vec![0; n], first..first + n, window);
            inputs.first_keys = Some(device.upload([1, n], &keys)?);
        }
        inputs.narrow(config, device, first..first + n, cache.max_tokens(), || vec![0; n])?;
        Ok(inputs)
    }

    /// Adds what layers with a window need: their rotary positions, and a first key that leaves each of these tokens so
    /// many keys as the window has.
    fn narrow(
        &mut self,
        config: &LlamaConfig,
        device: &Device,
        tokens: Range<usize>,
        length: usize,
        first_keys: impl FnOnce() -> Vec<u32>,
    ) -> Result<()> {
        if !(0..config.num_hidden_layers).any(|layer| config.is_local(layer)) {
            return Ok(());
        }
        let mut local = self.clone();
        if let Some(theta) = config.local_rope_theta {
            let rope = RopeConfig { theta, scaling: RopeScaling::None };
            let config = LlamaConfig { rope, ..config.clone() };
            local.rope_table = rotary_table(&config, device, tokens.clone(), length)?;
        }
        if let Some(window) = config.window.filter(|window| *window < tokens.end) {
            let keys = first_keys();
            let sizes = [keys.len() / tokens.len().max(1), tokens.len()];
            let keys = within_window(&keys, tokens, window);
            local.first_keys = Some(device.upload(sizes, &keys)?);
            local.window = Some(window);
        }
        self.local = Some(Box::new(local));
        Ok(())
    }

    /// Those of a layer.
    fn of_layer(&self, is_local: bool) -> &Self {
        self.local.as_deref().filter(|_| is_local).unwrap_or(self)
    }

    /// The same for tokens with a position on each of several axes, of which each turns its section of a head.
    pub fn of_sections<const AXES: usize>(
        config: &LlamaConfig,
        device: &Device,
        sections: [usize; AXES],
        positions: &[[usize; AXES]],
    ) -> Result<Self> {
        Ok(Self::with_table(section_table(config, device, sections, positions)?, false))
    }

    /// The same, where each token attends from a first one on; to no more than `window`, if that is given.
    #[must_use]
    pub fn with_first_keys(&self, first_keys: Tensor, window: Option<usize>) -> Self {
        Self { first_keys: Some(first_keys), window, ..self.clone() }
    }

    /// The same, with tokens after each sample's length masked.
    #[must_use]
    pub fn with_lengths(&self, lengths: Option<&Tensor>) -> Self {
        Self { key_lengths: lengths.cloned(), ..self.clone() }
    }
}

/// The first keys of these tokens of each sample: what is given for them, or as many keys as the window has.
fn within_window(first_keys: &[u32], tokens: Range<usize>, window: usize) -> Vec<u32> {
    let of_window = tokens.map(|at| (at + 1).saturating_sub(window) as u32);
    first_keys.iter().zip(of_window.cycle()).map(|(given, own)| *given.max(&own)).collect()
}

impl Llama {
    /// Builds the model.
    pub fn new(config: &LlamaConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let (dtype, sizes) = (build.dtype(), [config.vocab_size, config.hidden_size]);
        let mut inner = build.at("model");
        let tokens = inner.embedding("embed_tokens", sizes)?;
        let blocks = (0..config.num_hidden_layers)
            .map(|index| LlamaBlock::of_layer(config, index, inner.block("layers", index)))
            .collect::<Result<_>>()?;
        let norm = NormWeight::new(config, &mut inner, "norm", config.hidden_size)?;
        let head = if config.tie_word_embeddings {
            None
        } else {
            Some(build.embedding("lm_head", sizes)?)
        };
        let ring = build.block_swap();
        Ok(Self { config: config.clone(), dtype, tokens, blocks, block_swap: ring, norm, head })
    }

    /// Its config.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The final hidden states of `ids` [S, N], u32: [S, N, D]. A token attends to those of its sample from
    /// `first_keys` [S, N] up to itself; to all before it if not given. In layers with a window, to no more than that.
    pub fn hidden_states<'m>(
        &'m self,
        tape: &Tape<'m>,
        ids: &Tensor,
        first_keys: Option<&[u32]>,
        recompute: Recompute,
    ) -> Result<Var> {
        let (config, sizes) = (&self.config, [ids.shape().rows(), ids.shape().width()]);
        let inputs =
            BlockInputs::of_documents(config, tape.device(), sizes, first_keys, recompute)?;
        let x = self.embed(tape, ids)?;
        let swap = self.block_swap.as_ref();
        let x = run_blocks(&self.blocks, swap, 0, tape, x, &inputs, recompute)?;
        self.normed(tape, &x)
    }

    /// The mean cross entropy of `targets` [S, N], u32, without [`compute::ops::IGNORE_INDEX`]. The logits are
    /// never materialised as a whole.
    pub fn loss<'m>(
        &'m self,
        tape: &Tape<'m>,
        ids: &Tensor,
        targets: &Tensor,
        first_keys: Option<&[u32]>,
        recompute: Recompute,
    ) -> Result<Var> {
        let hidden = self.hidden_states(tape, ids, first_keys, recompute)?;
        Ok(tape.cross_entropy(&hidden, &self.head(tape), targets)?)
    }

    /// A loss of the cross entropies of `targets` [S, N]: `weigh` says what it is, and its derivative by each.
    /// Probabilities are those of logits divided by `temperature`.
    pub fn weighted_loss<'m>(
        &'m self,
        tape: &Tape<'m>,
        TokenTargets { ids, targets, temperature }: TokenTargets<'_>,
        recompute: Recompute,
        weigh: impl FnOnce(&[f64]) -> Result<RowWeights>,
    ) -> Result<Var> {
        let hidden = self.hidden_states(tape, ids, None, recompute)?;
        let hidden = tempered(tape, hidden, temperature)?;
        tape.weighted_cross_entropy(&hidden, &self.head(tape), targets, weigh)
    }

    /// The cross entropy of each of `targets` [S, N], in nats, by a model that is not trained meanwhile.
    pub fn token_losses<'m>(
        &'m self,
        tape: &Tape<'m>,
        TokenTargets { ids, targets, temperature }: TokenTargets<'_>,
    ) -> Result<Vec<f64>> {
        let hidden = self.hidden_states(tape, ids, None, Recompute::None)?;
        let hidden = tempered(tape, hidden, temperature)?;
        Ok(tape.cross_entropy_with_rows(&hidden, &self.head(tape), targets)?.1.read()?)
    }

    /// A KV cache for a text of up to `max_tokens` tokens.
    pub fn new_cache(&self, device: &Device, max_tokens: usize) -> Result<KvCache> {
        KvCache::new(device, &self.config, self.dtype, max_tokens)
    }

    /// The same for `n_texts` texts that begin with the same prompt.
    pub fn new_group_cache(
        &self,
        device: &Device,
        max_tokens: usize,
        n_texts: usize,
    ) -> Result<KvCache> {
        KvCache::of_group(device, &self.config, self.dtype, max_tokens, n_texts)
    }

    /// The final hidden states of a text's next tokens, `ids` [1, n]: [1, n, D]. They attend to those in
    /// the cache, and are added to it. Of a group: first of the prompt, [1, n], then of the next token of each text,
    /// [texts, 1].
    pub fn forward_cached<'m>(
        &'m self,
        tape: &Tape<'m>,
        ids: &Tensor,
        cache: &mut KvCache,
    ) -> Result<Var> {
        let (x, swap) = (self.embed(tape, ids)?, self.block_swap.as_ref());
        let x = run_cached_blocks(&self.blocks, swap, &self.config, tape, x, cache, None)?;
        self.normed(tape, &x)
    }

    /// The same of embedded tokens, x [1, n, D], that have a position on each of several axes. Those that follow go on
    /// behind the largest.
    pub fn forward_cached_sections<'m, const AXES: usize>(
        &'m self,
        tape: &Tape<'m>,
        x: Var,
        sections: [usize; AXES],
        positions: &[[usize; AXES]],
        cache: &mut KvCache,
    ) -> Result<Var> {
        let inputs = BlockInputs::of_sections(&self.config, tape.device(), sections, positions)?;
        let swap = self.block_swap.as_ref();
        let x = run_next(&self.blocks, swap, tape, x, cache, &inputs)?;
        let largest = positions.as_flattened().iter().max();
        cache.set_next_position(largest.map_or(0, |largest| largest + 1));
        self.normed(tape, &x)
    }

    /// The same model with activations in f32 where they would be in f16: those of some models outgrow it.
    #[must_use]
    pub fn with_wide_activations(mut self) -> Self {
        if self.dtype == Dtype::F16 {
            self.dtype = Dtype::F32;
        }
        self
    }

    /// The logits of all tokens after each of `hidden` [.., D]: [.., vocabulary], f32, since in 16 bits
    /// several would often be the largest.
    pub fn logits(&self, tape: &Tape<'_>, hidden: &Var) -> Result<Var> {
        let hidden = tape.convert(hidden, Dtype::F32)?;
        Ok(tape.linear(&hidden, Linear::new(&self.head(tape)))?)
    }

    /// The embeddings of `ids` [S, N]: [S, N, D].
    pub fn embed(&self, tape: &Tape<'_>, ids: &Tensor) -> Result<Var> {
        // A trained embedding is held in f32.
        let x = tape.convert(&tape.embedding(ids, &self.tokens.var(tape))?, self.dtype)?;
        match self.config.embedding_scale(self.dtype) {
            Some(scale) => Ok(tape.scale(&x, scale)?),
            None => Ok(x),
        }
    }

    fn normed(&self, tape: &Tape<'_>, x: &Var) -> Result<Var> {
        Ok(tape.rms_norm(x, Some(&self.norm.var(tape)?), self.config.rms_norm_eps)?)
    }

    fn head(&self, tape: &Tape<'_>) -> Var {
        self.head.as_ref().unwrap_or(&self.tokens).var(tape)
    }
}

/// Logits are linear in the hidden states, which are fewer.
fn tempered(tape: &Tape<'_>, hidden: Var, temperature: f64) -> Result<Var> {
    if temperature == 1.0 {
        return Ok(hidden);
    }
    Ok(tape.scale(&hidden, (1.0 / temperature) as f32)?)
}

/// x [S, N, D] through some of a model's blocks, of which the first has the index `first` in the model.
pub fn run_blocks<'m>(
    blocks: &'m [LlamaBlock],
    block_swap: Option<&'m BlockSwap>,
    first: usize,
    tape: &Tape<'m>,
    mut x: Var,
    inputs: &BlockInputs,
    recompute: Recompute,
) -> Result<Var> {
    for (index, block) in (first..).zip(blocks) {
        [x] = tape.run_block(block_swap, index, || {
            if !recompute.recomputes(index) {
                return Ok([block.forward(tape, &x, inputs)?]);
            }
            let inputs = inputs.clone();
            tape.recompute(&[&x], move |tape, x| Ok([block.forward(tape, &x[0], &inputs)?]))
        })?;
    }
    Ok(x)
}

/// x [1, n, D], the next tokens of a text, through blocks that attend to those in the cache, of a window to the last ones
/// only. They are added to it. Of a group: the prompt, [1, n, D], or the next token of each text, [texts, 1, D].
pub fn run_cached_blocks<'m>(
    blocks: &'m [LlamaBlock],
    block_swap: Option<&'m BlockSwap>,
    config: &LlamaConfig,
    tape: &Tape<'m>,
    x: Var,
    cache: &mut KvCache,
    window: Option<usize>,
) -> Result<Var> {
    let n = x.shape().sizes()[1];
    let inputs = BlockInputs::of_next(config, tape.device(), cache, n, window)?;
    run_next(blocks, block_swap, tape, x, cache, &inputs)
}

/// The same with what the blocks need besides.
fn run_next<'m>(
    blocks: &'m [LlamaBlock],
    block_swap: Option<&'m BlockSwap>,
    tape: &Tape<'m>,
    mut x: Var,
    cache: &mut KvCache,
    inputs: &BlockInputs,
) -> Result<Var> {
    let (first, n) = (cache.n_tokens(), x.shape().sizes()[1]);
    cache.check_room(n)?;
    let n_texts = cache.n_texts;
    for (index, (block, held)) in blocks.iter().zip(&mut cache.blocks).enumerate() {
        x = tape.run_block(block_swap, index, || {
            if n_texts > 1 {
                return block.forward_group(tape, &x, inputs, held, first);
            }
            block.forward_cached(tape, &x, inputs, held, first)
        })?;
    }
    cache.skip_to(first + n);
    Ok(x)
}

/// The rotary table of these positions in texts of up to `length` tokens. Packed documents need no positions of their own:
/// attention depends on distances alone.
fn rotary_table(
    config: &LlamaConfig,
    device: &Device,
    positions: Range<usize>,
    length: usize,
) -> Result<Tensor> {
    let LlamaConfig { rope, rotary_dim, .. } = config;
    let sizes = [positions.len(), *rotary_dim];
    let positions: Vec<f32> = positions.map(|position| position as f32).collect();
    let amplitude = rope.scaling.amplitude();
    Ok(device.upload_with(sizes, || {
        let mut table = rope_table(&[rope.axis(*rotary_dim, length)], &positions);
        if amplitude != 1.0 {
            table.iter_mut().for_each(|number| *number *= amplitude);
        }
        table
    })?)
}

/// The rotary table of tokens with a position on each of several axes. Of the pairs of a head, each axis turns as many as
/// its section has.
fn section_table<const AXES: usize>(
    config: &LlamaConfig,
    device: &Device,
    sections: [usize; AXES],
    positions: &[[usize; AXES]],
) -> Result<Tensor> {
    let axis = config.rope.axis(config.head_dim, positions.len());
    let mut frequencies = axis.frequencies.into_iter();
    let axes = sections.map(|n| RopeAxis { frequencies: frequencies.by_ref().take(n).collect() });
    let places: Vec<f32> = positions.as_flattened().iter().map(|at| *at as f32).collect();
    let sizes = [positions.len(), config.head_dim];
    Ok(device.upload_with(sizes, || rope_table(&axes, &places))?)
}

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
    gate_up: Projections,
    down: LinearLayer,
    n_heads: usize,
    n_kv_heads: usize,
    d_head: usize,
    scale: f32,
    epsilon: f32,
    activation: Activation,
    is_local: bool,
}

/// The weight of a norm.
struct NormWeight {
    weight: ModelTensor,
    /// Of Gemma, which multiplies by one more than the weight.
    ones: Option<Var>,
}

impl NormWeight {
    fn new(
        config: &LlamaConfig,
        b: &mut ModelBuilder<'_>,
        name: &str,
        width: usize,
    ) -> Result<Self> {
        let weight = b.norm(name, width)?;
        let device = b.device();
        let ones = || device.with_tag(Tag::Weights, || device.upload([width], &vec![1.0f32; width]));
        let ones = config.is_gemma().then(ones).transpose()?.map(Var::from);
        Ok(Self { weight, ones })
    }

    /// What it multiplies by.
    fn var(&self, tape: &Tape<'_>) -> compute::Result<Var> {
        let weight = self.weight.var(tape);
        self.ones.as_ref().map_or(Ok(weight.clone()), |ones| tape.add(&weight, ones))
    }
}

impl LlamaBlock {
    /// Builds a block of a model whose blocks are all alike.
    pub fn new(config: &LlamaConfig, b: ModelBuilder<'_>) -> Result<Self> {
        Self::of_layer(config, 0, b)
    }

    /// Builds a block.
    fn of_layer(config: &LlamaConfig, index: usize, mut b: ModelBuilder<'_>) -> Result<Self> {
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
            gate_up: Projections::gate_up(config, &mut b)?,
            down: layer(&mut b, "mlp.down_proj", [inner, d], config.mlp_bias)?,
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
    fn forward_cached(
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
    fn forward_group(
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
        let parts = self.gate_up.of(tape, &h)?;
        let (gate, up) = (parts.part(tape, 0, false)?, parts.part(tape, 1, false)?);
        drop(parts);
        drop(h);
        let inner = tape.glu(&gate, &up, self.activation)?;
        drop((gate, up));
        self.add(tape, &self.down, &inner, &x, 1)
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
