//! Means over squares on a GPU.

use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "avg_pool", text: include_str!("kernel.cu") };

pub fn forward(cuda: &CudaBackend, x: &Tensor, size: usize, y: &mut Tensor) {
    let (n, narrow) = (y.shape().elements(), y.shape().width());
    let arguments = arguments![x, y, n, narrow, size];
    let variant = CudaVariant::of(&[x.dtype()]);
    cuda.launch(&KERNELS, "avg_pool", variant, LaunchConfig::per_element(n), &arguments);
}
