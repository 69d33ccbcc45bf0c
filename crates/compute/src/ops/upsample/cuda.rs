//! Enlarging images on a GPU.

use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "upsample", text: include_str!("kernel.cu") };

pub fn forward(cuda: &CudaBackend, x: &Tensor, factor: usize, y: &mut Tensor) {
    let (n, wide) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, wide, factor];
    let variant = CudaVariant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "upsample", variant, LaunchConfig::per_element(n), &arguments);
}
