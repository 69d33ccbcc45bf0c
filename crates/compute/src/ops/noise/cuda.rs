//! Noise on an NVIDIA GPU.

use super::{Channels, Sizes};
use crate::Tensor;
use crate::cuda::{Cuda, Grid, Source, Variant, arguments};

const KERNELS: Source = Source { name: "noise", text: include_str!("kernel.cu") };

pub fn sample_latents(
    cuda: &Cuda,
    latents: &mut Tensor,
    sizes: Sizes,
    (deviation, streams): (Option<&Tensor>, Option<&Tensor>),
    Channels { shift, scale }: Channels<'_>,
) {
    let (n, variant) = (latents.shape().elements(), Variant::of(&[latents.dtype()]));
    let (per_sample, per_channel) = (sizes.per_sample(), sizes.per_channel);
    let arguments =
        arguments![latents, deviation, shift, scale, streams, n, per_sample, per_channel];
    cuda.launch(&KERNELS, "sample_latents", variant, Grid::numbers(n), &arguments);
}

pub fn add_noise(
    cuda: &Cuda,
    (latents, noisy): (&mut Tensor, &mut Tensor),
    sizes: Sizes,
    sigmas: &Tensor,
    streams: Option<&Tensor>,
) {
    let (n, variant) = (latents.shape().elements(), Variant::of(&[noisy.dtype()]));
    let arguments = arguments![latents, noisy, sigmas, streams, n, sizes.per_sample()];
    cuda.launch(&KERNELS, "add_noise", variant, Grid::numbers(n), &arguments);
}
