//! The joint (MM-DiT) block of SD3, FLUX and Qwen-Image: two streams, image tokens and prompt tokens, each with separate
//! weights, with joint attention (Esser et al., arXiv 2403.03206, section 4). Families differ in QK norm, rotary
//! positions, the names of layers, and in what becomes of the prompt in the last block.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width.

use std::ops::Range;

use compute::ops::{Activation, Attention, QkNormRope, Rope, RopeAxis, RopePairs, rope_table};
use compute::{BlockSwap, Tape, Tensor, Var};

use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::config::Unsupported;
use crate::model::layer::{LinearLayer, NormTensor};
use crate::model::recompute::Recompute;

/// Of every norm.
pub const EPSILON: f32 = 1e-6;
/// Inner width of a feed-forward, in widths.
pub const MLP_RATIO: usize = 4;

/// The layers of its attention, of both streams, as diffusers calls them.
pub const ATTENTION_LAYERS: &[&str] = &[
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
];

/// The config of a joint block.
#[derive(Clone, Copy, Debug)]
pub struct JointBlockConfig {
    /// Heads of every attention.
    pub n_heads: usize,
    /// Width of a head.
    pub d_head: usize,
    /// Whether queries and keys are normed (RMS).
    pub has_qk_norm: bool,
    /// Whether image tokens have a second attention among themselves.
    pub has_dual_attention: bool,
    /// What becomes of the prompt.
    pub prompt: PromptUse,
    /// Names of its layers.
    pub names: JointNames,
}

/// What becomes of the prompt in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptUse {
    /// The next block takes it.
    Next,
    /// Nothing takes it, and the block has no layers for it after attention: the last of SD3.
    Dropped,
    /// Nothing takes it, although the block has all layers for it: the last of Qwen-Image.
    Unused,
}

/// The names of a block's layers, where families differ.
#[derive(Clone, Copy, Debug)]
pub struct JointNames {
    /// The modulations of image and prompt.
    pub modulations: [&'static str; 2],
    /// The feed-forwards of image and prompt.
    pub feed_forwards: [&'static str; 2],
}

impl JointNames {
    /// Of SD3 and FLUX.
    pub const DIFFUSERS: Self = Self {
        modulations: ["norm1.linear", "norm1_context.linear"],
        feed_forwards: ["ff.net", "ff_context.net"],
    };
}

/// Where tokens are, and which of them count; the same for all blocks of a model.
#[derive(Clone, Default)]
pub struct JointPositions {
    /// The rotary table of image tokens.
    pub image: Option<Tensor>,
    /// The rotary table of the tokens of reference images, where these are a stream of their own.
    pub references: Option<Tensor>,
    /// The rotary table of the prompt's tokens; at the origin if there is none.
    pub prompt: Option<Tensor>,
    /// Tokens of images and prompt that count in each sample, u32 `[S]`, if not all do.
    pub lengths: Option<Tensor>,
}

/// θ of the rotary embedding of FLUX.1 and Qwen-Image.
pub const THETA: f64 = 10_000.0;

/// The rotary table of tokens, by the position of each on several axes, such as image index, row and column.
pub fn rotary_table<const AXES: usize>(
    tape: &Tape<'_>,
    theta: f64,
    axes: [usize; AXES],
    positions: &[f32],
) -> Result<Tensor> {
    let sizes = [positions.len() / axes.len(), axes.iter().sum()];
    let axes = axes.map(|width| RopeAxis::new(width, theta));
    Ok(tape.device().upload_with(sizes, || rope_table(&axes, positions))?)
}

/// Checks that the axes of a rotary embedding fill a head.
pub fn check_axes(axes: &[usize], head_dim: usize) -> std::result::Result<(), Unsupported> {
    let n: usize = axes.iter().sum();
    let problem = format!("axes_dims_rope sums to {n}, a head has {head_dim}");
    Unsupported::unless(n == head_dim, problem)?;
    let is_even = axes.iter().all(|axis| axis.is_multiple_of(2));
    Unsupported::unless(is_even, format!("axes_dims_rope {axes:?} is odd"))
}

/// How a stream's queries, keys and values are computed.
#[derive(Clone, Copy)]
pub struct QkvOptions<'a> {
    /// The rotary table of its tokens; at the origin if there is none.
    pub rope: Option<&'a Tensor>,
    /// Whether queries are recomputed in backward instead of kept.
    pub recomputes_queries: bool,
}

impl JointBlockConfig {
    fn width(&self) -> usize {
        self.n_heads * self.d_head
    }
}

/// A block of two streams with joint attention.
pub struct JointBlock {
    modulation: LinearLayer,
    image: QkvProjections,
    image_out: LinearLayer,
    /// The second attention, among image tokens alone.
    dual_attention: Option<(QkvProjections, LinearLayer)>,
    feed_forward: FeedForward,
    context_modulation: LinearLayer,
    context: QkvProjections,
    /// None in the last block of SD3, after which the prompt is not needed.
    context_out: Option<(LinearLayer, FeedForward)>,
    prompt: PromptUse,
}

impl JointBlock {
    /// Builds the block.
    pub fn new(joint: JointBlockConfig, mut build: ModelBuilder<'_>) -> Result<Self> {
        let (d, JointBlockConfig { has_dual_attention: is_dual, prompt, .. }) =
            (joint.width(), joint);
        let JointNames { modulations, feed_forwards } = joint.names;
        let (is_used, is_dropped) = (prompt == PromptUse::Next, prompt == PromptUse::Dropped);
        let image = ["to_q", "to_k", "to_v", "norm_q", "norm_k"];
        let context = ["add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k"];
        Ok(Self {
            modulation: build.modulation(modulations[0], d, if is_dual { 9 } else { 6 } * d)?,
            image: QkvProjections::new(joint, build.at("attn"), image, true)?,
            image_out: build.linear("attn.to_out.0", d, d)?,
            dual_attention: if is_dual {
                let projections = QkvProjections::new(joint, build.at("attn2"), image, true)?;
                Some((projections, build.linear("attn2.to_out.0", d, d)?))
            } else {
                None
            },
            feed_forward: FeedForward::new(build.at(feed_forwards[0]), d)?,
            context_modulation: build.modulation(
                modulations[1],
                d,
                if is_dropped { 2 } else { 6 } * d,
            )?,
            // The output of the last block's prompt queries is not used.
            context: QkvProjections::new(joint, build.at("attn"), context, is_used)?,
            context_out: if is_dropped {
                None
            } else {
                let mut build = build.unused(!is_used);
                let out = build.linear("attn.to_add_out", d, d)?;
                Some((out, FeedForward::new(build.at(feed_forwards[1]), d)?))
            },
            prompt,
        })
    }

