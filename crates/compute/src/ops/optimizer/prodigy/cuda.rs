//! Prodigy on a GPU; one launch works on many parameters.

use super::super::cuda::{
    KernelName, SHARE, STEP_SHARE, TensorArgs, clip_arguments, launch, tensor_args,
};
use super::{GradClip, ProdigyState, ProdigyUpdate};
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, THREADS, arguments};
use crate::{Dtype, Tensor};

const KERNELS: CudaSource = CudaSource {
    name: "prodigy",
    text: concat!(include_str!("../tensors.cuh"), include_str!("../prodigy.cu")),
};

fn named(function: &'static str) -> KernelName {
    KernelName { source: &KERNELS, function }
}

/// Floats of workspace for parameters of these sizes: two sums in f64 of each share.
pub fn floats(sizes: impl Iterator<Item = usize>) -> usize {
    4 * sizes.map(|n| n.div_ceil(SHARE)).sum::<usize>()
}

/// What kernels work on.
pub fn tensors(
    params: &mut [Tensor],
    gradients: &[Option<&Tensor>],
    state: &mut [ProdigyState],
) -> Vec<TensorArgs> {
    let state = state
        .iter_mut()
        .map(|ProdigyState { first, second, start, sum }| [first, second, start, sum]);
    tensor_args(params, gradients, state)
}

pub fn prodigy(
    cuda: &CudaBackend,
    tensors: &[TensorArgs],
    distance: &mut Tensor,
    sums: &mut Tensor,
    update: ProdigyUpdate,
    clip: Option<&GradClip>,
) {
    let ProdigyUpdate { scale, means, squares, keeps, rate, sum_rate, .. } = update;
    let ProdigyUpdate { decay, epsilon, d0, d_coef, .. } = update;
    let (estimates, partial) = (distance.address_mut(), sums.address_mut());
    let moments = arguments![means[0], means[1], squares[0], squares[1], keeps, sum_rate, d0];
    let clip = [&clip_arguments(clip)[..], &arguments![scale]].concat();
    let arguments = |before: usize| {
        let partial = partial + (2 * before * size_of::<f64>()) as u64;
        [&arguments![partial, SHARE, estimates][..], &clip, &moments].concat()
    };
    launch(cuda, named("prodigy_moments"), Dtype::F32, tensors, SHARE, THREADS, arguments);
    let count: usize = tensors.iter().map(|tensor| tensor.n.div_ceil(SHARE)).sum();
    let numbers = arguments![keeps, rate, d0, d_coef];
    let arguments = [&arguments![partial, count, estimates][..], &clip, &numbers].concat();
    let variant = CudaVariant::of(&[Dtype::F32]);
    cuda.launch(&KERNELS, "prodigy_distance", variant, LaunchConfig::blocks(1), &arguments);
    let numbers = arguments![rate, decay, epsilon];
    let arguments = |_| [&arguments![STEP_SHARE, estimates][..], &clip, &numbers].concat();
    launch(cuda, named("prodigy_params"), Dtype::F32, tensors, STEP_SHARE, THREADS, arguments);
}
