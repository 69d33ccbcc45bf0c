//! Noise on the processor.

use rayon::prelude::*;

use super::{Channels, Sizes, Spread};
use crate::Tensor;
use crate::cpu::Cpu;
use crate::cpu::rows::GRAIN;
use crate::dtype::{Real, with_real};
use crate::random::Stream;

pub fn sample_latents(
    cpu: &Cpu,
    latents: &mut Tensor,
    sizes: Sizes,
    spread: Option<Spread<'_>>,
    Channels { shift, scale }: Channels<'_>,
) {
    let (shift, scale) = (shift.data::<f32>(), scale.data::<f32>());
    let spread = spread.map(|Spread { deviation, streams }| (deviation.data::<f32>(), streams));
    cpu.rows(latents.data_mut::<f32>(), 1, |first, piece| {
        for (at, x) in (first..).zip(piece) {
            let (sample, index) = (at / sizes.per_sample(), at % sizes.per_sample());
            let channel = index / sizes.per_channel;
            if let Some((deviation, streams)) = spread {
                *x += deviation[at] * streams[sample].normal(index);
            }
            *x = (*x - shift[channel]) * scale[channel];
        }
    });
}

pub fn add_noise(
    cpu: &Cpu,
    (latents, noisy): (&mut Tensor, &mut Tensor),
    sizes: Sizes,
    sigmas: &Tensor,
    streams: &[Stream],
) {
    let sigmas = sigmas.data::<f32>();
    with_real!(noisy.dtype(), T => {
        let (latents, noisy) = (latents.data_mut::<f32>(), noisy.data_mut::<T>());
        let work = |task: usize, latents: &mut [f32], noisy: &mut [T]| {
            for (at, (x, noisy)) in (task * GRAIN..).zip(latents.iter_mut().zip(noisy)) {
                let (sample, index) = (at / sizes.per_sample(), at % sizes.per_sample());
                let (sigma, noise) = (sigmas[sample], streams[sample].normal(index));
                *noisy = T::from_f32((1.0 - sigma) * *x + sigma * noise);
                *x = noise - *x;
            }
        };
        cpu.run(|| {
            let pieces = latents.par_chunks_mut(GRAIN).zip(noisy.par_chunks_mut(GRAIN));
            pieces
                .enumerate()
                .for_each(|(task, (latents, noisy))| work(task, latents, noisy));
        });
    });
}
