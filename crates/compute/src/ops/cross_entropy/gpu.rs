//! The cross entropy on a GPU: what is done to a piece of the logits.

use std::ops::Range;

use super::count;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs, singles};

const KERNELS: WgslSource = WgslSource { name: "cross_entropy", text: include_str!("kernel.wgsl") };

/// Takes some columns of the logits into account.
pub fn fold(
    gpu: &GpuBackend,
    logits: &Tensor,
    targets: &Tensor,
    range: &Range<usize>,
    folds: &mut Tensor,
) {
    let (rows, columns) = (logits.shape().rows(), logits.shape().width());
    let arguments = arguments![logits, targets, folds, columns, range.start];
    gpu.launch(&KERNELS, "fold", &GpuVariant::default(), rows, &arguments);
}

/// The mean over the rows that count.
pub fn finish(gpu: &GpuBackend, folds: &Tensor, targets: &Tensor, mean: &mut Tensor) {
    let (rows, counted) = (folds.shape().rows(), count(targets) as f32);
    let arguments = arguments![folds, targets, mean, rows, counted];
    gpu.launch(&KERNELS, "finish", &GpuVariant::default(), 1, &arguments);
}

/// Turns logits into the gradients of their rows' losses: softmax - 1 at the target
pub fn logit_gradients(
    gpu: &GpuBackend,
    targets: &Tensor,
    folds: &Tensor,
    range: &Range<usize>,
    logits: &mut Tensor,
) {
    let (n, columns) = (logits.shape().elements(), logits.shape().width());
    let arguments = arguments![logits, targets, folds, n, columns, range.start];
    gpu.launch(&KERNELS, "logit_gradients", &GpuVariant::default(), singles(n), &arguments);
}

/// Multiplies each row of x by its weight.
pub fn scale_rows(gpu: &GpuBackend, weights: &Tensor, x: &mut Tensor) {
    let (n, width) = (x.shape().elements(), x.shape().width());
    let variant = GpuVariant::of(&[x.dtype()]);
    let arguments = arguments![weights, x, n, width];
    gpu.launch(&KERNELS, "scale_rows", &variant, pairs(n), &arguments);
}

/// Writes share · gradient · sums, or adds it to what is there.
pub fn add_scaled(
    gpu: &GpuBackend,
    sums: &Tensor,
    gradient: &Tensor,
    share: f32,
    to: &mut Tensor,
    add: bool,
) {
    let (n, variant) = (sums.shape().elements(), GpuVariant::of(&[to.dtype()]));
    let arguments = arguments![sums, gradient, to, n, share, add];
    gpu.launch(&KERNELS, "add_scaled", &variant, pairs(n), &arguments);
}
