//! Activations on a GPU.

use super::Activation;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, eights, is_wide};

const KERNELS: WgslSource = WgslSource { name: "activation", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &GpuBackend, activation: Activation, x: &Tensor, y: &mut Tensor) {
    let (n, variant) = (x.shape().elements(), variant(activation, x, y));
    gpu.launch(&KERNELS, "activate", &variant, eights(n), &arguments![x, y, n]);
}

pub fn backward(gpu: &GpuBackend, activation: Activation, x: &Tensor, gradient: &mut Tensor) {
    let (n, variant) = (x.shape().elements(), variant(activation, x, gradient));
    gpu.launch(&KERNELS, "activate_backward", &variant, eights(n), &arguments![x, gradient, n]);
}

fn variant(activation: Activation, x: &Tensor, other: &Tensor) -> GpuVariant {
    let is_wide = is_wide(x.shape().elements(), &[Some(x), Some(other)]);
    GpuVariant::of(&[x.dtype()])
        .with("KIND", activation.code() as usize)
        .with("WIDE", is_wide.into())
}
