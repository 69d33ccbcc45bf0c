//! The mean cost of errors on the CPU.

use super::{CostKind, LossFactors};
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{load, store, sum, sum_squares};
use crate::cpu::simd::simd;
use crate::dtype::with_real;
use crate::{Shape, Tensor};

/// Elements of a row that are summed in f32. Chosen: short enough for the error of a sum in sixteen
/// lanes to stay below that of rounding its result a few times.
const PIECE: usize = 1024;

pub fn forward(
    cpu: &CpuBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossFactors,
    mean: &mut Tensor,
) {
    let (shape, width) = (prediction.shape(), prediction.shape().width());
    let factors = RowFactors::new(factors, shape);
    let total = cpu.total(shape.rows(), |rows| {
        let (mut errors, mut total) = (RowErrors::new(prediction, target), 0.0);
        for row in rows {
            let mut costs = 0.0;
            for start in (row * width..(row + 1) * width).step_by(PIECE) {
                let length = PIECE.min((row + 1) * width - start);
                let errors = errors.load(start, length);
                costs += f64::from(factors.cost(errors, row, start));
            }
            total += f64::from(factors.of(row)) * costs;
        }
        total
    });
    mean.data_mut::<f32>()[0] = (total * factors.inverse_count) as f32;
}

/// gradient·cost'(prediction - target)·factor / count
pub fn backward(
    cpu: &CpuBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossFactors,
    gradient: &Tensor,
    slot: &mut GradientSlot,
) {
    let width = prediction.shape().width();
    let factors = RowFactors::new(factors, prediction.shape());
    let scale = f64::from(gradient.data::<f32>()[0]) * factors.inverse_count;
    let add = slot.add;
    with_real!(slot.tensor.dtype(), T => {
        cpu.par_rows(slot.tensor.data_mut::<T>(), width, |first, rows| {
            let mut errors = RowErrors::new(prediction, target);
            for (row, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                let factor = (scale * f64::from(factors.of(row))) as f32;
                for (start, out) in (row * width..).step_by(PIECE).zip(out.chunks_mut(PIECE)) {
                    let errors = errors.load(start, out.len());
                    factors.differentiate(errors, row);
                    for error in &mut *errors {
                        *error *= factor;
                    }
                    factors.scale(errors, start);
                    store(errors, out, add);
                }
            }
        });
    });
}

/// Differences in f32, a piece at a time. The dtypes are looked at per piece: a kernel for each
/// combination of three would be compiled dozens of times.
struct RowErrors<'a> {
    prediction: &'a Tensor,
    target: &'a Tensor,
    scratch: [[f32; PIECE]; 2],
}

impl<'a> RowErrors<'a> {
    fn new(prediction: &'a Tensor, target: &'a Tensor) -> Self {
        Self { prediction, target, scratch: [[0.0; PIECE]; 2] }
    }

    #[inline(always)]
    fn load(&mut self, start: usize, length: usize) -> &mut [f32] {
        let [errors, target] = &mut self.scratch;
        let (errors, target) = (&mut errors[..length], &mut target[..length]);
        for (tensor, to) in [(self.prediction, &mut *errors), (self.target, &mut *target)] {
            with_real!(tensor.dtype(), T => load(&tensor.data::<T>()[start..start + length], to));
        }
        errors.iter_mut().zip(target).for_each(|(error, target)| *error -= *target);
        errors
    }
}

struct RowFactors<'a> {
    kind: CostKind,
    thresholds: Option<&'a [f32]>,
    weights: Option<&'a [f32]>,
    mask: Option<&'a [f32]>,
    elements: Option<&'a [f32]>,
    rows_per_sample: usize,
    /// One over what the sum is divided by; zero where that is zero.
    inverse_count: f64,
}

impl<'a> RowFactors<'a> {
    fn new(factors: &'a LossFactors, shape: Shape) -> Self {
        let weights = factors.weights.as_ref().map(Tensor::data);
        let mask = factors.mask.as_ref().map(Tensor::data::<f32>);
        let count = match mask {
            None => shape.elements() as f64,
            Some(mask) => {
                shape.width() as f64 * mask.iter().map(|factor| f64::from(*factor)).sum::<f64>()
            }
        };
        let inverse_count = if count == 0.0 { 0.0 } else { count.recip() };
        let elements = factors.elements.as_ref().map(Tensor::data);
        let rows_per_sample = factors.rows_per_sample;
        let (kind, thresholds) = (factors.kind, factors.thresholds.as_ref().map(Tensor::data));
        Self { kind, thresholds, weights, mask, elements, rows_per_sample, inverse_count }
    }

    /// What errors of a row from an element on cost, each by its factor. The errors are lost.
    #[inline(always)]
    fn cost(&self, errors: &mut [f32], row: usize, start: usize) -> f32 {
        let c = self.threshold(row);
        match self.kind {
            CostKind::Squared => {
                self.scale_roots(errors, start);
                return sum_squares(errors, 0.0);
            }
            CostKind::Absolute => errors.iter_mut().for_each(|error| *error = error.abs()),
            CostKind::Huber => huber(errors, c),
            CostKind::PseudoHuber => pseudo_huber(errors, c),
        }
        self.scale(errors, start);
        sum(errors)
    }

    /// Errors of a row become the derivatives of their costs.
    #[inline(always)]
    fn differentiate(&self, errors: &mut [f32], row: usize) {
        let c = self.threshold(row);
        match self.kind {
            CostKind::Squared => errors.iter_mut().for_each(|error| *error *= 2.0),
            CostKind::Absolute => {
                for error in errors {
                    *error = if *error == 0.0 { 0.0 } else { error.signum() };
                }
            }
            CostKind::Huber => errors.iter_mut().for_each(|error| *error = error.clamp(-c, c)),
            CostKind::PseudoHuber => pseudo_huber_slopes(errors, c),
        }
    }

    #[inline(always)]
    fn threshold(&self, row: usize) -> f32 {
        self.thresholds.map_or(1.0, |thresholds| thresholds[row / self.rows_per_sample])
    }

    /// Multiplies numbers from an element on by the factors of theirs.
    #[inline(always)]
    fn scale(&self, numbers: &mut [f32], start: usize) {
        let Some(elements) = self.elements else { return };
        numbers.iter_mut().zip(&elements[start..]).for_each(|(number, factor)| *number *= factor);
    }

    /// The same by their roots, as the numbers will be squared.
    #[inline(always)]
    fn scale_roots(&self, numbers: &mut [f32], start: usize) {
        let Some(elements) = self.elements else { return };
        for (number, factor) in numbers.iter_mut().zip(&elements[start..]) {
            *number *= factor.sqrt();
        }
    }

    #[inline(always)]
    fn of(&self, row: usize) -> f32 {
        let weight = self.weights.map_or(1.0, |weights| weights[row / self.rows_per_sample]);
        weight * self.mask.map_or(1.0, |mask| mask[row])
    }
}

simd! {
    fn huber(errors: &mut [f32], c: f32) {
        for error in errors {
            let size = error.abs();
            *error = if size <= c { 0.5 * size * size } else { c * (size - 0.5 * c) };
        }
    }

    /// 2c·(√(d² + c²) - c) without the difference of two near numbers.
    fn pseudo_huber(errors: &mut [f32], c: f32) {
        for error in errors {
            let d = *error;
            *error = 2.0 * c * d * (d / ((d * d + c * c).sqrt() + c));
        }
    }

    fn pseudo_huber_slopes(errors: &mut [f32], c: f32) {
        for error in errors {
            let d = *error;
            *error = 2.0 * c * d / (d * d + c * c).sqrt();
        }
    }
}
