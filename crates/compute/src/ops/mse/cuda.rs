//! The mean cost of errors on a GPU.

use super::LossFactors;
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "mse", text: include_str!("kernel.cu") };

/// Partial sums at most. Chosen: several blocks for each SM of the largest GPUs.
const MOST_BLOCKS: usize = 1024;

/// Floats of workspace that forward takes: partial sums in f64.
pub fn forward_floats(prediction: &Tensor) -> usize {
    2 * MOST_BLOCKS.min(prediction.shape().rows())
}

/// Floats of workspace that backward takes: one number in f64.
pub const BACKWARD_FLOATS: usize = 2;

pub fn forward(
    cuda: &CudaBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossFactors,
    workspace: &mut Tensor,
    mean: &mut Tensor,
) {
    let (rows, width) = (prediction.shape().rows(), prediction.shape().width());
    let share = rows.div_ceil(MOST_BLOCKS.min(rows));
    let blocks = rows.div_ceil(share);
    let variant = CudaVariant::of(&[prediction.dtype(), target.dtype()]);
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
    cuda.launch(&KERNELS, "mse_rows", variant, LaunchConfig::blocks(blocks), &arguments);
    let arguments = arguments![&*workspace, mask, mean, blocks, rows, width];
    cuda.launch(&KERNELS, "mse_finish", variant, LaunchConfig::blocks(1), &arguments);
}

/// gradient·cost'(prediction - target)·factor / count
pub fn backward(
    cuda: &CudaBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossFactors,
    gradient: &Tensor,
    workspace: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let (rows, width) = (prediction.shape().rows(), prediction.shape().width());
    let (weights, mask) = (factors.weights.as_ref(), factors.mask.as_ref());
    let (elements, thresholds) = (factors.elements.as_ref(), factors.thresholds.as_ref());
    let out = &mut slot.tensor;
    let p = pack(width, &[prediction, target, out]);
    let variant = CudaVariant::of(&[prediction.dtype(), target.dtype()]).with_pack(p);
    let arguments = arguments![mask, &mut *workspace, rows, width];
    cuda.launch(&KERNELS, "mse_count", variant, LaunchConfig::blocks(1), &arguments);
    let (packs, per_sample) = (rows * width / p, factors.rows_per_sample);
    let arguments = arguments![
        prediction,
        target,
        weights,
        mask,
        elements,
        thresholds,
        gradient,
        &*workspace,
        out,
        packs,
        width,
        per_sample,
        factors.kind as u32,
        slot.add
    ];
    cuda.launch(&KERNELS, "mse_backward", variant, LaunchConfig::per_element(packs), &arguments);
}
