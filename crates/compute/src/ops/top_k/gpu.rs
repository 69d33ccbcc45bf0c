//! The largest keys on a GPU.

use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, THREADS, WgslSource, arguments};

const KERNELS: WgslSource = WgslSource { name: "top_k", text: include_str!("kernel.wgsl") };

pub fn top_k(gpu: &GpuBackend, keys: &Tensor, ids: &mut Tensor) {
    let (all, n, k) = (keys.shape().elements(), keys.shape().width(), ids.shape().width());
    // A kernel can only add to integers.
    ids.fill_zeros();
    let arguments = arguments![keys, ids, all, n, k];
    let variant = GpuVariant::of(&[keys.dtype()]);
    gpu.launch(&KERNELS, "top_k", &variant, all.div_ceil(THREADS), &arguments);
}
