//! The blocks of FLUX.2. Their modulation vectors are the same for all blocks of a list, so that they are given. No layer has a
//! bias; feed-forwards are `SwiGLU`, of which one layer gives both factors.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width, E inner width, a multiple of D.

use compute::ops::{Activation, Attention, QkNormRope, Rope, RopePairs};
use compute::{Tape, Tensor, Var};

use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::diffusion::joint::{
    EPSILON, JointBlockConfig, QkvOptions, QkvProjections, joint_heads, split_features,
};
use crate::model::layer::{LinearLayer, NormTensor};
use crate::model::recompute::{BlockRun, Recompute};

/// The sizes of a block.
#[derive(Clone, Copy)]
pub struct Flux2BlockConfig {
    /// Of attention.
    pub joint: JointBlockConfig,
    /// E / D.
    pub mlp_ratio: usize,
}

impl Flux2BlockConfig {
    fn width(&self) -> usize {
        self.joint.n_heads * self.joint.d_head
    }
}

/// The rotary tables of tokens.
#[derive(Clone)]
pub struct Flux2Positions {
    /// Of images.
    pub image: Tensor,
    /// Of the prompt.
    pub prompt: Tensor,
    /// Of both, images first.
    pub all: Tensor,
}

/// A double-stream block: image and prompt have separate weights.
pub struct Flux2DoubleBlock {
    image: BlockStream,
    prompt: BlockStream,
}

/// The layers of one stream.
struct BlockStream {
    projections: QkvProjections,
    out: LinearLayer,
    feed_forward: GatedFeedForward,
}

impl BlockStream {
    fn new(
        config: Flux2BlockConfig,
        build: &mut ModelBuilder<'_>,
        attention: [&str; 6],
        feed_forward: &str,
    ) -> Result<Self> {
        let [q, k, v, q_norm, k_norm, out] = attention;
        let (d, names) = (config.width(), [q, k, v, q_norm, k_norm]);
        Ok(Self {
            projections: QkvProjections::new(config.joint, build.at("attn"), names, true)?,
            out: build.at("attn").linear(out, d, d)?,
            feed_forward: GatedFeedForward::new(config, build.at(feed_forward))?,
        })
    }

    /// x with attention's output and the feed-forward's added.
    fn finish(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        attended: &Var,
        vectors: &Var,
    ) -> compute::Result<Var> {
        let y = self.out.forward(tape, attended)?;
        let x = tape.gated_add(x, vectors.chunk(2), &y)?;
        drop(y);
        let h = tape.norm_modulate(&x, vectors.chunk(4), vectors.chunk(3), EPSILON)?;
        let y = self.feed_forward.forward(tape, h)?;
        tape.gated_add(&x, vectors.chunk(5), &y)
    }
}

impl Flux2DoubleBlock {
    /// Builds the block.
    pub fn new(config: Flux2BlockConfig, mut build: ModelBuilder<'_>) -> Result<Self> {
        let image = ["to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0"];
        let added = ["add_q_proj", "add_k_proj", "add_v_proj"];
        let [q, k, v] = added;
        let prompt = [q, k, v, "norm_added_q", "norm_added_k", "to_add_out"];
        Ok(Self {
            image: BlockStream::new(config, &mut build, image, "ff")?,
            prompt: BlockStream::new(config, &mut build, prompt, "ff_context")?,
        })
    }

    /// Image tokens [S, N, D] and prompt tokens [S, C, D] to the same, by the modulation vectors of each.
    pub fn run<'m>(
        &'m self,
        tape: &Tape<'m>,
        BlockRun { block_swap, index, recompute }: BlockRun<'m>,
        [x, context]: [&Var; 2],
        [image_vectors, prompt_vectors]: [&Var; 2],
        positions: &Flux2Positions,
    ) -> compute::Result<[Var; 2]> {
        let inputs = [x, context, image_vectors, prompt_vectors];
        tape.run_block(block_swap, index, || {
            if !recompute.recomputes(index) {
                let recomputes_queries = recompute == Recompute::Queries;
                return self.forward(tape, inputs, positions, recomputes_queries);
            }
            let positions = positions.clone();
            tape.recompute(&inputs, move |tape, inputs| {
                let inputs = std::array::from_fn(|at| &inputs[at]);
                self.forward(tape, inputs, &positions, false)
            })
        })
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        [x, context, image_vectors, prompt_vectors]: [&Var; 4],
        positions: &Flux2Positions,
        recomputes_queries: bool,
    ) -> compute::Result<[Var; 2]> {
        let normed = |x: &Var, vectors: &Var| {
            tape.norm_modulate(x, vectors.chunk(1), vectors.chunk(0), EPSILON)
        };
        let of_image = QkvOptions { rope: Some(&positions.image), recomputes_queries };
        // A prompt's tokens are few: its queries are kept.
        let of_prompt = QkvOptions { rope: Some(&positions.prompt), recomputes_queries: false };
        let streams = [
            (&self.image.projections, normed(x, image_vectors)?, of_image),
            (&self.prompt.projections, normed(context, prompt_vectors)?, of_prompt),
        ];
        let heads = |index| joint_heads(tape, &streams, index);
        let (q, k, v) = (heads(0)?, heads(1)?, heads(2)?);
        drop(streams);
        let attended = tape.attention(&q, &k, &v, self.image.projections.attention())?;
        drop((q, k, v));
        let (n, all) = (x.shape().sizes()[1], attended.shape().sizes()[1]);
        let [of_image, of_prompt] =
            [0..n, n..all].map(|tokens| tape.split_tokens(&attended, tokens));
        drop(attended);
        let context = self.prompt.finish(tape, context, &of_prompt?, prompt_vectors)?;
        let x = self.image.finish(tape, x, &of_image?, image_vectors)?;
        Ok([x, context])
    }
}

