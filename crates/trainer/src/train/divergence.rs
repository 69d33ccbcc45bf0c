//! Whether a finished run has diverged: judged at its end, by the metrics of its steps and by its weights, so that
//! a run that is resumed after its end is judged the same. A diverged result is not exported unless forced.

use compute::ops::global_norm;
use compute::{Dtype, Tensor};

use super::health::Health;
use crate::error::Result;
use crate::event::warning::Divergence;

/// The largest weight that can be used. Taken: the largest number of f16, in which many programs hold
/// adapters; what is beyond becomes infinite there. Weights of models that work are below a hundred.
const MAX_WEIGHT: f32 = 65504.0;

/// Values that are read together. Chosen: 16 MiB as f32.
const MAX_VALUES: usize = 4 << 20;

/// Why a finished run with these weights has diverged, if it has.
pub fn find(health: &Health, trained: &[(String, Tensor)]) -> Result<Option<Divergence>> {
    match health.divergence() {
        Some(divergence) => Ok(Some(divergence)),
        None => first_unusable_weight(trained),
    }
}

/// The first weight that cannot be used.
fn first_unusable_weight(trained: &[(String, Tensor)]) -> Result<Option<Divergence>> {
    for (name, tensor) in trained {
        if let Some(value) = first_unusable_value(tensor)? {
            let (tensor, value) = (name.clone(), value.into());
            return Ok(Some(Divergence::Weight { tensor, value, largest: MAX_WEIGHT.into() }));
        }
    }
    Ok(None)
}

/// The same of one tensor, of which the host has some rows at a time.
fn first_unusable_value(tensor: &Tensor) -> Result<Option<f32>> {
    // No weight is larger than the norm of all, which the device finds by itself.
    if tensor.dtype() == Dtype::F32 {
        let norm = global_norm(&[Some(tensor)], tensor.device())?.read_f32()?[0];
        if norm <= MAX_WEIGHT {
            return Ok(None);
        }
    }
    let is_unusable = |value: &f32| !value.is_finite() || value.abs() > MAX_WEIGHT;
    let n_rows = tensor.shape().sizes()[0];
    let n_read = (MAX_VALUES * n_rows / tensor.shape().elements()).max(1);
    for first in (0..n_rows).step_by(n_read) {
        let rows = tensor.narrow(first..n_rows.min(first + n_read));
        if let Some(value) = rows.read_f32()?.into_iter().find(is_unusable) {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use compute::Device;

    use super::*;

    #[test]
    fn a_weight_beyond_f16_is_named() {
        let device = Device::cpu(1, 1 << 16).unwrap();
        let with = |values: &[f32]| {
            let named = |name: &str, values: &[f32], dtype| {
                (name.to_owned(), device.upload_as([values.len()], values, dtype).unwrap())
            };
            let [f32s, bf16s] = [Dtype::F32, Dtype::Bf16].map(|dtype| {
                let down = named("to_q.lora_A", &[1.0], dtype);
                first_unusable_weight(&[down, named("to_q.lora_B", values, dtype)]).unwrap()
            });
            assert_eq!(f32s.is_some(), bf16s.is_some());
            f32s
        };
        assert_eq!(with(&[0.5, -60000.0]), None);
        // Many usable weights may have a larger norm.
        assert_eq!(with(&[60000.0; 9]), None);
        for value in [-8e14, f32::INFINITY] {
            let tensor = "to_q.lora_B".into();
            let expected = Divergence::Weight { tensor, value: value.into(), largest: 65504.0 };
            assert_eq!(with(&[0.5, value, 0.5]), Some(expected));
        }
        let message = with(&[1.0, f32::NAN]).unwrap().to_string();
        assert_eq!(message, "a weight of to_q.lora_B is NaN, the largest usable is 65504");
    }
}
