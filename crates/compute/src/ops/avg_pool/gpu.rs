//! Means over squares on a GPU.

use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "avg_pool", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &GpuBackend, x: &Tensor, size: usize, y: &mut Tensor) {
    let (n, narrow) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, narrow, size];
    gpu.launch(&KERNELS, "avg_pool", &GpuVariant::of(&[x.dtype()]), pairs(n), &arguments);
}
