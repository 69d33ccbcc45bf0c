//! Sums on the CPU.

use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{RowChunk, store};
use crate::dtype::{Real, with_real};

pub fn add(cpu: &CpuBackend, x: &Tensor, y: &Tensor, sum: &mut Tensor) {
    with_real!(x.dtype(), T => {
        let (x, y) = (x.data::<T>(), y.data::<T>());
        cpu.par_rows(sum.data_mut::<T>(), 1, |first, sum| {
            let (x, y) = (&x[first..first + sum.len()], &y[first..first + sum.len()]);
            for ((sum, x), y) in sum.iter_mut().zip(x).zip(y) {
                *sum = T::from_f32(x.to_f32() + y.to_f32());
            }
        });
    });
}

pub fn scale(cpu: &CpuBackend, x: &Tensor, factor: f32, y: &mut Tensor) {
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), 1, |first, y| {
            for (y, x) in y.iter_mut().zip(&x[first..]) {
                *y = T::from_f32(factor * x.to_f32());
            }
        });
    });
}

/// The gradient may be rounded and what it is added to not: parameters are f32.
pub fn accumulate(cpu: &CpuBackend, gradient: &Tensor, sum: &mut Tensor, add: bool) {
    with_real!(gradient.dtype(), T => with_real!(sum.dtype(), S => {
        let gradient = gradient.data::<T>();
        cpu.par_rows(sum.data_mut::<S>(), 1, |first, sum| {
            for (sum, gradient) in sum.iter_mut().zip(&gradient[first..]) {
                let before = if add { sum.to_f32() } else { 0.0 };
                *sum = S::from_f32(before + gradient.to_f32());
            }
        });
    }));
}

pub fn gated_add(
    cpu: &CpuBackend,
    x: &Tensor,
    gates: &Tensor,
    index: usize,
    y: &Tensor,
    sum: &mut Tensor,
) {
    let &[_, tokens, width] = x.shape().sizes() else { unreachable!("checked by the op") };
    with_real!(x.dtype(), T => {
        let (x, y, gates) = (x.data::<T>(), y.data::<T>(), RowChunk::of(gates.data::<T>(), gates, index, width));
        cpu.par_rows(sum.data_mut::<T>(), width, |first, rows| {
            for (row, sum) in (first..).zip(rows.chunks_exact_mut(width)) {
                let gate = gates.row(row / tokens);
                let (x, y) = (&x[row * width..][..width], &y[row * width..][..width]);
                for (((sum, x), gate), y) in sum.iter_mut().zip(x).zip(gate).zip(y) {
                    *sum = T::from_f32(x.to_f32() + gate.to_f32() * y.to_f32());
                }
            }
        });
    });
}

/// `out` = gate · gradient
pub fn gated(
    cpu: &CpuBackend,
    gates: &Tensor,
    index: usize,
    gradient: &Tensor,
    out: &mut Tensor,
    add: bool,
) {
    let &[_, tokens, width] = gradient.shape().sizes() else { unreachable!("checked by the op") };
    with_real!(gradient.dtype(), T => {
        let (gradient, gates) = (gradient.data::<T>(), RowChunk::of(gates.data::<T>(), gates, index, width));
        cpu.par_rows(out.data_mut::<T>(), width, |first, rows| {
            let mut values = vec![0.0; width];
            for (row, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                let (gate, gradient) = (gates.row(row / tokens), &gradient[row * width..][..width]);
                for ((value, gate), gradient) in values.iter_mut().zip(gate).zip(gradient) {
                    *value = gate.to_f32() * gradient.to_f32();
                }
                store(&values, out, add);
            }
        });
    });
}

/// Adds Σ over a sample's tokens of gradient · y to its gate's gradient.
pub fn gate_gradient(
    cpu: &CpuBackend,
    gradient: &Tensor,
    y: &Tensor,
    index: usize,
    out: &mut Tensor,
) {
    let &[_, tokens, width] = y.shape().sizes() else { unreachable!("checked by the op") };
    let all = out.shape().width();
    with_real!(y.dtype(), T => with_real!(out.dtype(), G => {
        let (gradient, y) = (gradient.data::<T>(), y.data::<T>());
        cpu.par_chunks(out.data_mut::<G>(), all, |sample, out| {
            let mut sums = vec![0.0; width];
            for row in sample * tokens..(sample + 1) * tokens {
                let (gradient, y) = (&gradient[row * width..][..width], &y[row * width..][..width]);
                for ((sum, gradient), y) in sums.iter_mut().zip(gradient).zip(y) {
                    *sum += gradient.to_f32() * y.to_f32();
                }
            }
            store(&sums, &mut out[index * width..][..width], true);
        });
    }));
}
