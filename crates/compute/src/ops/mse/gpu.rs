//! The mean cost of errors on a GPU.

use super::LossFactors;
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "mse", text: include_str!("kernel.wgsl") };

/// Partial sums at most. Chosen: several workgroups for each core of the largest GPUs.
const MOST_GROUPS: usize = 1024;

/// Floats of workspace that forward takes: partial sums.
pub fn forward_floats(prediction: &Tensor) -> usize {
    MOST_GROUPS.min(prediction.shape().rows())
}

/// Floats of workspace that backward takes.
pub const BACKWARD_FLOATS: usize = 1;

pub fn forward(
    gpu: &GpuBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossFactors,
    workspace: &mut Tensor,
    mean: &mut Tensor,
) {
    let (rows, width) = (prediction.shape().rows(), prediction.shape().width());
    let share = rows.div_ceil(MOST_GROUPS.min(rows));
    let groups = rows.div_ceil(share);
    let variant = GpuVariant::of(&[prediction.dtype(), target.dtype()]);
    let (weights, mask) = (factors.weights.as_ref(), factors.mask.as_ref());
    let (elements, thresholds) = (factors.elements.as_ref(), factors.thresholds.as_ref());
    let per_sample = factors.rows_per_sample;
    let arguments = arguments![
        prediction,
        target,
        weights,
        mask,
        elements,
        thresholds,
        &mut *workspace,
        rows,
        width,
        per_sample,
        share,
        factors.kind as u32
    ];
    gpu.launch(&KERNELS, "mse_rows", &variant, groups, &arguments);
    let arguments = arguments![&*workspace, mask, mean, groups, rows, width];
    gpu.launch(&KERNELS, "mse_finish", &variant, 1, &arguments);
}

/// gradient·cost'(prediction - target)·factor / count
pub fn backward(
    gpu: &GpuBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossFactors,
    gradient: &Tensor,
    workspace: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let (n, rows, width) =
        (prediction.shape().elements(), prediction.shape().rows(), prediction.shape().width());
    let (weights, mask) = (factors.weights.as_ref(), factors.mask.as_ref());
    let (elements, thresholds) = (factors.elements.as_ref(), factors.thresholds.as_ref());
    let variant = GpuVariant::of(&[prediction.dtype(), target.dtype()]);
    let counted =
        [&[GpuArg::None][..], &arguments![mask, &mut *workspace, 0usize, rows, width]].concat();
    gpu.launch(&KERNELS, "mse_finish", &variant, 1, &counted);
    let (out, per_sample, add) = (&mut slot.tensor, factors.rows_per_sample, slot.add);
    let tensors = arguments![
        prediction,
        target,
        weights,
        mask,
        elements,
        thresholds,
        gradient,
        &*workspace,
        out
    ];
    let kind = factors.kind as u32;
    let arguments = [&tensors[..], &arguments![n, width, per_sample, kind, add]].concat();
    gpu.launch(&KERNELS, "mse_backward", &variant, pairs(n), &arguments);
}
