//! Khatri-Rao products on a GPU.

use super::{FactorSizes, KhatriRaoSizes, SharedAxis};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "khatri_rao", text: include_str!("kernel.cu") };

pub fn forward(cuda: &CudaBackend, sizes: KhatriRaoSizes, a: &Tensor, b: &Tensor, y: &mut Tensor) {
    let KhatriRaoSizes { axis, shared, own: [r, s] } = sizes;
    let (n, by_rows) = (y.shape().elements(), axis == SharedAxis::Rows);
    let arguments = arguments![a, b, y, n, shared, r, s, by_rows];
    let grid = LaunchConfig::per_element(n);
    cuda.launch(&KERNELS, "khatri_rao", CudaVariant::of(&[]), grid, &arguments);
}

pub fn backward(
    cuda: &CudaBackend,
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
    let grid = LaunchConfig::per_element(n);
    cuda.launch(&KERNELS, "khatri_rao_backward", CudaVariant::of(&[]), grid, &arguments);
}
