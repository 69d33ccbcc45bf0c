//! Steps on the CPU: all tensors together are one loop over blocks of fixed size, so that
//! many small ones are shared among threads as well as one large one.

use half::bf16;
use rayon::prelude::*;

use super::adamw::AdamWUpdate;
use super::eight_bit::BLOCK;
use super::lion::LionUpdate;
use super::muon::MIN_NORM;
use super::schedule_free::{ScheduleFreeStep, ScheduleFreeUpdate};
use super::{AdamW, BlockCodes, GradClip, Moments, Moments8bit, Muon, ScheduleFreeState};
use crate::Tensor;
use crate::codebook::Codebook;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{LANES, max};
use crate::cpu::simd::simd;
use crate::cpu::sums::squares;
use crate::dtype::{Real, with_real};
use crate::random::RandomSequence;

/// Elements per task; a multiple of what shares a scale.
pub(super) const GRAIN: usize = if cfg!(test) { BLOCK } else { 64 * BLOCK };

/// Elements of a partial sum of squares. Chosen: a fraction of a millisecond.
const SHARE: usize = if cfg!(test) { BLOCK } else { 1 << 20 };

pub fn adamw(
    cpu: &CpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let Some(scale) = scale(step.scale, clip) else { return };
    let update = AdamWUpdate::new(step, scale);
    let tensors = params.iter_mut().zip(gradients).zip(state);
    let tensors: Vec<_> = tensors
        .filter_map(|((param, gradient), Moments { first, second })| {
            let (param, gradient) = (param.data_mut::<f32>(), (*gradient)?.data::<f32>());
            Some((param, gradient, first.data_mut::<f32>(), second.data_mut::<f32>()))
        })
        .collect();
    let blocks = tensors.into_par_iter().flat_map(|(param, gradient, first, second)| {
        let param = param.par_chunks_mut(GRAIN).zip(gradient.par_chunks(GRAIN));
        param.zip(first.par_chunks_mut(GRAIN)).zip(second.par_chunks_mut(GRAIN))
    });
    cpu.install(|| {
        blocks.for_each(|(((param, gradient), first), second)| {
            adamw_block(update, param, gradient, first, second);
        });
    });
}

/// What gradients are multiplied by; none if the step is not to be made.
pub(super) fn scale(own: f32, clip: Option<&GradClip>) -> Option<f32> {
    let Some(GradClip { norm, max_norm }) = clip else { return Some(own) };
    let norm = own * norm.data::<f32>()[0];
    norm.is_finite().then(|| own * (max_norm / (norm + 1e-6)).min(1.0))
}

/// As much of a parameter as a task takes, with its gradient and its state.
pub(super) struct ParamPiece<'a, const N: usize> {
    pub param: &'a mut [f32],
    pub gradient: &'a [f32],
    pub state: [&'a mut [f32]; N],
}

/// All parameters with a gradient, in pieces.
pub(super) fn param_pieces<'a, const N: usize>(
    params: &'a mut [Tensor],
    gradients: &[Option<&'a Tensor>],
    state: impl Iterator<Item = [&'a mut Tensor; N]>,
) -> Vec<ParamPiece<'a, N>> {
    let mut all = Vec::new();
    for ((param, gradient), state) in params.iter_mut().zip(gradients).zip(state) {
        let Some(gradient) = *gradient else { continue };
        let mut state = state.map(|tensor| tensor.data_mut::<f32>().chunks_mut(GRAIN));
        let pieces = param.data_mut::<f32>().chunks_mut(GRAIN);
        for (param, gradient) in pieces.zip(gradient.data::<f32>().chunks(GRAIN)) {
            let state = state.each_mut().map(|pieces| pieces.next().expect("of the same shape"));
            all.push(ParamPiece { param, gradient, state });
        }
    }
    all
}

pub fn lion(
    cpu: &CpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    means: &mut [Tensor],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let Some(scale) = scale(step.scale, clip) else { return };
    let update = LionUpdate::new(step, scale);
    let pieces = param_pieces(params, gradients, means.iter_mut().map(|mean| [mean]));
    cpu.install(|| {
        pieces.into_par_iter().for_each(|ParamPiece { param, gradient, state: [mean] }| {
            lion_block(update, param, gradient, mean);
        });
    });
}

