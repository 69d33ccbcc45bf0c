//! Khatri-Rao products on a GPU.

use super::{FactorSizes, KhatriRaoSizes, SharedAxis};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, singles};

const KERNELS: WgslSource = WgslSource { name: "khatri_rao", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &GpuBackend, sizes: KhatriRaoSizes, a: &Tensor, b: &Tensor, y: &mut Tensor) {
    let KhatriRaoSizes { axis, shared, own: [r, s] } = sizes;
    let (n, by_rows) = (y.shape().elements(), axis == SharedAxis::Rows);
    let arguments = arguments![a, b, y, n, shared, r, s, by_rows];
    gpu.launch(&KERNELS, "khatri_rao", &GpuVariant::default(), singles(n), &arguments);
}

pub fn backward(
    gpu: &GpuBackend,
    sizes: FactorSizes,
    gradient: &Tensor,
    other: &Tensor,
    slot: &mut GradientSlot,
) {
    let FactorSizes { axis, shared, own: [own, others], steps: [step, inner] } = sizes;
    let (n, by_rows, add) = (shared * own, axis == SharedAxis::Rows, slot.add);
    let out = &mut slot.tensor;
    let arguments =
        arguments![gradient, other, out, n, shared, own, others, step, inner, by_rows, add];
    gpu.launch(&KERNELS, "khatri_rao_backward", &GpuVariant::default(), singles(n), &arguments);
}
