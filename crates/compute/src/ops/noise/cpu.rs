//! Noise on the CPU.

use rayon::prelude::*;

use super::{LatentScaling, LatentSizes, LatentStd};
use crate::Tensor;
use crate::cpu::CpuBackend;
use crate::cpu::rows::GRAIN;
use crate::dtype::{Real, with_real};
use crate::random::RandomSequence;

pub fn sample_latents(
    cpu: &CpuBackend,
    latents: &mut Tensor,
    sizes: LatentSizes,
    spread: Option<LatentStd<'_>>,
    LatentScaling { shift, scale }: LatentScaling<'_>,
) {
    let (shift, scale) = (shift.data::<f32>(), scale.data::<f32>());
    let spread = spread.map(|LatentStd { std, sequences }| (std.data::<f32>(), sequences));
    cpu.par_rows(latents.data_mut::<f32>(), 1, |first, piece| {
        for (at, x) in (first..).zip(piece) {
            let (sample, index) = (at / sizes.per_sample(), at % sizes.per_sample());
            let channel = index / sizes.per_channel;
            if let Some((std, sequences)) = spread {
                *x += std[at] * sequences[sample].normal(index);
            }
            *x = (*x - shift[channel]) * scale[channel];
        }
    });
}

pub fn add_noise(
    cpu: &CpuBackend,
    latents: &mut Tensor,
    noisy: &mut Tensor,
    sizes: LatentSizes,
    sigmas: &Tensor,
    sequences: &[RandomSequence],
) {
    let sigmas = sigmas.data::<f32>();
    with_real!(noisy.dtype(), T => {
        let (latents, noisy) = (latents.data_mut::<f32>(), noisy.data_mut::<T>());
        let work = |task: usize, latents: &mut [f32], noisy: &mut [T]| {
            for (at, (x, noisy)) in (task * GRAIN..).zip(latents.iter_mut().zip(noisy)) {
                let (sample, index) = (at / sizes.per_sample(), at % sizes.per_sample());
                let (sigma, noise) = (sigmas[sample], sequences[sample].normal(index));
                *noisy = T::from_f32((1.0 - sigma) * *x + sigma * noise);
                *x = noise - *x;
            }
        };
        cpu.install(|| {
            let pieces = latents.par_chunks_mut(GRAIN).zip(noisy.par_chunks_mut(GRAIN));
            pieces
                .enumerate()
                .for_each(|(task, (latents, noisy))| work(task, latents, noisy));
        });
    });
}
