//! The blocks of Kandinsky 5: those of a prompt, and those of images and clips, which attend to the prompt too.
//!
//! Shapes: S samples, N tokens of images or clips, C prompt tokens, D width.

use compute::ops::{Activation, Attention, QkNormRope, Rope, RopePairs};
use compute::{Tape, Tensor, Var};

use super::Kandinsky5Config;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::{LinearLayer, NormTensor};
use crate::model::recompute::{BlockRun, Recompute};

/// Of every layer norm.
pub const EPSILON: f32 = 1e-5;
/// Of the norms of queries and keys: PyTorch's default for f32.
const QK_EPSILON: f32 = f32::EPSILON;

/// Where tokens are, and which of the prompt's count; the same for all blocks.
#[derive(Clone)]
pub struct TokenPositions {
    /// The rotary table of prompts.
    pub text: Tensor,
    /// The rotary table of images or clips.
    pub visual: Tensor,
    /// Tokens of each prompt, u32 `[S]`, if not all count.
    pub text_lengths: Option<Tensor>,
}

/// A block of the prompt: self-attention and feed-forward.
pub struct PromptBlock {
    modulation: LinearLayer,
    attention: AttentionLayers,
    feed_forward: FeedForwardLayers,
}

impl PromptBlock {
    /// Builds the block.
    pub fn new(config: &Kandinsky5Config, mut build: ModelBuilder<'_>) -> Result<Self> {
        let d = config.model_dim;
        Ok(Self {
            modulation: build.modulation("text_modulation.out_layer", config.time_dim, 6 * d)?,
            attention: AttentionLayers::new(config, build.at("self_attention"))?,
            feed_forward: FeedForwardLayers::new(config, build.at("feed_forward"))?,
        })
    }

    /// x [S, C, D] to the same, with block offloading and gradient checkpointing.
    pub fn run<'m>(
        &'m self,
        tape: &Tape<'m>,
        run: BlockRun<'m>,
        [x, condition]: [&Var; 2],
        positions: &TokenPositions,
    ) -> compute::Result<Var> {
        let [x] = tape.run_block(run.block_swap, run.index, || {
            let vectors = self.modulation.forward(tape, condition)?;
            if !run.recompute.recomputes(run.index) {
                return Ok([self.forward(tape, x, &vectors, positions)?]);
            }
            let positions = positions.clone();
            tape.recompute(&[x, &vectors], move |tape, inputs| {
                Ok([self.forward(tape, &inputs[0], &inputs[1], &positions)?])
            })
        })?;
        Ok(x)
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        vectors: &Var,
        positions: &TokenPositions,
    ) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(1), vectors.chunk(0), EPSILON)?;
        let how = AttentionOptions {
            rope: Some(&positions.text),
            key_lengths: positions.text_lengths.as_ref(),
            // A prompt's tokens are few: its queries are kept.
            recomputes_queries: false,
        };
        let y = self.attention.forward(tape, &h, &h, how)?;
        drop(h);
        let x = tape.gated_add(x, vectors.chunk(2), &y)?;
        drop(y);
        self.feed_forward.forward(tape, &x, vectors, 3)
    }
}

/// A block of images or clips: self-attention, cross-attention to the prompt, and feed-forward.
pub struct VisualBlock {
    modulation: LinearLayer,
    self_attention: AttentionLayers,
    cross_attention: AttentionLayers,
    feed_forward: FeedForwardLayers,
}

impl VisualBlock {
    /// Builds the block.
    pub fn new(config: &Kandinsky5Config, mut build: ModelBuilder<'_>) -> Result<Self> {
        let d = config.model_dim;
        Ok(Self {
            modulation: build.modulation("visual_modulation.out_layer", config.time_dim, 9 * d)?,
            self_attention: AttentionLayers::new(config, build.at("self_attention"))?,
            cross_attention: AttentionLayers::new(config, build.at("cross_attention"))?,
            feed_forward: FeedForwardLayers::new(config, build.at("feed_forward"))?,
        })
    }

