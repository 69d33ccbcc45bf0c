//! Means over squares on the CPU, a row of the result at a time.

use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::dtype::{Real, with_real};

pub fn forward(cpu: &CpuBackend, x: &Tensor, size: usize, y: &mut Tensor) {
    let (width, narrow) = (x.shape().width(), y.shape().width());
    let share = 1.0 / (size * size) as f32;
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), narrow, |first, rows| {
            let mut sums = vec![0.0; narrow];
            for (row, y) in (first..).zip(rows.chunks_exact_mut(narrow)) {
                sums.fill(0.0);
                for x in x[row * size * width..][..size * width].chunks_exact(width) {
                    for (sum, x) in sums.iter_mut().zip(x.chunks_exact(size)) {
                        *sum += x.iter().map(|x| x.to_f32()).sum::<f32>();
                    }
                }
                for (y, sum) in y.iter_mut().zip(&sums) {
                    *y = T::from_f32(sum * share);
                }
            }
        });
    });
}
