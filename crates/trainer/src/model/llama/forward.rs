//! The forward pass of Llama.
//!
//! Shapes: S samples, N tokens, D width.

use compute::ops::{Linear, RowWeights};
use compute::{BlockSwap, Device, Dtype, Tape, Tensor, Var};

use super::LlamaConfig;
use super::block::{LlamaBlock, NormWeight};
use super::inputs::BlockInputs;
use super::kv_cache::KvCache;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::ModelTensor;
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
