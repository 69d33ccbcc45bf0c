//! Layer norm on the CPU, a row at a time.

use super::NormConfig;
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{dot, load, store, sum, sum_squares};
use crate::dtype::{Real, with_real};

pub fn forward(
    cpu: &CpuBackend,
    x: &Tensor,
    vectors: [Option<&Tensor>; 2],
    form: NormConfig,
    y: &mut Tensor,
) {
    let width = x.shape().width();
    let factors = vectors[0].map(|scale| NormVector::new(scale, form.indices.0, form));
    let shifts = vectors[1].map(|shift| NormVector::new(shift, form.indices.1, form));
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), width, |first, rows| {
            let (mut row, mut vector) = (vec![0.0; width], vec![0.0; width]);
            for (index, y) in (first..).zip(rows.chunks_exact_mut(width)) {
                load(&x[index * width..][..width], &mut row);
                normalise(&mut row, form.epsilon);
                if let Some(factors) = &factors {
                    factors.factor(index, &mut vector);
                    row.iter_mut().zip(&vector).for_each(|(x, factor)| *x *= factor);
                }
                if let Some(shifts) = &shifts {
                    shifts.load(index, &mut vector);
                    row.iter_mut().zip(&vector).for_each(|(x, shift)| *x += shift);
                }
                store(&row, y, false);
            }
        });
    });
}

/// With g = gradient · factor: dx = (g - mean(g) - x̂ · mean(g · x̂)) / deviation
pub fn backward(
    cpu: &CpuBackend,
    x: &Tensor,
    scale: Option<&Tensor>,
    gradient: &Tensor,
    form: NormConfig,
    slot: &mut GradientSlot,
) {
    let width = x.shape().width();
    let factors = scale.map(|scale| NormVector::new(scale, form.indices.0, form));
    let add = slot.add;
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        cpu.par_rows(slot.tensor.data_mut::<T>(), width, |first, rows| {
            let (mut row, mut g, mut vector) = (vec![0.0; width], vec![0.0; width], vec![0.0; width]);
            for (index, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                load(&x[index * width..][..width], &mut row);
                load(&gradient[index * width..][..width], &mut g);
                let inverse = normalise(&mut row, form.epsilon);
                if let Some(factors) = &factors {
                    factors.factor(index, &mut vector);
                    g.iter_mut().zip(&vector).for_each(|(g, factor)| *g *= factor);
                }
                let mean = sum(&g) / width as f32;
                let slope = dot(&g, &row) / width as f32;
                for (g, x) in g.iter_mut().zip(&row) {
                    *g = (*g - mean - x * slope) * inverse;
                }
                store(&g, out, add);
            }
        });
    });
}

/// Adds Σ gradient · x̂ over the rows of a vector.
pub fn scale_gradient(
    cpu: &CpuBackend,
    x: &Tensor,
    gradient: &Tensor,
    form: NormConfig,
    out: &mut Tensor,
) {
    let width = x.shape().width();
    with_real!(x.dtype(), T => {
        let (x, gradient) = (x.data::<T>(), gradient.data::<T>());
        vector_sums(cpu, out, form.indices.0, width, |vector, sums| {
            let mut row = vec![0.0; width];
            for index in vector * form.rows_per_vector..(vector + 1) * form.rows_per_vector {
                load(&x[index * width..][..width], &mut row);
                normalise(&mut row, form.epsilon);
                let gradient = &gradient[index * width..][..width];
                for ((sum, g), x) in sums.iter_mut().zip(gradient).zip(&row) {
                    *sum += g.to_f32() * x;
                }
            }
        });
    });
}

/// Adds Σ gradient over the rows of a vector.
pub fn shift_gradient(cpu: &CpuBackend, gradient: &Tensor, form: NormConfig, out: &mut Tensor) {
    let width = gradient.shape().width();
    with_real!(gradient.dtype(), T => {
        let gradient = gradient.data::<T>();
        vector_sums(cpu, out, form.indices.1, width, |vector, sums| {
            for index in vector * form.rows_per_vector..(vector + 1) * form.rows_per_vector {
                let gradient = &gradient[index * width..][..width];
                sums.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g.to_f32());
            }
        });
    });
}

/// Lets `work` sum up, for each vector as a task of its own, and adds that to its part in `out`.
fn vector_sums(
    cpu: &CpuBackend,
    out: &mut Tensor,
    index: usize,
    width: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) {
    let all = out.shape().width();
    with_real!(out.dtype(), T => {
        cpu.par_chunks(out.data_mut::<T>(), all, |vector, out| {
            let mut sums = vec![0.0; width];
            work(vector, &mut sums);
            store(&sums, &mut out[index * width..][..width], true);
        });
    });
}

/// Brings a row to mean 0 and variance 1; returns 1 / std.
#[inline(always)]
fn normalise(row: &mut [f32], epsilon: f32) -> f32 {
    let width = row.len() as f32;
    let mean = sum(row) / width;
    let inverse = 1.0 / (sum_squares(row, mean) / width + epsilon).sqrt();
    for x in row {
        *x = (*x - mean) * inverse;
    }
    inverse
}

/// The vectors that rows are multiplied by or shifted by.
struct NormVector<'a> {
    tensor: &'a Tensor,
    index: usize,
    form: NormConfig,
}

impl<'a> NormVector<'a> {
    fn new(tensor: &'a Tensor, index: usize, form: NormConfig) -> Self {
        Self { tensor, index, form }
    }

    /// The vector of a row.
    #[inline(always)]
    fn load(&self, row: usize, to: &mut [f32]) {
        let width = to.len();
        let start =
            row / self.form.rows_per_vector * self.tensor.shape().width() + self.index * width;
        with_real!(self.tensor.dtype(), T => load(&self.tensor.data::<T>()[start..start + width], to));
    }

    /// The same plus one where that is what the row is multiplied by.
    #[inline(always)]
    fn factor(&self, row: usize, to: &mut [f32]) {
        self.load(row, to);
        if self.form.plus_one {
            for factor in to {
                *factor += 1.0;
            }
        }
    }
}
