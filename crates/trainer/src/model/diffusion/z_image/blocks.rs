//! The block of Z-Image: attention and feed-forward, each normed before and after; modulated by the timestep but for the blocks
//! of the prompt alone.
//!
//! Shapes: S samples, N tokens, D width.

use compute::ops::{Activation, Attention, QkNormRope, Rope, RopePairs};
use compute::{Tape, Tensor, Var};

use super::ZImageConfig;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::layer::{LinearLayer, NormTensor};
use crate::model::recompute::{BlockRun, Recompute};

/// Of the norms of queries and keys, whatever that of the others is.
const QK_EPSILON: f32 = 1e-5;

/// Where tokens are, and how many of each sample count; the same for all blocks of a list.
#[derive(Clone)]
pub struct TokenPlaces {
    /// The rotary table of the tokens of all samples, one after the other: [S · N, width of a head].
    pub rope: Tensor,
    /// Tokens of each sample that count, u32 `[S]`, if not all do.
    pub lengths: Option<Tensor>,
}

/// A block.
pub struct ZImageBlock {
    /// The scale of attention's input, its gate, and those of the feed-forward.
    modulation: Option<LinearLayer>,
    /// Before attention and after it, before the feed-forward and after it.
    norms: [NormTensor; 4],
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    q_norm: NormTensor,
    k_norm: NormTensor,
    out: LinearLayer,
    gate: LinearLayer,
    up: LinearLayer,
    down: LinearLayer,
    n_heads: usize,
    d_head: usize,
    epsilon: f32,
}

impl ZImageBlock {
    /// Builds the block; one of the prompt alone is not modulated.
    pub fn new(
        config: &ZImageConfig,
        mut build: ModelBuilder<'_>,
        is_modulated: bool,
    ) -> Result<Self> {
        let (d, inner, d_head) = (config.dim, config.feed_forward_dim(), config.head_dim());
        let modulation = if is_modulated {
            Some(build.modulation("adaLN_modulation.0", config.condition_dim(), 4 * d)?)
        } else {
            None
        };
        Ok(Self {
            modulation,
            norms: [
                build.norm("attention_norm1", d)?,
                build.norm("attention_norm2", d)?,
                build.norm("ffn_norm1", d)?,
                build.norm("ffn_norm2", d)?,
            ],
            q: build.linear_no_bias("attention.to_q", d, d)?,
            k: build.linear_no_bias("attention.to_k", d, d)?,
            v: build.linear_no_bias("attention.to_v", d, d)?,
            q_norm: build.norm("attention.norm_q", d_head)?,
            k_norm: build.norm("attention.norm_k", d_head)?,
            out: build.linear_no_bias("attention.to_out.0", d, d)?,
            gate: build.linear_no_bias("feed_forward.w1", d, inner)?,
            up: build.linear_no_bias("feed_forward.w3", d, inner)?,
            down: build.linear_no_bias("feed_forward.w2", inner, d)?,
            n_heads: config.n_heads,
            d_head,
            epsilon: config.norm_eps,
        })
    }

    /// x [S, N, D] to the same, with block offloading and gradient checkpointing. `condition` is the embedded timestep
    /// [S, condition width].
    pub fn run<'m>(
        &'m self,
        tape: &Tape<'m>,
        run: BlockRun<'m>,
        x: &Var,
        condition: &Var,
        places: &TokenPlaces,
    ) -> compute::Result<Var> {
        let [x] = tape.run_block(run.block_swap, run.index, || {
            let vectors = self.modulation.as_ref().map(|layer| layer.forward(tape, condition));
            let vectors = vectors.transpose()?;
            if !run.recompute.recomputes(run.index) {
                let recomputes_queries = run.recompute == Recompute::Queries;
                let y = self.forward(tape, x, vectors.as_ref(), places, recomputes_queries)?;
                return Ok([y]);
            }
            let places = places.clone();
            let inputs: Vec<&Var> = std::iter::once(x).chain(&vectors).collect();
            tape.recompute(&inputs, move |tape, inputs| {
                Ok([self.forward(tape, &inputs[0], inputs.get(1), &places, false)?])
            })
        })?;
        Ok(x)
    }

    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        vectors: Option<&Var>,
        places: &TokenPlaces,
        recomputes_queries: bool,
    ) -> compute::Result<Var> {
        let gates = vectors.map(|vectors| tape.activate(vectors, Activation::Tanh)).transpose()?;
        let [before, after, inner_before, inner_after] = &self.norms;
        let h = self.scaled(tape, x, before, vectors.map(|vectors| (vectors, 0)))?;
        let y = self.attend(tape, &h, places, recomputes_queries)?;
        drop(h);
        let x = self.add(tape, x, y, after, gates.as_ref().map(|gates| (gates, 1)))?;
        let h = self.scaled(tape, &x, inner_before, vectors.map(|vectors| (vectors, 2)))?;
        let (gate, up) = (self.gate.forward(tape, &h)?, self.up.forward(tape, &h)?);
        drop(h);
        let inner = tape.glu(&gate, &up, Activation::Silu)?;
        drop((gate, up));
        let y = self.down.forward(tape, &inner)?;
        drop(inner);
        self.add(tape, &x, y, inner_after, gates.as_ref().map(|gates| (gates, 3)))
    }

    /// The norm of x, times 1 + one of the modulation vectors.
    fn scaled(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        norm: &NormTensor,
        scale: Option<(&Var, usize)>,
    ) -> compute::Result<Var> {
        let h = tape.rms_norm(x, Some(&norm.var(tape)?), self.epsilon)?;
        match scale {
            Some((vectors, index)) => tape.gated_add(&h, vectors.chunk(index), &h),
            None => Ok(h),
        }
    }

    /// x and the norm of y, times one of the gates.
    fn add(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        y: Var,
        norm: &NormTensor,
        gate: Option<(&Var, usize)>,
    ) -> compute::Result<Var> {
        let normed = tape.rms_norm(&y, Some(&norm.var(tape)?), self.epsilon)?;
        drop(y);
        match gate {
            Some((gates, index)) => tape.gated_add(x, gates.chunk(index), &normed),
            None => tape.add(x, &normed),
        }
    }

    fn attend(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        places: &TokenPlaces,
        recomputes_queries: bool,
    ) -> compute::Result<Var> {
        let q = self.q.forward_recomputed(tape, x, recomputes_queries)?;
        let q = self.turned(tape, &q, &self.q_norm, places)?;
        let k = self.turned(tape, &self.k.forward(tape, x)?, &self.k_norm, places)?;
        let v = self.v.forward(tape, x)?;
        let key_lengths = places.lengths.as_ref();
        let how = Attention { key_lengths, ..Attention::full(self.n_heads, self.d_head) };
        let attended = tape.attention(&q, &k, &v, how)?;
        drop((q, k, v));
        self.out.forward(tape, &attended)
    }

    /// Queries or keys, normed and turned by their places, which differ from sample to sample.
    fn turned(
        &self,
        tape: &Tape<'_>,
        y: &Var,
        norm: &NormTensor,
        TokenPlaces { rope: table, .. }: &TokenPlaces,
    ) -> compute::Result<Var> {
        let shape = y.shape();
        let all = y.reshape([1, shape.rows(), shape.width()]);
        let norm = norm.var(tape)?;
        let (norm, rope) =
            (Some((&norm, QK_EPSILON)), Rope { table, pairs: RopePairs::Interleaved });
        let heads = QkNormRope { n_heads: self.n_heads, norm, rope: Some(rope) };
        Ok(tape.qk_norm_rope(&all, heads)?.reshape(shape))
    }
}
