//! Prodigy on a GPU, a kernel for each parameter.

use super::super::gpu::{SHARE, clip_args};
use super::{GradClip, ProdigyState, ProdigyUpdate};
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, singles};

const KERNELS: WgslSource = WgslSource { name: "prodigy", text: include_str!("../prodigy.wgsl") };

/// What is summed over all parameters.
pub struct Sums<'a> {
    pub distance: &'a mut Tensor,
    /// Of shares.
    pub sums: &'a mut Tensor,
}

/// Floats of workspace for parameters of these sizes: two for each share.
pub fn floats(sizes: impl Iterator<Item = usize>) -> usize {
    2 * sizes.map(|n| n.div_ceil(SHARE)).sum::<usize>()
}

pub fn prodigy(
    gpu: &GpuBackend,
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ProdigyState],
    Sums { distance, sums }: Sums<'_>,
    update: ProdigyUpdate,
    clip: Option<&GradClip>,
) {
    let ProdigyUpdate { scale, means, squares, keeps, rate, sum_rate, .. } = update;
    let ProdigyUpdate { decay, epsilon, d0, d_coef, .. } = update;
    let ((norm, most), variant, mut count) = (clip_args(clip), GpuVariant::default(), 0);
    let moments = arguments![means[0], means[1], squares[0], squares[1], keeps, sum_rate, d0];
    let all = params.iter().zip(gradients).zip(state.iter_mut());
    for ((param, gradient), ProdigyState { first, second, start, sum }) in all {
        let Some(gradient) = *gradient else { continue };
        let n = param.shape().elements();
        let tensors = arguments![param, gradient, first, second, &*start, sum];
        let others = arguments![&mut *sums, &*distance, norm, n, SHARE, count, most, scale];
        let arguments = [&tensors[..], &others, &moments].concat();
        let groups = n.div_ceil(SHARE);
        gpu.launch(&KERNELS, "prodigy_moments", &variant, groups, &arguments);
        count += groups;
    }
    let tensors = arguments![&*sums, &mut *distance, norm, count, scale];
    let arguments = [&tensors[..], &arguments![keeps, rate, d0, d_coef]].concat();
    gpu.launch(&KERNELS, "prodigy_distance", &variant, 1, &arguments);
    for ((param, gradient), of) in params.iter_mut().zip(gradients).zip(state) {
        if gradient.is_none() {
            continue;
        }
        let (n, ProdigyState { first, second, .. }) = (param.shape().elements(), &*of);
        let tensors = arguments![param, first, second, &*distance, norm, n, scale];
        let arguments = [&tensors[..], &arguments![rate, decay, epsilon]].concat();
        gpu.launch(&KERNELS, "prodigy_params", &variant, singles(n), &arguments);
    }
}
