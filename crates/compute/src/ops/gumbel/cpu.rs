//! Random choices on the CPU, a row at a time. They are made from numbers in f32, before
//! rounding to a narrow dtype could make two of them equal.

use rayon::prelude::*;

use super::GumbelDraw;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::math::{exp, ln};
use crate::cpu::rows::{GRAIN, dot, load, max, store, sum};
use crate::dtype::{Real, with_real};

/// Half a step of the random numbers below 1: what is nearer counts as this far, for a number that
/// was rounded to 1 would have an infinite logarithm.
const NEAREST_TO_ONE: f32 = 1.0 / (1 << 25) as f32;

/// Writes soft or hard choices; `logits` is none where they lie in `out` themselves.
pub fn one(
    cpu: &CpuBackend,
    draw: GumbelDraw,
    logits: Option<&Tensor>,
    out: &mut Tensor,
    hard: bool,
) {
    let width = out.shape().width();
    with_real!(out.dtype(), T => {
        let logits = logits.map(Tensor::data::<T>);
        cpu.par_rows(out.data_mut::<T>(), width, |first, rows| {
            let mut row = vec![0.0; width];
            for (index, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                draw.scores(index, logits, out, &mut row);
                if hard { choose(&mut row) } else { draw.soften(&mut row) }
                store(&row, out, false);
            }
        });
    });
}

/// Writes soft choices and the hard ones that belong to them.
pub fn both(
    cpu: &CpuBackend,
    draw: GumbelDraw,
    logits: Option<&Tensor>,
    soft: &mut Tensor,
    hard: &mut Tensor,
) {
    let width = soft.shape().width().max(1);
    let rows = (GRAIN / width).max(1);
    with_real!(soft.dtype(), T => {
        let logits = logits.map(Tensor::data::<T>);
        let (soft, hard) = (soft.data_mut::<T>(), hard.data_mut::<T>());
        let work = |task: usize, soft: &mut [T], hard: &mut [T]| {
            let (mut row, mut choice) = (vec![0.0; width], vec![0.0; width]);
            let pairs = soft.chunks_exact_mut(width).zip(hard.chunks_exact_mut(width));
            for (index, (soft, hard)) in (task * rows..).zip(pairs) {
                draw.scores(index, logits, soft, &mut row);
                choice.copy_from_slice(&row);
                choose(&mut choice);
                store(&choice, hard, false);
                draw.soften(&mut row);
                store(&row, soft, false);
            }
        };
        cpu.install(|| {
            let pieces = soft.par_chunks_mut(rows * width).zip(hard.par_chunks_mut(rows * width));
            pieces
                .enumerate()
                .for_each(|(task, (soft, hard))| work(task, soft, hard));
        });
    });
}

/// dlogits = soft · (gradient - Σ gradient · soft) / τ, in place
pub fn backward(cpu: &CpuBackend, soft: &Tensor, temperature: f32, gradient: &mut Tensor) {
    let width = soft.shape().width();
    with_real!(soft.dtype(), T => {
        let soft = soft.data::<T>();
        cpu.par_rows(gradient.data_mut::<T>(), width, |first, rows| {
            let (mut row, mut g) = (vec![0.0; width], vec![0.0; width]);
            for (index, gradient) in (first..).zip(rows.chunks_exact_mut(width)) {
                load(&soft[index * width..][..width], &mut row);
                load(gradient, &mut g);
                // Twice: the first mean is off by as much as rounding moved the sum of a row from
                // 1, which is all that there is where one value has nearly all of it.
                for _ in 0..2 {
                    let mean = dot(&g, &row);
                    for g in &mut g {
                        *g -= mean;
                    }
                }
                for (g, soft) in g.iter_mut().zip(&row) {
                    *g = soft * *g / temperature;
                }
                store(&g, gradient, false);
            }
        });
    });
}

impl GumbelDraw {
    /// The logits of a row with their noise, from where they lie.
    #[inline(always)]
    fn scores<T: Real>(&self, index: usize, logits: Option<&[T]>, own: &[T], row: &mut [f32]) {
        let width = row.len();
        load(logits.map_or(own, |logits| &logits[index * width..][..width]), row);
        for (number, at) in row.iter_mut().zip(index * width..) {
            let u = self.sequence.uniform(at);
            *number += noise(if self.is_mirrored { 1.0 - u } else { u });
        }
    }

    /// Softmax of a row in place.
    #[inline(always)]
    fn soften(&self, row: &mut [f32]) {
        let largest = max(row);
        // Divided rather than multiplied by 1 / τ, which may be infinite.
        for number in &mut *row {
            *number = exp((*number - largest) / self.temperature);
        }
        let inverse = 1.0 / sum(row);
        for number in row {
            *number *= inverse;
        }
    }
}

/// -ln(-ln u)
#[inline(always)]
fn noise(u: f32) -> f32 {
    let wait = -ln(u);
    -ln(if wait < NEAREST_TO_ONE { NEAREST_TO_ONE } else { wait })
}

/// One at the first of the largest and zero elsewhere; where softmax would be undefined, so is this.
#[inline(always)]
fn choose(row: &mut [f32]) {
    let largest = max(row);
    let chosen = row.iter().position(|number| *number == largest);
    row.fill(if largest.is_finite() { 0.0 } else { f32::NAN });
    if let Some(chosen) = chosen.filter(|_| largest.is_finite()) {
        row[chosen] = 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_finite_at_both_ends() {
        let least = 0.5 / (1 << 24) as f32;
        assert!((noise(least) + (-f64::from(least).ln()).ln() as f32).abs() < 1e-6);
        assert!((noise(1.0) - 25.0 * std::f32::consts::LN_2).abs() < 1e-5);
        assert!((noise(0.5) - 0.366_512_92).abs() < 1e-6);
    }
}
