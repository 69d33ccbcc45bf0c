//! The forward pass of Qwen-Image.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width. Image tokens come first everywhere, so that a prompt's
//! padding is at the end; attention does not depend on the order, and positions are where they are looked up.

use compute::ops::{Activation, PatchOrder};
use compute::{BlockSwap, Dtype, Tape, Var};

use super::QwenImageConfig;
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::diffusion::condition::TOKENS;
use crate::model::diffusion::denoiser::{DenoiserInput, DenoiserNetwork, LatentPatches};
use crate::model::diffusion::joint::{
    EPSILON, JointBlock, JointBlockConfig, JointNames, JointPositions, JointStream, PromptUse,
    THETA, rotary_table,
};
use crate::model::layer::{LinearLayer, NormTensor};
use crate::model::recompute::Recompute;
use crate::model::timestep::TimestepEmbedder;
use crate::objective::flow::Timestep;

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
    context_norm: NormTensor,
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
    fn condition(&self, tape: &Tape<'_>, sigmas: &[f32], dtype: Dtype) -> Result<Var> {
        let time = self.timestep.forward(tape, sigmas, TIMESTEP_SCALE, dtype)?;
        // Every use of it begins with silu.
        Ok(tape.activate(&time, Activation::Silu)?)
    }

    /// The prompts' tokens: [S, C, D].
    fn embed_prompt(&self, tape: &Tape<'_>, prompt: &Var) -> Result<Var> {
        let weight = self.context_norm.var(tape)?;
        let normed = tape.rms_norm(prompt, Some(&weight), EPSILON)?;
        Ok(self.context.forward(tape, &normed)?)
    }

    /// The rotary tables of images and prompt, and how many tokens of each sample count.
    fn positions(
        &self,
        tape: &Tape<'_>,
        sizes: &[[usize; 2]],
        prompts: &[usize],
    ) -> Result<JointPositions> {
        let axes = self.config.axes_dims_rope;
        let table = |positions: &[f32]| rotary_table(tape, THETA, axes, positions);
        let n_prompt = prompts.iter().copied().max().unwrap_or(0);
        let (images, prompt) = places(sizes, n_prompt);
        let n: usize = sizes.iter().map(|[rows, columns]| rows * columns).sum();
        let lengths: Vec<u32> = prompts.iter().map(|prompt| (n + prompt) as u32).collect();
        // One sample has no padding.
        let lengths = (prompts.len() > 1).then(|| tape.device().upload([prompts.len()], &lengths));
        let n_image = if self.has_clean_references(sizes.len()) { n_tokens(sizes[0]) } else { n };
        let (image, references) = images.split_at(3 * n_image);
        Ok(JointPositions {
            image: Some(table(image)?),
            references: (!references.is_empty()).then(|| table(references)).transpose()?,
            prompt: Some(table(&prompt)?),
            lengths: lengths.transpose()?,
        })
    }

    /// Whether reference images are modulated as if without noise, so that they are a stream of their own.
    fn has_clean_references(&self, n_images: usize) -> bool {
        self.config.zero_cond_t && n_images > 1
    }

    /// The image tokens after all blocks. Reference images are tokens like those of the image.
    fn blocks<'m>(
        &'m self,
        tape: &Tape<'m>,
        [mut x, mut context]: [Var; 2],
        condition: &Var,
        positions: &JointPositions,
        recompute: Recompute,
    ) -> Result<Var> {
        for (index, block) in self.blocks.iter().enumerate() {
            let streams = [&x, &context].map(|tokens| JointStream { tokens, condition });
            let block_swap = self.block_swap.as_ref();
            [x, context] = block.run(tape, block_swap, index, streams, positions, recompute)?;
        }
        Ok(x)
    }

    /// The same with reference images as a stream of their own.
    fn blocks_with_references<'m>(
        &'m self,
        tape: &Tape<'m>,
        [mut x, mut references, mut context]: [Var; 3],
        [condition, clean]: [&Var; 2],
        positions: &JointPositions,
        recompute: Recompute,
    ) -> Result<Var> {
        for (index, block) in self.blocks.iter().enumerate() {
            let conditions = [condition, clean, condition];
            let tokens = [&x, &references, &context];
            let stream = |at| JointStream { tokens: tokens[at], condition: conditions[at] };
            let (streams, block_swap) = (std::array::from_fn(stream), self.block_swap.as_ref());
            [x, references, context] =
                block.run(tape, block_swap, index, streams, positions, recompute)?;
        }
        Ok(x)
    }
}

