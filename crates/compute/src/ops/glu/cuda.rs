//! Gated linear units on a GPU.

use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments, pack};
use crate::ops::Activation;

const KERNELS: CudaSource = CudaSource { name: "glu", text: include_str!("kernel.cu") };

pub fn forward(
    cuda: &CudaBackend,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    y: &mut Tensor,
) {
    let n = gate.shape().elements();
    let p = pack(n, &[gate, up, y]);
    let variant = CudaVariant::of(&[gate.dtype()]).with_pack(p);
    let arguments = arguments![gate, up, y, n / p, activation.code()];
    cuda.launch(&KERNELS, "glu", variant, LaunchConfig::per_element(n / p), &arguments);
}

/// The gradient of up, f(gate) · gradient, if it has a place; and if up is given, that of the gate, in
/// place of the result's: f'(gate) · up · gradient
pub fn backward(
    cuda: &CudaBackend,
    activation: Activation,
    gate: &Tensor,
    up: Option<&Tensor>,
    gradient: &mut Tensor,
    slot: Option<&mut GradientSlot>,
) {
    let n = gate.shape().elements();
    let out = slot.as_ref().map_or(gate, |slot| &slot.tensor);
    let p = pack(n, &[gate, up.unwrap_or(gate), gradient, out]);
    let variant = CudaVariant::of(&[gate.dtype(), out.dtype()]).with_pack(p);
    let add = slot.as_ref().is_some_and(|slot| slot.add);
    let out = slot.map(|slot| &mut slot.tensor);
    let arguments = arguments![gate, up, &*gradient, out, n / p, activation.code(), add];
    cuda.launch(&KERNELS, "glu_backward", variant, LaunchConfig::per_element(n / p), &arguments);
}
