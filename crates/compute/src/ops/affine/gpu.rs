//! Channels scaled and shifted on a GPU.

use crate::Tensor;
use crate::backward::Slot;
use crate::gpu::columns::Sum;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs};
use crate::ops::Activation;

const KERNELS: Source = Source { name: "affine", text: include_str!("kernel.wgsl") };

pub fn forward(
    gpu: &Gpu,
    x: &Tensor,
    (scale, bias): (&Tensor, Option<&Tensor>),
    activation: Activation,
    y: &mut Tensor,
) {
    let (n, width) = (x.shape().elements(), x.shape().width());
    let arguments = arguments![x, scale, bias, y, n, width, activation.code()];
    gpu.launch(&KERNELS, "affine", &Variant::of(&[x.dtype()]), pairs(n), &arguments);
}

/// Multiplies every row by a vector, in place.
pub fn multiply(gpu: &Gpu, matrix: &mut Tensor, vector: &Tensor) {
    let (n, width) = (matrix.shape().elements(), matrix.shape().width());
    let variant = Variant::of(&[matrix.dtype()]);
    gpu.launch(&KERNELS, "multiply", &variant, pairs(n), &arguments![matrix, vector, n, width]);
}

/// Σ gradient·x over all rows.
pub fn scale_gradient(gpu: &Gpu, x: &Tensor, gradient: &Tensor, slot: &mut Slot) {
    let rows_per_vector = x.shape().rows();
    let sum = Sum { a: gradient, b: Some(x), rows_per_vector };
    sum.run(gpu, &mut slot.tensor, 0, slot.add);
}
