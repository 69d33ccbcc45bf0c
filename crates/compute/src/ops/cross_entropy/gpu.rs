//! The cross entropy on a GPU: what is done to a piece of the logits.

use std::ops::Range;

use super::count;
use crate::Tensor;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs, singles};

const KERNELS: Source = Source { name: "cross_entropy", text: include_str!("kernel.wgsl") };

/// Takes some columns of the logits into account.
pub fn fold(
    gpu: &Gpu,
    logits: &Tensor,
    targets: &Tensor,
    range: &Range<usize>,
    folds: &mut Tensor,
) {
    let (rows, columns) = (logits.shape().rows(), logits.shape().width());
    let arguments = arguments![logits, targets, folds, columns, range.start];
    gpu.launch(&KERNELS, "fold", &Variant::default(), rows, &arguments);
}

/// The mean over the rows that count.
pub fn finish(gpu: &Gpu, folds: &Tensor, targets: &Tensor, mean: &mut Tensor) {
    let (rows, counted) = (folds.shape().rows(), count(targets) as f32);
    let arguments = arguments![folds, targets, mean, rows, counted];
    gpu.launch(&KERNELS, "finish", &Variant::default(), 1, &arguments);
}

/// Turns logits into the gradients of their rows' losses: softmax - 1 at the target
pub fn slopes(
    gpu: &Gpu,
    targets: &Tensor,
    folds: &Tensor,
    range: &Range<usize>,
    logits: &mut Tensor,
) {
    let (n, columns) = (logits.shape().elements(), logits.shape().width());
    let arguments = arguments![logits, targets, folds, n, columns, range.start];
    gpu.launch(&KERNELS, "slopes", &Variant::default(), singles(n), &arguments);
}

/// Writes share · gradient · sums, or adds it to what is there.
pub fn add_scaled(
    gpu: &Gpu,
    sums: &Tensor,
    (gradient, share): (&Tensor, f32),
    to: &mut Tensor,
    add: bool,
) {
    let (n, variant) = (sums.shape().elements(), Variant::of(&[to.dtype()]));
    let arguments = arguments![sums, gradient, to, n, share, add];
    gpu.launch(&KERNELS, "add_scaled", &variant, pairs(n), &arguments);
}
