//! The forward pass of FLUX.2.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, D width. Image tokens come first everywhere, references after the image
//! that is denoised; attention does not depend on the order, and positions are where they are looked up.

use compute::ops::{Activation, PatchOrder};
use compute::{BlockSwap, Tape, Var};

use super::blocks::{Flux2BlockConfig, Flux2DoubleBlock, Flux2Positions, Flux2SingleBlock};
use super::{Flux2Config, PATCH};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::diffusion::condition::TOKENS;
use crate::model::diffusion::denoiser::{DenoiserInput, DenoiserNetwork, LatentPatches};
use crate::model::diffusion::joint::{
    EPSILON, JointBlockConfig, JointNames, PromptUse, rotary_table,
};
use crate::model::layer::LinearLayer;
use crate::model::recompute::{BlockRun, Recompute};
use crate::model::timestep::TimestepEmbedder;
use crate::objective::flow::Timestep;

/// Timesteps are multiplied by this before they are embedded.
const TIMESTEP_SCALE: f32 = 1000.0;
/// How far images are apart on the first axis. Taken: diffusers' `Flux2KleinPipeline`.
const IMAGE_STEP: usize = 10;

/// The transformer.
pub struct Flux2 {
    config: Flux2Config,
    patches: LinearLayer,
    context: LinearLayer,
    timestep: TimestepEmbedder,
    /// The modulation of all double-stream blocks, of image and prompt, and that of all single-stream blocks.
    modulations: [LinearLayer; 3],
    blocks: Vec<Flux2DoubleBlock>,
    single_blocks: Vec<Flux2SingleBlock>,
    block_swap: Option<BlockSwap>,
    modulation_out: LinearLayer,
    out: LinearLayer,
}

impl Flux2 {
    /// Builds the model.
    pub fn new(config: &Flux2Config, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let (d, n_double) = (config.width(), config.num_layers);
        let joint = JointBlockConfig {
            n_heads: config.num_attention_heads,
            d_head: config.attention_head_dim,
            has_qk_norm: true,
            has_dual_attention: false,
            prompt: PromptUse::Next,
            names: JointNames::DIFFUSERS,
        };
        let block = Flux2BlockConfig { joint, mlp_ratio: config.mlp_ratio as usize };
        let mut build = build.without_biases();
        let double = |index| Flux2DoubleBlock::new(block, build.block("transformer_blocks", index));
        let blocks = (0..n_double).map(double).collect::<Result<_>>()?;
        let single = |index| {
            Flux2SingleBlock::new(
                block,
                build.block_after(n_double, "single_transformer_blocks", index),
            )
        };
        let single_blocks = (0..config.num_single_layers).map(single).collect::<Result<_>>()?;
        let time = build.at("time_guidance_embed.timestep_embedder");
        let widths = [config.timestep_guidance_channels, d, d];
        let timestep = TimestepEmbedder::with_layers(time, ["linear_1", "linear_2"], widths)?;
        // Every block depends on them, and they are few: not quantised.
        let modulations = [
            build.linear_unquantised("double_stream_modulation_img.linear", d, 6 * d)?,
            build.linear_unquantised("double_stream_modulation_txt.linear", d, 6 * d)?,
            build.linear_unquantised("single_stream_modulation.linear", d, 3 * d)?,
        ];
        Ok(Self {
            patches: build.linear_unquantised("x_embedder", config.in_channels, d)?,
            context: build.linear_unquantised("context_embedder", config.joint_attention_dim, d)?,
            modulation_out: build.linear_unquantised("norm_out.linear", d, 2 * d)?,
            out: build.linear_unquantised("proj_out", d, config.in_channels)?,
            block_swap: build.block_swap(),
            config: config.clone(),
            timestep,
            modulations,
            blocks,
            single_blocks,
        })
    }

