//! Root-mean-square norm on the CPU, a row at a time.

use super::{RmsNormInputs, RmsNormSlots};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{dot, load, store};
use crate::dtype::{Real, with_real};

pub fn forward(
    cpu: &CpuBackend,
    x: &Tensor,
    weight: Option<&Tensor>,
    epsilon: f32,
    y: &mut Tensor,
) {
    let width = x.shape().width();
    let weight = weight.map(Tensor::data::<f32>);
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), width, |first, rows| {
            let mut row = vec![0.0; width];
            for (index, y) in (first..).zip(rows.chunks_exact_mut(width)) {
                load(&x[index * width..][..width], &mut row);
                normalise(&mut row, epsilon);
                if let Some(weight) = weight {
                    row.iter_mut().zip(weight).for_each(|(x, weight)| *x *= weight);
                }
                store(&row, y, false);
            }
        });
    });
}

pub fn backward(
    cpu: &CpuBackend,
    rows: RmsNormInputs<'_>,
    wanted: RmsNormSlots<'_>,
    scratch: &mut Tensor,
) {
    if let Some(slot) = wanted.weight {
        weight_gradient(cpu, rows, scratch, slot);
    }
    if let Some(slot) = wanted.x {
        x_gradient(cpu, rows, slot);
    }
}

fn x_gradient(cpu: &CpuBackend, rows: RmsNormInputs<'_>, slot: &mut GradientSlot) {
    let RmsNormInputs { x, weight, gradient, epsilon } = rows;
    let (width, add) = (x.shape().width(), slot.add);
    let weight = weight.map(Tensor::data::<f32>);
    with_real!(x.dtype(), T => with_real!(slot.tensor.dtype(), G => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.par_rows(slot.tensor.data_mut::<G>(), width, |first, rows| {
            let (mut row, mut g) = (vec![0.0; width], vec![0.0; width]);
            for (index, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                load(&x[index * width..][..width], &mut row);
                load(&gradient[index * width..][..width], &mut g);
                let inverse = normalise(&mut row, epsilon);
                if let Some(weight) = weight {
                    g.iter_mut().zip(weight).for_each(|(g, weight)| *g *= weight);
                }
                backward_row(&row, inverse, &mut g);
                store(&g, out, add);
            }
        });
    }));
}

/// Σ gradient · x̂ over all rows.
fn weight_gradient(
    cpu: &CpuBackend,
    rows: RmsNormInputs<'_>,
    partial: &mut Tensor,
    slot: &mut GradientSlot,
) {
    let RmsNormInputs { x, gradient, epsilon, .. } = rows;
    let (rows, width) = (x.shape().rows(), x.shape().width());
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.sum_rows(rows, partial, &mut slot.tensor, slot.add, |block, sums| {
            let mut row = vec![0.0; width];
            for index in block {
                load(&x[index * width..][..width], &mut row);
                normalise(&mut row, epsilon);
                let gradient = &gradient[index * width..][..width];
                for ((sum, g), x) in sums.iter_mut().zip(gradient).zip(&row) {
                    *sum += g.to_f32() * x;
                }
            }
        });
    });
}

/// Brings a row to mean square 1; returns what it was multiplied by.
#[inline(always)]
pub(crate) fn normalise(row: &mut [f32], epsilon: f32) -> f32 {
    let inverse = 1.0 / (dot(row, row) / row.len() as f32 + epsilon).sqrt();
    for x in row {
        *x *= inverse;
    }
    inverse
}

/// Turns the gradient of a row x̂, as [`normalise`] left it, into that of the row before:
/// dx = (g - x̂ · mean(g · x̂)) · inverse
#[inline(always)]
pub(crate) fn backward_row(row: &[f32], inverse: f32, g: &mut [f32]) {
    let slope = dot(g, row) / row.len() as f32;
    for (g, x) in g.iter_mut().zip(row) {
        *g = (*g - x * slope) * inverse;
    }
}
