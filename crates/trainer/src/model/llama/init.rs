//! Random init for training from scratch: small normal weights, norms of one, biases of zero; and smaller
//! weights in the two residual projections of each block, scaled by their number, so that the residual
//! stream does not grow with depth
//! (Radford et al., "Language Models are Unsupervised Multitask Learners", section 2.3).

use compute::{Device, RandomSequence, Tag, Tensor};

use super::LlamaConfig;
use crate::error::Result;
use crate::model::build::{
    INIT_STD, Precision, TensorRole, TensorSpec, WeightSource, WeightTensor, quantise,
};

/// Random init from a seed, the same on every device.
pub struct LlamaInit {
    precision: Precision,
    seed: u64,
    /// Factor on the std of residual projections.
    factor: f32,
    /// What the weight of a norm is that changes nothing.
    norm: f32,
    n_tensors: u64,
}

/// Layers that add to the residual stream.
const RESIDUAL_PROJECTIONS: [&str; 3] = ["o_proj.weight", "down_proj.weight", "w2.weight"];

/// Between the narrow layers of a compressed model and its trunk. Both keep the scale of embeddings: smaller numbers
/// would be lost beside what the trunk's attention adds, larger ones would hide the narrow layers' own states. With
/// [`INIT_STD`] for both, a model that keeps all tokens learns slower than a Llama without narrow layers
/// (docs/compression.md, "Measured").
const INTO_TRUNK: &str = "trunk.in_proj.weight";
const OUT_OF_TRUNK: &str = "trunk.out_proj.weight";

impl LlamaInit {
    /// For a model of this config.
    pub fn new(config: &LlamaConfig, precision: Precision, seed: u64) -> Self {
        let factor = 1.0 / (2.0 * config.num_hidden_layers as f32).sqrt();
        let norm = if config.is_gemma() { 0.0 } else { 1.0 };
        Self { precision, seed, factor, norm, n_tensors: 0 }
    }

    fn random_init(&self, device: &Device, want: &TensorSpec) -> compute::Result<Tensor> {
        let dtype = self.precision.dtype_of(want.role);
        if want.role == TensorRole::Vector {
            let number = if want.name.ends_with(".weight") { self.norm } else { 0.0 };
            return device.upload_as(want.shape, &vec![number; want.shape.elements()], dtype);
        }
        let sequence = RandomSequence::new(self.seed, self.n_tensors);
        device.normal(want.shape, dtype, self.deviation(want), sequence)
    }

    fn deviation(&self, want: &TensorSpec) -> f32 {
        let is_adding = RESIDUAL_PROJECTIONS.iter().any(|layer| want.name.ends_with(layer));
        let fan_in = want.shape.width() as f32;
        match want.name.as_str() {
            INTO_TRUNK => 1.0 / fan_in.sqrt(),
            OUT_OF_TRUNK => INIT_STD / fan_in.sqrt(),
            _ if is_adding => self.factor * INIT_STD,
            _ => INIT_STD,
        }
    }
}

impl WeightSource for LlamaInit {
    fn take(&mut self, device: &Device, want: TensorSpec) -> Result<WeightTensor> {
        self.n_tensors += 1;
        device.with_tag(Tag::Weights, || {
            quantise(self.random_init(device, &want)?, self.precision.quantisation(&want))
        })
    }
}
