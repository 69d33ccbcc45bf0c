//! The forward pass of FLUX.1.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width. Image tokens come first everywhere; attention does not
//! depend on the order, and positions are where they are looked up.

use compute::ops::{Activation, PatchOrder};
use compute::{BlockSwap, Tape, Tensor, Var};

use super::{FluxConfig, PATCH};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::diffusion::condition::{POOLED, TOKENS};
use crate::model::diffusion::denoiser::{DenoiserInput, DenoiserNetwork, LatentPatches};
use crate::model::diffusion::joint::{
    EPSILON, JointBlock, JointBlockConfig, JointNames, JointPositions, JointStream, MLP_RATIO,
    PromptUse, QkvOptions, QkvProjections, THETA, rotary_table,
};
use crate::model::layer::LinearLayer;
use crate::model::recompute::Recompute;
use crate::model::timestep::TimestepEmbedder;

/// Timesteps and guidance scales are multiplied by this before they are embedded.
const TIMESTEP_SCALE: f32 = 1000.0;

/// The transformer.
pub struct Flux {
    config: FluxConfig,
    patches: LinearLayer,
    context: LinearLayer,
    timestep: TimestepEmbedder,
    guidance: Option<TimestepEmbedder>,
    pooled: [LinearLayer; 2],
    blocks: Vec<JointBlock>,
    single_blocks: Vec<SingleBlock>,
    block_swap: Option<BlockSwap>,
    modulation_out: LinearLayer,
    out: LinearLayer,
}

impl Flux {
    /// Builds the model.
    pub fn new(config: &FluxConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let d = config.width();
        let joint = JointBlockConfig {
            n_heads: config.num_attention_heads,
            d_head: config.attention_head_dim,
            has_qk_norm: true,
            has_dual_attention: false,
            prompt: PromptUse::Next,
            names: JointNames::DIFFUSERS,
        };
        let n_double = config.num_layers;
        let double = |index| JointBlock::new(joint, build.block("transformer_blocks", index));
        let blocks = (0..n_double).map(double).collect::<Result<_>>()?;
        let single = |index| {
            SingleBlock::new(joint, build.block_after(n_double, "single_transformer_blocks", index))
        };
        let singles = (0..config.num_single_layers).map(single).collect::<Result<_>>()?;
        let mut time = build.at("time_text_embed");
        let timestep = TimestepEmbedder::new(time.at("timestep_embedder"), d)?;
        let guidance = if config.guidance_embeds {
            Some(TimestepEmbedder::new(time.at("guidance_embedder"), d)?)
        } else {
            None
        };
        let pooled = [
            time.linear_unquantised("text_embedder.linear_1", config.pooled_projection_dim, d)?,
            time.linear_unquantised("text_embedder.linear_2", d, d)?,
        ];
        Ok(Self {
            patches: build.linear_unquantised("x_embedder", config.in_channels, d)?,
            context: build.linear_unquantised("context_embedder", config.joint_attention_dim, d)?,
            modulation_out: build.linear_unquantised("norm_out.linear", d, 2 * d)?,
            out: build.linear_unquantised("proj_out", d, config.in_channels)?,
            block_swap: build.block_swap(),
            config: config.clone(),
            timestep,
            guidance,
            pooled,
            blocks,
            single_blocks: singles,
        })
    }

    /// The modulation input of the blocks, from timestep, guidance and pooled prompt: [S, D].
    fn condition(&self, tape: &Tape<'_>, input: &DenoiserInput<'_>) -> Result<Var> {
        let pooled = input.condition.get(POOLED)?;
        let dtype = pooled.dtype();
        let rounded = |number: f32| input.time_dtype.round(number);
        let thousandths = |numbers: Vec<f32>| -> Vec<f32> {
            let scaled = |number| rounded(rounded(number) * TIMESTEP_SCALE);
            numbers.into_iter().map(scaled).collect()
        };
        let sigmas = thousandths(input.timesteps.iter().map(|level| level.sigma).collect());
        let mut sum = self.timestep.forward(tape, &sigmas, 1.0, dtype)?;
        if let (Some(embedder), Some(scales)) = (&self.guidance, input.guidance) {
            let scales = thousandths(scales.to_vec());
            sum = tape.add(&sum, &embedder.forward(tape, &scales, 1.0, dtype)?)?;
        }
        let [first, second] = &self.pooled;
        let prompt = first.forward_activated(tape, pooled, Activation::Silu)?;
        let prompt = second.forward(tape, &prompt)?;
        // Every use of it begins with silu.
        Ok(tape.activate(&tape.add(&sum, &prompt)?, Activation::Silu)?)
    }