fn n_tokens([rows, columns]: [usize; 2]) -> usize {
    rows * columns
}

/// Positions of image tokens and of prompt tokens: image index, row and column of each. The origin of every image is in
/// its middle, a prompt goes on from the end of the longest side, along the diagonal.
fn places(sizes: &[[usize; 2]], n_prompt: usize) -> (Vec<f32>, Vec<f32>) {
    let centred = |at: usize, side: usize| at as f32 - side.div_ceil(2) as f32;
    let mut images = Vec::new();
    for (index, [rows, columns]) in sizes.iter().enumerate() {
        let place = |at: usize| {
            [index as f32, centred(at / columns, *rows), centred(at % columns, *columns)]
        };
        images.extend((0..rows * columns).flat_map(place));
    }
    let start = sizes.iter().flatten().max().map_or(0, |side| side / 2);
    let prompt = (start..start + n_prompt).flat_map(|at| [at as f32; 3]).collect();
    (images, prompt)
}

impl DenoiserNetwork for QwenImage {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let prompt = input.condition.get(TOKENS)?;
        let rounded = |time: &Timestep| input.time_dtype.round(time.sigma);
        let sigmas: Vec<f32> = input.timesteps.iter().map(rounded).collect();
        let condition = self.condition(tape, &sigmas, prompt.dtype())?;
        let (tokens, sizes) = input.image_tokens(tape, self.patches())?;
        let x = self.patches.forward(tape, &tokens)?;
        drop(tokens);
        let context = self.embed_prompt(tape, prompt)?;
        let positions = self.positions(tape, &sizes, input.condition.lengths(TOKENS)?)?;
        let (n, n_all) = (n_tokens(sizes[0]), x.shape().sizes()[1]);
        let x = if self.has_clean_references(sizes.len()) {
            let clean = self.condition(tape, &vec![0.0; sigmas.len()], prompt.dtype())?;
            let [image, references] = [0..n, n..n_all].map(|part| tape.split_tokens(&x, part));
            let streams = [image?, references?, context];
            drop(x);
            let conditions = [&condition, &clean];
            self.blocks_with_references(tape, streams, conditions, &positions, recompute)?
        } else {
            self.blocks(tape, [x, context], &condition, &positions, recompute)?
        };
        let x = if x.shape().sizes()[1] > n { tape.split_tokens(&x, 0..n)? } else { x };
        let vectors = self.modulation_out.forward(tape, &condition)?;
        let x = tape.norm_modulate(&x, vectors.chunk(0), vectors.chunk(1), EPSILON)?;
        Ok(self.out.forward(tape, &x)?)
    }

    fn patches(&self) -> LatentPatches {
        LatentPatches { size: self.config.patch_size, order: PatchOrder::ChannelsFirst }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 3 rows the extra one is above the origin; a prompt begins at half of the longer side.
    #[test]
    fn images_are_centred_and_prompts_follow_them() {
        let (image, prompt) = places(&[[3, 4]], 2);
        let rows: Vec<f32> = image.chunks(12).map(|row| row[1]).collect();
        let columns: Vec<f32> = image[..12].chunks(3).map(|place| place[2]).collect();
        assert_eq!(rows, [-2.0, -1.0, 0.0]);
        assert_eq!(columns, [-2.0, -1.0, 0.0, 1.0]);
        assert_eq!(prompt, [2.0, 2.0, 2.0, 3.0, 3.0, 3.0]);
        assert_eq!(places(&[[5, 3]], 1).1, [2.0; 3]);
        // A reference image has an index and an origin of its own.
        let (images, prompt) = places(&[[1, 2], [6, 1]], 1);
        assert_eq!(images[..9], [0.0, -1.0, -1.0, 0.0, -1.0, 0.0, 1.0, -3.0, -1.0]);
        assert_eq!(prompt, [3.0; 3]);
    }
}
