//! Gated linear units on a card.

use crate::Tensor;
use crate::backward::Slot;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments, pack};
use crate::ops::Activation;

const KERNELS: Source = Source { name: "glu", text: include_str!("kernel.cu") };

pub fn forward(cuda: &Cuda, activation: Activation, gate: &Tensor, up: &Tensor, y: &mut Tensor) {
    let n = gate.shape().elements();
    let p = pack(n, &[gate, up, y]);
    let variant = Variant::of(&[gate.dtype()]).by(p);
    let arguments = arguments![gate, up, y, n / p, activation.code()];
    cuda.launch(&KERNELS, "glu", variant, Grid::numbers(n / p), &arguments);
}

/// f(gate) · gradient
pub fn up_gradient(
    cuda: &Cuda,
    activation: Activation,
    gate: &Tensor,
    gradient: &Tensor,
    slot: &mut Slot,
) {
    let n = gate.shape().elements();
    let p = pack(n, &[gate, gradient, &slot.tensor]);
    let variant = Variant::of(&[gate.dtype(), slot.tensor.dtype()]).by(p);
    let arguments =
        arguments![gate, gradient, &mut slot.tensor, n / p, activation.code(), slot.add];
    cuda.launch(&KERNELS, "glu_up_backward", variant, Grid::numbers(n / p), &arguments);
}

/// Turns the gradient of the result into that of the gate, in place: f'(gate) · up · gradient
pub fn gate_gradient(
    cuda: &Cuda,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    gradient: &mut Tensor,
) {
    let n = gate.shape().elements();
    let p = pack(n, &[gate, up, gradient]);
    let variant = Variant::of(&[gate.dtype()]).by(p);
    let arguments = arguments![gate, up, gradient, n / p, activation.code()];
    cuda.launch(&KERNELS, "glu_gate_backward", variant, Grid::numbers(n / p), &arguments);
}
