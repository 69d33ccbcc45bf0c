//! Norms of rows on the CPU.

use super::Weight;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::gemm::Floats;
use crate::cpu::rows::{GRAIN, dot, sum_squares};

pub fn row_norms(cpu: &CpuBackend, weight: Weight<'_>, norms: &mut Tensor) {
    let width = weight.shape().width();
    let numbers = match weight {
        Weight::Dense(var) => Floats::from(var.tensor()),
        Weight::Quantised(quantised) => quantised.floats(),
    };
    let rows = (GRAIN / width.max(1)).max(1);
    cpu.par_chunks(norms.data_mut::<f32>(), rows, |piece, norms| {
        let mut row = vec![0.0; width];
        for (index, norm) in (piece * rows..).zip(norms) {
            numbers.load(index * width, &mut row);
            *norm = sum_squares(&row, 0.0).sqrt();
        }
    });
}

/// √(norm² + scale·b·cross) for each row b of `up`.
pub fn adapted_norms(
    cpu: &CpuBackend,
    norms: &Tensor,
    up: &Tensor,
    cross: &Tensor,
    scale: f32,
    adapted: &mut Tensor,
) {
    let rank = up.shape().width();
    let [norms, up, cross] = [norms, up, cross].map(Tensor::data::<f32>);
    cpu.par_rows(adapted.data_mut::<f32>(), 1, |first, adapted| {
        for (row, adapted) in (first..).zip(adapted) {
            let at = row * rank..(row + 1) * rank;
            let before = norms[row] * norms[row];
            let square = before + scale * dot(&up[at.clone()], &cross[at]);
            // An adapter that cancels its row leaves nothing but rounding, perhaps below zero; and
            // a row of zeros must not turn its magnitude, zero too, into NaN.
            let least = f32::EPSILON * before + f32::MIN_POSITIVE;
            *adapted = if square < least { least } else { square }.sqrt();
        }
    });
}

pub fn divide(cpu: &CpuBackend, x: &Tensor, by: &Tensor, out: &mut Tensor, add: bool) {
    let (x, by) = (x.data::<f32>(), by.data::<f32>());
    cpu.par_rows(out.data_mut::<f32>(), 1, |first, out| {
        for ((out, x), by) in out.iter_mut().zip(&x[first..]).zip(&by[first..]) {
            *out = if add { *out } else { 0.0 } + x / by;
        }
    });
}
