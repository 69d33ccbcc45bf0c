//! Group norm on the CPU: a task per group, which cuts itself up where the group is large.

use rayon::prelude::*;

use super::GroupNormConfig;
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::{GRAIN, store};
use crate::cpu::sums::moments;
use crate::dtype::{Real, with_real};

pub fn forward(
    cpu: &CpuBackend,
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    form: GroupNormConfig,
    y: &mut Tensor,
) {
    let &[_, channels, height, width] = x.shape().sizes() else {
        unreachable!("checked by the op")
    };
    let per_group = channels / form.n_groups;
    let n_pixels = height * width;
    let (weight, bias) = (weight.data::<f32>(), bias.data::<f32>());
    with_real!(x.dtype(), T => {
        let (x, y) = (x.data::<T>(), y.data_mut::<T>());
        // Nothing at all is no reason to cut it into pieces of no size.
        let (group_size, plane_size) = ((per_group * n_pixels).max(1), n_pixels.max(1));
        let groups = x.par_chunks(group_size).zip(y.par_chunks_mut(group_size)).enumerate();
        cpu.install(|| groups.for_each(|(index, (x, y))| {
            let (mean, inverse) = statistics(x, form.epsilon);
            let planes = x.par_chunks(plane_size).zip(y.par_chunks_mut(plane_size)).enumerate();
            planes.for_each(|(plane, (x, y))| {
                let channel = index % form.n_groups * per_group + plane;
                let (factor, shift) = (inverse * weight[channel], bias[channel]);
                x.par_chunks(GRAIN).zip(y.par_chunks_mut(GRAIN)).for_each(|(x, y)| {
                    let mut values = vec![0.0; x.len()];
                    for (value, x) in values.iter_mut().zip(x) {
                        *value = (x.to_f32() - mean) * factor + shift;
                    }
                    form.activation.apply(&mut values);
                    store(&values, y, false);
                });
            });
        }));
    });
}

/// Mean and 1 / std. Distances are taken from the first number, which is near the others
/// where the mean is large, so that one pass is as good as two.
fn statistics<T: Real>(x: &[T], epsilon: f32) -> (f32, f32) {
    let (count, center) = (x.len() as f64, f64::from(x[0].to_f32()));
    let [sum, squares] = moments(x, center);
    let distance = sum / count;
    // Rounding may leave a negative variance where all values are equal; `max` would hide NaN.
    let variance = squares / count - distance * distance;
    let variance = if variance < 0.0 { 0.0 } else { variance };
    let inverse = 1.0 / (variance + f64::from(epsilon)).sqrt();
    ((center + distance) as f32, inverse as f32)
}
