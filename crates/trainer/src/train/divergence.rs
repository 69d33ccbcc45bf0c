//! Whether a finished run has diverged: judged at its end, by the metrics of its steps and by its weights, so that
//! a run that is resumed after its end is judged the same. A diverged result is not exported unless forced.

use super::health::Health;
use crate::event::warning::Divergence;
use crate::task::session::TrainedWeights;

/// The largest weight that can be used. Taken: the largest number of f16, in which many programs hold
/// adapters; what is beyond becomes infinite there. Weights of models that work are below a hundred.
const MAX_WEIGHT: f32 = 65504.0;

/// Why a finished run has diverged, if it has.
pub fn find(health: &Health, trained: &TrainedWeights) -> Option<Divergence> {
    health.divergence().or_else(|| first_unusable_weight(trained))
}

/// The first weight that cannot be used.
fn first_unusable_weight(trained: &TrainedWeights) -> Option<Divergence> {
    let is_unusable = |value: &&f32| !value.is_finite() || value.abs() > MAX_WEIGHT;
    trained.tensors().find_map(|(tensor, values)| {
        let value = *values.iter().find(is_unusable)?;
        Some(Divergence::Weight { tensor, value: value.into(), largest: MAX_WEIGHT.into() })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::model::adapter::LoraWeights;

    #[test]
    fn a_weight_beyond_f16_is_named() {
        let with = |up: f32| {
            let given = LoraWeights {
                rank: 1,
                alpha: 1.0,
                down: vec![1.0],
                up: vec![0.5, up],
                magnitude: None,
            };
            first_unusable_weight(&TrainedWeights::Adapter(BTreeMap::from([(
                "to_q".into(),
                given,
            )])))
        };
        assert_eq!(with(-60000.0), None);
        for value in [-8e14, f32::INFINITY] {
            let tensor = "to_q.lora_B".into();
            let (value, largest) = (value.into(), MAX_WEIGHT.into());
            assert_eq!(with(value as f32), Some(Divergence::Weight { tensor, value, largest }));
        }
        assert!(with(f32::NAN).is_some());
        let full = TrainedWeights::Full(BTreeMap::from([("norm".into(), vec![1.0, f32::NAN])]));
        let message = first_unusable_weight(&full).unwrap().to_string();
        assert_eq!(message, "a weight of norm is NaN, the largest usable is 65504");
    }
}
