//! Root-mean-square norm over channels on a GPU.

use super::EPSILON;
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, WARP, arguments, pack};
use crate::ops::Activation;

const KERNELS: CudaSource =
    CudaSource { name: "channel_rms_norm", text: include_str!("kernel.cu") };

/// Channels of a thread. Chosen: few enough that small images keep a GPU busy.
const CHANNELS: usize = 4;

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
    let plane = height * width;
    if samples * channels * plane == 0 {
        return;
    }
    let variant = CudaVariant::of(&[x.dtype()]);
    let per_sample = plane.div_ceil(WARP);
    let grid = LaunchConfig::blocks(samples * per_sample);
    let arguments = arguments![x, &mut *factors, channels, plane, per_sample, EPSILON];
    cuda.launch(&KERNELS, "channel_factors", variant, grid, &arguments);
    let p = pack(plane, &[x, factors, y]);
    let across = LaunchConfig::per_element(plane / p);
    let down = channels.div_ceil(CHANNELS) as u32;
    let grid = LaunchConfig { blocks: [across.blocks[0], down, samples as u32], ..across };
    let arguments = arguments![x, &*factors, weight, y, channels, plane, activation.code()];
    let variant = variant.with_pack(p);
    cuda.launch(&KERNELS, "channel_rms_norm", variant, grid, &arguments);
}
