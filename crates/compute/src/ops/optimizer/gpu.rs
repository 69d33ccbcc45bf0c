//! Steps on a GPU, a kernel for each tensor.

use super::adamw::Update;
use super::eight_bit::BLOCK;
use super::muon::LEAST_NORM;
use super::{AdamW, Clip, Moments, Moments8, Muon};
use crate::Tensor;
use crate::codebook::Codebook;
use crate::gpu::{Argument, Gpu, Source, Variant, arguments, pairs, singles};

const KERNELS: Source = Source { name: "optimizer", text: include_str!("kernel.wgsl") };
const MUON: Source = Source { name: "muon", text: include_str!("muon.wgsl") };
const EIGHT_BIT: Source = Source { name: "8-bit optimizer", text: include_str!("eight_bit.wgsl") };

/// Numbers of a partial sum of squares. Chosen: a few hundred for each thread.
const SHARE: usize = 1 << 16;

pub fn adamw(
    gpu: &Gpu,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments],
    (step, clip): (AdamW, Option<&Clip>),
) {
    let numbers = step_numbers(step, clip);
    for ((param, gradient), Moments { first, second }) in
        params.iter_mut().zip(gradients).zip(state)
    {
        let Some(gradient) = *gradient else { continue };
        let (n, norm) = (param.shape().elements(), clip.map(|clip| &clip.norm));
        let tensors = arguments![param, gradient, first, second, norm, n];
        let arguments = [&tensors[..], &numbers].concat();
        gpu.launch(&KERNELS, "adamw", &Variant::default(), singles(n), &arguments);
    }
}

pub fn adamw_8bit(
    gpu: &Gpu,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments8],
    (step, clip): (AdamW, Option<&Clip>),
) {
    let numbers = step_numbers(step, clip);
    let (signed, unsigned) = (Codebook::signed(), Codebook::unsigned());
    let books = gpu.table("codebooks", || [signed.table(), unsigned.table()].concat());
    let zeros = arguments![signed.zero(), unsigned.zero()];
    for ((param, gradient), Moments8 { first, second }) in
        params.iter_mut().zip(gradients).zip(state)
    {
        let Some(gradient) = *gradient else { continue };
        let (n, norm) = (param.shape().elements(), clip.map(|clip| &clip.norm));
        let moments =
            arguments![&mut first.codes, &mut first.scales, &mut second.codes, &mut second.scales];
        let tensors = [&arguments![param, gradient][..], &moments, &[books, norm.into()]].concat();
        let arguments = [&tensors[..], &zeros, &[n.into()], &numbers].concat();
        gpu.launch(&EIGHT_BIT, "adamw_8bit", &Variant::default(), n.div_ceil(BLOCK), &arguments);
    }
}

/// Floats of workspace of [`direction`]: partial sums of squares, and the root of them all.
pub fn squares_floats(elements: usize) -> usize {
    elements.div_ceil(SHARE) + 1
}

/// Moves the mean of gradients on, and writes where Muon goes.
pub fn direction(
    gpu: &Gpu,
    gradient: &Tensor,
    mean: &mut Tensor,
    (how, clip): (Muon, Option<&Clip>),
    squares: &mut Tensor,
    x: &mut Tensor,
) {
    let (n, (norm, most)) = (gradient.shape().elements(), clip_numbers(clip));
    let (groups, plain) = (n.div_ceil(SHARE), Variant::default());
    let rest = arguments![most, how.scale, how.momentum];
    let tensors = arguments![gradient, &mut *mean, &mut *squares, norm, n, SHARE];
    gpu.launch(&MUON, "move_mean", &plain, groups, &[&tensors[..], &rest].concat());
    gpu.launch(&MUON, "root_of_all", &plain, 1, &arguments![&mut *squares, groups]);
    let variant = Variant::of(&[x.dtype()]);
    let tensors = arguments![gradient, &*mean, &*squares, x, norm, n, groups, LEAST_NORM];
    gpu.launch(&MUON, "direction", &variant, pairs(n), &[&tensors[..], &rest].concat());
}

/// Moves a matrix along X.
pub fn follow(gpu: &Gpu, param: &mut Tensor, x: &Tensor, (how, clip): (Muon, Option<&Clip>)) {
    let (n, (norm, _)) = (param.shape().elements(), clip_numbers(clip));
    let (remains, rate) = how.lengths(param.shape());
    let arguments = arguments![param, x, norm, n, how.scale, remains, rate];
    gpu.launch(&MUON, "follow", &Variant::of(&[x.dtype()]), singles(n), &arguments);
}

/// The norm of all gradients, and the longest that is left as it is.
fn clip_numbers(clip: Option<&Clip>) -> (Option<&Tensor>, f32) {
    (clip.map(|clip| &clip.norm), clip.map_or(0.0, |clip| clip.max))
}

/// What kernels that make a step are told last.
fn step_numbers(step: AdamW, clip: Option<&Clip>) -> Vec<Argument<'static>> {
    let most = clip.map_or(0.0, |clip| clip.max);
    let update = Update::new(step, step.scale).numbers();
    [most].into_iter().chain(update).map(Argument::from).collect()
}

/// Floats of workspace of [`global_norm`]: two for each share.
pub fn norm_floats(gradients: &[&Tensor]) -> usize {
    2 * gradients.iter().map(|gradient| n_shares(gradient)).sum::<usize>()
}

fn n_shares(gradient: &Tensor) -> usize {
    gradient.shape().elements().div_ceil(SHARE)
}

pub fn global_norm(gpu: &Gpu, gradients: &[&Tensor], room: &mut Tensor, norm: &mut Tensor) {
    let (mut count, variant) = (0, Variant::default());
    for gradient in gradients {
        let (n, groups) = (gradient.shape().elements(), n_shares(gradient));
        let arguments = arguments![*gradient, &mut *room, n, SHARE, count];
        gpu.launch(&KERNELS, "squares", &variant, groups, &arguments);
        count += groups;
    }
    gpu.launch(&KERNELS, "root", &variant, 1, &arguments![&*room, norm, count]);
}

pub fn count_not_finite(gpu: &Gpu, tensors: &[&Tensor], count: &mut Tensor) {
    count.clear();
    for tensor in tensors {
        let (n, variant) = (tensor.shape().elements(), Variant::of(&[tensor.dtype()]));
        let arguments = arguments![*tensor, &mut *count, n];
        gpu.launch(&KERNELS, "count_not_finite", &variant, singles(n), &arguments);
    }
}

pub fn ema(gpu: &Gpu, average: &mut Tensor, value: &Tensor, decay: f32) {
    let (n, variant) = (value.shape().elements(), Variant::of(&[value.dtype()]));
    gpu.launch(&KERNELS, "ema", &variant, singles(n), &arguments![average, value, n, decay]);
}
