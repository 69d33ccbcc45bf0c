//! Root-mean-square norm over channels on a GPU.

use super::EPSILON;
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs, singles};
use crate::ops::Activation;

const KERNELS: WgslSource =
    WgslSource { name: "channel_rms_norm", text: include_str!("kernel.wgsl") };

pub fn forward(
    gpu: &GpuBackend,
    x: &Tensor,
    weight: &Tensor,
    activation: Activation,
    factors: &mut Tensor,
    y: &mut Tensor,
) {
    let &[samples, channels, height, width] = x.shape().sizes() else {
        unreachable!("checked by the op")
    };
    let (n, plane) = (x.shape().elements(), height * width);
    if n == 0 {
        return;
    }
    let variant = GpuVariant::of(&[x.dtype()]);
    let pixels = samples * plane;
    let arguments = arguments![x, &mut *factors, pixels, channels, plane, EPSILON];
    gpu.launch(&KERNELS, "channel_factors", &variant, singles(pixels), &arguments);
    let arguments = arguments![x, &*factors, weight, y, n, channels, plane, activation.code()];
    gpu.launch(&KERNELS, "channel_rms_norm", &variant, pairs(n), &arguments);
}