    /// The rotary tables of image tokens, by image, row and column, and of all tokens: a prompt's are at the origin.
    fn angles(
        &self,
        tape: &Tape<'_>,
        sizes: &[[usize; 2]],
        n_prompt: usize,
    ) -> Result<[Tensor; 2]> {
        let of_image = |(index, [rows, columns]): (usize, &[usize; 2])| {
            let columns = *columns;
            let place =
                move |at: usize| [index as f32, (at / columns) as f32, (at % columns) as f32];
            (0..rows * columns).flat_map(place)
        };
        let image: Vec<f32> = sizes.iter().enumerate().flat_map(of_image).collect();
        let all = [&image[..], &vec![0.0; 3 * n_prompt]].concat();
        let table = |positions| rotary_table(tape, THETA, self.config.axes_dims_rope, positions);
        Ok([table(&image)?, table(&all)?])
    }
}

impl DenoiserNetwork for Flux {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let condition = self.condition(tape, &input)?;
        let (tokens, sizes) = input.image_tokens(tape, self.patches())?;
        let n = sizes[0].iter().product();
        let mut x = self.patches.forward(tape, &tokens)?;
        drop(tokens);
        let mut context = self.context.forward(tape, input.condition.get(TOKENS)?)?;
        let [of_image, of_all] = self.angles(tape, &sizes, context.shape().sizes()[1])?;
        let recomputes_queries = recompute == Recompute::Queries;
        let positions = JointPositions { image: Some(of_image), ..JointPositions::default() };
        for (index, block) in self.blocks.iter().enumerate() {
            let streams =
                [&x, &context].map(|tokens| JointStream { tokens, condition: &condition });
            let block_swap = self.block_swap.as_ref();
            [x, context] = block.run(tape, block_swap, index, streams, &positions, recompute)?;
        }
        let mut both = tape.concat_tokens(&[&x, &context])?;
        drop((x, context));
        for (index, block) in (self.blocks.len()..).zip(&self.single_blocks) {
            let rope = of_all.clone();
            [both] = tape.run_block(self.block_swap.as_ref(), index, || {
                let vectors = block.modulation.forward(tape, &condition)?;
                if !recompute.recomputes(index) {
                    let how = QkvOptions { rope: Some(&rope), recomputes_queries };
                    return Ok([block.forward(tape, &both, &vectors, how)?]);
                }
                tape.recompute(&[&both, &vectors], move |tape, inputs| {
                    let how = QkvOptions { rope: Some(&rope), recomputes_queries: false };
                    Ok([block.forward(tape, &inputs[0], &inputs[1], how)?])
                })
            })?;
        }
        let x = tape.split_tokens(&both, 0..n)?;
        let vectors = self.modulation_out.forward(tape, &condition)?;
        let x = tape.norm_modulate(&x, vectors.chunk(0), vectors.chunk(1), EPSILON)?;
        Ok(self.out.forward(tape, &x)?)
    }

    fn patches(&self) -> LatentPatches {
        LatentPatches { size: PATCH, order: PatchOrder::ChannelsFirst }
    }
}

/// A single-stream block: attention and feed-forward in parallel.
struct SingleBlock {
    modulation: LinearLayer,
    projections: QkvProjections,
    up: LinearLayer,
    out: LinearLayer,
}

impl SingleBlock {
    fn new(joint: JointBlockConfig, mut build: ModelBuilder<'_>) -> Result<Self> {
        let d = joint.n_heads * joint.d_head;
        let names = ["to_q", "to_k", "to_v", "norm_q", "norm_k"];
        Ok(Self {
            modulation: build.modulation("norm.linear", d, 3 * d)?,
            projections: QkvProjections::new(joint, build.at("attn"), names, true)?,
            up: build.linear("proj_mlp", d, MLP_RATIO * d)?,
            out: build.linear("proj_out", (1 + MLP_RATIO) * d, d)?,
        })
    }

    /// x [S, N + C, D] to the same, by its modulation vectors.
    fn forward(
        &self,
        tape: &Tape<'_>,
        x: &Var,
        vectors: &Var,
        how: QkvOptions<'_>,
    ) -> compute::Result<Var> {
        let h = tape.norm_modulate(x, vectors.chunk(1), vectors.chunk(0), EPSILON)?;
        let project = |index| self.projections.forward(tape, &h, index, how);
        let (q, k, v) = (project(0)?, project(1)?, project(2)?);
        let attended = tape.attention(&q, &k, &v, self.projections.attention())?;
        drop((q, k, v));
        // After attention, so that what its activation is applied to is done with before attention's backward pass.
        let inner = self.up.forward_activated(tape, &h, Activation::GeluTanh)?;
        drop(h);
        let y = self.out.forward_concat(tape, attended, inner)?;
        tape.gated_add(x, vectors.chunk(2), &y)
    }
}
