//! Weights to begin with where a model is trained from nothing: small normal numbers, norms of one,
//! biases of zero; and smaller still in the two layers of a block that add to its stream, of which
//! there are twice as many as blocks, so that the stream stays as large however deep the model is
//! (Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3).

use compute::{Device, Tag, Tensor};

use super::Config;
use crate::error::Result;
use crate::model::build::{DEVIATION, Held, Precision, Role, Source, Want, hold};

/// Numbers that follow from a seed, the same on every engine.
pub struct Initial {
    precision: Precision,
    seed: u64,
    /// What the deviation of layers that add to the stream is multiplied by.
    factor: f32,
    n_taken: u64,
}

/// Layers that add to the stream.
const ADDING: [&str; 2] = ["o_proj.weight", "down_proj.weight"];

impl Initial {
    /// For a model of these settings.
    pub fn new(config: &Config, precision: Precision, seed: u64) -> Self {
        let factor = 1.0 / (2.0 * config.num_hidden_layers as f32).sqrt();
        Self { precision, seed, factor, n_taken: 0 }
    }

    fn make(&self, device: &Device, want: &Want) -> compute::Result<Tensor> {
        let dtype = self.precision.of(want.role);
        if want.role == Role::Vector {
            let number = if want.name.ends_with(".weight") { 1.0 } else { 0.0 };
            return device.upload_as(want.shape, &vec![number; want.shape.elements()], dtype);
        }
        let is_adding = ADDING.iter().any(|layer| want.name.ends_with(layer));
        let deviation = if is_adding { self.factor * DEVIATION } else { DEVIATION };
        device.normal(want.shape, dtype, deviation, (self.seed, self.n_taken))
    }
}

impl Source for Initial {
    fn take(&mut self, device: &Device, want: Want) -> Result<Held> {
        self.n_taken += 1;
        device.tagged(Tag::Weights, || {
            hold(self.make(device, &want)?, self.precision.quantisation(&want))
        })
    }
}
