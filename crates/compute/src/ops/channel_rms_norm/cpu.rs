//! Root-mean-square norm over channels on the CPU: a task for some pixels finds their factors, then a task for each
//! plane applies them.

use super::EPSILON;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{GRAIN, store};
use crate::cpu::simd::simd;
use crate::dtype::{Real, with_real};
use crate::ops::Activation;

pub fn forward(
    cpu: &CpuBackend,
    x: &Tensor,
    weight: &Tensor,
    activation: Activation,
    factors: &mut Tensor,
    y: &mut Tensor,
) {
    let &[_, channels, height, width] = x.shape().sizes() else {
        unreachable!("checked by the op")
    };
    // Nothing at all is no reason to cut it into pieces of no size.
    let plane = (height * width).max(1);
    let (weight, factors) = (weight.data::<f32>(), factors.data_mut::<f32>());
    with_real!(x.dtype(), T => {
        let x = x.data::<T>();
        let n_pixels = (GRAIN / channels.max(1)).max(1);
        for (x, factors) in x.chunks(channels.max(1) * plane).zip(factors.chunks_mut(plane)) {
            cpu.par_chunks(factors, n_pixels, |index, factors| {
                find(x, plane, index * n_pixels, factors);
            });
        }
        let factors = &*factors;
        cpu.par_chunks(y.data_mut::<T>(), plane, |index, y| {
            let (sample, channel) = (index / channels, index % channels);
            let (x, factors) = (&x[index * plane..][..plane], &factors[sample * plane..][..plane]);
            let parts = x.chunks(GRAIN).zip(factors.chunks(GRAIN)).zip(y.chunks_mut(GRAIN));
            for ((x, factors), y) in parts {
                let mut values: Vec<f32> = x
                    .iter()
                    .zip(factors)
                    .map(|(x, factor)| x.to_f32() * factor * weight[channel])
                    .collect();
                activation.apply(&mut values);
                store(&values, y, false);
            }
        });
    });
}

simd! {
    /// The factors of pixels from `first` on, of the planes of a sample.
    fn find<T: Real>(x: &[T], plane: usize, first: usize, factors: &mut [f32]) {
        factors.fill(0.0);
        for x in x.chunks(plane) {
            for (sum, x) in factors.iter_mut().zip(&x[first..]) {
                *sum += x.to_f32() * x.to_f32();
            }
        }
        let scale = ((x.len() / plane) as f32).sqrt();
        for factor in factors {
            let norm = factor.sqrt();
            // `max` would hide NaN.
            *factor = scale / if norm < EPSILON { EPSILON } else { norm };
        }
    }
}
