//! The arithmetic of SD3.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width.

use compute::ops::{Activation, Attention, PatchOrder, QkNormRope};
use compute::{Ring, Tape, Tensor, Var};

use super::{Config, QkNorm};
use crate::error::{Result, TrainerError};
use crate::model::build::Builder;
use crate::model::diffusion::condition::{POOLED, TOKENS};
use crate::model::diffusion::denoiser::{Input, Network};
use crate::model::layer::{Layer, Slot};
use crate::model::recompute::Recompute;
use crate::model::timestep::TimestepEmbedder;

const EPSILON: f32 = 1e-6;
/// Inner width of a feed-forward, in widths.
const WIDENING: usize = 4;

/// The transformer.
pub struct Sd3 {
    config: Config,
    patches: Layer,
    /// [side · side, D]
    positions: Var,
    timestep: TimestepEmbedder,
    pooled: [Layer; 2],
    context: Layer,
    blocks: Vec<Block>,
    ring: Option<Ring>,
    modulation_out: Layer,
    out: Layer,
}

impl Sd3 {
    /// Puts the model together.
    pub fn new(config: &Config, build: &mut Builder<'_>) -> Result<Self> {
        let (d, patch) = (config.width(), config.patch_size);
        let side = config.pos_embed_max_size;
        let blocks = (0..config.num_layers)
            .map(|index| Block::new(config, index, build.block("transformer_blocks", index)));
        Ok(Self {
            blocks: blocks.collect::<Result<_>>()?,
            patches: build.patches("pos_embed.proj", [d, config.in_channels, patch, patch])?,
            positions: build
                .array("pos_embed.pos_embed", [1, side * side, d])?
                .reshape([side * side, d]),
            timestep: TimestepEmbedder::new(build.at("time_text_embed.timestep_embedder"), d)?,
            pooled: [
                build.edge(
                    "time_text_embed.text_embedder.linear_1",
                    config.pooled_projection_dim,
                    d,
                )?,
                build.edge("time_text_embed.text_embedder.linear_2", d, d)?,
            ],
            context: build.edge("context_embedder", config.joint_attention_dim, d)?,
            modulation_out: build.edge("norm_out.linear", d, 2 * d)?,
            out: build.edge("proj_out", d, patch * patch * config.out_channels())?,
            ring: build.ring(),
            config: config.clone(),
        })
    }

    /// What the blocks are modulated by, from time and prompt: [S, D].
    fn condition(&self, tape: &Tape<'_>, input: &Input<'_>) -> Result<Var> {
        let [first, second] = &self.pooled;
        let pooled = input.condition.get(POOLED)?;
        let timesteps: Vec<f32> = input.levels.iter().map(|level| level.timestep).collect();
        let time = self.timestep.forward(tape, &timesteps, pooled.dtype())?;
        let prompt = first.forward_into(tape, &pooled.clone().into(), Activation::Silu)?;
        let prompt = second.forward(tape, &prompt)?;
        // Every use of it begins with silu.
        Ok(tape.activate(&tape.add(&time, &prompt)?, Activation::Silu)?)
    }

    /// Patches with their positions, cut from the middle of the table: [S, N, D].
    fn embed(&self, tape: &Tape<'_>, latents: &Tensor) -> Result<Var> {
        let Config { patch_size, pos_embed_max_size: side, .. } = self.config;
        let tokens =
            tape.patchify(&latents.clone().into(), patch_size, PatchOrder::ChannelsFirst)?;
        let (sizes, samples) = (latents.shape(), tokens.shape().sizes()[0]);
        let (rows, columns) = (sizes.sizes()[2] / patch_size, sizes.sizes()[3] / patch_size);
        if rows > side || columns > side {
            return Err(TrainerError::Request {
                problem: format!(
                    "a picture of {rows} x {columns} patches is larger than the model's {side} x {side}"
                ),
                hint: "choose a smaller size",
            });
        }
        let (top, left) = ((side - rows) / 2, (side - columns) / 2);
        let cell = |row, column| ((top + row) * side + left + column) as u32;
        let one = (0..rows).flat_map(|row| (0..columns).map(move |column| cell(row, column)));
        let cells: Vec<u32> =
            std::iter::repeat_n(one.collect::<Vec<_>>(), samples).flatten().collect();
        let cells = tape.device().upload([samples, rows * columns], &cells)?;
        let tokens = self.patches.forward(tape, &tokens)?;
        Ok(tape.add(&tokens, &tape.embedding(&cells, &self.positions)?)?)
    }
}