pub fn schedule_free(
    cpu: &CpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ScheduleFreeState],
    how: ScheduleFreeStep,
    clip: Option<&GradClip>,
) {
    let Some(scale) = scale(how.step.scale, clip) else { return };
    let update = ScheduleFreeUpdate::new(how, scale);
    let state = state.iter_mut().map(|ScheduleFreeState { z, second }| [z, second]);
    let pieces = param_pieces(params, gradients, state);
    cpu.install(|| {
        pieces.into_par_iter().for_each(|ParamPiece { param, gradient, state: [z, second] }| {
            schedule_free_block(update, param, gradient, z, second);
        });
    });
}

pub fn adamw_8bit(
    cpu: &CpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments8bit],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let Some(scale) = scale(step.scale, clip) else { return };
    let update = AdamWUpdate::new(step, scale);
    let books = Codebooks { signed: Codebook::signed(), unsigned: Codebook::unsigned() };
    let tensors = params.iter_mut().zip(gradients).zip(state);
    let tensors: Vec<_> = tensors
        .filter_map(|((param, gradient), Moments8bit { first, second })| {
            let (param, gradient) = (param.data_mut::<f32>(), (*gradient)?.data::<f32>());
            Some((param, gradient, pieces(first), pieces(second)))
        })
        .collect();
    let blocks = tensors.into_par_iter().flat_map(|(param, gradient, first, second)| {
        param.par_chunks_mut(GRAIN).zip(gradient.par_chunks(GRAIN)).zip(first).zip(second)
    });
    cpu.install(|| {
        blocks.for_each(|(((param, gradient), first), second)| {
            step_8bit(update, &books, param, gradient, first, second);
        });
    });
}

/// Codes with their scales, cut as their parameter is.
fn pieces(
    BlockCodes { codes, scales }: &mut BlockCodes,
) -> impl IndexedParallelIterator<Item = BlockCodesPiece<'_>> {
    let codes = codes.data_mut::<u8>().par_chunks_mut(GRAIN);
    codes.zip(scales.data_mut::<f32>().par_chunks_mut(GRAIN / BLOCK))
}

/// Those of first moments and of second ones.
struct Codebooks {
    signed: Codebook,
    unsigned: Codebook,
}

type BlockCodesPiece<'a> = (&'a mut [u8], &'a mut [f32]);

fn step_8bit(
    update: AdamWUpdate,
    books: &Codebooks,
    params: &mut [f32],
    gradients: &[f32],
    first: BlockCodesPiece<'_>,
    second: BlockCodesPiece<'_>,
) {
    let (mut means, mut squares) = ([0.0; BLOCK], [0.0; BLOCK]);
    let first = first.0.chunks_mut(BLOCK).zip(first.1);
    let second = second.0.chunks_mut(BLOCK).zip(second.1);
    let values = params.chunks_mut(BLOCK).zip(gradients.chunks(BLOCK));
    for ((params, gradients), (first, second)) in values.zip(first.zip(second)) {
        let (means, squares) = (&mut means[..params.len()], &mut squares[..params.len()]);
        books.signed.decode(first.0, *first.1, means);
        books.unsigned.decode(second.0, *second.1, squares);
        adamw_block(update, params, gradients, means, squares);
        // NaN makes the scale, and with it the whole block, NaN.
        *first.1 = largest_size(means);
        *second.1 = max(squares);
        books.signed.encode(means, *first.1, first.0);
        books.unsigned.encode(squares, *second.1, second.0);
    }
}

fn largest_size(numbers: &[f32]) -> f32 {
    let mut sizes = [0.0; BLOCK];
    sizes.iter_mut().zip(numbers).for_each(|(size, number)| *size = number.abs());
    max(&sizes)
}

/// Updates the mean of gradients; X is the Nesterov direction, normalised.
pub fn direction(
    cpu: &CpuBackend,
    gradient: &Tensor,
    mean: &mut Tensor,
    config: Muon,
    clip: Option<&GradClip>,
    x: &mut Tensor,
) {
    let Some(scale) = scale(config.scale, clip) else { return };
    let (gradient, mean) = (gradient.data::<f32>(), mean.data_mut::<f32>());
    let blocks = mean.par_chunks_mut(GRAIN).zip(gradient.par_chunks(GRAIN));
    let squares: Vec<f64> = cpu.install(|| {
        blocks
            .map(|(mean, gradient)| update_momentum(mean, gradient, scale, config.momentum))
            .collect()
    });
    let norm = squares.iter().sum::<f64>().sqrt() as f32;
    let inverse = 1.0 / norm.max(MIN_NORM);
    let mean = &*mean;
    with_real!(x.dtype(), T => {
        cpu.par_rows(x.data_mut::<T>(), 1, |first, x| {
            for (x, (mean, gradient)) in x.iter_mut().zip(mean[first..].iter().zip(&gradient[first..])) {
                let gradient = scale * gradient;
                *x = T::from_f32((gradient + (mean - gradient) * config.momentum) * inverse);
            }
        });
    });
}