    /// The forward pass with block offloading and gradient checkpointing. Streams are image and prompt; or image,
    /// reference images and prompt, where references are modulated otherwise than the image, with the same weights.
    pub fn run<'m, const N: usize>(
        &'m self,
        tape: &Tape<'m>,
        block_swap: Option<&'m BlockSwap>,
        index: usize,
        streams: [JointStream<'_>; N],
        positions: &JointPositions,
        recompute: Recompute,
    ) -> compute::Result<[Var; N]> {
        tape.run_block(block_swap, index, || {
            // Kept: as much to read as half of the block's other weights, and a vector for each sample to remember.
            let mut vectors = Vec::with_capacity(N);
            for (at, stream) in streams.iter().enumerate() {
                let is_prompt = at + 1 == N;
                let layer = if is_prompt { &self.context_modulation } else { &self.modulation };
                vectors.push(layer.forward(tape, stream.condition)?);
            }
            let tokens = streams.iter().map(|stream| stream.tokens);
            let inputs: Vec<&Var> = tokens.chain(&vectors).collect();
            if !recompute.recomputes(index) {
                let recomputes_queries = recompute == Recompute::Queries;
                return self.forward(tape, &inputs, positions, recomputes_queries);
            }
            let positions = positions.clone();
            tape.recompute(&inputs, move |tape, inputs| {
                let inputs: Vec<&Var> = inputs.iter().collect();
                self.forward(tape, &inputs, &positions, false)
            })
        })
    }

    /// The streams' tokens [S, …, D] to the same. `inputs` are the tokens of all streams, then the modulation vectors of
    /// all; the prompt is the last stream.
    fn forward<const N: usize>(
        &self,
        tape: &Tape<'_>,
        inputs: &[&Var],
        positions: &JointPositions,
        recomputes_queries: bool,
    ) -> compute::Result<[Var; N]> {
        let (tokens, vectors) = inputs.split_at(N);
        let streams: [(&Var, &Var); N] = std::array::from_fn(|at| (tokens[at], vectors[at]));
        let [images @ .., (context, context_vectors)] = &streams[..] else {
            unreachable!("a block has an image and a prompt")
        };
        let attended = self.attend(tape, &streams, positions, recomputes_queries)?;
        let places = token_ranges(&streams);
        // What comes after the inner layers of all is not recomputed, with the rest of a block.
        let prompt_half =
            self.prompt_half(tape, &attended, places[N - 1].start, [context, context_vectors])?;
        let mut projected = Vec::with_capacity(N);
        for place in &places[..N - 1] {
            let own = tape.split_tokens(&attended, place.clone())?;
            projected.push(self.image_out.forward(tape, &own)?);
        }
        drop(attended);
        let mut halves = Vec::with_capacity(N);
        for ((x, vectors), projected) in images.iter().zip(projected) {
            let y = tape.gated_add(x, vectors.chunk(2), &projected)?;
            drop(projected);
            let options = QkvOptions { rope: positions.image.as_ref(), recomputes_queries };
            let y = self.attend_alone(tape, x, y, vectors, options)?;
            let inner = self.feed_forward.inner(tape, &y, vectors)?;
            halves.push((y, inner));
        }
        let context = match (&self.context_out, prompt_half) {
            (Some((_, feed_forward)), Some((context, inner))) => {
                feed_forward.finish(tape, &context, inner, context_vectors)?
            }
            _ => (*context).clone(),
        };
        let mut done = Vec::with_capacity(N);
        for ((y, inner), (_, vectors)) in halves.into_iter().zip(images) {
            done.push(self.feed_forward.finish(tape, &y, inner, vectors)?);
        }
        done.push(context);
        Ok(done.try_into().unwrap_or_else(|_| unreachable!("as many as there were")))
    }