impl Network for Sd3 {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: Input<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let condition = self.condition(tape, &input)?;
        let mut x = self.embed(tape, input.latents)?;
        let context = input.condition.get(TOKENS)?;
        let mut context = self.context.forward(tape, &context.clone().into())?;
        for (index, block) in self.blocks.iter().enumerate() {
            [x, context] = tape.block(self.ring.as_ref(), index, || {
                if !recompute.does(index) {
                    let remakes_queries = recompute == Recompute::Queries;
                    return block.forward(tape, [&x, &context, &condition], remakes_queries);
                }
                tape.recompute(&[&x, &context, &condition], move |tape, inputs| {
                    block.forward(tape, [&inputs[0], &inputs[1], &inputs[2]], false)
                })
            })?;
        }
        let vectors = self.modulation_out.forward(tape, &condition)?;
        let x = tape.norm_modulate(&x, vectors.chunk(0), vectors.chunk(1), EPSILON)?;
        Ok(self.out.forward(tape, &x)?)
    }

    /// Channels last, unlike what it is given.
    fn patches(&self) -> (usize, PatchOrder) {
        (self.config.patch_size, PatchOrder::ChannelsLast)
    }
}

/// Two streams that meet in attention.
struct Block {
    modulation: Layer,
    image: Projections,
    image_out: Layer,
    /// Attention among the image's tokens alone.
    alone: Option<(Projections, Layer)>,
    feed_forward: FeedForward,
    context_modulation: Layer,
    context: Projections,
    /// None in the last block: nothing comes after that needs the prompt.
    context_rest: Option<(Layer, FeedForward)>,
}

impl Block {
    fn new(config: &Config, index: usize, mut build: Builder<'_>) -> Result<Self> {
        let d = config.width();
        let is_last = index + 1 == config.num_layers;
        let is_dual = config.dual_attention_layers.contains(&index);
        let image = ["to_q", "to_k", "to_v", "norm_q", "norm_k"];
        let context = ["add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k"];
        Ok(Self {
            modulation: build.linear("norm1.linear", d, if is_dual { 9 } else { 6 } * d)?,
            image: Projections::new(config, build.at("attn"), image, true)?,
            image_out: build.linear("attn.to_out.0", d, d)?,
            alone: if is_dual {
                let projections = Projections::new(config, build.at("attn2"), image, true)?;
                Some((projections, build.linear("attn2.to_out.0", d, d)?))
            } else {
                None
            },
            feed_forward: FeedForward::new(build.at("ff.net"), d)?,
            context_modulation: build.linear(
                "norm1_context.linear",
                d,
                if is_last { 2 } else { 6 } * d,
            )?,
            // What the prompt's queries of the last block would find is read by nobody.
            context: Projections::new(config, build.at("attn"), context, !is_last)?,
            context_rest: if is_last {
                None
            } else {
                let out = build.linear("attn.to_add_out", d, d)?;
                Some((out, FeedForward::new(build.at("ff_context.net"), d)?))
            },
        })
    }

    /// x [S, N, D] and context [S, C, D] to the same, by condition [S, D].
    fn forward(
        &self,
        tape: &Tape<'_>,
        [x, context, condition]: [&Var; 3],
        remakes_queries: bool,
    ) -> compute::Result<[Var; 2]> {
        let vectors = self.modulation.forward(tape, condition)?;
        let context_vectors = self.context_modulation.forward(tape, condition)?;
        let streams = [(x, &vectors), (context, &context_vectors)];
        let attended = self.attend(tape, streams, remakes_queries)?;
        let n = x.shape().sizes()[1];
        // The larger stream comes last: of a block that is computed twice, the end is not.
        let context = match &self.context_rest {
            None => context.clone(),
            Some((out, feed_forward)) => {
                let all = attended.shape().sizes()[1];
                let attended = out.forward(tape, &tape.split_tokens(&attended, n..all)?)?;
                let context = tape.gated_add(context, context_vectors.chunk(2), &attended)?;
                drop(attended);
                feed_forward.forward(tape, &context, &context_vectors)?
            }
        };
        let projected = self.image_out.forward(tape, &tape.split_tokens(&attended, 0..n)?)?;
        drop(attended);
        let mut y = tape.gated_add(x, vectors.chunk(2), &projected)?;
        drop(projected);
        if let Some((projections, out)) = &self.alone {
            let h = tape.norm_modulate(x, vectors.chunk(7), vectors.chunk(6), EPSILON)?;
            let project = |index| projections.forward(tape, &h, index, remakes_queries);
            let (q, k, v) = (project(0)?, project(1)?, project(2)?);
            drop(h);
            let attended = tape.attention(&q, &k, &v, projections.attention())?;
            y = tape.gated_add(&y, vectors.chunk(8), &out.forward(tape, &attended)?)?;
        }
        Ok([self.feed_forward.forward(tape, &y, &vectors)?, context])
    }

