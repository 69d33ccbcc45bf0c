//! The timestep embedding: sinusoids of many frequencies, then two linear layers.

use compute::ops::Activation;
use compute::{Dtype, Tape, Var};

use super::build::ModelBuilder;
use super::layer::LinearLayer;
use crate::error::Result;

/// Width of the sinusoidal embedding of most families: half cosines, then as many sines.
pub const EMBEDDING_DIM: usize = 256;
/// The longest period, relative to the shortest.
const MAX_PERIOD: f32 = 10_000.0;

/// The sinusoids and the layers.
pub struct TimestepEmbedder {
    first: LinearLayer,
    second: LinearLayer,
    embedding_dim: usize,
}

impl TimestepEmbedder {
    /// With `linear_1` and `linear_2`.
    pub fn new(build: ModelBuilder<'_>, width: usize) -> Result<Self> {
        Self::with_layers(build, ["linear_1", "linear_2"], [EMBEDDING_DIM, width, width])
    }

    /// With layers of other names and widths: of the sinusoids, between the layers, and of the result.
    pub fn with_layers(
        mut build: ModelBuilder<'_>,
        [first, second]: [&str; 2],
        [embedding_dim, inner, width]: [usize; 3],
    ) -> Result<Self> {
        let first = build.linear_unquantised(first, embedding_dim, inner)?;
        let second = build.linear_unquantised(second, inner, width)?;
        Ok(Self { first, second, embedding_dim })
    }

    /// A vector [samples, width] for each of `timesteps`, whose angles are multiplied by `scale`: in f32 it makes a
    /// difference when that is done.
    pub fn forward(
        &self,
        tape: &Tape<'_>,
        timesteps: &[f32],
        scale: f32,
        dtype: Dtype,
    ) -> Result<Var> {
        let sinusoids: Vec<f32> = timesteps
            .iter()
            .flat_map(|timestep| embed(*timestep, scale, self.embedding_dim))
            .collect();
        let sinusoids =
            tape.device().upload_as([timesteps.len(), self.embedding_dim], &sinusoids, dtype)?;
        let hidden = self.first.forward_activated(tape, &sinusoids.into(), Activation::Silu)?;
        Ok(self.second.forward(tape, &hidden)?)
    }
}

fn embed(timestep: f32, scale: f32, embedding_dim: usize) -> impl Iterator<Item = f32> {
    let half = embedding_dim / 2;
    let angle = move |index: usize| {
        scale * (timestep * (-MAX_PERIOD.ln() * index as f32 / half as f32).exp())
    };
    (0..half)
        .map(move |index| angle(index).cos())
        .chain((0..half).map(move |index| angle(index).sin()))
}
