//! Channels scaled and shifted on a GPU.

use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cuda::columns::CudaColumnSum;
use crate::cuda::{CudaArg, CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};
use crate::ops::Activation;

const KERNELS: CudaSource = CudaSource { name: "affine", text: include_str!("kernel.cu") };

pub fn forward(
    cuda: &CudaBackend,
    x: &Tensor,
    scale: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    y: &mut Tensor,
) {
    let (n, width) = (x.shape().elements(), x.shape().width());
    let p = pack(width, &[x, scale, bias.unwrap_or(scale), y]);
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    let arguments = arguments![x, scale, bias, y, n / p, width, activation.code()];
    cuda.launch(&KERNELS, "affine", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// Multiplies every row by a vector, in place.
pub fn multiply(cuda: &CudaBackend, matrix: &mut Tensor, vector: &Tensor) {
    let (n, width) = (matrix.shape().elements(), matrix.shape().width());
    let p = pack(width, &[matrix, vector]);
    let variant = CudaVariant::of(&[matrix.dtype()]).with_pack(p);
    let matrix_arg = CudaArg::from(matrix);
    let (packs, width) = (CudaArg::from(n / p), CudaArg::from(width));
    let none = CudaArg::from(Activation::None.code());
    let arguments = [matrix_arg, vector.into(), CudaArg::NONE, matrix_arg, packs, width, none];
    cuda.launch(&KERNELS, "affine", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// Σ gradient·x over all rows.
pub fn scale_gradient(cuda: &CudaBackend, x: &Tensor, gradient: &Tensor, slot: &mut GradientSlot) {
    let rows_per_vector = x.shape().rows();
    let sum = CudaColumnSum { a: gradient, b: Some(x), statistics: None, rows_per_vector };
    sum.run(cuda, &mut slot.tensor, 0, slot.add);
}
