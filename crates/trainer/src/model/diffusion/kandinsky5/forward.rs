//! The forward pass of Kandinsky 5.
//!
//! Shapes: S samples, N tokens of images or clips, C prompt tokens, D width. Prompts of different lengths are padded at their
//! end, and no token attends to padding, as in the authors' program; diffusers' attends to it.

use compute::ops::{Activation, PatchOrder};
use compute::{BlockSwap, Dtype, Tape, Tensor, Var};

use super::Kandinsky5Config;
use super::blocks::{EPSILON, PromptBlock, TokenPositions, VisualBlock};
use super::positions::{grid_table, scale_factor, text_table};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::diffusion::condition::{POOLED, TOKENS};
use crate::model::diffusion::denoiser::{DenoiserInput, DenoiserNetwork, LatentPatches};
use crate::model::layer::{LinearLayer, NormTensor};
use crate::model::recompute::{BlockRun, Recompute};
use crate::model::timestep::TimestepEmbedder;

/// The transformer.
pub struct Kandinsky5 {
    config: Kandinsky5Config,
    patches: LinearLayer,
    text: TextEmbedder,
    pooled: TextEmbedder,
    timestep: TimestepEmbedder,
    text_blocks: Vec<PromptBlock>,
    visual_blocks: Vec<VisualBlock>,
    block_swap: Option<BlockSwap>,
    modulation_out: LinearLayer,
    out: LinearLayer,
}

impl Kandinsky5 {
    /// Builds the model.
    pub fn new(config: &Kandinsky5Config, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let Kandinsky5Config { model_dim: d, time_dim, num_text_blocks: n_text, .. } = *config;
        let pixels = config.patch() * config.patch();
        let text = |index| PromptBlock::new(config, build.block("text_transformer_blocks", index));
        let text_blocks = (0..n_text).map(text).collect::<Result<_>>()?;
        let visual = |index| {
            VisualBlock::new(config, build.block_after(n_text, "visual_transformer_blocks", index))
        };
        let visual_blocks = (0..config.num_visual_blocks).map(visual).collect::<Result<_>>()?;
        let inputs = pixels * config.input_channels();
        Ok(Self {
            timestep: TimestepEmbedder::with_layers(
                build.at("time_embeddings"),
                ["in_layer", "out_layer"],
                [d, time_dim, time_dim],
            )?,
            text: TextEmbedder::new(build.at("text_embeddings"), config.in_text_dim, d)?,
            pooled: TextEmbedder::new(
                build.at("pooled_text_embeddings"),
                config.in_text_dim2,
                time_dim,
            )?,
            patches: build.linear_unquantised("visual_embeddings.in_layer", inputs, d)?,
            modulation_out: build.linear_unquantised(
                "out_layer.modulation.out_layer",
                time_dim,
                2 * d,
            )?,
            out: build.linear_unquantised(
                "out_layer.out_layer",
                d,
                pixels * config.out_visual_dim,
            )?,
            block_swap: build.block_swap(),
            config: config.clone(),
            text_blocks,
            visual_blocks,
        })
    }

    /// The modulation input of the blocks, from timestep and pooled prompt: [S, time width]. Timesteps are not rounded to
    /// the activations' dtype, as in the authors' program.
    fn condition(&self, tape: &Tape<'_>, input: &DenoiserInput<'_>, dtype: Dtype) -> Result<Var> {
        let timesteps: Vec<f32> = input.timesteps.iter().map(|level| level.t).collect();
        let time = self.timestep.forward(tape, &timesteps, 1.0, dtype)?;
        let pooled = self.pooled.forward(tape, input.condition.get(POOLED)?)?;
        // Every use of it begins with silu.
        Ok(tape.activate(&tape.add(&time, &pooled)?, Activation::Silu)?)
    }

    /// Noisy latents as tokens [S, N, D].
    fn embed(&self, tape: &Tape<'_>, latents: &Tensor) -> Result<Var> {
        let given = self.with_conditioning_channels(tape, latents)?;
        let tokens = tape.patchify(&given, self.config.patch(), PatchOrder::ChannelsLast)?;
        drop(given);
        Ok(self.patches.forward(tape, &tokens)?)
    }

