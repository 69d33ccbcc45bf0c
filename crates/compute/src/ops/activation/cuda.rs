//! Activations on a GPU.

use super::Activation;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};

const KERNELS: CudaSource = CudaSource { name: "activation", text: include_str!("kernel.cu") };

pub fn forward(cuda: &CudaBackend, activation: Activation, x: &Tensor, y: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, y]);
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    let arguments = arguments![x, y, n / p, activation.code()];
    cuda.launch(&KERNELS, "activate", variant, LaunchConfig::per_element(n / p), &arguments);
}

pub fn backward(cuda: &CudaBackend, activation: Activation, x: &Tensor, gradient: &mut Tensor) {
    let n = x.shape().elements();
    let p = pack(n, &[x, gradient]);
    let variant = CudaVariant::of(&[x.dtype()]).with_pack(p);
    let arguments = arguments![x, gradient, n / p, activation.code()];
    cuda.launch(
        &KERNELS,
        "activate_backward",
        variant,
        LaunchConfig::per_element(n / p),
        &arguments,
    );
}

impl Activation {
    /// What kernels call it.
    pub(crate) fn code(self) -> u32 {
        self as u32
    }
}
