//! Gated linear units on the CPU.

use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{load, store};
use crate::cpu::simd::simd;
use crate::dtype::{Real, with_real};
use crate::ops::Activation;

/// Numbers that go through all steps at a time, in the first level of the cache. Chosen: 8 KiB.
const STRIP: usize = if cfg!(test) { 8 } else { 2048 };

pub fn forward(
    cpu: &CpuBackend,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    y: &mut Tensor,
) {
    with_real!(gate.dtype(), T => {
        let (gate, up) = (gate.data::<T>(), up.data::<T>());
        in_strips(cpu, y.data_mut::<T>(), |at, values, y| {
            load(&gate[at..], values);
            activation.apply(values);
            multiply(values, &up[at..]);
            store(values, y, false);
        });
    });
}

/// The gradient of up, f(gate) · gradient, if it has a place; and if up is given, that of the gate, in
/// place of the result's: f'(gate) · up · gradient
pub fn backward(
    cpu: &CpuBackend,
    activation: Activation,
    gate: &Tensor,
    up: Option<&Tensor>,
    gradient: &mut Tensor,
    slot: Option<&mut GradientSlot>,
) {
    if let Some(slot) = slot {
        up_gradient(cpu, activation, gate, gradient, slot);
    }
    if let Some(up) = up {
        gate_gradient(cpu, activation, gate, up, gradient);
    }
}

fn up_gradient(
    cpu: &CpuBackend,
    activation: Activation,
    gate: &Tensor,
    gradient: &Tensor,
    slot: &mut GradientSlot,
) {
    let add = slot.add;
    with_real!(gate.dtype(), T => with_real!(slot.tensor.dtype(), G => {
        let (gate, gradient) = (gate.data::<T>(), gradient.data::<T>());
        in_strips(cpu, slot.tensor.data_mut::<G>(), |at, values, out| {
            load(&gate[at..], values);
            activation.apply(values);
            multiply(values, &gradient[at..]);
            store(values, out, add);
        });
    }));
}

fn gate_gradient(
    cpu: &CpuBackend,
    activation: Activation,
    gate: &Tensor,
    up: &Tensor,
    gradient: &mut Tensor,
) {
    with_real!(gate.dtype(), T => {
        let (gate, up) = (gate.data::<T>(), up.data::<T>());
        in_strips(cpu, gradient.data_mut::<T>(), |at, values, gradient| {
            load(&gate[at..], values);
            activation.apply_derivative(values);
            multiply(values, &up[at..]);
            multiply(values, gradient);
            store(values, gradient, false);
        });
    });
}

/// Calls `work` for every strip of `out`, with where it starts and as many floats of scratch memory.
fn in_strips<T: Send>(
    cpu: &CpuBackend,
    out: &mut [T],
    work: impl Fn(usize, &mut [f32], &mut [T]) + Sync,
) {
    cpu.par_rows(out, 1, |first, piece| {
        let mut scratch = [0.0; STRIP];
        for (at, strip) in (first..).step_by(STRIP).zip(piece.chunks_mut(STRIP)) {
            work(at, &mut scratch[..strip.len()], strip);
        }
    });
}

simd! {
    fn multiply<T: Real>(values: &mut [f32], by: &[T]) {
        for (value, by) in values.iter_mut().zip(by) {
            *value *= by.to_f32();
        }
    }
}
