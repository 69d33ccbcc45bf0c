//! Root-mean-square norm over channels on a GPU.

use super::EPSILON;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, WARP, arguments};
use crate::ops::Activation;

const KERNELS: CudaSource =
    CudaSource { name: "channel_rms_norm", text: include_str!("kernel.cu") };

/// Rows of blocks that a GPU can have.
const MAX_BLOCK_ROWS: usize = 65535;

pub fn forward(
    cuda: &CudaBackend,
    x: &Tensor,
    weight: &Tensor,
    activation: Activation,
    factors: &mut Tensor,
    y: &mut Tensor,
) {
    let &[samples, channels, height, width] = x.shape().sizes() else {
        unreachable!("checked by the op")
    };
    let (planes, plane) = (samples * channels, height * width);
    if planes * plane == 0 {
        return;
    }
    let variant = CudaVariant::of(&[x.dtype()]);
    let per_sample = plane.div_ceil(WARP);
    let grid = LaunchConfig::blocks(samples * per_sample);
    let arguments = arguments![x, &mut *factors, channels, plane, per_sample, EPSILON];
    cuda.launch(&KERNELS, "channel_factors", variant, grid, &arguments);
    let across = LaunchConfig::per_element(plane);
    let down = planes.min(MAX_BLOCK_ROWS) as u32;
    let grid = LaunchConfig { blocks: [across.blocks[0], down, 1], ..across };
    let arguments = arguments![x, &*factors, weight, y, planes, channels, plane, activation.code()];
    cuda.launch(&KERNELS, "channel_rms_norm", variant, grid, &arguments);
}
