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

/// The gradient of up, f(gate) · gradient, if it has a place; and if up is given, that of the gate, in
/// place of the result's: f'(gate) · up · gradient
pub fn backward(
    gpu: &Gpu,
    activation: Activation,
    (gate, up): (&Tensor, Option<&Tensor>),
    gradient: &mut Tensor,
    slot: Option<&mut Slot>,
) {
    if let Some(slot) = slot {
        up_gradient(gpu, activation, gate, gradient, slot);
    }
    if let Some(up) = up {
        gate_gradient(gpu, activation, gate, up, gradient);
    }
}

fn up_gradient(
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

fn gate_gradient(
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
