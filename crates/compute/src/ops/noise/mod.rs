//! Noisy latents for training by flow matching, drawn and mixed where the model computes:
//!
//! `sample_latents`: x = (mean + std·ε - shift)·scale, with one shift and one scale per channel
//! `add_noise`: noisy = (1 - σ)·x + σ·ε and velocity = ε - x, with one σ per sample
//!
//! for latents [samples, channels, ..] in f32. ε is standard normal noise from the sample's own random
//! sequence, by the index in the sample, so that a sample's noise does not depend on the others in its batch. The arithmetic is f32 in the order of the formulas; only `noisy` is rounded.
//!
//! In place: x takes the memory of the mean, and velocity that of x, if nobody shares it.
//!
//! Plain functions, since no gradient of noise is ever wanted.

mod cpu;
mod cuda;
mod gpu;
#[cfg(test)]
mod tests;

use crate::device::{Backend, DeviceKind};
use crate::op::Op;
use crate::random::RandomSequence;
use crate::{ComputeError, Dtype, Result, Shape, Tag, Tensor};

/// FLOPs per element, for the work counter: two random words and the functions that make them normal,
/// counted as [`super::gumbel`] counts them; and the formulas.
const NORMAL_FLOPS: usize = 120;
const SAMPLE_FLOPS: usize = 4;
const ADD_NOISE_FLOPS: usize = 5;

/// The standard deviation of latents, and one random sequence for each sample.
#[derive(Clone, Copy)]
pub struct LatentStd<'a> {
    /// The standard deviation of every element, f32 of the shape of the mean.
    pub std: &'a Tensor,
    /// As many as there are samples.
    pub sequences: &'a [RandomSequence],
}

/// Per-channel statistics of a VAE's latents: f32 vectors, as long as there are channels.
#[derive(Clone, Copy)]
pub struct LatentScaling<'a> {
    /// Subtracted.
    pub shift: &'a Tensor,
    /// Multiplied by, after that.
    pub scale: &'a Tensor,
}

/// Latents with noise.
#[derive(Debug)]
pub struct NoisyLatents {
    /// The model's input.
    pub noisy: Tensor,
    /// The model's target, f32.
    pub velocity: Tensor,
}

/// Samples latents from what a VAE's encoder gave; without a standard deviation, their mean.
pub fn sample_latents(
    mean: Tensor,
    spread: Option<LatentStd<'_>>,
    channels: LatentScaling<'_>,
) -> Result<Tensor> {
    let device = mean.device().clone();
    let op = Op::standalone("sample_latents", &device);
    let sizes = LatentSizes::of(&op, "mean", &mean)?;
    op.expect_vector("shift", channels.shift, sizes.channels)?;
    op.expect_vector("scale", channels.scale, sizes.channels)?;
    if let Some(LatentStd { std, sequences }) = spread {
        op.expect_dtype("std", std, Dtype::F32)?;
        op.expect_shape("std", std, mean.shape())?;
        sizes.expect_sequences(&op, sequences)?;
    }
    let mut latents = mean.into_unique()?;
    let table = spread.map(|spread| upload_sequences(&op, spread.sequences)).transpose()?.flatten();
    let std = spread.map(|spread| spread.std);
    let (normal, written) = (std.map_or(0, |_| NORMAL_FLOPS), [&latents; 2]);
    let tensors: Vec<&Tensor> = written.into_iter().chain(std).collect();
    op.count((SAMPLE_FLOPS + normal) * latents.shape().elements(), &tensors);
    match op.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => {
            cpu::sample_latents(backend, &mut latents, sizes, spread, channels);
        }
        Backend::Cuda(backend) => {
            cuda::sample_latents(backend, &mut latents, sizes, std, table.as_ref(), channels);
        }
        Backend::Gpu(backend) => {
            gpu::sample_latents(backend, &mut latents, sizes, std, table.as_ref(), channels);
        }
    }
    Ok(latents)
}

/// Mixes latents with noise, of which each sample gets as much as its σ in `sigmas` says, f32; `dtype`
/// is the dtype of the noisy ones.
pub fn add_noise(
    latents: Tensor,
    sigmas: &Tensor,
    sequences: &[RandomSequence],
    dtype: Dtype,
) -> Result<NoisyLatents> {
    let device = latents.device().clone();
    let op = Op::standalone("add_noise", &device);
    let sizes = LatentSizes::of(&op, "latents", &latents)?;
    op.expect_vector("sigmas", sigmas, sizes.samples)?;
    sizes.expect_sequences(&op, sequences)?;
    let mut velocity = latents.into_unique()?;
    let mut noisy = op.alloc(velocity.shape(), dtype)?;
    op.expect_real("the noisy latents", &noisy)?;
    let table = upload_sequences(&op, sequences)?;
    let work = (NORMAL_FLOPS + ADD_NOISE_FLOPS) * velocity.shape().elements();
    op.count(work, &[&velocity, &velocity, &noisy]);
    match op.backend() {
        Backend::Meta => {}
        Backend::Cpu(backend) => {
            cpu::add_noise(backend, &mut velocity, &mut noisy, sizes, sigmas, sequences);
        }
        Backend::Cuda(backend) => {
            cuda::add_noise(backend, &mut velocity, &mut noisy, sizes, sigmas, table.as_ref());
        }
        Backend::Gpu(backend) => {
            gpu::add_noise(backend, &mut velocity, &mut noisy, sizes, sigmas, table.as_ref());
        }
    }
    Ok(NoisyLatents { noisy, velocity })
}

/// What latents are made of.
#[derive(Clone, Copy)]
struct LatentSizes {
    samples: usize,
    channels: usize,
    per_channel: usize,
}

impl LatentSizes {
    fn of(op: &Op<'_>, what: &'static str, latents: &Tensor) -> Result<Self> {
        op.expect_dtype(what, latents, Dtype::F32)?;
        let got = latents.shape();
        let &[samples, channels, ref rest @ ..] = got.sizes() else {
            return Err(ComputeError::Rank { op: op.name, what, expected: 2, got });
        };
        Ok(Self { samples, channels, per_channel: rest.iter().product() })
    }

    fn per_sample(self) -> usize {
        self.channels * self.per_channel
    }

    fn expect_sequences(self, op: &Op<'_>, sequences: &[RandomSequence]) -> Result<()> {
        op.expect_sizes(
            "the list of random sequences",
            Shape::from([sequences.len()]),
            [self.samples],
        )
    }
}

/// Random sequences as GPU kernels read them: seed, index and first place of each, the lower word first.
fn upload_sequences(op: &Op<'_>, sequences: &[RandomSequence]) -> Result<Option<Tensor>> {
    if matches!(op.device.kind(), DeviceKind::Cpu { .. }) {
        return Ok(None);
    }
    let parts = sequences.iter().flat_map(|sequence| sequence.parts());
    let words: Vec<u32> = parts.flat_map(|part| [part as u32, (part >> 32) as u32]).collect();
    let upload = || op.device.upload([words.len()], &words);
    op.device.with_tag(Tag::Workspace, upload).map(Some)
}
