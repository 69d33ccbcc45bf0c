//! Norms of rows on a GPU.

use super::Weight;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, singles};
use crate::quantised;

const KERNELS: WgslSource = WgslSource { name: "dora", text: include_str!("kernel.wgsl") };

/// Numbers of workspace, f32: a quantised weight is read whole for once.
pub fn workspace_floats(weight: Weight<'_>) -> usize {
    match weight {
        Weight::Dense(_) => 0,
        Weight::Quantised(quantised) => quantised.shape().elements(),
    }
}

pub fn row_norms(gpu: &GpuBackend, weight: Weight<'_>, workspace: &mut Tensor, norms: &mut Tensor) {
    let (rows, width) = (weight.shape().rows(), weight.shape().width());
    let numbers = match weight {
        Weight::Dense(var) => var.tensor(),
        Weight::Quantised(quantised) => {
            quantised::gpu::dequantise(gpu, quantised, workspace);
            &*workspace
        }
    };
    let variant = GpuVariant::of(&[numbers.dtype()]);
    gpu.launch(&KERNELS, "row_norms", &variant, rows, &arguments![numbers, norms, width]);
}

/// √(norm² + scale·b·cross) for each row b of `up`.
pub fn adapted_norms(
    gpu: &GpuBackend,
    norms: &Tensor,
    up: &Tensor,
    cross: &Tensor,
    scale: f32,
    adapted: &mut Tensor,
) {
    let (rows, rank) = (up.shape().rows(), up.shape().width());
    let arguments = arguments![norms, up, cross, adapted, rows, rank, scale];
    gpu.launch(&KERNELS, "adapted_norms", &GpuVariant::default(), singles(rows), &arguments);
}

pub fn divide(gpu: &GpuBackend, x: &Tensor, by: &Tensor, out: &mut Tensor, add: bool) {
    let n = x.shape().elements();
    let arguments = arguments![x, by, out, n, add];
    gpu.launch(&KERNELS, "divide", &GpuVariant::default(), singles(n), &arguments);
}
