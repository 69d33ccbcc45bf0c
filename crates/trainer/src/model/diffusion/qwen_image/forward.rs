//! The forward pass of Qwen-Image.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width. Image tokens come first everywhere, so that a prompt's
//! padding is at the end; attention does not depend on the order, and positions are where they are looked up.

use compute::ops::{Activation, PatchOrder};
use compute::{BlockSwap, Tape, Tensor, Var};

use super::QwenImageConfig;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::diffusion::condition::TOKENS;
use crate::model::diffusion::denoiser::{DenoiserInput, DenoiserNetwork};
use crate::model::diffusion::joint::{
    EPSILON, JointBlock, JointBlockConfig, JointNames, JointPositions, PromptUse, rotary_table,
};
use crate::model::layer::{LinearLayer, ModelTensor};
use crate::model::recompute::Recompute;
use crate::model::timestep::TimestepEmbedder;

/// Timesteps are sigmas, times this.
const TIMESTEP_SCALE: f32 = 1000.0;

/// The names of a block's layers.
const NAMES: JointNames = JointNames {
    modulations: ["img_mod.1", "txt_mod.1"],
    feed_forwards: ["img_mlp.net", "txt_mlp.net"],
};

/// The transformer.
pub struct QwenImage {
    config: QwenImageConfig,
    patches: LinearLayer,
    context_norm: ModelTensor,
    context: LinearLayer,
    timestep: TimestepEmbedder,
    blocks: Vec<JointBlock>,
    block_swap: Option<BlockSwap>,
    modulation_out: LinearLayer,
    out: LinearLayer,
}

impl QwenImage {
    /// Builds the model.
    pub fn new(config: &QwenImageConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let (d, n_text) = (config.width(), config.joint_attention_dim);
        let block = |index| {
            let is_last = index + 1 == config.num_layers;
            let joint = JointBlockConfig {
                n_heads: config.num_attention_heads,
                d_head: config.attention_head_dim,
                has_qk_norm: true,
                has_dual_attention: false,
                prompt: if is_last { PromptUse::Unused } else { PromptUse::Next },
                names: NAMES,
            };
            JointBlock::new(joint, build.block("transformer_blocks", index))
        };
        let blocks = (0..config.num_layers).map(block).collect::<Result<_>>()?;
        let timestep = build.at("time_text_embed.timestep_embedder");
        Ok(Self {
            timestep: TimestepEmbedder::new(timestep, d)?,
            patches: build.linear_unquantised("img_in", config.in_channels, d)?,
            context_norm: build.norm("txt_norm", n_text)?,
            context: build.linear_unquantised("txt_in", n_text, d)?,
            modulation_out: build.linear_unquantised("norm_out.linear", d, 2 * d)?,
            out: build.linear_unquantised("proj_out", d, config.in_channels)?,
            block_swap: build.block_swap(),
            config: config.clone(),
            blocks,
        })
    }

    /// The modulation input of the blocks: [S, D].
    fn condition(&self, tape: &Tape<'_>, input: &DenoiserInput<'_>) -> Result<Var> {
        let rounded = |sigma: f32| input.time_dtype.round(sigma);
        let timesteps: Vec<f32> = input.timesteps.iter().map(|time| rounded(time.sigma)).collect();
        let dtype = input.condition.get(TOKENS)?.dtype();
        let time = self.timestep.forward(tape, &timesteps, TIMESTEP_SCALE, dtype)?;
        // Every use of it begins with silu.
        Ok(tape.activate(&time, Activation::Silu)?)
    }

    /// The prompts' tokens: [S, C, D].
    fn embed_prompt(&self, tape: &Tape<'_>, prompt: &Tensor) -> Result<Var> {
        let weight = self.context_norm.var(tape);
        let normed = tape.rms_norm(&prompt.clone().into(), Some(&weight), EPSILON)?;
        Ok(self.context.forward(tape, &normed)?)
    }

    /// The rotary tables of image and prompt, and how many tokens of each sample count.
    fn positions(
        &self,
        tape: &Tape<'_>,
        size: [usize; 2],
        prompts: &[usize],
    ) -> Result<JointPositions> {
        let table = |positions| rotary_table(tape, self.config.axes_dims_rope, positions);
        let n_prompt = prompts.iter().copied().max().unwrap_or(0);
        let (image, prompt) = places(size, n_prompt);
        let n: usize = size.iter().product();
        let lengths: Vec<u32> = prompts.iter().map(|prompt| (n + prompt) as u32).collect();
        // One sample has no padding.
        let lengths = (prompts.len() > 1).then(|| tape.device().upload([prompts.len()], &lengths));
        let (image, prompt) = (Some(table(&image)?), Some(table(&prompt)?));
        Ok(JointPositions { image, prompt, lengths: lengths.transpose()? })
    }
}

/// Positions of image tokens and of prompt tokens: image index, row and column of each. The image's origin is in its
/// middle, a prompt goes on from the end of its longer side, along the diagonal.
fn places([rows, columns]: [usize; 2], n_prompt: usize) -> (Vec<f32>, Vec<f32>) {
    let centred = |at: usize, side: usize| at as f32 - side.div_ceil(2) as f32;
    let place = |at: usize| [0.0, centred(at / columns, rows), centred(at % columns, columns)];
    let image = (0..rows * columns).flat_map(place).collect();
    let start = rows.max(columns) / 2;
    let prompt = (start..start + n_prompt).flat_map(|at| [at as f32; 3]).collect();
    (image, prompt)
}

impl DenoiserNetwork for QwenImage {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let condition = self.condition(tape, &input)?;
        let (patch, order) = self.patches();
        let sizes = input.latents.shape();
        let size = [sizes.sizes()[2] / patch, sizes.sizes()[3] / patch];
        let tokens = tape.patchify(&input.latents.clone().into(), patch, order)?;
        let mut x = self.patches.forward(tape, &tokens)?;
        let mut context = self.embed_prompt(tape, input.condition.get(TOKENS)?)?;
        let positions = self.positions(tape, size, input.condition.lengths(TOKENS)?)?;
        for (index, block) in self.blocks.iter().enumerate() {
            let (block_swap, streams) = (self.block_swap.as_ref(), [&x, &context, &condition]);
            [x, context] = block.run(tape, block_swap, index, streams, &positions, recompute)?;
        }
        let vectors = self.modulation_out.forward(tape, &condition)?;
        let x = tape.norm_modulate(&x, vectors.chunk(0), vectors.chunk(1), EPSILON)?;
        Ok(self.out.forward(tape, &x)?)
    }

    fn patches(&self) -> (usize, PatchOrder) {
        (self.config.patch_size, PatchOrder::ChannelsFirst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 3 rows the extra one is above the origin; a prompt begins at half of the longer side.
    #[test]
    fn images_are_centred_and_prompts_follow_them() {
        let (image, prompt) = places([3, 4], 2);
        let rows: Vec<f32> = image.chunks(12).map(|row| row[1]).collect();
        let columns: Vec<f32> = image[..12].chunks(3).map(|place| place[2]).collect();
        assert_eq!(rows, [-2.0, -1.0, 0.0]);
        assert_eq!(columns, [-2.0, -1.0, 0.0, 1.0]);
        assert_eq!(prompt, [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]);
        assert_eq!(places([5, 3], 1).1, [2.0; 3]);
    }
}
