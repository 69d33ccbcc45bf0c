//! The forward pass of SD3.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width.

use compute::ops::{Activation, PatchOrder};
use compute::{BlockSwap, Tape, Tensor, Var};

use super::{QkNorm, Sd3Config};
use crate::error::{Result, TrainerError};
use crate::model::build::ModelBuilder;
use crate::model::diffusion::condition::{POOLED, TOKENS};
use crate::model::diffusion::denoiser::{DenoiserInput, DenoiserNetwork, LatentPatches};
use crate::model::diffusion::joint::{
    EPSILON, JointBlock, JointBlockConfig, JointNames, JointPositions, JointStream, PromptUse,
};
use crate::model::layer::LinearLayer;
use crate::model::recompute::Recompute;
use crate::model::timestep::TimestepEmbedder;

/// The transformer.
pub struct Sd3 {
    config: Sd3Config,
    patches: LinearLayer,
    /// [side · side, D]
    positions: Var,
    timestep: TimestepEmbedder,
    pooled: [LinearLayer; 2],
    context: LinearLayer,
    blocks: Vec<JointBlock>,
    block_swap: Option<BlockSwap>,
    modulation_out: LinearLayer,
    out: LinearLayer,
}

impl Sd3 {
    /// Builds the model.
    pub fn new(config: &Sd3Config, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let (d, patch) = (config.width(), config.patch_size);
        let side = config.pos_embed_max_size;
        let block = |index| {
            let joint = JointBlockConfig {
                n_heads: config.num_attention_heads,
                d_head: config.attention_head_dim,
                has_qk_norm: config.qk_norm == Some(QkNorm::RmsNorm),
                has_dual_attention: config.dual_attention_layers.contains(&index),
                prompt: if index + 1 < config.num_layers {
                    PromptUse::Next
                } else {
                    PromptUse::Dropped
                },
                names: JointNames::DIFFUSERS,
            };
            JointBlock::new(joint, build.block("transformer_blocks", index))
        };
        let blocks = (0..config.num_layers).map(block).collect::<Result<_>>()?;
        Ok(Self {
            blocks,
            patches: build.patch_embed("pos_embed.proj", [d, config.in_channels, patch, patch])?,
            positions: build
                .array("pos_embed.pos_embed", [1, side * side, d])?
                .reshape([side * side, d]),
            timestep: TimestepEmbedder::new(build.at("time_text_embed.timestep_embedder"), d)?,
            pooled: [
                build.linear_unquantised(
                    "time_text_embed.text_embedder.linear_1",
                    config.pooled_projection_dim,
                    d,
                )?,
                build.linear_unquantised("time_text_embed.text_embedder.linear_2", d, d)?,
            ],
            context: build.linear_unquantised("context_embedder", config.joint_attention_dim, d)?,
            modulation_out: build.linear_unquantised("norm_out.linear", d, 2 * d)?,
            out: build.linear_unquantised("proj_out", d, patch * patch * config.out_channels())?,
            block_swap: build.block_swap(),
            config: config.clone(),
        })
    }

    /// The modulation input of the blocks, from timestep and pooled prompt: [S, D].
    fn condition(&self, tape: &Tape<'_>, input: &DenoiserInput<'_>) -> Result<Var> {
        let [first, second] = &self.pooled;
        let pooled = input.condition.get(POOLED)?;
        let timesteps: Vec<f32> = input.timesteps.iter().map(|level| level.t).collect();
        let time = self.timestep.forward(tape, &timesteps, 1.0, pooled.dtype())?;
        let prompt = first.forward_activated(tape, pooled, Activation::Silu)?;
        let prompt = second.forward(tape, &prompt)?;
        // Every use of it begins with silu.
        Ok(tape.activate(&tape.add(&time, &prompt)?, Activation::Silu)?)
    }

    /// Patches plus position embeddings, cropped from the middle of the table: [S, N, D].
    fn embed(&self, tape: &Tape<'_>, latents: &Tensor) -> Result<Var> {
        let Sd3Config { patch_size, pos_embed_max_size: side, .. } = self.config;
        let tokens =
            tape.patchify(&latents.clone().into(), patch_size, PatchOrder::ChannelsFirst)?;
        let (sizes, samples) = (latents.shape(), tokens.shape().sizes()[0]);
        let (rows, columns) = (sizes.sizes()[2] / patch_size, sizes.sizes()[3] / patch_size);
        if rows > side || columns > side {
            return Err(TrainerError::Request {
                problem: format!(
                    "an image of {rows} x {columns} patches is larger than the model's {side} x {side}"
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

impl DenoiserNetwork for Sd3 {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let condition = self.condition(tape, &input)?;
        let mut x = self.embed(tape, input.latents)?;
        let mut context = self.context.forward(tape, input.condition.get(TOKENS)?)?;
        let positions = JointPositions::default();
        for (index, block) in self.blocks.iter().enumerate() {
            let streams =
                [&x, &context].map(|tokens| JointStream { tokens, condition: &condition });
            let block_swap = self.block_swap.as_ref();
            [x, context] = block.run(tape, block_swap, index, streams, &positions, recompute)?;
        }
        let vectors = self.modulation_out.forward(tape, &condition)?;
        let x = tape.norm_modulate(&x, vectors.chunk(0), vectors.chunk(1), EPSILON)?;
        Ok(self.out.forward(tape, &x)?)
    }

    /// Channels last, unlike the input.
    fn patches(&self) -> LatentPatches {
        LatentPatches { size: self.config.patch_size, order: PatchOrder::ChannelsLast }
    }
}
