//! The cross entropy on a card: what is done to a chunk of the logits.

use std::ops::Range;

use super::count;
use crate::Tensor;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments};

const KERNELS: Source = Source { name: "cross_entropy", text: include_str!("kernel.cu") };

/// Takes some columns of the logits into account.
pub fn fold(
    cuda: &Cuda,
    logits: &Tensor,
    targets: &Tensor,
    range: &Range<usize>,
    folds: &mut Tensor,
) {
    let (rows, columns) = (logits.shape().rows(), logits.shape().width());
    let arguments = arguments![logits, targets, folds, columns, range.start];
    cuda.launch(&KERNELS, "fold", Variant::of(&[]), Grid::blocks(rows), &arguments);
}

/// The mean, and each row's log-sum if that is kept.
pub fn finish(
    cuda: &Cuda,
    folds: &Tensor,
    targets: &Tensor,
    log_sums: Option<&mut Tensor>,
    mean: &mut Tensor,
) {
    let counted = count(targets) as f64;
    let rows = folds.shape().rows();
    let arguments = arguments![folds, targets, log_sums, mean, rows, counted];
    cuda.launch(&KERNELS, "finish", Variant::of(&[]), Grid::blocks(1), &arguments);
}

/// Turns logits into their gradients: (softmax - 1 at the target) · gradient / counted rows
pub fn slopes(
    cuda: &Cuda,
    targets: &Tensor,
    log_sums: &Tensor,
    gradient: &Tensor,
    range: &Range<usize>,
    logits: &mut Tensor,
) {
    let (n, columns) = (logits.shape().elements(), logits.shape().width());
    let counted = count(targets) as f64;
    let arguments =
        arguments![logits, targets, log_sums, gradient, n, columns, range.start, counted];
    cuda.launch(&KERNELS, "slopes", Variant::of(&[]), Grid::numbers(n), &arguments);
}
