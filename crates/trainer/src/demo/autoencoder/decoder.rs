//! The decoder's training. Convolutions have no gradients here, and need none: with a picture's
//! pixels as tokens, a convolution is a gather of each pixel's neighbours and a linear layer, an
//! enlargement is part of that gather, and a norm over a whole picture is a layer norm. Those are
//! what transformers are trained with. The weights are the same numbers in another order.
//!
//! Shapes: S samples, N pixels, C channels; activations [S, N, C].

use std::collections::{BTreeMap, HashMap};

use compute::ops::{Activation, AdamW, Clip, Linear, Moments, adamw, global_norm};
use compute::{Device, Dtype, Gradients, ParamKey, Params, Stream, Tape, Tensor, Var};
use weights::WeightsError;

use super::transform::Transform;
use super::{BLOCK, LATENT, SEED, Tensors};
use crate::error::Result;
use crate::model::build::wants;
use crate::model::host::numbers;
use crate::model::vae::{self, Config};
use crate::sample::Picture;

/// How far the training is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Steps taken.
    pub step: usize,
    /// Steps to take.
    pub of: usize,
    /// The mean squared error of the last one.
    pub error: f32,
}

/// Told of progress; answers whether to go on.
pub type Tell<'a> = &'a dyn Fn(Progress) -> bool;

/// Pictures per step.
const SAMPLES: usize = 2;
/// Steps until a round's rate is reached. Chosen by trial, as all here.
const WARM_UP: usize = 40;
/// Gradients longer than this are shortened.
const LONGEST_GRADIENT: f32 = 1.0;
/// Deviation of what is added to latents: those that a model draws are not quite right either.
const NOISE: f32 = 0.05;
const EPSILON: f32 = 1e-6;

/// Training with a rate that rises, falls to nothing, and remembers nothing of rounds before.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// Steps to take.
    pub n_steps: usize,
    /// The highest rate.
    pub learning_rate: f32,
}

/// Trains a decoder for the latents of `transform`.
pub fn train(
    device: &Device,
    config: &Config,
    transform: &Transform,
    pictures: &[Picture],
    rounds: &[Round],
    tell: Tell<'_>,
) -> Result<Tensors> {
    let mut decoder = Decoder::new(device, config)?;
    let examples = Examples::new(transform, pictures);
    let of = rounds.iter().map(|round| round.n_steps).sum();
    let mut before = 0;
    for round in rounds {
        let tell = |step, error| tell(Progress { step: before + step, of, error });
        decoder.train(device, &examples, before, *round, &tell)?;
        before += round.n_steps;
    }
    decoder.tensors(config)
}

/// Up in a straight line, down along a cosine.
fn rate(step: usize, round: Round) -> f32 {
    let warm = (step as f32 / WARM_UP as f32).min(1.0);
    let done = step as f32 / round.n_steps as f32;
    round.learning_rate * warm * 0.5 * (1.0 + (std::f32::consts::PI * done).cos())
}

/// Latents and pictures as tokens.
struct Examples {
    side: usize,
    latents: Vec<Vec<f32>>,
    pictures: Vec<Vec<f32>>,
}

struct Batch {
    side: usize,
    latents: Tensor,
    pictures: Tensor,
}

impl Examples {
    fn new(transform: &Transform, pictures: &[Picture]) -> Self {
        let tokens = |picture: &Picture| -> Vec<f32> {
            let count = picture.size[0] * picture.size[1];
            let number = |at: usize| picture.numbers[at % 3 * count + at / 3] * 2.0 - 1.0;
            (0..3 * count).map(number).collect()
        };
        Self {
            side: pictures.first().map_or(0, |picture| picture.size[0] / BLOCK),
            latents: pictures.iter().map(|picture| transform.latent(picture)).collect(),
            pictures: pictures.iter().map(tokens).collect(),
        }
    }

