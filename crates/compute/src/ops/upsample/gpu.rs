//! Enlarging images on a GPU.

use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "upsample", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &GpuBackend, x: &Tensor, factor: usize, y: &mut Tensor) {
    let (n, wide) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, wide, factor];
    gpu.launch(&KERNELS, "upsample", &GpuVariant::of(&[x.dtype()]), pairs(n), &arguments);
}
