//! Channels scaled and shifted on a card.

use crate::Tensor;
use crate::backward::Slot;
use crate::cuda::columns::Sum;
use crate::cuda::{Argument, Cuda, Grid, Source, Variant, arguments, pack};
use crate::ops::Activation;

const KERNELS: Source = Source { name: "affine", text: include_str!("kernel.cu") };

pub fn forward(
    cuda: &Cuda,
    x: &Tensor,
    (scale, bias): (&Tensor, Option<&Tensor>),
    activation: Activation,
    y: &mut Tensor,
) {
    let (n, width) = (x.shape().elements(), x.shape().width());
    let p = pack(width, &[x, scale, bias.unwrap_or(scale), y]);
    let variant = Variant::of(&[x.dtype()]).by(p);
    let arguments = arguments![x, scale, bias, y, n / p, width, activation.code()];
    cuda.launch(&KERNELS, "affine", variant, Grid::numbers(n / p), &arguments);
}

/// Multiplies every row by a vector, in place.
pub fn multiply(cuda: &Cuda, matrix: &mut Tensor, vector: &Tensor) {
    let (n, width) = (matrix.shape().elements(), matrix.shape().width());
    let p = pack(width, &[matrix, vector]);
    let variant = Variant::of(&[matrix.dtype()]).by(p);
    let place = Argument::from(matrix);
    let (packs, width) = (Argument::from(n / p), Argument::from(width));
    let none = Argument::from(Activation::None.code());
    let arguments = [place, vector.into(), Argument::NONE, place, packs, width, none];
    cuda.launch(&KERNELS, "affine", variant, Grid::numbers(n / p), &arguments);
}

/// Σ gradient·x over all rows.
pub fn scale_gradient(cuda: &Cuda, x: &Tensor, gradient: &Tensor, slot: &mut Slot) {
    let rows_per_vector = x.shape().rows();
    let sum = Sum { a: gradient, b: Some(x), statistics: None, rows_per_vector };
    sum.run(cuda, &mut slot.tensor, 0, slot.add);
}