    /// x [S, N, D] to the same, with the prompt [S, C, D].
    pub fn run<'m>(
        &'m self,
        tape: &Tape<'m>,
        run: BlockRun<'m>,
        [x, context, condition]: [&Var; 3],
        positions: &TokenPositions,
    ) -> compute::Result<Var> {
        let [x] = tape.run_block(run.block_swap, run.index, || {
            let vectors = self.modulation.forward(tape, condition)?;
            if !run.recompute.recomputes(run.index) {
                let recomputes_queries = run.recompute == Recompute::Queries;
                let inputs = [x, context, &vectors];
                return Ok([self.forward(tape, inputs, positions, recomputes_queries)?]);
            }
            let positions = positions.clone();
            tape.recompute(&[x, context, &vectors], move |tape, inputs| {
                let inputs = [&inputs[0], &inputs[1], &inputs[2]];
                Ok([self.forward(tape, inputs, &positions, false)?])
            })
        })?;
        Ok(x)
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        [x, context, vectors]: [&Var; 3],
        positions: &TokenPositions,
        recomputes_queries: bool,
    ) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(1), vectors.chunk(0), EPSILON)?;
        let rope = Some(&positions.visual);
        let how = AttentionOptions { rope, key_lengths: None, recomputes_queries };
        let y = self.self_attention.forward(tape, &h, &h, how)?;
        drop(h);
        let x = tape.gated_add(x, vectors.chunk(2), &y)?;
        drop(y);
        let h = tape.norm_modulate(&x, vectors.chunk(4), vectors.chunk(3), EPSILON)?;
        let key_lengths = positions.text_lengths.as_ref();
        let how = AttentionOptions { rope: None, key_lengths, recomputes_queries };
        let y = self.cross_attention.forward(tape, &h, context, how)?;
        drop(h);
        let x = tape.gated_add(&x, vectors.chunk(5), &y)?;
        drop(y);
        self.feed_forward.forward(tape, &x, vectors, 6)
    }
}

/// The layers of an attention.
struct AttentionLayers {
    query: LinearLayer,
    key: LinearLayer,
    value: LinearLayer,
    out: LinearLayer,
    query_norm: NormTensor,
    key_norm: NormTensor,
    n_heads: usize,
    d_head: usize,
}

#[derive(Clone, Copy)]
struct AttentionOptions<'a> {
    /// The rotary table of queries and keys, where these are turned.
    rope: Option<&'a Tensor>,
    /// Keys of each sample that count, if not all do.
    key_lengths: Option<&'a Tensor>,
    /// Whether queries are recomputed in backward instead of kept.
    recomputes_queries: bool,
}

impl AttentionLayers {
    fn new(config: &Kandinsky5Config, mut build: ModelBuilder<'_>) -> Result<Self> {
        let (d, d_head) = (config.model_dim, config.head_dim());
        Ok(Self {
            query: build.linear("to_query", d, d)?,
            key: build.linear("to_key", d, d)?,
            value: build.linear("to_value", d, d)?,
            query_norm: build.norm("query_norm", d_head)?,
            key_norm: build.norm("key_norm", d_head)?,
            out: build.linear("out_layer", d, d)?,
            n_heads: d / d_head,
            d_head,
        })
    }

    /// The queries of x attend to the keys of `context`.
    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        context: &Var,
        AttentionOptions { rope, key_lengths, recomputes_queries }: AttentionOptions<'_>,
    ) -> compute::Result<Var> {
        let rope = rope.map(|table| Rope { table, pairs: RopePairs::Interleaved });
        let heads = |y: &Var, norm: &NormTensor| {
            let norm = Some((&norm.var(tape)?, QK_EPSILON));
            tape.qk_norm_rope(y, QkNormRope { n_heads: self.n_heads, norm, rope })
        };
        let q = self.query.forward_recomputed(tape, x, recomputes_queries)?;
        let q = heads(&q, &self.query_norm)?;
        let k = heads(&self.key.forward(tape, context)?, &self.key_norm)?;
        let v = self.value.forward(tape, context)?;
        let how = Attention { key_lengths, ..Attention::full(self.n_heads, self.d_head) };
        let attended = tape.attention(&q, &k, &v, how)?;
        drop((q, k, v));
        self.out.forward(tape, &attended)
    }
}

/// The feed-forward with its modulation.
struct FeedForwardLayers {
    up: LinearLayer,
    down: LinearLayer,
}

impl FeedForwardLayers {
    fn new(config: &Kandinsky5Config, mut build: ModelBuilder<'_>) -> Result<Self> {
        let (d, inner) = (config.model_dim, config.ff_dim);
        let up = build.linear_no_bias("in_layer", d, inner)?;
        Ok(Self { up, down: build.linear_no_bias("out_layer", inner, d)? })
    }

    /// x + gate · the layers of modulated x, by three of the block's modulation vectors from `first` on: shift, scale, gate.
    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        vectors: &Var,
        first: usize,
    ) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(first + 1), vectors.chunk(first), EPSILON)?;
        let inner = self.up.forward_activated(tape, &h, Activation::GeluErf)?;
        drop(h);
        let y = self.down.forward(tape, &inner)?;
        drop(inner);
        tape.gated_add(x, vectors.chunk(first + 2), &y)
    }
}
