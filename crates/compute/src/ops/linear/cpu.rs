//! What a linear layer needs on the CPU besides matmuls.

use super::Dropout;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::store;
use crate::dtype::{Real, with_real};

/// Dropout: zeros a share of the elements, and scales the others up.
pub fn dropout(
    cpu: &CpuBackend,
    Dropout { share, sequence: random }: Dropout,
    x: &Tensor,
    out: &mut Tensor,
) {
    let scale = 1.0 / (1.0 - share);
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(out.data_mut::<T>(), 1, |first, out| {
            for (index, (out, x)) in (first..).zip(out.iter_mut().zip(&x[first..])) {
                let factor = if random.uniform(index) < share { 0.0 } else { scale };
                *out = T::from_f32(factor * x.to_f32());
            }
        });
    });
}

/// The sum of each column, a strip of columns per task.
pub fn column_sums(cpu: &CpuBackend, matrix: &Tensor, sums: &mut Tensor, add: bool) {
    const STRIP: usize = 64;
    let width = matrix.shape().width();
    with_real!(matrix.dtype(), T => {
        let matrix = matrix.data::<T>();
        cpu.par_chunks(sums.data_mut::<f32>(), STRIP, |strip, sums| {
            let from = strip * STRIP;
            let mut totals = [0.0; STRIP];
            for row in matrix.chunks_exact(width) {
                for (total, number) in totals.iter_mut().zip(&row[from..from + sums.len()]) {
                    *total += number.to_f32();
                }
            }
            store(&totals, sums, add);
        });
    });
}
