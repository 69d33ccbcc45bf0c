//! Gated linear units on the processor.

use crate::Tensor;
use crate::backward::Slot;
use crate::cpu::Cpu;
use crate::cpu::rows::{load, store};
use crate::dtype::{Real, with_real};
use crate::ops::Activation;

pub fn forward(cpu: &Cpu, activation: Activation, gate: &Tensor, up: &Tensor, y: &mut Tensor) {
    with_real!(gate.dtype(), T => {
        let (gate, up) = (gate.data::<T>(), up.data::<T>());
        cpu.rows(y.data_mut::<T>(), 1, |first, y| {
            let mut product = vec![0.0; y.len()];
            load(&gate[first..], &mut product);
            activation.apply(&mut product);
            multiply(&mut product, &up[first..]);
            store(&product, y, false);
        });
    });
}

/// The gradient of up, f(gate) · gradient, if it has a place; and if up is given, that of the gate, in
/// place of the result's: f'(gate) · up · gradient
pub fn backward(
    cpu: &Cpu,
    activation: Activation,
    (gate, up): (&Tensor, Option<&Tensor>),
    gradient: &mut Tensor,
    slot: Option<&mut Slot>,
) {
    if let Some(slot) = slot {
        up_gradient(cpu, activation, gate, gradient, slot);
    }
    if let Some(up) = up {
        gate_gradient(cpu, activation, gate, up, gradient);
    }
}

fn up_gradient(
    cpu: &Cpu,
    activation: Activation,
    gate: &Tensor,
    gradient: &Tensor,
    slot: &mut Slot,
) {
    let add = slot.add;
    with_real!(gate.dtype(), T => with_real!(slot.tensor.dtype(), G => {
        let (gate, gradient) = (gate.data::<T>(), gradient.data::<T>());
        cpu.rows(slot.tensor.data_mut::<G>(), 1, |first, out| {
            let mut product = vec![0.0; out.len()];
            load(&gate[first..], &mut product);
            activation.apply(&mut product);
            multiply(&mut product, &gradient[first..]);
            store(&product, out, add);
        });
    }));
}

fn gate_gradient(
    cpu: &Cpu,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    gradient: &mut Tensor,
) {
    with_real!(gate.dtype(), T => {
        let (gate, up) = (gate.data::<T>(), up.data::<T>());
        cpu.rows(gradient.data_mut::<T>(), 1, |first, gradient| {
            let mut product = vec![0.0; gradient.len()];
            load(&gate[first..], &mut product);
            activation.apply_slope(&mut product);
            multiply(&mut product, &up[first..]);
            multiply(&mut product, gradient);
            store(&product, gradient, false);
        });
    });
}

#[inline(always)]
fn multiply<T: Real>(product: &mut [f32], by: &[T]) {
    for (product, by) in product.iter_mut().zip(by) {
        *product *= by.to_f32();
    }
}
