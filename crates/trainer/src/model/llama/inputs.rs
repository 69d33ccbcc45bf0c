//! What blocks need besides x: rotary positions, and which tokens see which.
//!
//! Shapes: S samples, N tokens.

use std::ops::Range;

use compute::ops::{RopeAxis, rope_table};
use compute::{Device, Tensor};

use super::kv_cache::KvCache;
use super::{LlamaConfig, RopeConfig, RopeScaling};
use crate::error::Result;
use crate::model::recompute::Recompute;

/// Inputs that all blocks share.
#[derive(Clone)]
pub struct BlockInputs {
    /// The rotary table.
    pub(super) rope_table: Tensor,
    /// The first key that each query sees, [S, N].
    pub(super) first_keys: Option<Tensor>,
    /// The most keys that a query sees.
    pub(super) window: Option<usize>,
    /// How many keys of each sample count, `[S]`.
    pub(super) key_lengths: Option<Tensor>,
    /// Whether queries are recomputed.
    pub(super) recomputes_queries: bool,
    /// The same for layers with a window, where theirs are others.
    local: Option<Box<Self>>,
}

impl BlockInputs {
    /// For texts of N tokens that a model only reads.
    pub fn of_text(config: &LlamaConfig, device: &Device, n: usize) -> Result<Self> {
        Self::packed(config, device, n, Recompute::None)
    }

    /// For texts of N tokens in training.
    pub fn packed(
        config: &LlamaConfig,
        device: &Device,
        n: usize,
        recompute: Recompute,
    ) -> Result<Self> {
        let rope_table = rotary_table(config, device, 0..n, n)?;
        Ok(Self::with_table(rope_table, recompute == Recompute::Queries))
    }

    fn with_table(rope_table: Tensor, recomputes_queries: bool) -> Self {
        Self {
            rope_table,
            first_keys: None,
            window: None,
            key_lengths: None,
            recomputes_queries,
            local: None,
        }
    }

    /// For texts of N tokens, each of which attends from its first key on.
    pub(super) fn of_documents(
        config: &LlamaConfig,
        device: &Device,
        sizes: [usize; 2],
        first_keys: Option<&[u32]>,
        recompute: Recompute,
    ) -> Result<Self> {
        let [samples, n] = sizes;
        let mut inputs = Self::packed(config, device, n, recompute)?;
        inputs.first_keys = first_keys.map(|keys| device.upload(sizes, keys)).transpose()?;
        let zeros = || vec![0; samples * n];
        inputs
            .narrow(config, device, 0..n, n, || first_keys.map_or_else(zeros, <[u32]>::to_vec))?;
        Ok(inputs)
    }

    /// For the next `n` tokens of a text behind those in a cache; with `window`, all layers have one.
    pub(super) fn of_next(
        config: &LlamaConfig,
        device: &Device,
        cache: &KvCache,
        n: usize,
        window: Option<usize>,
    ) -> Result<Self> {
        let (first, position) = (cache.n_tokens(), cache.next_position());
        let table = rotary_table(config, device, position..position + n, cache.max_tokens())?;
        let mut inputs = Self::with_table(table, false);
        if let Some(window) = window {
            let keys = within_window(&vec![0; n], first..first + n, window);
            inputs.first_keys = Some(device.upload([1, n], &keys)?);
        }
        inputs.narrow(config, device, first..first + n, cache.max_tokens(), || vec![0; n])?;
        Ok(inputs)
    }

    /// Adds what layers with a window need: their rotary positions, and a first key that leaves each of these tokens so
    /// many keys as the window has.
    fn narrow(
        &mut self,
        config: &LlamaConfig,
        device: &Device,
        tokens: Range<usize>,
        length: usize,
        first_keys: impl FnOnce() -> Vec<u32>,
    ) -> Result<()> {
        if !(0..config.num_hidden_layers).any(|layer| config.is_local(layer)) {
            return Ok(());
        }
        let mut local = self.clone();
        if let Some(theta) = config.local_rope_theta {
            let rope = RopeConfig { theta, scaling: RopeScaling::None };
            let config = LlamaConfig { rope, ..config.clone() };
            local.rope_table = rotary_table(&config, device, tokens.clone(), length)?;
        }
        if let Some(window) = config.window.filter(|window| *window < tokens.end) {
            let keys = first_keys();
            let sizes = [keys.len() / tokens.len().max(1), tokens.len()];
            let keys = within_window(&keys, tokens, window);
            local.first_keys = Some(device.upload(sizes, &keys)?);
            local.window = Some(window);
        }
        self.local = Some(Box::new(local));
        Ok(())
    }

    /// Those of a layer.
    pub(super) fn of_layer(&self, is_local: bool) -> &Self {
        self.local.as_deref().filter(|_| is_local).unwrap_or(self)
    }

    /// The same for tokens with a position on each of several axes, of which each turns its section of a head.
    pub fn of_sections<const AXES: usize>(
        config: &LlamaConfig,
        device: &Device,
        sections: [usize; AXES],
        positions: &[[usize; AXES]],
    ) -> Result<Self> {
        Ok(Self::with_table(section_table(config, device, sections, positions)?, false))
    }

    /// The same, where each token attends from a first one on; to no more than `window`, if that is given.
    #[must_use]
    pub fn with_first_keys(&self, first_keys: Tensor, window: Option<usize>) -> Self {
        Self { first_keys: Some(first_keys), window, ..self.clone() }
    }

    /// The same, with tokens after each sample's length masked.
    #[must_use]
    pub fn with_lengths(&self, lengths: Option<&Tensor>) -> Self {
        Self { key_lengths: lengths.cloned(), ..self.clone() }
    }
}

/// The first keys of these tokens of each sample: what is given for them, or as many keys as the window has.
fn within_window(first_keys: &[u32], tokens: Range<usize>, window: usize) -> Vec<u32> {
    let of_window = tokens.map(|at| (at + 1).saturating_sub(window) as u32);
    first_keys.iter().zip(of_window.cycle()).map(|(given, own)| *given.max(&own)).collect()
}

/// The rotary table of these positions in texts of up to `length` tokens. Packed documents need no positions of their own:
/// attention depends on distances alone.
fn rotary_table(
    config: &LlamaConfig,
    device: &Device,
    positions: Range<usize>,
    length: usize,
) -> Result<Tensor> {
    let LlamaConfig { rope, rotary_dim, .. } = config;
    let sizes = [positions.len(), *rotary_dim];
    let positions: Vec<f32> = positions.map(|position| position as f32).collect();
    let amplitude = rope.scaling.amplitude();
    Ok(device.upload_with(sizes, || {
        let mut table = rope_table(&[rope.axis(*rotary_dim, length)], &positions);
        if amplitude != 1.0 {
            for number in &mut table {
                *number *= amplitude;
            }
        }
        table
    })?)
}

/// The rotary table of tokens with a position on each of several axes. Of the pairs of a head, each axis turns as many as
/// its section has.
fn section_table<const AXES: usize>(
    config: &LlamaConfig,
    device: &Device,
    sections: [usize; AXES],
    positions: &[[usize; AXES]],
) -> Result<Tensor> {
    let axis = config.rope.axis(config.head_dim, positions.len());
    let mut frequencies = axis.frequencies.into_iter();
    let axes = sections.map(|n| RopeAxis { frequencies: frequencies.by_ref().take(n).collect() });
    let places: Vec<f32> = positions.as_flattened().iter().map(|at| *at as f32).collect();
    let sizes = [positions.len(), config.head_dim];
    Ok(device.upload_with(sizes, || rope_table(&axes, &places))?)
}
