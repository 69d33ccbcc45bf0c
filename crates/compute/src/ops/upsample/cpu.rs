//! Enlarging images on the CPU, a row of the result at a time.

use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::dtype::with_real;

pub fn forward(cpu: &CpuBackend, x: &Tensor, factor: usize, y: &mut Tensor) {
    let (width, wide) = (x.shape().width(), y.shape().width());
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), wide, |first, rows| {
            for (row, y) in (first..).zip(rows.chunks_exact_mut(wide)) {
                let x = &x[row / factor * width..][..width];
                for (y, x) in y.chunks_exact_mut(factor).zip(x) {
                    y.fill(*x);
                }
            }
        });
    });
}
