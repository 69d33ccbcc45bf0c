//! The decoder's training. Convolutions have no gradients here, and need none: with an image's
//! pixels as tokens, a convolution is a gather of each pixel's neighbours and a linear layer, an
//! enlargement is part of that gather, and a norm over a whole image is a layer norm. Those are
//! what transformers are trained with. The weights are the same numbers in another order.
//!
//! Shapes: S samples, N pixels, C channels; activations [S, N, C].

use std::collections::{BTreeMap, HashMap};

use compute::ops::{Activation, AdamW, GradClip, Linear, Moments, adamw, global_norm};
use compute::{Device, Dtype, Gradients, ParamKey, Params, RandomSequence, Tape, Tensor, Var};
use weights::WeightsError;

use super::transform::BlockTransform;
use super::{BLOCK, LATENT, SEED, TensorMap};
use crate::error::Result;
use crate::model::build::tensor_specs;
use crate::model::host::to_vec;
use crate::model::vae::{KlVaeConfig, kl};
use crate::sample::Image;

/// How far the training is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderProgress {
    /// Steps taken.
    pub step: usize,
    /// Steps to take.
    pub total: usize,
    /// The mean squared error of the last one.
    pub error: f32,
}

/// Told of progress; answers whether to go on.
pub type DecoderProgressFn<'a> = &'a dyn Fn(DecoderProgress) -> bool;

/// Images per step.
const BATCH_SIZE: usize = 2;
/// Warm-up steps of a round. Chosen by trial, as all here.
const WARM_UP: usize = 40;
/// Max gradient norm.
const MAX_GRAD_NORM: f32 = 1.0;
/// Deviation of what is added to latents: those that a model draws are not quite right either.
const LATENT_NOISE: f32 = 0.05;
const EPSILON: f32 = 1e-6;

/// A training round: the learning rate warms up and decays to 0; the optimizer state starts anew.
#[derive(Clone, Copy, Debug)]
pub struct TrainRound {
    /// Steps to take.
    pub n_steps: usize,
    /// The peak learning rate.
    pub learning_rate: f32,
}

/// Trains a decoder for the latents of `transform`.
pub fn train(
    device: &Device,
    config: &KlVaeConfig,
    transform: &BlockTransform,
    images: &[Image],
    rounds: &[TrainRound],
    on_progress: DecoderProgressFn<'_>,
) -> Result<TensorMap> {
    let mut decoder = DemoDecoder::new(device, config)?;
    let examples = DecoderExamples::new(transform, images);
    let of = rounds.iter().map(|round| round.n_steps).sum();
    let mut before = 0;
    for round in rounds {
        let tell =
            |step, error| on_progress(DecoderProgress { step: before + step, total: of, error });
        decoder.train(device, &examples, before, *round, &tell)?;
        before += round.n_steps;
    }
    decoder.tensors(config)
}

/// Up in a straight line, down along a cosine.
fn learning_rate(step: usize, round: TrainRound) -> f32 {
    let warm = (step as f32 / WARM_UP as f32).min(1.0);
    let done = step as f32 / round.n_steps as f32;
    round.learning_rate * warm * 0.5 * (1.0 + (std::f32::consts::PI * done).cos())
}

/// Latents and images as tokens.
struct DecoderExamples {
    side: usize,
    latents: Vec<Vec<f32>>,
    images: Vec<Vec<f32>>,
}

struct DecoderBatch {
    side: usize,
    latents: Tensor,
    images: Tensor,
}

impl DecoderExamples {
    fn new(transform: &BlockTransform, images: &[Image]) -> Self {
        let tokens = |image: &Image| -> Vec<f32> {
            let count = image.size[0] * image.size[1];
            let number = |at: usize| image.values[at % 3 * count + at / 3] * 2.0 - 1.0;
            (0..3 * count).map(number).collect()
        };
        Self {
            side: images.first().map_or(0, |image| image.size[0] / BLOCK),
            latents: images.iter().map(|image| transform.latent(image)).collect(),
            images: images.iter().map(tokens).collect(),
        }
    }

    fn batch(&self, device: &Device, step: usize) -> Result<DecoderBatch> {
        let stream = RandomSequence::new(SEED, step as u64);
        let chosen: Vec<usize> =
            (0..BATCH_SIZE).map(|at| stream.word(at) as usize % self.images.len()).collect();
        let of = |all: &[Vec<f32>]| -> Vec<f32> {
            chosen.iter().flat_map(|index| &all[*index]).copied().collect()
        };
        let (mut latents, images) = (of(&self.latents), of(&self.images));
        for (at, number) in latents.iter_mut().enumerate() {
            *number += LATENT_NOISE * stream.normal(BATCH_SIZE + at);
        }
        let n_pixels = self.side * self.side;
        Ok(DecoderBatch {
            side: self.side,
            latents: device.upload([BATCH_SIZE, n_pixels, LATENT], &latents)?,
            images: device.upload([BATCH_SIZE, n_pixels * BLOCK * BLOCK, 3], &images)?,
        })
    }
}

