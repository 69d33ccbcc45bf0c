//! The cross entropy on a GPU: what is done to a chunk of the logits.

use std::ops::Range;

use super::count;
use crate::Tensor;
use crate::gpu::{Gpu, Source, Variant, arguments, singles};

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

/// The mean, and each row's log-sum if that is kept.
pub fn finish(
    gpu: &Gpu,
    folds: &Tensor,
    targets: &Tensor,
    log_sums: Option<&mut Tensor>,
    mean: &mut Tensor,
) {
    let (rows, counted) = (folds.shape().rows(), count(targets) as f32);
    let arguments = arguments![folds, targets, log_sums, mean, rows, counted];
    gpu.launch(&KERNELS, "finish", &Variant::default(), 1, &arguments);
}

/// Turns logits into their gradients: (softmax - 1 at the target) · gradient / counted rows
pub fn slopes(
    gpu: &Gpu,
    targets: &Tensor,
    log_sums: &Tensor,
    gradient: &Tensor,
    range: &Range<usize>,
    logits: &mut Tensor,
) {
    let (n, columns) = (logits.shape().elements(), logits.shape().width());
    let counted = count(targets) as f32;
    let arguments =
        arguments![logits, targets, log_sums, gradient, n, columns, range.start, counted];
    gpu.launch(&KERNELS, "slopes", &Variant::default(), singles(n), &arguments);
}
