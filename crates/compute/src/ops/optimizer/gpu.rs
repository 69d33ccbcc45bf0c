//! Steps on a GPU, a kernel for each tensor.

use super::adamw::AdamWUpdate;
use super::eight_bit::BLOCK;
use super::lion::LionUpdate;
use super::muon::MIN_NORM;
use super::schedule_free::{ScheduleFreeStep, ScheduleFreeUpdate};
use super::{AdamW, GradClip, Moments, Moments8bit, Muon, ScheduleFreeState};
use crate::Tensor;
use crate::codebook::Codebook;
use crate::gpu::{
    GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, pairs, sequence_args, singles,
};
use crate::random::RandomSequence;

const KERNELS: WgslSource = WgslSource { name: "optimizer", text: include_str!("kernel.wgsl") };
const MUON: WgslSource = WgslSource { name: "muon", text: include_str!("muon.wgsl") };
const EIGHT_BIT: WgslSource =
    WgslSource { name: "8-bit optimizer", text: include_str!("eight_bit.wgsl") };

/// Elements of a partial sum of squares. Chosen: a few hundred for each thread.
pub(super) const SHARE: usize = 1 << 16;

pub fn adamw(
    gpu: &GpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let numbers = step_args(step, clip);
    for ((param, gradient), Moments { first, second }) in
        params.iter_mut().zip(gradients).zip(state)
    {
        let Some(gradient) = *gradient else { continue };
        let (n, norm) = (param.shape().elements(), clip.map(|clip| &clip.norm));
        let tensors = arguments![param, gradient, first, second, norm, n];
        let arguments = [&tensors[..], &numbers].concat();
        gpu.launch(&KERNELS, "adamw", &GpuVariant::default(), singles(n), &arguments);
    }
}

pub fn lion(
    gpu: &GpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    means: &mut [Tensor],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let (norm, most) = clip_args(clip);
    let update = LionUpdate::new(step, step.scale).kernel_args().map(GpuArg::from);
    for ((param, gradient), mean) in params.iter_mut().zip(gradients).zip(means) {
        let Some(gradient) = *gradient else { continue };
        let n = param.shape().elements();
        let tensors = arguments![param, gradient, mean, norm, n, most];
        let arguments = [&tensors[..], &update].concat();
        gpu.launch(&KERNELS, "lion", &GpuVariant::default(), singles(n), &arguments);
    }
}

pub fn schedule_free(
    gpu: &GpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ScheduleFreeState],
    how: ScheduleFreeStep,
    clip: Option<&GradClip>,
) {
    let (norm, most) = clip_args(clip);
    let update = ScheduleFreeUpdate::new(how, how.step.scale).kernel_args().map(GpuArg::from);
    for ((param, gradient), ScheduleFreeState { z, second }) in
        params.iter_mut().zip(gradients).zip(state)
    {
        let Some(gradient) = *gradient else { continue };
        let n = param.shape().elements();
        let tensors = arguments![param, gradient, z, second, norm, n, most];
        let arguments = [&tensors[..], &update].concat();
        gpu.launch(&KERNELS, "schedule_free", &GpuVariant::default(), singles(n), &arguments);
    }
}

pub fn adamw_8bit(
    gpu: &GpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [Moments8bit],
    step: AdamW,
    clip: Option<&GradClip>,
) {
    let numbers = step_args(step, clip);
    let (signed, unsigned) = (Codebook::signed(), Codebook::unsigned());
    let books = gpu.table("codebooks", || [signed.table(), unsigned.table()].concat());
    let zeros = arguments![signed.zero(), unsigned.zero()];
    for ((param, gradient), Moments8bit { first, second }) in
        params.iter_mut().zip(gradients).zip(state)
    {
        let Some(gradient) = *gradient else { continue };
        let (n, norm) = (param.shape().elements(), clip.map(|clip| &clip.norm));
        let moments =
            arguments![&mut first.codes, &mut first.scales, &mut second.codes, &mut second.scales];
        let tensors = [&arguments![param, gradient][..], &moments, &[books, norm.into()]].concat();
        let arguments = [&tensors[..], &zeros, &[n.into()], &numbers].concat();
        gpu.launch(&EIGHT_BIT, "adamw_8bit", &GpuVariant::default(), n.div_ceil(BLOCK), &arguments);
    }
}

/// Floats of workspace of [`direction`]: partial sums of squares, and the root of them all.
pub fn squares_floats(elements: usize) -> usize {
    elements.div_ceil(SHARE) + 1
}

