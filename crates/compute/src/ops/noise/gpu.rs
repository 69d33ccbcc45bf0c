//! Noise on a GPU.

use super::{Channels, Sizes};
use crate::Tensor;
use crate::gpu::{Gpu, Source, Variant, arguments, pairs, singles};

const KERNELS: Source = Source { name: "noise", text: include_str!("kernel.wgsl") };

pub fn sample_latents(
    gpu: &Gpu,
    latents: &mut Tensor,
    sizes: Sizes,
    (deviation, streams): (Option<&Tensor>, Option<&Tensor>),
    Channels { shift, scale }: Channels<'_>,
) {
    let (n, variant) = (latents.shape().elements(), Variant::of(&[latents.dtype()]));
    let (per_sample, per_channel) = (sizes.per_sample(), sizes.per_channel);
    let arguments =
        arguments![latents, deviation, shift, scale, streams, n, per_sample, per_channel];
    gpu.launch(&KERNELS, "sample_latents", &variant, singles(n), &arguments);
}

pub fn add_noise(
    gpu: &Gpu,
    (latents, noisy): (&mut Tensor, &mut Tensor),
    sizes: Sizes,
    sigmas: &Tensor,
    streams: Option<&Tensor>,
) {
    let (n, variant) = (latents.shape().elements(), Variant::of(&[noisy.dtype()]));
    let arguments = arguments![latents, noisy, sigmas, streams, n, sizes.per_sample()];
    gpu.launch(&KERNELS, "add_noise", &variant, pairs(n), &arguments);
}
