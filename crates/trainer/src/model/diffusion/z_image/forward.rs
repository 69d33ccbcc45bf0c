//! The forward pass of Z-Image. It sees time the other way round, 1 where there is no noise, and its output is the velocity
//! from noise to data; what is returned is negated.
//!
//! Images and prompts are filled up to a multiple of 32 tokens with learned tokens, which are attended to like others. Where
//! the prompts of a batch differ in length, the rest is padding that is not.
//!
//! Shapes: S samples, N image tokens, C prompt tokens, both filled up, D width.

use compute::ops::{Activation, PatchOrder};
use compute::{BlockSwap, Dtype, Tape, Var};

use super::ZImageConfig;
use super::blocks::{TokenPlaces, ZImageBlock};
use crate::error::Result;
use crate::model::build::ModelBuilder;
use crate::model::diffusion::condition::TOKENS;
use crate::model::diffusion::denoiser::{DenoiserInput, DenoiserNetwork, LatentPatches};
use crate::model::diffusion::joint::rotary_table;
use crate::model::layer::{LinearLayer, ModelTensor, NormTensor};
use crate::model::recompute::{BlockRun, Recompute};
use crate::model::timestep::{EMBEDDING_DIM, TimestepEmbedder};
use crate::objective::flow::Timestep;

/// Images and prompts have a multiple of this many tokens.
const MULTIPLE: usize = 32;
/// Width between the layers of the timestep's embedding.
const TIMESTEP_DIM: usize = 1024;
/// Of the last norm, whatever that of the blocks is.
const EPSILON: f32 = 1e-6;
/// Timesteps without noise.
const NO_NOISE: f32 = 1000.0;

/// The transformer.
pub struct ZImage {
    config: ZImageConfig,
    patches: LinearLayer,
    /// What images are filled up with, [1, D].
    image_filler: ModelTensor,
    text_norm: NormTensor,
    text: LinearLayer,
    /// What prompts are filled up with, [1, D].
    text_filler: ModelTensor,
    timestep: TimestepEmbedder,
    image_blocks: Vec<ZImageBlock>,
    text_blocks: Vec<ZImageBlock>,
    blocks: Vec<ZImageBlock>,
    block_swap: Option<BlockSwap>,
    modulation_out: LinearLayer,
    out: LinearLayer,
}

impl ZImage {
    /// Builds the model.
    pub fn new(config: &ZImageConfig, build: &mut ModelBuilder<'_>) -> Result<Self> {
        let ZImageConfig { dim: d, n_refiner_layers: n, cap_feat_dim: text_dim, .. } = *config;
        let mut list = |first, name: &str, n_blocks, is_modulated| -> Result<Vec<ZImageBlock>> {
            let block = |index| {
                ZImageBlock::new(config, build.block_after(first, name, index), is_modulated)
            };
            (0..n_blocks).map(block).collect()
        };
        let image_blocks = list(0, "noise_refiner", n, true)?;
        let text_blocks = list(n, "context_refiner", n, false)?;
        let blocks = list(2 * n, "layers", config.n_layers, true)?;
        let (pixels, condition) = (config.token_dim(), config.condition_dim());
        let widths = [EMBEDDING_DIM, TIMESTEP_DIM, condition];
        let timestep = build.at("t_embedder.mlp");
        let timestep = TimestepEmbedder::with_layers(timestep, ["0", "2"], widths)?;
        Ok(Self {
            patches: build.linear_unquantised("all_x_embedder.2-1", pixels, d)?,
            image_filler: build.parameter("x_pad_token", [1, d])?,
            text_norm: build.norm("cap_embedder.0", text_dim)?,
            text: build.linear_unquantised("cap_embedder.1", text_dim, d)?,
            text_filler: build.parameter("cap_pad_token", [1, d])?,
            modulation_out: build.linear_unquantised(
                "all_final_layer.2-1.adaLN_modulation.1",
                condition,
                d,
            )?,
            out: build.linear_unquantised("all_final_layer.2-1.linear", d, pixels)?,
            block_swap: build.block_swap(),
            config: config.clone(),
            timestep,
            image_blocks,
            text_blocks,
            blocks,
        })
    }

