//! The cross entropy on the processor: what is done to a chunk of the logits.

use std::ops::Range;

use super::{FOLD, IGNORED, count};
use crate::Tensor;
use crate::cpu::Cpu;
use crate::cpu::math::{exp, ln};
use crate::cpu::rows::{self, GRAIN, exp_sum, max, sum_exp};

/// Takes some columns of the logits into account.
pub fn fold(cpu: &Cpu, logits: &Tensor, targets: &Tensor, range: Range<usize>, folds: &mut Tensor) {
    let columns = logits.shape().width();
    let (logits, targets) = (logits.data::<f32>(), targets.data::<u32>());
    let rows = (GRAIN / columns).max(1);
    cpu.samples(folds.data_mut::<f32>(), rows * FOLD, |task, folds| {
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

/// The mean, and each row's log-sum if that is kept.
pub fn finish(
    cpu: &Cpu,
    folds: &Tensor,
    targets: &Tensor,
    log_sums: Option<&mut Tensor>,
    mean: &mut Tensor,
) {
    let folds = folds.data::<f32>().as_chunks::<FOLD>().0;
    let n_counted = count(targets);
    let targets = targets.data::<u32>();
    if let Some(log_sums) = log_sums {
        cpu.rows(log_sums.data_mut::<f32>(), 1, |first, log_sums| {
            for (log_sum, [largest, sum, _]) in log_sums.iter_mut().zip(&folds[first..]) {
                *log_sum = largest + ln(*sum);
            }
        });
    }
    let total = cpu.total(folds.len(), |rows| {
        let mut total = 0.0;
        for row in rows {
            let [largest, sum, target_logit] = folds[row];
            let loss = largest - target_logit + ln(sum);
            total += if targets[row] == IGNORED { 0.0 } else { f64::from(loss) };
        }
        total
    });
    mean.data_mut::<f32>()[0] = (total / n_counted as f64) as f32;
}

/// Turns logits into their gradients: (softmax - 1 at the target) · gradient / counted rows
pub fn slopes(
    cpu: &Cpu,
    targets: &Tensor,
    log_sums: &Tensor,
    gradient: &Tensor,
    range: Range<usize>,
    logits: &mut Tensor,
) {
    let columns = logits.shape().width();
    let scale = gradient.data::<f32>()[0] / count(targets) as f32;
    let (targets, log_sums) = (targets.data::<u32>(), log_sums.data::<f32>());
    cpu.rows(logits.data_mut::<f32>(), columns, |first, rows| {
        for (row, logits) in (first..).zip(rows.chunks_exact_mut(columns)) {
            if targets[row] == IGNORED {
                logits.fill(0.0);
                continue;
            }
            exp_sum(logits, 1.0, log_sums[row]);
            rows::multiply(logits, scale);
            let column = (targets[row] as usize).checked_sub(range.start);
            if let Some(at) = column.and_then(|column| logits.get_mut(column)) {
                *at -= scale;
            }
        }
    });
}
