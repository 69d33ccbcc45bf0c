//! Group norm on a GPU.

use super::GroupNormConfig;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "group_norm", text: include_str!("kernel.cu") };

/// Threads of a block that has a group: few groups are large.
const THREADS: u32 = 1024;

/// Floats of workspace: two statistics of each group.
pub fn floats(x: &Tensor, form: GroupNormConfig) -> usize {
    2 * x.shape().sizes()[0] * form.n_groups
}

pub fn forward(
    cuda: &CudaBackend,
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
    let variant = CudaVariant::of(&[x.dtype()]);
    let grid = LaunchConfig { threads: THREADS, ..LaunchConfig::blocks(groups) };
    let arguments = arguments![x, &mut *workspace, size, form.epsilon];
    cuda.launch(&KERNELS, "group_statistics", variant, grid, &arguments);
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
    cuda.launch(&KERNELS, "group_norm", variant, LaunchConfig::per_element(n), &arguments);
}
