//! How noisy a sample is, as a vector: waves of many lengths at that place, then two layers.

use compute::ops::Activation;
use compute::{Dtype, Tape, Var};

use super::build::Builder;
use super::layer::Layer;
use crate::error::Result;

/// Numbers of the waves, half of them cosines, then as many sines.
const WAVES: usize = 256;
/// The longest wave, relative to the shortest.
const LONGEST: f32 = 10_000.0;

/// The waves and the layers.
pub struct TimestepEmbedder {
    first: Layer,
    second: Layer,
}

impl TimestepEmbedder {
    /// With `linear_1` and `linear_2`.
    pub fn new(mut build: Builder<'_>, width: usize) -> Result<Self> {
        let first = build.edge("linear_1", WAVES, width)?;
        Ok(Self { first, second: build.edge("linear_2", width, width)? })
    }

    /// A vector [samples, width] for each of `timesteps`.
    pub fn forward(&self, tape: &Tape<'_>, timesteps: &[f32], dtype: Dtype) -> Result<Var> {
        let waves: Vec<f32> = timesteps.iter().flat_map(|timestep| waves(*timestep)).collect();
        let waves = tape.device().upload_as([timesteps.len(), WAVES], &waves, dtype)?;
        let hidden = self.first.forward_into(tape, &waves.into(), Activation::Silu)?;
        Ok(self.second.forward(tape, &hidden)?)
    }
}

fn waves(timestep: f32) -> impl Iterator<Item = f32> {
    let half = WAVES / 2;
    let angle = move |index: usize| timestep * (-LONGEST.ln() * index as f32 / half as f32).exp();
    (0..half)
        .map(move |index| angle(index).cos())
        .chain((0..half).map(move |index| angle(index).sin()))
}