/// Updates a matrix along X.
pub fn apply_update(
    cpu: &CpuBackend,
    param: &mut Tensor,
    x: &Tensor,
    config: Muon,
    clip: Option<&GradClip>,
) {
    if scale(config.scale, clip).is_none() {
        return;
    }
    let (remains, rate) = config.lengths(param.shape());
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(param.data_mut::<f32>(), 1, |first, param| {
            for (param, x) in param.iter_mut().zip(&x[first..]) {
                *param = *param * remains - rate * x.to_f32();
            }
        });
    });
}

pub fn global_norm(cpu: &CpuBackend, gradients: &[&Tensor], norm: &mut Tensor) {
    // In pieces: a table of tokens may be a third of all.
    let pieces = gradients.iter().flat_map(|gradient| gradient.data::<f32>().chunks(SHARE));
    let pieces: Vec<&[f32]> = pieces.collect();
    let squares: Vec<f64> = cpu.install(|| pieces.par_iter().map(|piece| squares(piece)).collect());
    norm.data_mut::<f32>()[0] = squares.iter().sum::<f64>().sqrt() as f32;
}

pub fn count_not_finite(cpu: &CpuBackend, tensors: &[&Tensor], count: &mut Tensor) {
    let counts = tensors.par_iter().map(|tensor| {
        with_real!(tensor.dtype(), T => {
            let blocks = tensor.data::<T>().par_chunks(GRAIN);
            blocks.map(not_finite).sum::<u64>()
        })
    });
    let total: u64 = cpu.install(|| counts.sum());
    count.data_mut::<u32>()[0] = u32::try_from(total).unwrap_or(u32::MAX);
}

simd! {
    fn not_finite<T: Real>(numbers: &[T]) -> u64 {
        let count: u32 = numbers.iter().map(|number| u32::from(!number.to_f32().is_finite())).sum();
        u64::from(count)
    }

    /// Updates some of the mean; returns the sum of the squares of the direction there.
    fn update_momentum(mean: &mut [f32], gradient: &[f32], scale: f32, momentum: f32) -> f64 {
        let mut squares = [0.0; LANES];
        for (means, gradients) in mean.chunks_mut(LANES).zip(gradient.chunks(LANES)) {
            for ((mean, gradient), square) in means.iter_mut().zip(gradients).zip(&mut squares) {
                let gradient = scale * gradient;
                *mean += (gradient - *mean) * (1.0 - momentum);
                let direction = gradient + (*mean - gradient) * momentum;
                *square += f64::from(direction) * f64::from(direction);
            }
        }
        squares.iter().sum()
    }

    fn adamw_block(
        update: AdamWUpdate,
        params: &mut [f32],
        gradients: &[f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        update.apply(params, gradients, first, second);
    }

    fn lion_block(update: LionUpdate, params: &mut [f32], gradients: &[f32], means: &mut [f32]) {
        update.apply(params, gradients, means);
    }

    fn schedule_free_block(
        update: ScheduleFreeUpdate,
        params: &mut [f32],
        gradients: &[f32],
        z: &mut [f32],
        second: &mut [f32],
    ) {
        update.apply(params, gradients, z, second);
    }
}

pub fn ema(cpu: &CpuBackend, ema: &mut Tensor, value: &Tensor, decay: f32) {
    with_real!(value.dtype(), T => {
        let value = value.data::<T>();
        cpu.par_rows(ema.data_mut::<f32>(), 1, |first, ema| {
            for (ema, value) in ema.iter_mut().zip(&value[first..]) {
                *ema = decay * *ema + (1.0 - decay) * value.to_f32();
            }
        });
    });
}

pub fn stochastic_round(
    cpu: &CpuBackend,
    values: &Tensor,
    rounded: &mut Tensor,
    sequence: RandomSequence,
) {
    let values = values.data::<f32>();
    cpu.par_rows(rounded.data_mut::<bf16>(), 1, |first, rounded| {
        for (at, rounded) in rounded.iter_mut().enumerate() {
            let (value, index) = (values[first + at], first + at);
            let bits = value.to_bits().wrapping_add(sequence.word(index) & 0xffff);
            let up_or_down = bf16::from_bits((bits >> 16) as u16);
            *rounded = if value.is_finite() { up_or_down } else { bf16::from_f32(value) };
        }
    });
}
