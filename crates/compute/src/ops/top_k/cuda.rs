//! The largest keys on a GPU.

use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "top_k", text: include_str!("kernel.cu") };

pub fn top_k(cuda: &CudaBackend, keys: &Tensor, ids: &mut Tensor) {
    let (all, n, k) = (keys.shape().elements(), keys.shape().width(), ids.shape().width());
    let arguments = arguments![keys, ids, all, n, k];
    let variant = CudaVariant::of(&[keys.dtype()]);
    cuda.launch(&KERNELS, "top_k", variant, LaunchConfig::per_element(all), &arguments);
}
