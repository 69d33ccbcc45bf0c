//! The mean squared error on the CPU.

use super::LossWeights;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{load, store, sum_squares};
use crate::dtype::with_real;
use crate::{Shape, Tensor};

/// Elements of a row that are summed in f32. Chosen: short enough for the error of a sum in sixteen
/// lanes to stay below that of rounding its result a few times.
const PIECE: usize = 1024;

pub fn forward(
    cpu: &CpuBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossWeights,
    mean: &mut Tensor,
) {
    let (shape, width) = (prediction.shape(), prediction.shape().width());
    let factors = RowLossWeights::new(factors, shape);
    let total = cpu.total(shape.rows(), |rows| {
        let (mut errors, mut total) = (RowErrors::new(prediction, target), 0.0);
        for row in rows {
            let mut squares = 0.0;
            for start in (row * width..(row + 1) * width).step_by(PIECE) {
                let length = PIECE.min((row + 1) * width - start);
                let errors = errors.load(start, length);
                factors.scale_roots(errors, start);
                squares += f64::from(sum_squares(errors, 0.0));
            }
            total += f64::from(factors.of(row)) * squares;
        }
        total
    });
    mean.data_mut::<f32>()[0] = (total * factors.inverse_count) as f32;
}

/// 2·gradient·(prediction - target)·factor / count
pub fn backward(
    cpu: &CpuBackend,
    prediction: &Tensor,
    target: &Tensor,
    factors: &LossWeights,
    gradient: &Tensor,
    slot: &mut GradientSlot,
) {
    let width = prediction.shape().width();
    let factors = RowLossWeights::new(factors, prediction.shape());
    let scale = 2.0 * f64::from(gradient.data::<f32>()[0]) * factors.inverse_count;
    let add = slot.add;
    with_real!(slot.tensor.dtype(), T => {
        cpu.par_rows(slot.tensor.data_mut::<T>(), width, |first, rows| {
            let mut errors = RowErrors::new(prediction, target);
            for (row, out) in (first..).zip(rows.chunks_exact_mut(width)) {
                let factor = (scale * f64::from(factors.of(row))) as f32;
                for (start, out) in (row * width..).step_by(PIECE).zip(out.chunks_mut(PIECE)) {
                    let errors = errors.load(start, out.len());
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

struct RowLossWeights<'a> {
    weights: Option<&'a [f32]>,
    mask: Option<&'a [f32]>,
    elements: Option<&'a [f32]>,
    rows_per_sample: usize,
    /// One over what the sum is divided by; zero where that is zero.
    inverse_count: f64,
}

impl<'a> RowLossWeights<'a> {
    fn new(factors: &'a LossWeights, shape: Shape) -> Self {
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
        Self { weights, mask, elements, rows_per_sample, inverse_count }
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