    /// The embedded timesteps: [S, condition width]. They are not rounded to the activations' dtype.
    fn condition(&self, tape: &Tape<'_>, timesteps: &[Timestep], dtype: Dtype) -> Result<Var> {
        let inverted = |level: &Timestep| (NO_NOISE - level.t) / NO_NOISE * self.config.t_scale;
        let times: Vec<f32> = timesteps.iter().map(inverted).collect();
        self.timestep.forward(tape, &times, 1.0, dtype)
    }

    /// Noisy latents as tokens [S, N, D].
    fn embed_image(&self, tape: &Tape<'_>, tokens: &Var) -> Result<Var> {
        let x = self.patches.forward(tape, tokens)?;
        let &[samples, n, _] = x.shape().sizes() else { unreachable!("tokens of samples") };
        let n_filled = n.next_multiple_of(MULTIPLE) - n;
        if n_filled == 0 {
            return Ok(x);
        }
        let ids = tape.device().upload([samples, n_filled], &vec![0u32; samples * n_filled])?;
        let filler = tape.convert(&self.image_filler.var(tape), x.dtype())?;
        let filled = tape.embedding(&ids, &filler)?;
        Ok(tape.concat_tokens(&[&x, &filled])?)
    }

    /// Prompts of these lengths as tokens [S, C, D].
    fn embed_text(&self, tape: &Tape<'_>, prompt: &Var, lengths: &[usize]) -> Result<Var> {
        let weight = self.text_norm.var(tape)?;
        let normed = tape.rms_norm(prompt, Some(&weight), self.config.norm_eps)?;
        let x = self.text.forward(tape, &normed)?;
        drop(normed);
        let &[samples, n, d] = x.shape().sizes() else { unreachable!("tokens of samples") };
        let filler = tape.convert(&self.text_filler.var(tape), x.dtype())?;
        // Each token of a prompt in its place, and the filler, the last row of all, in the others.
        let rows =
            tape.concat_tokens(&[&x.reshape([1, samples * n, d]), &filler.reshape([1, 1, d])])?;
        let most = filled_up(lengths).max().unwrap_or(0);
        let row = |(sample, length): (usize, &usize)| {
            let length = *length;
            (0..most).map(move |at| if at < length { sample * n + at } else { samples * n } as u32)
        };
        let ids: Vec<u32> = lengths.iter().enumerate().flat_map(row).collect();
        let ids = tape.device().upload([samples, most], &ids)?;
        Ok(tape.embedding(&ids, &rows.reshape([samples * n + 1, d]))?)
    }

    /// Where the tokens of images are, those of prompts, and those of both.
    fn places(
        &self,
        tape: &Tape<'_>,
        size: [usize; 2],
        lengths: &[usize],
    ) -> Result<[TokenPlaces; 3]> {
        let n = (size[0] * size[1]).next_multiple_of(MULTIPLE);
        let most = filled_up(lengths).max().unwrap_or(0);
        let (mut of_images, mut of_text, mut of_both) = (Vec::new(), Vec::new(), Vec::new());
        let text = text_places(most);
        for length in filled_up(lengths) {
            let image = image_places(size, length);
            of_both.extend([&image[..], &text].concat());
            of_images.extend(image);
            of_text.extend(&text);
        }
        let counts = |before: usize| {
            let counts: Vec<u32> =
                filled_up(lengths).map(|length| (before + length) as u32).collect();
            // One sample has no padding.
            let several =
                (lengths.len() > 1).then(|| tape.device().upload([counts.len()], &counts));
            several.transpose()
        };
        let table = |places: &[f32]| {
            rotary_table(tape, self.config.rope_theta, self.config.axes_dims, places)
        };
        Ok([
            TokenPlaces { rope: table(&of_images)?, lengths: None },
            TokenPlaces { rope: table(&of_text)?, lengths: counts(0)? },
            TokenPlaces { rope: table(&of_both)?, lengths: counts(n)? },
        ])
    }
}

