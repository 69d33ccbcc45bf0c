//! Khatri-Rao products on the CPU, a row of the result at a time.

use super::{FactorSizes, KhatriRaoSizes, SharedAxis};
use crate::Tensor;
use crate::backward::GradientSlot;
use crate::cpu::CpuBackend;
use crate::cpu::rows::store;

pub fn forward(cpu: &CpuBackend, sizes: KhatriRaoSizes, a: &Tensor, b: &Tensor, y: &mut Tensor) {
    let KhatriRaoSizes { axis, shared, own: [r, s] } = sizes;
    let (a, b, width) = (a.data::<f32>(), b.data::<f32>(), y.shape().width());
    cpu.par_rows(y.data_mut::<f32>(), width, |first, rows| {
        for (index, y) in (first..).zip(rows.chunks_exact_mut(width)) {
            match axis {
                SharedAxis::Columns => {
                    let (a, b) = (&a[index / s * shared..], &b[index % s * shared..]);
                    y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = a * b);
                }
                SharedAxis::Rows => {
                    let (a, b) = (&a[index * r..], &b[index * s..]);
                    for (y, a) in y.chunks_exact_mut(s).zip(a) {
                        y.iter_mut().zip(b).for_each(|(y, b)| *y = a * b);
                    }
                }
            }
        }
    });
}

pub fn backward(
    cpu: &CpuBackend,
    sizes: FactorSizes,
    gradient: &Tensor,
    other: &Tensor,
    slot: &mut GradientSlot,
) {
    let FactorSizes { axis, shared, own: [own, others], steps: [step, inner] } = sizes;
    let (gradient, other, add) = (gradient.data::<f32>(), other.data::<f32>(), slot.add);
    let width = slot.tensor.shape().width();
    cpu.par_rows(slot.tensor.data_mut::<f32>(), width, |first, rows| {
        let mut sums = vec![0.0; width];
        for (index, out) in (first..).zip(rows.chunks_exact_mut(width)) {
            sums.fill(0.0);
            for j in 0..others {
                match axis {
                    SharedAxis::Columns => {
                        let gradient = &gradient[(index * step + j * inner) * shared..];
                        let pairs = gradient.iter().zip(&other[j * shared..]);
                        sums.iter_mut().zip(pairs).for_each(|(sum, (g, x))| *sum += g * x);
                    }
                    SharedAxis::Rows => {
                        let gradient = &gradient[index * own * others + j * inner..];
                        let (gradient, x) =
                            (gradient.iter().step_by(step), other[index * others + j]);
                        sums.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g * x);
                    }
                }
            }
            store(&sums, out, add);
        }
    });
}
