//! Steps on a card, a kernel for each tensor.

use super::adamw::Update;
use super::eight_bit::BLOCK;
use super::muon::LEAST_NORM;
use super::{AdamW, Clip, Moments, Moments8, Muon};
use crate::Tensor;
use crate::codebook::Codebook;
use crate::cuda::{Argument, Cuda, Grid, Source, Variant, arguments};

const KERNELS: Source = Source { name: "optimizer", text: include_str!("kernel.cu") };

/// Numbers of a partial sum of squares. Chosen: a few hundred for each thread.
const SHARE: usize = 1 << 16;

pub fn adamw(
    cuda: &Cuda,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments],
    (step, clip): (AdamW, Option<&Clip>),
) {
    let rest = step_arguments(step, clip);
    for ((param, gradient), Moments { first, second }) in
        params.iter_mut().zip(gradients).zip(state)
    {
        let Some(gradient) = *gradient else { continue };
        let n = param.shape().elements();
        let arguments = [&arguments![param, gradient, first, second, n][..], &rest].concat();
        cuda.launch(&KERNELS, "adamw", Variant::of(&[]), Grid::numbers(n), &arguments);
    }
}

pub fn adamw_8bit(
    cuda: &Cuda,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments8],
    (step, clip): (AdamW, Option<&Clip>),
) {
    let rest = step_arguments(step, clip);
    let (signed, unsigned) = (Codebook::signed(), Codebook::unsigned());
    let books = [
        cuda.table("signed codebook", || signed.table()),
        cuda.table("unsigned codebook", || unsigned.table()),
    ];
    let zeros = arguments![signed.zero(), unsigned.zero()];
    for ((param, gradient), Moments8 { first, second }) in
        params.iter_mut().zip(gradients).zip(state)
    {
        let Some(gradient) = *gradient else { continue };
        let n = param.shape().elements();
        let tensors = arguments![
            param,
            gradient,
            &mut first.codes,
            &mut first.scales,
            &mut second.codes,
            &mut second.scales
        ];
        let arguments = [&tensors[..], &books, &zeros, &arguments![n], &rest].concat();
        let grid = Grid { threads: BLOCK as u32, ..Grid::blocks(n.div_ceil(BLOCK)) };
        cuda.launch(&KERNELS, "adamw_8bit", Variant::of(&[]), grid, &arguments);
    }
}

/// Floats of workspace of [`direction`]: partial sums in f64, then the norm.
pub fn squares_floats(n: usize) -> usize {
    2 * n.div_ceil(SHARE) + 1
}

/// Moves the mean of gradients on; X is the direction that follows from it, of length 1.
pub fn direction(
    cuda: &Cuda,
    gradient: &Tensor,
    mean: &mut Tensor,
    (how, clip): (Muon, Option<&Clip>),
    squares: &mut Tensor,
    x: &mut Tensor,
) {
    let n = gradient.shape().elements();
    let (blocks, partial) = (n.div_ceil(SHARE), squares.address_mut());
    let norm = partial + (blocks * size_of::<f64>()) as u64;
    let rest = [&clip_arguments(clip)[..], &arguments![how.scale, how.momentum]].concat();
    let arguments = [&arguments![gradient, &mut *mean, partial, n, SHARE][..], &rest].concat();
    cuda.launch(&KERNELS, "move_mean", Variant::of(&[]), Grid::blocks(blocks), &arguments);
    let arguments = arguments![partial, blocks, norm];
    cuda.launch(&KERNELS, "root", Variant::of(&[]), Grid::blocks(1), &arguments);
    let variant = Variant::of(&[x.dtype()]);
    let arguments = [&arguments![gradient, &*mean, norm, x, n, LEAST_NORM][..], &rest].concat();
    cuda.launch(&KERNELS, "direction", variant, Grid::numbers(n), &arguments);
}

/// Moves a matrix along X.
pub fn follow(cuda: &Cuda, param: &mut Tensor, x: &Tensor, (how, clip): (Muon, Option<&Clip>)) {
    let (n, (remains, rate)) = (param.shape().elements(), how.lengths(param.shape()));
    let numbers = arguments![how.scale, remains, rate];
    let arguments = [&arguments![param, x, n][..], &clip_arguments(clip), &numbers].concat();
    cuda.launch(&KERNELS, "follow", Variant::of(&[x.dtype()]), Grid::numbers(n), &arguments);
}

/// The norm of all gradients, and the longest that is left as it is.
fn clip_arguments(clip: Option<&Clip>) -> [Argument; 2] {
    let (norm, most) = clip.map(|clip| (&clip.norm, clip.max)).unzip();
    arguments![norm, most.unwrap_or(0.0)]
}

/// What kernels that make a step of `AdamW` are told last.
fn step_arguments(step: AdamW, clip: Option<&Clip>) -> Vec<Argument> {
    let update = Update::new(step, step.scale);
    let mut all = clip_arguments(clip).to_vec();
    all.extend(update.numbers().map(Argument::from));
    all
}

/// Floats of workspace of [`global_norm`]: partial sums in f64.
pub fn norm_floats(gradients: &[&Tensor]) -> usize {
    2 * gradients.iter().map(|gradient| n_shares(gradient)).sum::<usize>()
}

fn n_shares(gradient: &Tensor) -> usize {
    gradient.shape().elements().div_ceil(SHARE)
}

pub fn global_norm(cuda: &Cuda, gradients: &[&Tensor], room: &mut Tensor, norm: &mut Tensor) {
    let partial = room.address_mut();
    let mut count = 0;
    for gradient in gradients {
        let (n, blocks) = (gradient.shape().elements(), n_shares(gradient));
        let place = partial + (count * size_of::<f64>()) as u64;
        let arguments = arguments![*gradient, place, n, SHARE];
        cuda.launch(&KERNELS, "squares", Variant::of(&[]), Grid::blocks(blocks), &arguments);
        count += blocks;
    }
    let arguments = arguments![partial, count, norm];
    cuda.launch(&KERNELS, "root", Variant::of(&[]), Grid::blocks(1), &arguments);
}

pub fn count_not_finite(cuda: &Cuda, tensors: &[&Tensor], count: &mut Tensor) {
    count.clear();
    for tensor in tensors {
        let n = tensor.shape().elements();
        let arguments = arguments![*tensor, &mut *count, n];
        let variant = Variant::of(&[tensor.dtype()]);
        cuda.launch(&KERNELS, "count_not_finite", variant, Grid::numbers(n), &arguments);
    }
}

pub fn ema(cuda: &Cuda, average: &mut Tensor, value: &Tensor, decay: f32) {
    let n = value.shape().elements();
    let arguments = arguments![average, value, n, decay];
    let variant = Variant::of(&[value.dtype()]);
    cuda.launch(&KERNELS, "ema", variant, Grid::numbers(n), &arguments);
}