    /// Attention over both streams, the image's tokens first; each is given with what it is modulated by.
    fn attend(
        &self,
        tape: &Tape<'_>,
        [(x, vectors), (context, context_vectors)]: [(&Var, &Var); 2],
        remakes_queries: bool,
    ) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(1), vectors.chunk(0), EPSILON)?;
        // The last block has only a scale and a shift, in this order.
        let (scale, shift) = if self.context_rest.is_some() { (1, 0) } else { (0, 1) };
        let (scale, shift) = (context_vectors.chunk(scale), context_vectors.chunk(shift));
        let prompt = tape.norm_modulate(context, scale, shift, EPSILON)?;
        // One after the other, so that only one of the parts is there beside the whole.
        let both = |index: usize| {
            let image = self.image.forward(tape, &h, index, remakes_queries)?;
            // The prompt's are few.
            tape.concat_tokens(&[&image, &self.context.forward(tape, &prompt, index, false)?])
        };
        let (q, k, v) = (both(0)?, both(1)?, both(2)?);
        drop((h, prompt));
        tape.attention(&q, &k, &v, self.image.attention())
    }
}

/// Queries, keys and values of one stream.
struct Projections {
    layers: [Layer; 3],
    norms: Option<[Slot; 2]>,
    n_heads: usize,
    d_head: usize,
}

impl Projections {
    fn new(
        config: &Config,
        mut build: Builder<'_>,
        names: [&str; 5],
        uses_queries: bool,
    ) -> Result<Self> {
        let (d, d_head) = (config.width(), config.attention_head_dim);
        let [q, k, v, q_norm, k_norm] = names;
        let queries = build.unused(!uses_queries).linear(q, d, d)?;
        let layers = [queries, build.linear(k, d, d)?, build.linear(v, d, d)?];
        let norms = match config.qk_norm {
            Some(QkNorm::RmsNorm) => {
                let queries = build.unused(!uses_queries).norm(q_norm, d_head)?;
                Some([queries, build.norm(k_norm, d_head)?])
            }
            None => None,
        };
        Ok(Self { layers, norms, n_heads: config.num_attention_heads, d_head })
    }

    fn attention(&self) -> Attention<'static> {
        Attention::full(self.n_heads, self.d_head)
    }

    /// Queries, keys or values, by their place among the three.
    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        index: usize,
        remakes_queries: bool,
    ) -> compute::Result<Var> {
        let y = self.layers[index].forward_again(tape, x, remakes_queries && index == 0)?;
        let Some(weight) = self.norms.as_ref().and_then(|norms| norms.get(index)) else {
            return Ok(y);
        };
        let weight = weight.on(tape);
        let norm = Some((&weight, EPSILON));
        tape.qk_norm_rope(&y, QkNormRope { n_heads: self.n_heads, norm, rope: None })
    }
}

/// Two layers and what surrounds them.
struct FeedForward {
    up: Layer,
    down: Layer,
}

impl FeedForward {
    fn new(mut build: Builder<'_>, d: usize) -> Result<Self> {
        let up = build.linear("0.proj", d, WIDENING * d)?;
        Ok(Self { up, down: build.linear("2", WIDENING * d, d)? })
    }

    /// x + gate · f(modulated x), by the fourth to sixth of the block's vectors.
    fn forward(&self, tape: &Tape<'_>, x: &Var, vectors: &Var) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(4), vectors.chunk(3), EPSILON)?;
        let inner = self.up.forward_into(tape, &h, Activation::GeluTanh)?;
        drop(h);
        let y = self.down.forward(tape, &inner)?;
        drop(inner);
        tape.gated_add(x, vectors.chunk(5), &y)
    }
}