/// The decoder with its convolutions as matrices [out, taps · in].
pub(super) struct DemoDecoder {
    n_levels: usize,
    n_blocks: usize,
    pub(super) params: Params,
    keys: HashMap<String, ParamKey>,
}

impl DemoDecoder {
    pub(super) fn new(device: &Device, config: &KlVaeConfig) -> Result<Self> {
        let (mut params, mut keys) = (Params::default(), HashMap::new());
        for (want, stream) in tensor_specs(|build| kl::decoder(config, build))?.into_iter().zip(1..)
        {
            let value = if let [outputs, inputs, height, width] = *want.shape.sizes() {
                let taps = height * width * inputs;
                let deviation = (1.0 / taps as f32).sqrt();
                device.normal(
                    [outputs, taps],
                    Dtype::F32,
                    deviation,
                    RandomSequence::new(SEED, stream),
                )?
            } else {
                let start = f32::from(u8::from(want.name.ends_with("weight")));
                device.upload(want.shape, &vec![start; want.shape.elements()])?
            };
            keys.insert(want.name, params.add(value));
        }
        let n_levels = config.block_out_channels.len();
        Ok(Self { n_levels, n_blocks: config.layers_per_block + 1, params, keys })
    }

    /// One round, whose first step has `before` steps before it.
    fn train(
        &mut self,
        device: &Device,
        examples: &DecoderExamples,
        before: usize,
        round: TrainRound,
        on_progress: &dyn Fn(usize, f32) -> bool,
    ) -> Result<()> {
        let moments: compute::Result<Vec<_>> =
            self.params.values().iter().map(Moments::new).collect();
        let mut state = moments?;
        let mut gradients = Gradients::default();
        for step in 1..=round.n_steps {
            let batch = examples.batch(device, before + step)?;
            let error = self.step(device, &batch, &mut gradients)?;
            let found = gradients.all(self.params.values().len());
            let clip = GradClip { norm: global_norm(&found, device)?, max_norm: MAX_GRAD_NORM };
            let how = AdamW {
                learning_rate: learning_rate(step, round),
                weight_decay: 0.0,
                step: step as u64,
                ..AdamW::default()
            };
            adamw(self.params.values_mut()?, &found, &mut state, how, Some(&clip))?;
            if !on_progress(step, error) {
                return Err(WeightsError::Cancelled.into());
            }
        }
        Ok(())
    }

    /// One forward and backward pass; the loss.
    fn step(
        &self,
        device: &Device,
        batch: &DecoderBatch,
        gradients: &mut Gradients,
    ) -> Result<f32> {
        gradients.reset();
        let tape = Tape::training(device, &self.params, 0);
        let drawn = self.forward(&tape, &batch.latents.clone().into(), batch.side)?;
        let error = tape.mse(&drawn, &batch.images, None, None)?;
        tape.backward(&error, gradients)?;
        Ok(to_vec(error.tensor())?[0])
    }

    /// The same as [`crate::model::vae::VaeDecoder::forward`].
    pub(super) fn forward(
        &self,
        tape: &Tape<'_>,
        latents: &Var,
        mut side: usize,
    ) -> compute::Result<Var> {
        let mut x =
            self.convolve(tape, "decoder.conv_in", latents, ConvGrid { side, factor: 1 })?;
        for index in 0..2 {
            x = self.block(tape, &format!("decoder.mid_block.resnets.{index}"), &x, side)?;
        }
        for level in 0..self.n_levels {
            let name = format!("decoder.up_blocks.{level}");
            for index in 0..self.n_blocks {
                x = self.block(tape, &format!("{name}.resnets.{index}"), &x, side)?;
            }
            if level + 1 < self.n_levels {
                side *= 2;
                let grid = ConvGrid { side, factor: 2 };
                x = self.convolve(tape, &format!("{name}.upsamplers.0.conv"), &x, grid)?;
            }
        }
        let x = self.norm(tape, "decoder.conv_norm_out", &x)?;
        self.convolve(tape, "decoder.conv_out", &x, ConvGrid { side, factor: 1 })
    }

