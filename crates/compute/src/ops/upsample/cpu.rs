//! Enlarging images on the CPU, a row of the result at a time.

use super::UpsampleFactors;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::dtype::with_real;

pub fn forward(cpu: &CpuBackend, x: &Tensor, factors: UpsampleFactors, y: &mut Tensor) {
    let (&[_, _, frames, height, width], &[_, _, all_frames, tall, wide]) =
        (x.shape().sizes(), y.shape().sizes())
    else {
        unreachable!("checked by the op")
    };
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        cpu.par_rows(y.data_mut::<T>(), wide, |first, rows| {
            for (row, y) in (first..).zip(rows.chunks_exact_mut(wide)) {
                let (plane, row) = (row / tall, row % tall / factors.side);
                let frame = (plane % all_frames).div_ceil(factors.frames);
                let line = (plane / all_frames * frames + frame) * height + row;
                let x = &x[line * width..][..width];
                for (y, x) in y.chunks_exact_mut(factors.side).zip(x) {
                    y.fill(*x);
                }
            }
        });
    });
}
