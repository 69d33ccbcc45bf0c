//! Steps on the processor: all tensors together are one loop over blocks of fixed size, so that
//! many small ones are shared among threads as well as one large one.

use rayon::prelude::*;

use super::adamw::Update;
use super::eight_bit::BLOCK;
use super::{AdamW, Clip, Codes, Moments, Moments8};
use crate::Tensor;
use crate::codebook::Codebook;
use crate::cpu::Cpu;
use crate::cpu::rows::max;
use crate::cpu::simd::simd;
use crate::cpu::sums::moments;
use crate::dtype::{Real, with_real};

/// Numbers per task; a multiple of what shares a scale.
const GRAIN: usize = if cfg!(test) { BLOCK } else { 64 * BLOCK };

pub fn adamw(
    cpu: &Cpu,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments],
    (step, clip): (AdamW, Option<&Clip>),
) {
    let Some(scale) = scale(step, clip) else { return };
    let update = Update::new(step, scale);
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
    cpu.run(|| {
        blocks.for_each(|(((param, gradient), first), second)| {
            adamw_block(update, param, gradient, first, second);
        });
    });
}

/// What gradients are multiplied by; none if the step is not to be made.
fn scale(step: AdamW, clip: Option<&Clip>) -> Option<f32> {
    let Some(Clip { norm, max }) = clip else { return Some(step.scale) };
    let norm = step.scale * norm.data::<f32>()[0];
    norm.is_finite().then(|| step.scale * (max / (norm + 1e-6)).min(1.0))
}

pub fn adamw_8bit(
    cpu: &Cpu,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments8],
    (step, clip): (AdamW, Option<&Clip>),
) {
    let Some(scale) = scale(step, clip) else { return };
    let update = Update::new(step, scale);
    let books = (Codebook::signed(), Codebook::unsigned());
    let tensors = params.iter_mut().zip(gradients).zip(state);
    let tensors: Vec<_> = tensors
        .filter_map(|((param, gradient), Moments8 { first, second })| {
            let (param, gradient) = (param.data_mut::<f32>(), (*gradient)?.data::<f32>());
            Some((param, gradient, pieces(first), pieces(second)))
        })
        .collect();
    let blocks = tensors.into_par_iter().flat_map(|(param, gradient, first, second)| {
        param.par_chunks_mut(GRAIN).zip(gradient.par_chunks(GRAIN)).zip(first).zip(second)
    });
    cpu.run(|| {
        blocks.for_each(|(((param, gradient), first), second)| {
            step_8bit(update, &books, (param, gradient), first, second);
        });
    });
}

/// Codes with their scales, cut as their parameter is.
fn pieces(Codes { codes, scales }: &mut Codes) -> impl IndexedParallelIterator<Item = Piece<'_>> {
    let codes = codes.data_mut::<u8>().par_chunks_mut(GRAIN);
    codes.zip(scales.data_mut::<f32>().par_chunks_mut(GRAIN / BLOCK))
}

type Piece<'a> = (&'a mut [u8], &'a mut [f32]);

fn step_8bit(
    update: Update,
    books: &(Codebook, Codebook),
    (params, gradients): (&mut [f32], &[f32]),
    first: Piece<'_>,
    second: Piece<'_>,
) {
    let (mut means, mut squares) = ([0.0; BLOCK], [0.0; BLOCK]);
    let first = first.0.chunks_mut(BLOCK).zip(first.1);
    let second = second.0.chunks_mut(BLOCK).zip(second.1);
    let numbers = params.chunks_mut(BLOCK).zip(gradients.chunks(BLOCK));
    for ((params, gradients), (first, second)) in numbers.zip(first.zip(second)) {
        let (means, squares) = (&mut means[..params.len()], &mut squares[..params.len()]);
        books.0.decode(first.0, *first.1, means);
        books.1.decode(second.0, *second.1, squares);
        adamw_block(update, params, gradients, means, squares);
        // What is not a number makes the scale, and with it the whole block, not a number.
        *first.1 = largest_size(means);
        *second.1 = max(squares);
        books.0.encode(means, *first.1, first.0);
        books.1.encode(squares, *second.1, second.0);
    }
}

fn largest_size(numbers: &[f32]) -> f32 {
    let mut sizes = [0.0; BLOCK];
    sizes.iter_mut().zip(numbers).for_each(|(size, number)| *size = number.abs());
    max(&sizes)
}

pub fn global_norm(cpu: &Cpu, gradients: &[&Tensor], norm: &mut Tensor) {
    let squares: Vec<f64> = cpu.run(|| {
        let squares = |gradient: &&Tensor| moments(gradient.data::<f32>(), 0.0)[1];
        gradients.par_iter().map(squares).collect()
    });
    norm.data_mut::<f32>()[0] = squares.iter().sum::<f64>().sqrt() as f32;
}

pub fn count_not_finite(cpu: &Cpu, tensors: &[&Tensor], count: &mut Tensor) {
    let counts = tensors.par_iter().map(|tensor| {
        with_real!(tensor.dtype(), T => {
            let blocks = tensor.data::<T>().par_chunks(GRAIN);
            blocks.map(not_finite).sum::<u64>()
        })
    });
    let total: u64 = cpu.run(|| counts.sum());
    count.data_mut::<u32>()[0] = u32::try_from(total).unwrap_or(u32::MAX);
}

simd! {
    fn not_finite<T: Real>(numbers: &[T]) -> u64 {
        let count: u32 = numbers.iter().map(|number| u32::from(!number.to_f32().is_finite())).sum();
        u64::from(count)
    }

    fn adamw_block(
        update: Update,
        params: &mut [f32],
        gradients: &[f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        update.apply(params, gradients, first, second);
    }
}

pub fn ema(cpu: &Cpu, average: &mut Tensor, value: &Tensor, decay: f32) {
    with_real!(value.dtype(), T => {
        let value = value.data::<T>();
        cpu.rows(average.data_mut::<f32>(), 1, |first, average| {
            for (average, value) in average.iter_mut().zip(&value[first..]) {
                *average = decay * *average + (1.0 - decay) * value.to_f32();
            }
        });
    });
}
