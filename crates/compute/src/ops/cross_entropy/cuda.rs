//! The cross entropy on a GPU: what is done to a piece of the logits.

use std::ops::Range;

use super::count;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "cross_entropy", text: include_str!("kernel.cu") };

/// Takes some columns of the logits into account.
pub fn fold(
    cuda: &CudaBackend,
    logits: &Tensor,
    targets: &Tensor,
    range: &Range<usize>,
    folds: &mut Tensor,
) {
    let (rows, columns) = (logits.shape().rows(), logits.shape().width());
    let arguments = arguments![logits, targets, folds, columns, range.start];
    let variant = CudaVariant::of(&[logits.dtype()]).with_pack(pack(columns, &[logits]));
    cuda.launch(&KERNELS, "fold", variant, LaunchConfig::blocks(rows), &arguments);
}

/// The mean over the rows that count.
pub fn finish(cuda: &CudaBackend, folds: &Tensor, targets: &Tensor, mean: &mut Tensor) {
    let (rows, counted) = (folds.shape().rows(), count(targets) as f64);
    let arguments = arguments![folds, targets, mean, rows, counted];
    cuda.launch(&KERNELS, "finish", CudaVariant::of(&[]), LaunchConfig::blocks(1), &arguments);
}

/// Turns logits into the gradients of their rows' losses: softmax - 1 at the target
pub fn logit_gradients(
    cuda: &CudaBackend,
    targets: &Tensor,
    folds: &Tensor,
    range: &Range<usize>,
    logits: &mut Tensor,
) {
    let columns = logits.shape().width();
    let p = pack(columns, &[logits]);
    let (packs, variant) =
        (logits.shape().elements() / p, CudaVariant::of(&[logits.dtype()]).with_pack(p));
    let arguments = arguments![logits, targets, folds, packs, columns, range.start];
    cuda.launch(&KERNELS, "logit_gradients", variant, LaunchConfig::per_element(packs), &arguments);
}

/// Multiplies each row of x by its weight.
pub fn scale_rows(cuda: &CudaBackend, weights: &Tensor, x: &mut Tensor) {
    let (n, width) = (x.shape().elements(), x.shape().width());
    let p = pack(width, &[x]);
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    let arguments = arguments![x, weights, n / p, width];
    cuda.launch(&KERNELS, "scale_rows", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// Writes share · gradient · sums, or adds it to what is there.
pub fn add_scaled(
    cuda: &CudaBackend,
    sums: &Tensor,
    gradient: &Tensor,
    share: f32,
    to: &mut Tensor,
    add: bool,
) {
    let n = sums.shape().elements();
    let p = pack(n, &[sums, to]);
    let variant = CudaVariant::of(&[to.dtype()]).with_pack(p);
    let arguments = arguments![sums, gradient, share, to, n / p, add];
    cuda.launch(&KERNELS, "add_scaled", variant, LaunchConfig::per_element(n / p), &arguments);
}
