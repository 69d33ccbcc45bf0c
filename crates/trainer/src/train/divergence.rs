//! Whether a run that took all its steps came to something that can be used. Judged when it is over, by
//! the figures of its steps and by what was trained, so that a run that goes on after it has finished is
//! judged the same. What diverged is not written for other programs unless that is asked for.

use super::health::Health;
use crate::event::warning::Divergence;
use crate::task::session::TrainedWeights;

/// The largest weight that can be used. Taken: the largest number of f16, in which many programs hold
/// adapters; what is beyond becomes infinite there. Weights of models that work are below a hundred.
const MAX_WEIGHT: f32 = 65504.0;

/// Why what came of a run that is over is of no use, if it has diverged.
pub fn find(health: &Health, trained: &TrainedWeights) -> Option<Divergence> {
    health.divergence().or_else(|| first_unusable_weight(trained))
}

/// The first weight that cannot be used.
fn first_unusable_weight(trained: &TrainedWeights) -> Option<Divergence> {
    let is_spoilt = |value: &&f32| !value.is_finite() || value.abs() > MAX_WEIGHT;
    trained.tensors().find_map(|(tensor, values)| {
        let value = *values.iter().find(is_spoilt)?;
        Some(Divergence::Weight { tensor, value: value.into(), largest: MAX_WEIGHT.into() })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::model::adapter::LoraWeights;

    #[test]
    fn a_weight_that_no_program_can_hold_is_named() {
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
        let own = TrainedWeights::Full(BTreeMap::from([("norm".into(), vec![1.0, f32::NAN])]));
        let said = first_unusable_weight(&own).unwrap().to_string();
        assert_eq!(said, "a weight of norm is NaN, the largest usable is 65504");
    }
}
