//! Gated linear units on a GPU.

use crate::Tensor;
use crate::backward::GradientSlot;
use crate::gpu::{GpuArg, GpuBackend, GpuVariant, WgslSource, arguments, pairs};
use crate::ops::Activation;

const KERNELS: WgslSource = WgslSource { name: "glu", text: include_str!("kernel.wgsl") };

pub fn forward(
    gpu: &GpuBackend,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    y: &mut Tensor,
) {
    let (n, variant) = (gate.shape().elements(), GpuVariant::of(&[gate.dtype()]));
    let arguments = arguments![gate, up, y, n, activation.code()];
    gpu.launch(&KERNELS, "glu", &variant, pairs(n), &arguments);
}

/// The gradient of up, f(gate) · gradient, if it has a place; and if up is given, that of the gate, in
/// place of the result's: f'(gate) · up · gradient
pub fn backward(
    gpu: &GpuBackend,
    activation: Activation,
    gate: &Tensor,
    up: Option<&Tensor>,
    gradient: &mut Tensor,
    slot: Option<&mut GradientSlot>,
) {
    let n = gate.shape().elements();
    let format = slot.as_ref().map_or(gate.dtype(), |slot| slot.tensor.dtype());
    let add = slot.as_ref().is_some_and(|slot| slot.add);
    // Without up, the result's gradient is read alone, and others may hold it.
    let gradient = if up.is_some() { GpuArg::from(gradient) } else { GpuArg::from(&*gradient) };
    let tensors = arguments![gate, up, gradient, slot.map(|slot| &mut slot.tensor)];
    let arguments = [&tensors[..], &arguments![n, activation.code(), add]].concat();
    let variant = GpuVariant::of(&[gate.dtype(), format]);
    gpu.launch(&KERNELS, "glu_backward", &variant, pairs(n), &arguments);
}
