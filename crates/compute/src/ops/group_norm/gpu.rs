//! Group norm on a GPU.

use super::GroupNormConfig;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs};

const KERNELS: WgslSource = WgslSource { name: "group_norm", text: include_str!("kernel.wgsl") };

/// Floats of workspace: two statistics of each group.
pub fn floats(x: &Tensor, form: GroupNormConfig) -> usize {
    2 * x.shape().sizes()[0] * form.n_groups
}

pub fn forward(
    gpu: &GpuBackend,
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    form: GroupNormConfig,
    workspace: &mut Tensor,
    y: &mut Tensor,
) {
    let &[samples, channels, height, width] = x.shape().sizes() else {
        unreachable!("checked by the op")
    };
    let (n, plane) = (x.shape().elements(), height * width);
    if n == 0 {
        return;
    }
    let (groups, size) = (samples * form.n_groups, channels / form.n_groups * plane);
    let variant = GpuVariant::of(&[x.dtype()]);
    let arguments = arguments![x, &mut *workspace, size, form.epsilon];
    gpu.launch(&KERNELS, "group_statistics", &variant, groups, &arguments);
    let arguments = arguments![
        x,
        &*workspace,
        weight,
        bias,
        y,
        n,
        size,
        plane,
        channels,
        form.activation.code()
    ];
    gpu.launch(&KERNELS, "group_norm", &variant, pairs(n), &arguments);
}
