//! Norms of rows on a GPU.

use super::Weight;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};
use crate::quantised;

const KERNELS: CudaSource = CudaSource { name: "dora", text: include_str!("kernel.cu") };

/// Numbers of workspace, f32: a quantised weight is read whole for once.
pub fn workspace_floats(weight: Weight<'_>) -> usize {
    match weight {
        Weight::Dense(_) => 0,
        Weight::Quantised(quantised) => quantised.shape().elements(),
    }
}

pub fn row_norms(
    cuda: &CudaBackend,
    weight: Weight<'_>,
    workspace: &mut Tensor,
    norms: &mut Tensor,
) {
    let (rows, width) = (weight.shape().rows(), weight.shape().width());
    let numbers = match weight {
        Weight::Dense(var) => var.tensor(),
        Weight::Quantised(quantised) => {
            let to = (&mut *workspace).into();
            quantised::cuda::dequantise(cuda, quantised, crate::Dtype::F32, to);
            &*workspace
        }
    };
    let arguments = arguments![numbers, norms, rows, width];
    let variant = CudaVariant::of(&[numbers.dtype()]);
    cuda.launch(&KERNELS, "row_norms", variant, LaunchConfig::per_row(rows), &arguments);
}

/// √(norm² + scale·b·cross) for each row b of `up`.
pub fn adapted_norms(
    cuda: &CudaBackend,
    norms: &Tensor,
    up: &Tensor,
    cross: &Tensor,
    scale: f32,
    adapted: &mut Tensor,
) {
    let (rows, rank) = (up.shape().rows(), up.shape().width());
    let arguments = arguments![norms, up, cross, scale, adapted, rows, rank];
    cuda.launch(
        &KERNELS,
        "adapted_norms",
        CudaVariant::of(&[]),
        LaunchConfig::per_row(rows),
        &arguments,
    );
}

pub fn divide(cuda: &CudaBackend, x: &Tensor, by: &Tensor, out: &mut Tensor, add: bool) {
    let n = x.shape().elements();
    let arguments = arguments![x, by, out, n, add];
    cuda.launch(&KERNELS, "divide", CudaVariant::of(&[]), LaunchConfig::per_element(n), &arguments);
}
