//! Channels scaled and shifted on the CPU, a row at a time.

use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{load, store};
use crate::dtype::{Real, with_real};
use crate::ops::Activation;

pub fn forward(
    cpu: &CpuBackend,
    x: &Tensor,
    scale: &Tensor,
    bias: Option<&Tensor>,
    activation: Activation,
    y: &mut Tensor,
) {
    let width = x.shape().width();
    let (scale, bias) = (scale.data::<f32>(), bias.map(Tensor::data::<f32>));
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), width, |first, rows| {
            let mut row = vec![0.0; width];
            for (index, y) in (first..).zip(rows.chunks_exact_mut(width)) {
                load(&x[index * width..][..width], &mut row);
                row.iter_mut().zip(scale).for_each(|(x, scale)| *x *= scale);
                if let Some(bias) = bias {
                    row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
                }
                activation.apply(&mut row);
                store(&row, y, false);
            }
        });
    });
}

/// Multiplies every row by a vector, in place.
pub fn multiply(cpu: &CpuBackend, matrix: &mut Tensor, vector: &Tensor) {
    let (width, vector) = (matrix.shape().width(), vector.data::<f32>());
    with_real!(matrix.dtype(), T => {
        cpu.par_rows(matrix.data_mut::<T>(), width, |_, rows| {
            for row in rows.chunks_exact_mut(width) {
                for (number, factor) in row.iter_mut().zip(vector) {
                    *number = T::from_f32(number.to_f32() * factor);
                }
            }
        });
    });
}

/// Σ gradient·x over all rows.
pub fn scale_gradient(
    cpu: &CpuBackend,
    x: &Tensor,
    gradient: &Tensor,
    partial: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let (rows, width) = (x.shape().rows(), x.shape().width());
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.sum_rows(rows, partial, &mut slot.tensor, slot.add, |block, sums| {
            for index in block {
                let (x, gradient) = (&x[index * width..][..width], &gradient[index * width..][..width]);
                for ((sum, x), gradient) in sums.iter_mut().zip(x).zip(gradient) {
                    *sum += gradient.to_f32() * x.to_f32();
                }
            }
        });
    });
}
