//! The mean squared error on a card.

use super::Factors;
use crate::Tensor;
use crate::backward::Slot;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments, pack};

const KERNELS: Source = Source { name: "mse", text: include_str!("kernel.cu") };

/// Partial sums at most. Chosen: several blocks for each processor of the largest cards.
const MOST_BLOCKS: usize = 1024;

/// Floats of workspace that forward takes: partial sums in f64.
pub fn forward_floats(prediction: &Tensor) -> usize {
    2 * MOST_BLOCKS.min(prediction.shape().rows())
}

/// Floats of workspace that backward takes: one number in f64.
pub const BACKWARD_FLOATS: usize = 2;

pub fn forward(
    cuda: &Cuda,
    (prediction, target): (&Tensor, &Tensor),
    factors: &Factors,
    room: &mut Tensor,
    mean: &mut Tensor,
) {
    let (rows, width) = (prediction.shape().rows(), prediction.shape().width());
    let share = rows.div_ceil(MOST_BLOCKS.min(rows));
    let blocks = rows.div_ceil(share);
    let variant = Variant::of(&[prediction.dtype(), target.dtype()]);
    let (weights, mask) = (factors.weights.as_ref(), factors.mask.as_ref());
    let per_sample = factors.rows_per_sample;
    let arguments =
        arguments![prediction, target, weights, mask, &mut *room, rows, width, per_sample, share];
    cuda.launch(&KERNELS, "mse_rows", variant, Grid::blocks(blocks), &arguments);
    let arguments = arguments![&*room, mask, mean, blocks, rows, width];
    cuda.launch(&KERNELS, "mse_finish", variant, Grid::blocks(1), &arguments);
}

/// 2·gradient·(prediction - target)·factor / count
pub fn backward(
    cuda: &Cuda,
    (prediction, target): (&Tensor, &Tensor),
    factors: &Factors,
    gradient: &Tensor,
    room: &mut Tensor,
    slot: &mut Slot,
) {
    let (rows, width) = (prediction.shape().rows(), prediction.shape().width());
    let (weights, mask) = (factors.weights.as_ref(), factors.mask.as_ref());
    let out = &mut slot.tensor;
    let p = pack(width, &[prediction, target, out]);
    let variant = Variant::of(&[prediction.dtype(), target.dtype()]).by(p);
    let arguments = arguments![mask, &mut *room, rows, width];
    cuda.launch(&KERNELS, "mse_count", variant, Grid::blocks(1), &arguments);
    let (packs, per_sample) = (rows * width / p, factors.rows_per_sample);
    let arguments = arguments![
        prediction, target, weights, mask, gradient, &*room, out, packs, width, per_sample,
        slot.add
    ];
    cuda.launch(&KERNELS, "mse_backward", variant, Grid::numbers(packs), &arguments);
}