/// A feed-forward of which one layer gives the gate and what it is for.
struct GatedFeedForward {
    gate_up: LinearLayer,
    down: LinearLayer,
    inner: usize,
}

impl GatedFeedForward {
    fn new(config: Flux2BlockConfig, mut build: ModelBuilder<'_>) -> Result<Self> {
        let (d, inner) = (config.width(), config.mlp_ratio * config.width());
        let gate_up = build.linear("linear_in", d, 2 * inner)?;
        Ok(Self { gate_up, down: build.linear("linear_out", inner, d)?, inner })
    }

    fn forward(&self, tape: &Tape<'_>, h: Var) -> compute::Result<Var> {
        let both = self.gate_up.forward(tape, &h)?;
        drop(h);
        let [gate, up] = [0..1, 1..2].map(|half| split_features(tape, &both, self.inner, half));
        let (gate, up) = (gate?, up?);
        drop(both);
        let inner = tape.glu(&gate, &up, Activation::Silu)?;
        drop((gate, up));
        self.down.forward(tape, &inner)
    }
}

/// A single-stream block: attention and feed-forward in parallel, with one layer before both and one after both.
pub struct Flux2SingleBlock {
    before: LinearLayer,
    q_norm: NormTensor,
    k_norm: NormTensor,
    after: LinearLayer,
    config: Flux2BlockConfig,
}

impl Flux2SingleBlock {
    /// Builds the block.
    pub fn new(config: Flux2BlockConfig, mut build: ModelBuilder<'_>) -> Result<Self> {
        let (d, ratio, d_head) = (config.width(), config.mlp_ratio, config.joint.d_head);
        let mut build = build.at("attn");
        Ok(Self {
            before: build.linear("to_qkv_mlp_proj", d, (3 + 2 * ratio) * d)?,
            q_norm: build.norm("norm_q", d_head)?,
            k_norm: build.norm("norm_k", d_head)?,
            after: build.linear("to_out", (1 + ratio) * d, d)?,
            config,
        })
    }

    /// x [S, N + C, D] to the same, by its modulation vectors.
    pub fn run<'m>(
        &'m self,
        tape: &Tape<'m>,
        BlockRun { block_swap, index, recompute }: BlockRun<'m>,
        x: &Var,
        vectors: &Var,
        rope: &Tensor,
    ) -> compute::Result<Var> {
        let [x] = tape.run_block(block_swap, index, || {
            if !recompute.recomputes(index) {
                return Ok([self.forward(tape, x, vectors, rope)?]);
            }
            let rope = rope.clone();
            tape.recompute(&[x, vectors], move |tape, inputs| {
                Ok([self.forward(tape, &inputs[0], &inputs[1], &rope)?])
            })
        })?;
        Ok(x)
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        vectors: &Var,
        table: &Tensor,
    ) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(1), vectors.chunk(0), EPSILON)?;
        let all = self.before.forward(tape, &h)?;
        drop(h);
        let JointBlockConfig { n_heads, d_head, .. } = self.config.joint;
        let (d, ratio) = (self.config.width(), self.config.mlp_ratio);
        let part = |first, n| split_features(tape, &all, d, first..first + n);
        let turned = |x: Var, norm: &NormTensor| {
            let norm = norm.var(tape)?;
            let rope = Some(Rope { table, pairs: RopePairs::Interleaved });
            tape.qk_norm_rope(&x, QkNormRope { n_heads, norm: Some((&norm, EPSILON)), rope })
        };
        let (q, k) = (turned(part(0, 1)?, &self.q_norm)?, turned(part(1, 1)?, &self.k_norm)?);
        let (v, gate, up) = (part(2, 1)?, part(3, ratio)?, part(3 + ratio, ratio)?);
        drop(all);
        let inner = tape.glu(&gate, &up, Activation::Silu)?;
        drop((gate, up));
        let attended = tape.attention(&q, &k, &v, Attention::full(n_heads, d_head))?;
        drop((q, k, v));
        let y = self.after.forward_concat(tape, attended, inner)?;
        tape.gated_add(x, vectors.chunk(2), &y)
    }
}
