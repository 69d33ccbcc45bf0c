//! Noise on an NVIDIA GPU.

use super::{LatentScaling, LatentSizes};
use crate::Tensor;
use crate::cuda::{CudaBackend, CudaSource, CudaVariant, LaunchConfig, arguments};

const KERNELS: CudaSource = CudaSource { name: "noise", text: include_str!("kernel.cu") };

pub fn sample_latents(
    cuda: &CudaBackend,
    latents: &mut Tensor,
    sizes: LatentSizes,
    std: Option<&Tensor>,
    sequences: Option<&Tensor>,
    LatentScaling { shift, scale }: LatentScaling<'_>,
) {
    let (n, variant) = (latents.shape().elements(), CudaVariant::of(&[latents.dtype()]));
    let (per_sample, per_channel) = (sizes.per_sample(), sizes.per_channel);
    let arguments = arguments![latents, std, shift, scale, sequences, n, per_sample, per_channel];
    cuda.launch(&KERNELS, "sample_latents", variant, LaunchConfig::per_element(n), &arguments);
}

pub fn add_noise(
    cuda: &CudaBackend,
    latents: &mut Tensor,
    noisy: &mut Tensor,
    sizes: LatentSizes,
    sigmas: &Tensor,
    sequences: Option<&Tensor>,
) {
    let (n, variant) = (latents.shape().elements(), CudaVariant::of(&[noisy.dtype()]));
    let arguments = arguments![latents, noisy, sigmas, sequences, n, sizes.per_sample()];
    cuda.launch(&KERNELS, "add_noise", variant, LaunchConfig::per_element(n), &arguments);
}