/// Updates the mean of gradients; X is the Nesterov direction, normalised.
pub fn direction(
    gpu: &GpuBackend,
    gradient: &Tensor,
    mean: &mut Tensor,
    config: Muon,
    clip: Option<&GradClip>,
    squares: &mut Tensor,
    x: &mut Tensor,
) {
    let (n, (norm, most)) = (gradient.shape().elements(), clip_args(clip));
    let (groups, plain) = (n.div_ceil(SHARE), GpuVariant::default());
    let rest = arguments![most, config.scale, config.momentum];
    let tensors = arguments![gradient, &mut *mean, &mut *squares, norm, n, SHARE];
    gpu.launch(&MUON, "update_momentum", &plain, groups, &[&tensors[..], &rest].concat());
    gpu.launch(&MUON, "root_of_all", &plain, 1, &arguments![&mut *squares, groups]);
    let variant = GpuVariant::of(&[x.dtype()]);
    let tensors = arguments![gradient, &*mean, &*squares, x, norm, n, groups, MIN_NORM];
    gpu.launch(&MUON, "direction", &variant, pairs(n), &[&tensors[..], &rest].concat());
}

/// Updates a matrix along X.
pub fn apply_update(
    gpu: &GpuBackend,
    param: &mut Tensor,
    x: &Tensor,
    config: Muon,
    clip: Option<&GradClip>,
) {
    let (n, (norm, _)) = (param.shape().elements(), clip_args(clip));
    let (remains, rate) = config.lengths(param.shape());
    let arguments = arguments![param, x, norm, n, config.scale, remains, rate];
    gpu.launch(&MUON, "apply_update", &GpuVariant::of(&[x.dtype()]), singles(n), &arguments);
}

/// The norm of all gradients, and the maximum norm.
pub(super) fn clip_args(clip: Option<&GradClip>) -> (Option<&Tensor>, f32) {
    (clip.map(|clip| &clip.norm), clip.map_or(0.0, |clip| clip.max_norm))
}

/// What kernels that make a step are told last.
fn step_args(step: AdamW, clip: Option<&GradClip>) -> Vec<GpuArg<'static>> {
    let most = clip.map_or(0.0, |clip| clip.max_norm);
    let update = AdamWUpdate::new(step, step.scale).kernel_args();
    [most].into_iter().chain(update).map(GpuArg::from).collect()
}

/// Floats of workspace of [`global_norm`]: two for each share.
pub fn norm_floats(gradients: &[&Tensor]) -> usize {
    2 * gradients.iter().map(|gradient| n_shares(gradient)).sum::<usize>()
}

fn n_shares(gradient: &Tensor) -> usize {
    gradient.shape().elements().div_ceil(SHARE)
}

pub fn global_norm(
    gpu: &GpuBackend,
    gradients: &[&Tensor],
    workspace: &mut Tensor,
    norm: &mut Tensor,
) {
    let (mut count, variant) = (0, GpuVariant::default());
    for gradient in gradients {
        let (n, groups) = (gradient.shape().elements(), n_shares(gradient));
        let arguments = arguments![*gradient, &mut *workspace, n, SHARE, count];
        gpu.launch(&KERNELS, "squares", &variant, groups, &arguments);
        count += groups;
    }
    gpu.launch(&KERNELS, "root", &variant, 1, &arguments![&*workspace, norm, count]);
}

pub fn count_not_finite(gpu: &GpuBackend, tensors: &[&Tensor], count: &mut Tensor) {
    count.fill_zeros();
    for tensor in tensors {
        let (n, variant) = (tensor.shape().elements(), GpuVariant::of(&[tensor.dtype()]));
        let arguments = arguments![*tensor, &mut *count, n];
        gpu.launch(&KERNELS, "count_not_finite", &variant, singles(n), &arguments);
    }
}

pub fn ema(gpu: &GpuBackend, ema: &mut Tensor, value: &Tensor, decay: f32) {
    let (n, variant) = (value.shape().elements(), GpuVariant::of(&[value.dtype()]));
    gpu.launch(&KERNELS, "ema", &variant, singles(n), &arguments![ema, value, n, decay]);
}

pub fn stochastic_round(
    gpu: &GpuBackend,
    values: &Tensor,
    rounded: &mut Tensor,
    sequence: RandomSequence,
) {
    let (n, variant) = (values.shape().elements(), GpuVariant::of(&[rounded.dtype()]));
    let arguments = [&arguments![values, rounded, n][..], &sequence_args(sequence)].concat();
    gpu.launch(&KERNELS, "stochastic_round", &variant, pairs(n), &arguments);
}
