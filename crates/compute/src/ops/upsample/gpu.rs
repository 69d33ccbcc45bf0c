//! Enlarging images on a GPU.

use crate::Tensor;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs};

const KERNELS: Source = Source { name: "upsample", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &Gpu, x: &Tensor, factor: usize, y: &mut Tensor) {
    let (n, wide) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, wide, factor];
    gpu.launch(&KERNELS, "upsample", &Variant::of(&[x.dtype()]), pairs(n), &arguments);
}