    /// The modulation input of all layers: [S, D].
    fn condition(&self, tape: &Tape<'_>, input: &DenoiserInput<'_>) -> Result<Var> {
        let dtype = input.condition.get(TOKENS)?.dtype();
        let rounded = |number: f32| input.time_dtype.round(number);
        let thousandth = |level: &Timestep| rounded(rounded(level.sigma) * TIMESTEP_SCALE);
        let sigmas: Vec<f32> = input.timesteps.iter().map(thousandth).collect();
        let time = self.timestep.forward(tape, &sigmas, 1.0, dtype)?;
        // Every use of it begins with silu.
        Ok(tape.activate(&time, Activation::Silu)?)
    }

    /// The rotary tables of tokens: of images by index, row and column, of a prompt by place.
    fn positions(
        &self,
        tape: &Tape<'_>,
        sizes: &[[usize; 2]],
        n_prompt: usize,
    ) -> Result<Flux2Positions> {
        let (image, prompt) = places(sizes, n_prompt);
        let Flux2Config { axes_dims_rope: axes, rope_theta: theta, .. } = self.config;
        let table = |places: &[f32]| rotary_table(tape, theta, axes, places);
        Ok(Flux2Positions {
            image: table(&image)?,
            prompt: table(&prompt)?,
            all: table(&[image, prompt].concat())?,
        })
    }
}

/// Positions of image tokens and of prompt tokens: image index, row, column and place in the prompt of each.
fn places(sizes: &[[usize; 2]], n_prompt: usize) -> (Vec<f32>, Vec<f32>) {
    let of_image = |(index, [rows, columns]): (usize, &[usize; 2])| {
        let (time, columns) = ((IMAGE_STEP * index) as f32, *columns);
        let place = move |at: usize| [time, (at / columns) as f32, (at % columns) as f32, 0.0];
        (0..rows * columns).flat_map(place)
    };
    let image = sizes.iter().enumerate().flat_map(of_image).collect();
    let prompt = (0..n_prompt).flat_map(|at| [0.0, 0.0, 0.0, at as f32]).collect();
    (image, prompt)
}

impl DenoiserNetwork for Flux2 {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let condition = self.condition(tape, &input)?;
        let [of_image, of_prompt, of_both] =
            self.modulations.each_ref().map(|layer| layer.forward(tape, &condition));
        let (of_double, of_both) = ([&of_image?, &of_prompt?], of_both?);
        let (tokens, sizes) = input.image_tokens(tape, self.patches())?;
        let n = sizes[0].iter().product();
        let mut x = self.patches.forward(tape, &tokens)?;
        drop(tokens);
        let mut context = self.context.forward(tape, input.condition.get(TOKENS)?)?;
        let positions = self.positions(tape, &sizes, context.shape().sizes()[1])?;
        let block_swap = self.block_swap.as_ref();
        let run = |index| BlockRun { block_swap, index, recompute };
        for (index, block) in self.blocks.iter().enumerate() {
            [x, context] = block.run(tape, run(index), [&x, &context], of_double, &positions)?;
        }
        let mut both = tape.concat_tokens(&[&x, &context])?;
        drop((x, context));
        for (index, block) in (self.blocks.len()..).zip(&self.single_blocks) {
            both = block.run(tape, run(index), &both, &of_both, &positions.all)?;
        }
        let x = tape.split_tokens(&both, 0..n)?;
        drop(both);
        let vectors = self.modulation_out.forward(tape, &condition)?;
        let x = tape.norm_modulate(&x, vectors.chunk(0), vectors.chunk(1), EPSILON)?;
        Ok(self.out.forward(tape, &x)?)
    }

    fn patches(&self) -> LatentPatches {
        LatentPatches { size: PATCH, order: PatchOrder::ChannelsFirst }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_apart_and_prompts_count_on_an_axis_of_their_own() {
        let (image, prompt) = places(&[[2, 2], [1, 2], [1, 1]], 2);
        assert_eq!(image[12..16], [0.0, 1.0, 1.0, 0.0]);
        assert_eq!(image[20..], [10.0, 0.0, 1.0, 0.0, 20.0, 0.0, 0.0, 0.0]);
        assert_eq!(prompt, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    }
}
