//! Noise on a GPU.

use super::{LatentScaling, LatentSizes};
use crate::Tensor;
use crate::gpu::{GpuBackend, GpuVariant, WgslSource, arguments, pairs, singles};

const KERNELS: WgslSource = WgslSource { name: "noise", text: include_str!("kernel.wgsl") };

pub fn sample_latents(
    gpu: &GpuBackend,
    latents: &mut Tensor,
    sizes: LatentSizes,
    std: Option<&Tensor>,
    sequences: Option<&Tensor>,
    LatentScaling { shift, scale }: LatentScaling<'_>,
) {
    let (n, variant) = (latents.shape().elements(), GpuVariant::of(&[latents.dtype()]));
    let (per_sample, per_channel) = (sizes.per_sample(), sizes.per_channel);
    let arguments = arguments![latents, std, shift, scale, sequences, n, per_sample, per_channel];
    gpu.launch(&KERNELS, "sample_latents", &variant, singles(n), &arguments);
}

pub fn add_noise(
    gpu: &GpuBackend,
    latents: &mut Tensor,
    noisy: &mut Tensor,
    sizes: LatentSizes,
    sigmas: &Tensor,
    sequences: Option<&Tensor>,
) {
    let (n, variant) = (latents.shape().elements(), GpuVariant::of(&[noisy.dtype()]));
    let arguments = arguments![latents, noisy, sigmas, sequences, n, sizes.per_sample()];
    gpu.launch(&KERNELS, "add_noise", &variant, pairs(n), &arguments);
}
