//! Activations on a GPU.

use super::Activation;
use crate::Tensor;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs};

const KERNELS: Source = Source { name: "activation", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &Gpu, activation: Activation, x: &Tensor, y: &mut Tensor) {
    let (n, variant) = (x.shape().elements(), Variant::of(&[x.dtype()]));
    let arguments = arguments![x, y, n, activation.code()];
    gpu.launch(&KERNELS, "activate", &variant, pairs(n), &arguments);
}

pub fn backward(gpu: &Gpu, activation: Activation, x: &Tensor, gradient: &mut Tensor) {
    let (n, variant) = (x.shape().elements(), Variant::of(&[x.dtype()]));
    let arguments = arguments![x, gradient, n, activation.code()];
    gpu.launch(&KERNELS, "activate_backward", &variant, pairs(n), &arguments);
}