    fn batch(&self, device: &Device, step: usize) -> Result<Batch> {
        let stream = Stream::new(SEED, step as u64);
        let chosen: Vec<usize> =
            (0..SAMPLES).map(|at| stream.word(at) as usize % self.pictures.len()).collect();
        let of = |all: &[Vec<f32>]| -> Vec<f32> {
            chosen.iter().flat_map(|index| &all[*index]).copied().collect()
        };
        let (mut latents, pictures) = (of(&self.latents), of(&self.pictures));
        for (at, number) in latents.iter_mut().enumerate() {
            *number += NOISE * stream.normal(SAMPLES + at);
        }
        let n_pixels = self.side * self.side;
        Ok(Batch {
            side: self.side,
            latents: device.upload([SAMPLES, n_pixels, LATENT], &latents)?,
            pictures: device.upload([SAMPLES, n_pixels * BLOCK * BLOCK, 3], &pictures)?,
        })
    }
}

/// The decoder with its convolutions as matrices [out, taps · in].
pub(super) struct Decoder {
    n_levels: usize,
    n_blocks: usize,
    pub(super) params: Params,
    keys: HashMap<String, ParamKey>,
}

impl Decoder {
    pub(super) fn new(device: &Device, config: &Config) -> Result<Self> {
        let (mut params, mut keys) = (Params::default(), HashMap::new());
        for (want, stream) in wants(|build| vae::Decoder::new(config, build))?.into_iter().zip(1..)
        {
            let value = if let [outputs, inputs, height, width] = *want.shape.sizes() {
                let taps = height * width * inputs;
                let deviation = (1.0 / taps as f32).sqrt();
                device.normal([outputs, taps], Dtype::F32, deviation, (SEED, stream))?
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
        examples: &Examples,
        before: usize,
        round: Round,
        tell: &dyn Fn(usize, f32) -> bool,
    ) -> Result<()> {
        let moments = self.params.values().iter().map(Moments::new);
        let mut state = moments.collect::<compute::Result<Vec<_>>>()?;
        let mut gradients = Gradients::default();
        for step in 1..=round.n_steps {
            let batch = examples.batch(device, before + step)?;
            let error = self.step(device, &batch, &mut gradients)?;
            let found = gradients.all(self.params.values().len());
            let clip = Clip { norm: global_norm(&found, device)?, max: LONGEST_GRADIENT };
            let how = AdamW {
                learning_rate: rate(step, round),
                weight_decay: 0.0,
                step: step as u64,
                ..AdamW::default()
            };
            adamw(self.params.values_mut()?, &found, &mut state, how, Some(&clip))?;
            if !tell(step, error) {
                return Err(WeightsError::Cancelled.into());
            }
        }
        Ok(())
    }

    /// One pass forward and back; the error.
    fn step(&self, device: &Device, batch: &Batch, gradients: &mut Gradients) -> Result<f32> {
        gradients.reset();
        let tape = Tape::training(device, &self.params, 0);
        let drawn = self.forward(&tape, &batch.latents.clone().into(), batch.side)?;
        let error = tape.mse(&drawn, &batch.pictures, None, None)?;
        tape.backward(&error, gradients)?;
        Ok(numbers(error.tensor())?[0])
    }

    /// The same as [`vae::Decoder::forward`].
    pub(super) fn forward(
        &self,
        tape: &Tape<'_>,
        latents: &Var,
        mut side: usize,
    ) -> compute::Result<Var> {
        let mut x = self.convolve(tape, "decoder.conv_in", latents, Grid { side, factor: 1 })?;
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
                let grid = Grid { side, factor: 2 };
                x = self.convolve(tape, &format!("{name}.upsamplers.0.conv"), &x, grid)?;
            }
        }
        let x = self.norm(tape, "decoder.conv_norm_out", &x)?;
        self.convolve(tape, "decoder.conv_out", &x, Grid { side, factor: 1 })
    }

    fn block(&self, tape: &Tape<'_>, name: &str, x: &Var, side: usize) -> compute::Result<Var> {
        let grid = Grid { side, factor: 1 };
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

    fn convolve(&self, tape: &Tape<'_>, name: &str, x: &Var, grid: Grid) -> compute::Result<Var> {
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
    pub(super) fn tensors(&self, config: &Config) -> Result<Tensors> {
        let mut tensors = BTreeMap::new();
        for want in wants(|build| vae::Decoder::new(config, build))? {
            let found = numbers(self.params.get(self.keys[&want.name]))?;
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

/// Pixels of a square picture, seen `factor` times as large as it is.
#[derive(Clone, Copy)]
struct Grid {
    /// Of the large picture.
    side: usize,
    factor: usize,
}

impl Grid {
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
