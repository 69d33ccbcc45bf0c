//! Channels scaled and shifted on a GPU.

use crate::Tensor;
use crate::backward::GradientSlot;
use crate::gpu::columns::GpuColumnSum;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs};
use crate::ops::Activation;

const KERNELS: WgslSource = WgslSource { name: "affine", text: include_str!("kernel.wgsl") };

pub fn forward(
    gpu: &GpuBackend,
    x: &Tensor,
    scale: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    y: &mut Tensor,
) {
    let (n, width) = (x.shape().elements(), x.shape().width());
    let arguments = arguments![x, scale, bias, y, n, width, activation.code()];
    gpu.launch(&KERNELS, "affine", &GpuVariant::of(&[x.dtype()]), pairs(n), &arguments);
}

/// Multiplies every row by a vector, in place.
pub fn multiply(gpu: &GpuBackend, matrix: &mut Tensor, vector: &Tensor) {
    let (n, width) = (matrix.shape().elements(), matrix.shape().width());
    let variant = GpuVariant::of(&[matrix.dtype()]);
    gpu.launch(&KERNELS, "multiply", &variant, pairs(n), &arguments![matrix, vector, n, width]);
}

/// Σ gradient·x over all rows.
pub fn scale_gradient(gpu: &GpuBackend, x: &Tensor, gradient: &Tensor, slot: &mut GradientSlot) {
    let rows_per_vector = x.shape().rows();
    let sum = GpuColumnSum { a: gradient, b: Some(x), rows_per_vector };
    sum.run(gpu, &mut slot.tensor, 0, slot.add);
}
