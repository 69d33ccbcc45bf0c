//! The cross entropy on the CPU: what is done to a piece of the logits.

use std::ops::Range;

use super::{FOLD, IGNORE_INDEX, count};
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::math::{exp, ln};
use crate::cpu::rows::{GRAIN, max, sum_exp};
use crate::cpu::simd::simd;
use crate::dtype::{Real, with_real};

/// Takes some columns of the logits into account.
pub fn fold(
    cpu: &CpuBackend,
    logits: &Tensor,
    targets: &Tensor,
    range: &Range<usize>,
    folds: &mut Tensor,
) {
    let columns = logits.shape().width();
    let (logits, targets) = (logits.data::<f32>(), targets.data::<u32>());
    let rows = (GRAIN / columns).max(1);
    cpu.par_chunks(folds.data_mut::<f32>(), rows * FOLD, |task, folds| {
        for (row, fold) in (task * rows..).zip(folds.as_chunks_mut::<FOLD>().0) {
            if range.start == 0 {
                *fold = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY];
            }
            fold_row(&logits[row * columns..][..columns], targets[row], range.start, fold);
        }
    });
}

#[inline(always)]
fn fold_row(logits: &[f32], target: u32, first: usize, fold: &mut [f32; FOLD]) {
    let [largest_before, sum_before, target_logit] = *fold;
    let largest_here = max(logits);
    let is_larger = largest_here > largest_before || largest_here.is_nan();
    let largest = if is_larger { largest_here } else { largest_before };
    // Where nothing is above minus infinity yet, any finite centre gives the right sum: zero.
    let center = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
    let sum_here = sum_exp(logits, center);
    let sum = sum_before * exp(largest_before - center) + sum_here;
    let here = (target as usize).checked_sub(first).and_then(|column| logits.get(column));
    *fold = [largest, sum, here.copied().unwrap_or(target_logit)];
}

/// The mean over the rows that count.
pub fn finish(cpu: &CpuBackend, folds: &Tensor, targets: &Tensor, mean: &mut Tensor) {
    let folds = folds.data::<f32>().as_chunks::<FOLD>().0;
    let n_counted = count(targets);
    let targets = targets.data::<u32>();
    let total = cpu.total(folds.len(), |rows| {
        let mut total = 0.0;
        for row in rows {
            let [largest, sum, target_logit] = folds[row];
            let loss = largest - target_logit + ln(sum);
            total += if targets[row] == IGNORE_INDEX { 0.0 } else { f64::from(loss) };
        }
        total
    });
    mean.data_mut::<f32>()[0] = (total / n_counted as f64) as f32;
}

/// Turns logits into the gradients of their rows' losses: softmax - 1 at the target
pub fn logit_gradients(
    cpu: &CpuBackend,
    targets: &Tensor,
    folds: &Tensor,
    range: &Range<usize>,
    logits: &mut Tensor,
) {
    let columns = logits.shape().width();
    let (targets, folds) = (targets.data::<u32>(), folds.data::<f32>().as_chunks::<FOLD>().0);
    cpu.par_rows(logits.data_mut::<f32>(), columns, |first, rows| {
        for (row, logits) in (first..).zip(rows.chunks_exact_mut(columns)) {
            if targets[row] == IGNORE_INDEX {
                logits.fill(0.0);
                continue;
            }
            let [largest, sum, _] = folds[row];
            softmax(logits, largest, 1.0 / sum);
            let column = (targets[row] as usize).checked_sub(range.start);
            if let Some(at) = column.and_then(|column| logits.get_mut(column)) {
                *at -= 1.0;
            }
        }
    });
}

/// Multiplies each row of x by its weight.
pub fn scale_rows(cpu: &CpuBackend, weights: &Tensor, x: &mut Tensor) {
    let (width, weights) = (x.shape().width(), weights.data::<f32>());
    with_real!(x.dtype(), T => {
        cpu.par_rows(x.data_mut::<T>(), width, |first, rows| {
            for (row, weight) in rows.chunks_exact_mut(width).zip(&weights[first..]) {
                for number in row {
                    *number = T::from_f32(weight * number.to_f32());
                }
            }
        });
    });
}

/// Writes share · gradient · sums, or adds it to what is there.
pub fn add_scaled(
    cpu: &CpuBackend,
    sums: &Tensor,
    gradient: &Tensor,
    share: f32,
    to: &mut Tensor,
    add: bool,
) {
    let (sums, scale) = (sums.data::<f32>(), share * gradient.data::<f32>()[0]);
    with_real!(to.dtype(), T => {
        cpu.par_rows(to.data_mut::<T>(), 1, |first, to| {
            for (to, sum) in to.iter_mut().zip(&sums[first..]) {
                let before = if add { to.to_f32() } else { 0.0 };
                *to = T::from_f32(before + scale * sum);
            }
        });
    });
}

simd! {
    fn softmax(logits: &mut [f32], largest: f32, inverse: f32) {
        for number in logits {
            *number = exp(*number - largest) * inverse;
        }
    }
}