    /// The prompt after attention, and the inner layer of its feed-forward; none if nothing takes it.
    fn prompt_half(
        &self,
        tape: &Tape<'_>,
        attended: &Var,
        start: usize,
        [context, vectors]: [&Var; 2],
    ) -> compute::Result<Option<(Var, Var)>> {
        let next = self.context_out.as_ref().filter(|_| self.prompt == PromptUse::Next);
        let Some((out, feed_forward)) = next else { return Ok(None) };
        let all = attended.shape().sizes()[1];
        let own = out.forward(tape, &tape.split_tokens(attended, start..all)?)?;
        let context = tape.gated_add(context, vectors.chunk(2), &own)?;
        drop(own);
        let inner = feed_forward.inner(tape, &context, vectors)?;
        Ok(Some((context, inner)))
    }

    /// Adds the second attention to `y`, where the block has one.
    fn attend_alone(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        y: Var,
        vectors: &Var,
        options: QkvOptions<'_>,
    ) -> compute::Result<Var> {
        let Some((projections, out)) = &self.dual_attention else { return Ok(y) };
        let h = tape.norm_modulate(x, vectors.chunk(7), vectors.chunk(6), EPSILON)?;
        let project = |index| projections.forward(tape, &h, index, options);
        let (q, k, v) = (project(0)?, project(1)?, project(2)?);
        drop(h);
        let attended = tape.attention(&q, &k, &v, projections.attention())?;
        tape.gated_add(&y, vectors.chunk(8), &out.forward(tape, &attended)?)
    }

