//! Gated linear units on a GPU.

use crate::Tensor;
use crate::backward::Slot;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs};
use crate::ops::Activation;

const KERNELS: Source = Source { name: "glu", text: include_str!("kernel.wgsl") };

pub fn forward(gpu: &Gpu, activation: Activation, gate: &Tensor, up: &Tensor, y: &mut Tensor) {
    let (n, variant) = (gate.shape().elements(), Variant::of(&[gate.dtype()]));
    let arguments = arguments![gate, up, y, n, activation.code()];
    gpu.launch(&KERNELS, "glu", &variant, pairs(n), &arguments);
}

/// f(gate) · gradient
pub fn up_gradient(
    gpu: &Gpu,
    activation: Activation,
    gate: &Tensor,
    gradient: &Tensor,
    slot: &mut Slot,
) {
    let n = gate.shape().elements();
    let variant = Variant::of(&[gate.dtype(), slot.tensor.dtype()]);
    let arguments = arguments![gate, gradient, &mut slot.tensor, n, activation.code(), slot.add];
    gpu.launch(&KERNELS, "glu_up_backward", &variant, pairs(n), &arguments);
}

/// Turns the gradient of the result into that of the gate, in place: f'(gate) · up · gradient
pub fn gate_gradient(
    gpu: &Gpu,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    gradient: &mut Tensor,
) {
    let (n, variant) = (gate.shape().elements(), Variant::of(&[gate.dtype()]));
    let arguments = arguments![gate, up, gradient, n, activation.code()];
    gpu.launch(&KERNELS, "glu_gate_backward", &variant, pairs(n), &arguments);
}
