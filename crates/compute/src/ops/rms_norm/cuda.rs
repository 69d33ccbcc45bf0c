//! Root-mean-square norm on a card.

use crate::Tensor;
use crate::backward::Slot;
use crate::cuda::columns::{Sum, statistics};
use crate::cuda::{Cuda, Grid, Source, Variant, arguments, pack};

const KERNELS: Source = Source { name: "rms_norm", text: include_str!("kernel.cu") };

pub fn forward(cuda: &Cuda, x: &Tensor, weight: Option<&Tensor>, epsilon: f32, y: &mut Tensor) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    let p = pack(width, &[x, weight.unwrap_or(x), y]);
    let variant = Variant::of(&[x.dtype()]).by(p);
    let arguments = arguments![x, weight, y, rows, width, epsilon];
    cuda.launch(&KERNELS, "rms_norm", variant, Grid::rows(rows), &arguments);
}

pub fn backward(
    cuda: &Cuda,
    x: &Tensor,
    weight: Option<&Tensor>,
    gradient: &Tensor,
    epsilon: f32,
    slot: &mut Slot,
) {
    let (rows, width, out) = (x.shape().rows(), x.shape().width(), &mut slot.tensor);
    let p = pack(width, &[x, weight.unwrap_or(x), gradient, out]);
    let variant = Variant::of(&[x.dtype(), out.dtype()]).by(p);
    let arguments = arguments![x, weight, gradient, out, rows, width, epsilon, slot.add];
    cuda.launch(&KERNELS, "rms_norm_backward", variant, Grid::rows(rows), &arguments);
}

/// Σ gradient · x̂ over all rows. The room is for statistics of rows, and for sums of shares.
pub fn weight_gradient(
    cuda: &Cuda,
    x: &Tensor,
    gradient: &Tensor,
    epsilon: f32,
    [of_rows, shares]: [&mut Tensor; 2],
    slot: &mut Slot,
) {
    statistics(cuda, x, epsilon, false, of_rows);
    let rows_per_vector = x.shape().rows();
    let sum = Sum { a: gradient, b: Some(x), statistics: Some(of_rows), rows_per_vector };
    sum.run_in_shares(cuda, shares, &mut slot.tensor, slot.add);
}