    fn block(&self, tape: &Tape<'_>, name: &str, x: &Var, side: usize) -> compute::Result<Var> {
        let grid = ConvGrid { side, factor: 1 };
        let h = self.norm(tape, &format!("{name}.norm1"), x)?;
        let h = self.convolve(tape, &format!("{name}.conv1"), &h, grid)?;
        let h = self.norm(tape, &format!("{name}.norm2"), &h)?;
        let h = self.convolve(tape, &format!("{name}.conv2"), &h, grid)?;
        let shortcut = format!("{name}.conv_shortcut");
        if self.keys.contains_key(&format!("{shortcut}.weight")) {
            tape.add(&self.linear(tape, &shortcut, x)?, &h)
        } else {
            tape.add(x, &h)
        }
    }

    fn norm(&self, tape: &Tape<'_>, name: &str, x: &Var) -> compute::Result<Var> {
        let (shape, samples) = (x.shape(), x.shape().sizes()[0]);
        let whole = x.reshape([samples, shape.elements() / samples]);
        let normed = tape.layer_norm(&whole, None, None, EPSILON)?.reshape(shape);
        let (weight, bias) = (self.param(tape, name, "weight"), self.param(tape, name, "bias"));
        tape.affine(&normed, &weight, Some(&bias), Activation::Silu)
    }

    fn convolve(
        &self,
        tape: &Tape<'_>,
        name: &str,
        x: &Var,
        grid: ConvGrid,
    ) -> compute::Result<Var> {
        let &[samples, _, channels] = x.shape().sizes() else { unreachable!("tokens") };
        let zero = tape.device().zeros([samples, 1, channels], x.dtype())?;
        let framed = tape.concat_tokens(&[x, &zero.into()])?;
        let ids = grid.neighbours().repeat(samples);
        let ids = tape.device().upload([samples, ids.len() / samples], &ids)?;
        let seen = tape.gather_tokens(&framed, &ids)?;
        let n_pixels = grid.side * grid.side;
        self.linear(tape, name, &seen.reshape([samples, n_pixels, TAPS * channels]))
    }

    fn linear(&self, tape: &Tape<'_>, name: &str, x: &Var) -> compute::Result<Var> {
        let (weight, bias) = (self.param(tape, name, "weight"), self.param(tape, name, "bias"));
        tape.linear(x, Linear { bias: Some(&bias), ..Linear::new(&weight) })
    }

    fn param(&self, tape: &Tape<'_>, name: &str, end: &str) -> Var {
        tape.param(self.keys[&format!("{name}.{end}")])
    }

    /// As files hold them.
    pub(super) fn tensors(&self, config: &KlVaeConfig) -> Result<TensorMap> {
        let mut tensors = BTreeMap::new();
        for want in tensor_specs(|build| kl::decoder(config, build))? {
            let found = to_vec(&self.params.get(self.keys[&want.name]))?;
            let ordered = match *want.shape.sizes() {
                [outputs, inputs, height, width] => {
                    in_order(&found, [outputs, inputs, height * width])
                }
                _ => found,
            };
            tensors.insert(want.name, (want.shape.sizes().to_vec(), ordered));
        }
        Ok(tensors)
    }
}

/// From [out, taps, in] to [out, in, taps].
fn in_order(numbers: &[f32], [outputs, inputs, taps]: [usize; 3]) -> Vec<f32> {
    let from = |at: usize| {
        let (output, input, tap) = (at / (inputs * taps), at / taps % inputs, at % taps);
        numbers[(output * taps + tap) * inputs + input]
    };
    (0..outputs * inputs * taps).map(from).collect()
}

/// Numbers of a channel that a pixel of a convolution sees.
const TAPS: usize = 9;

/// Pixels of a square image, seen `factor` times as large as it is.
#[derive(Clone, Copy)]
struct ConvGrid {
    /// Of the large image.
    side: usize,
    factor: usize,
}

impl ConvGrid {
    /// For each pixel the tokens of the 3x3 around it; the one after the last is outside.
    fn neighbours(self) -> Vec<u32> {
        let small = self.side / self.factor;
        let token = |pixel: usize, tap: usize| {
            let (row, column) = (pixel / self.side + tap / 3, pixel % self.side + tap % 3);
            let is_inside = |at: usize| (1..=self.side).contains(&at);
            if is_inside(row) && is_inside(column) {
                (row - 1) / self.factor * small + (column - 1) / self.factor
            } else {
                small * small
            }
        };
        (0..self.side * self.side)
            .flat_map(|pixel| (0..TAPS).map(move |tap| token(pixel, tap) as u32))
            .collect()
    }
}