    /// The latents, and behind them the channels for a given frame and its mask: zeros, since none is given.
    fn with_conditioning_channels(&self, tape: &Tape<'_>, latents: &Tensor) -> Result<Var> {
        let latents = Var::from(latents.clone());
        if !self.config.visual_cond {
            return Ok(latents);
        }
        let shape = latents.shape();
        let [samples, channels, size @ ..] = shape.sizes() else {
            unreachable!("latents have channels")
        };
        let (pixels, wanted) = (size.iter().product(), self.config.input_channels());
        let zeros = tape.device().zeros([*samples, wanted - channels, pixels], latents.dtype())?;
        let latents = latents.reshape([*samples, *channels, pixels]);
        let all = tape.concat_tokens(&[&latents, &zeros.into()])?;
        Ok(all.reshape(compute::Shape::new(&[&[*samples, wanted][..], size].concat())))
    }

    fn positions(&self, tape: &Tape<'_>, input: &DenoiserInput<'_>) -> Result<TokenPositions> {
        let shape = input.latents.shape();
        let (frames, size) = match *shape.sizes() {
            [_, _, frames, height, width] => (frames, [height, width]),
            [_, _, height, width] => (1, [height, width]),
            _ => unreachable!("latents have height and width"),
        };
        let [rows, columns] = size.map(|side| side / self.config.patch());
        let scale = scale_factor(self.config.is_video(), size);
        let prompts = input.condition.lengths(TOKENS)?;
        let n_prompt = input.condition.get(TOKENS)?.shape().sizes()[1];
        let lengths: Vec<u32> = prompts.iter().map(|length| *length as u32).collect();
        // One sample has no padding.
        let text_lengths =
            (prompts.len() > 1).then(|| tape.device().upload([prompts.len()], &lengths));
        Ok(TokenPositions {
            text: text_table(tape, n_prompt, self.config.head_dim())?,
            visual: grid_table(tape, [frames, rows, columns], self.config.axes_dims, scale)?,
            text_lengths: text_lengths.transpose()?,
        })
    }
}

impl DenoiserNetwork for Kandinsky5 {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let prompt = input.condition.get(TOKENS)?;
        let condition = self.condition(tape, &input, prompt.dtype())?;
        let positions = self.positions(tape, &input)?;
        let run = |index| BlockRun { block_swap: self.block_swap.as_ref(), index, recompute };
        let mut context = self.text.forward(tape, prompt)?;
        for (index, block) in self.text_blocks.iter().enumerate() {
            context = block.run(tape, run(index), [&context, &condition], &positions)?;
        }
        let mut x = self.embed(tape, input.latents)?;
        for (index, block) in (self.text_blocks.len()..).zip(&self.visual_blocks) {
            x = block.run(tape, run(index), [&x, &context, &condition], &positions)?;
        }
        drop(context);
        let vectors = self.modulation_out.forward(tape, &condition)?;
        let x = tape.norm_modulate(&x, vectors.chunk(1), vectors.chunk(0), EPSILON)?;
        Ok(self.out.forward(tape, &x)?)
    }

    /// Of what is predicted; the input's values are in the other order.
    fn patches(&self) -> LatentPatches {
        LatentPatches { size: self.config.patch(), order: PatchOrder::ChannelsFirst }
    }
}

/// An embedding of the prompt: a linear layer, then a layer norm.
struct TextEmbedder {
    layer: LinearLayer,
    norm: [NormTensor; 2],
}

impl TextEmbedder {
    fn new(mut build: ModelBuilder<'_>, inputs: usize, outputs: usize) -> Result<Self> {
        let layer = build.linear_unquantised("in_layer", inputs, outputs)?;
        Ok(Self { layer, norm: build.layer_norm("norm", outputs)? })
    }

    fn forward(&self, tape: &Tape<'_>, text: &Var) -> Result<Var> {
        let hidden = self.layer.forward(tape, text)?;
        let [weight, bias] = &self.norm;
        let (weight, bias) = (weight.var(tape)?, bias.var(tape)?);
        Ok(tape.layer_norm(&hidden, Some(&weight), Some(&bias), EPSILON)?)
    }
}