    /// Joint attention, the prompt last; each stream comes with its modulation vectors.
    fn attend<const N: usize>(
        &self,
        tape: &Tape<'_>,
        streams: &[(&Var, &Var); N],
        positions: &JointPositions,
        recomputes_queries: bool,
    ) -> compute::Result<Var> {
        let ropes = [&positions.image, &positions.references];
        // The last block of SD3 has only a scale and a shift, in this order.
        let (scale, shift) = if self.context_out.is_some() { (1, 0) } else { (0, 1) };
        let mut normed = Vec::with_capacity(N);
        for (at, (x, vectors)) in streams.iter().enumerate() {
            let is_prompt = at + 1 == N;
            let (scale, shift) = if is_prompt { (scale, shift) } else { (1, 0) };
            let h = tape.norm_modulate(x, vectors.chunk(scale), vectors.chunk(shift), EPSILON)?;
            // A prompt's tokens are few: its queries are kept.
            normed.push(if is_prompt {
                let rope = positions.prompt.as_ref();
                (&self.context, h, QkvOptions { rope, recomputes_queries: false })
            } else {
                (&self.image, h, QkvOptions { rope: ropes[at].as_ref(), recomputes_queries })
            });
        }
        let all = |index: usize| joint_heads(tape, &normed, index);
        let (q, k, v) = (all(0)?, all(1)?, all(2)?);
        drop(normed);
        let key_lengths = positions.lengths.as_ref();
        tape.attention(&q, &k, &v, Attention { key_lengths, ..self.image.attention() })
    }
}

/// Queries, keys or values of the tokens of all streams, by index 0, 1 or 2. One stream after the other, so that only one
/// part is in memory beside the concatenation.
pub fn joint_heads(
    tape: &Tape<'_>,
    streams: &[(&QkvProjections, Var, QkvOptions<'_>)],
    index: usize,
) -> compute::Result<Var> {
    let mut projected = Vec::with_capacity(streams.len());
    for (layers, h, options) in streams {
        let heads = layers.project(tape, h, index, *options)?;
        projected.push((heads, layers.norm(tape, index)?));
    }
    let parts = streams.iter().zip(&projected);
    let parts: Vec<_> = parts
        .map(|((layers, _, options), (x, norm))| (x, layers.heads(index, norm.as_ref(), *options)))
        .collect();
    tape.qk_norm_rope_concat(&parts)
}

/// Where each stream's tokens are among those of all.
fn token_ranges(streams: &[(&Var, &Var)]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |(tokens, _): &(&Var, &Var)| {
        let start = end;
        end += tokens.shape().sizes()[1];
        start..end
    };
    streams.iter().map(range).collect()
}

/// Features of x [S, N, M]: those of the units in `range`, each of them `unit` wide.
pub fn split_features(
    tape: &Tape<'_>,
    x: &Var,
    unit: usize,
    range: Range<usize>,
) -> compute::Result<Var> {
    let shape = x.shape();
    let &[samples, tokens, width] = shape.sizes() else { unreachable!("tokens of samples") };
    let n = range.len();
    let units = x.reshape([samples * tokens, width / unit, unit]);
    Ok(tape.split_tokens(&units, range)?.reshape([samples, tokens, n * unit]))
}

/// Tokens that share weights and modulation in a block.
#[derive(Clone, Copy)]
pub struct JointStream<'a> {
    /// [S, …, D]
    pub tokens: &'a Var,
    /// What its modulation vectors are made from: [S, D].
    pub condition: &'a Var,
}

/// Queries, keys and values of one stream.
pub struct QkvProjections {
    layers: [LinearLayer; 3],
    norms: Option<[NormTensor; 2]>,
    n_heads: usize,
    d_head: usize,
}

impl QkvProjections {
    /// With these names of the three layers and the two norms.
    pub fn new(
        joint: JointBlockConfig,
        mut build: ModelBuilder<'_>,
        names: [&str; 5],
        uses_queries: bool,
    ) -> Result<Self> {
        let (d, JointBlockConfig { n_heads, d_head, .. }) = (joint.width(), joint);
        let [q, k, v, q_norm, k_norm] = names;
        let queries = build.unused(!uses_queries).linear(q, d, d)?;
        let layers = [queries, build.linear(k, d, d)?, build.linear(v, d, d)?];
        let norms = if joint.has_qk_norm {
            let queries = build.unused(!uses_queries).norm(q_norm, d_head)?;
            Some([queries, build.norm(k_norm, d_head)?])
        } else {
            None
        };
        Ok(Self { layers, norms, n_heads, d_head })
    }

    /// Attention with these heads.
    pub fn attention(&self) -> Attention<'static> {
        Attention::full(self.n_heads, self.d_head)
    }

    /// Queries, keys or values, by index 0, 1 or 2.
    pub fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        index: usize,
        options: QkvOptions<'_>,
    ) -> compute::Result<Var> {
        let y = self.project(tape, x, index, options)?;
        let norm = self.norm(tape, index)?;
        tape.qk_norm_rope(&y, self.heads(index, norm.as_ref(), options))
    }

    /// The same before norm and rotation.
    fn project(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        index: usize,
        options: QkvOptions<'_>,
    ) -> compute::Result<Var> {
        let is_recomputed = options.recomputes_queries && index == 0;
        self.layers[index].forward_recomputed(tape, x, is_recomputed)
    }

    /// The weight of the norm; values have none.
    fn norm(&self, tape: &Tape<'_>, index: usize) -> compute::Result<Option<Var>> {
        let norm = self.norms.as_ref().and_then(|norms| norms.get(index));
        norm.map(|norm| norm.var(tape)).transpose()
    }

    /// What is done to the heads. Values are neither normed nor rotated.
    fn heads<'a>(
        &self,
        index: usize,
        norm: Option<&'a Var>,
        QkvOptions { rope, .. }: QkvOptions<'a>,
    ) -> QkNormRope<'a> {
        let rope = rope.filter(|_| index < 2);
        let rope = rope.map(|table| Rope { table, pairs: RopePairs::Interleaved });
        let norm = norm.map(|weight| (weight, EPSILON));
        QkNormRope { n_heads: self.n_heads, norm, rope }
    }
}

/// The feed-forward with its modulation.
struct FeedForward {
    up: LinearLayer,
    down: LinearLayer,
}

impl FeedForward {
    fn new(mut build: ModelBuilder<'_>, d: usize) -> Result<Self> {
        let up = build.linear("0.proj", d, MLP_RATIO * d)?;
        Ok(Self { up, down: build.linear("2", MLP_RATIO * d, d)? })
    }

    /// The inner layer of modulated x, by the fourth and fifth of the block's modulation vectors.
    fn inner(&self, tape: &Tape<'_>, x: &Var, vectors: &Var) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(4), vectors.chunk(3), EPSILON)?;
        self.up.forward_activated(tape, &h, Activation::GeluTanh)
    }

    /// x + gate · the outer layer, by the sixth.
    fn finish(&self, tape: &Tape<'_>, x: &Var, inner: Var, vectors: &Var) -> compute::Result<Var> {
        let y = self.down.forward(tape, &inner)?;
        drop(inner);
        tape.gated_add(x, vectors.chunk(5), &y)
    }
}
