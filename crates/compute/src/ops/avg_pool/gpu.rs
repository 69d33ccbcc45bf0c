//! Means over squares on a GPU.

use crate::Tensor;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs};

const KERNELS: Source = Source { name: "avg_pool", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &Gpu, x: &Tensor, size: usize, y: &mut Tensor) {
    let (n, narrow) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, narrow, size];
    gpu.launch(&KERNELS, "avg_pool", &Variant::of(&[x.dtype()]), pairs(n), &arguments);
}