/// The lengths of prompts that are filled up.
fn filled_up(lengths: &[usize]) -> impl Iterator<Item = usize> {
    lengths.iter().map(|length| length.next_multiple_of(MULTIPLE))
}

/// The places of a prompt's tokens: along the first axis, from 1 on.
fn text_places(n: usize) -> Vec<f32> {
    (1..=n).flat_map(|at| [at as f32, 0.0, 0.0]).collect()
}

/// The places of an image's tokens: behind a prompt of this length by row and column, with what fills it up at the origin.
fn image_places([rows, columns]: [usize; 2], after: usize) -> Vec<f32> {
    let n = rows * columns;
    let place = |at: usize| [(after + 1) as f32, (at / columns) as f32, (at % columns) as f32];
    let filled = n.next_multiple_of(MULTIPLE) - n;
    (0..n).map(place).chain(std::iter::repeat_n([0.0; 3], filled)).flatten().collect()
}

impl DenoiserNetwork for ZImage {
    fn forward<'m>(
        &'m self,
        tape: &Tape<'m>,
        input: DenoiserInput<'_>,
        recompute: Recompute,
    ) -> Result<Var> {
        let prompt = input.condition.get(TOKENS)?;
        let lengths = input.condition.lengths(TOKENS)?;
        let condition = self.condition(tape, input.timesteps, prompt.dtype())?;
        let (tokens, sizes) = input.image_tokens(tape, self.patches())?;
        let [of_image, of_text, of_both] = self.places(tape, sizes[0], lengths)?;
        let block_swap = self.block_swap.as_ref();
        let run = |index| BlockRun { block_swap, index, recompute };
        let mut x = self.embed_image(tape, &tokens)?;
        drop(tokens);
        for (index, block) in self.image_blocks.iter().enumerate() {
            x = block.run(tape, run(index), &x, &condition, &of_image)?;
        }
        let mut context = self.embed_text(tape, prompt, lengths)?;
        let first = self.image_blocks.len();
        for (index, block) in (first..).zip(&self.text_blocks) {
            context = block.run(tape, run(index), &context, &condition, &of_text)?;
        }
        let mut both = tape.concat_tokens(&[&x, &context])?;
        drop((x, context));
        for (index, block) in (first + self.text_blocks.len()..).zip(&self.blocks) {
            both = block.run(tape, run(index), &both, &condition, &of_both)?;
        }
        let n = sizes[0].iter().product();
        let x = tape.split_tokens(&both, 0..n)?;
        drop(both);
        let condition = tape.activate(&condition, Activation::Silu)?;
        let scale = self.modulation_out.forward(tape, &condition)?;
        let no_shift: Var = tape.device().zeros(scale.shape(), scale.dtype())?.into();
        let x = tape.norm_modulate(&x, scale.chunk(0), no_shift.chunk(0), EPSILON)?;
        Ok(tape.scale(&self.out.forward(tape, &x)?, -1.0)?)
    }

    fn patches(&self) -> LatentPatches {
        LatentPatches { size: super::PATCH, order: PatchOrder::ChannelsLast }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 3 x 11 tokens the last are filled up to 64, at the origin; the prompt before them has 32.
    #[test]
    fn an_image_comes_after_its_prompt() {
        let places = image_places([3, 11], 32);
        assert_eq!(places.len(), 3 * 64);
        assert_eq!(places[3 * 12..3 * 13], [33.0, 1.0, 1.0]);
        assert_eq!(places[3 * 32..3 * 34], [33.0, 2.0, 10.0, 0.0, 0.0, 0.0]);
        assert_eq!(text_places(2), [1.0, 0.0, 0.0, 2.0, 0.0, 0.0]);
        assert_eq!(filled_up(&[1, 32, 33]).collect::<Vec<_>>(), [32, 32, 64]);
    }
}
